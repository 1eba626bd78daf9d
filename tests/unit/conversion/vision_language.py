"""Vision-language models of transformers beside what they become here: logits and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.huggingface.writing import theirs_of
from megatron.core.conversion.portable import LazyTensor, fill
from megatron.core.conversion.questions import question_for
from megatron.core.conversion.tables import to_theirs
from megatron.core.models.registry import FAMILIES
from megatron.core.models.vlm.huggingface import FORMAT
from megatron.core.models.vlm.questions import ImageQuestion
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import ShardedState, sharded_parameters
from tests.harness.published import in_fp64


def check_logits_and_gradients(theirs: Any) -> None:
    """Compare logits of a text with images, and the gradient of every trained parameter, in fp64 to 1e-9."""
    portable = from_transformers(theirs)
    portable = replace(portable, model=replace(portable.model, make_vocab_size_divisible_by=1))
    question = question_for(portable.model, portable.groups)
    assert isinstance(question, ImageQuestion)
    question = replace(question, images=question.images.double())
    context = ModelContext.single(dtype=torch.float64)
    ours = FAMILIES["vlm"].train_spec.build_model(portable.model, portable.groups, context)
    state = [
        ShardedState(f"model.{sharding.tied or name}", parameter.detach(), sharding)
        for name, parameter, sharding in sharded_parameters(ours)
    ]
    fill(state, portable, context.mesh)
    with in_fp64():
        wanted = question.ask_theirs(theirs)["words"]
    found = ours(question.tokens, images=question.images, image_places=question.places)
    torch.testing.assert_close(found.logits(), wanted, rtol=0, atol=1e-9)

    labels = question.tokens.roll(-1, 1)
    cross_entropy = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="sum")
    for loss in (cross_entropy, found.cross_entropy(labels, torch.ones_like(labels))):
        torch.autograd.backward(loss)
    gradients = {each: parameter.grad for each, parameter, _ in sharded_parameters(ours)}
    assert all(each is not None for each in gradients.values())
    made = {each: _lazy(gradient) for each, gradient in gradients.items() if gradient is not None}
    model_type = theirs.config.model_type
    back = to_theirs(theirs_of(portable.model, portable.groups, model_type), made, portable.model)
    names = FORMAT.nested[model_type].current_names(name for name, _ in theirs.named_parameters())
    trained = {
        names[each]: parameter.grad for each, parameter in theirs.named_parameters() if parameter.grad is not None
    }
    assert trained.keys() <= back.keys()
    for each, gradient in trained.items():
        torch.testing.assert_close(back[each].make(), gradient, rtol=0, atol=1e-9)


def _lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor.clone())
