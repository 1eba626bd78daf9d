"""Vision-language models of transformers beside what they become here: logits and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron.config.vision import VisionConfig
from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.huggingface.writing import theirs_of
from megatron.core.conversion.portable import LazyTensor, PortableModel, fill
from megatron.core.conversion.questions import question_for
from megatron.core.conversion.tables import to_theirs
from megatron.core.images.expansion import feature_runs
from megatron.core.images.tiles import grid_of
from megatron.core.models.registry import FAMILIES
from megatron.core.models.vlm.ahead import ahead_in_tiles
from megatron.core.models.vlm.config import VLMConfig
from megatron.core.models.vlm.huggingface import FORMAT
from megatron.core.models.vlm.questions import ImageQuestion
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import ShardedState, sharded_parameters
from tests.harness.published import in_fp64


def ours_of(theirs: Any) -> tuple[PortableModel, Any]:
    """A model of transformers as it is read, and as our model in fp64."""
    portable = from_transformers(theirs)
    portable = replace(portable, model=replace(portable.model, make_vocab_size_divisible_by=1))
    context = ModelContext.single(dtype=torch.float64)
    ours = FAMILIES["vlm"].train_spec.build_model(portable.model, portable.groups, context)
    state = [
        ShardedState(f"model.{sharding.tied or name}", parameter.detach(), sharding)
        for name, parameter, sharding in sharded_parameters(ours)
    ]
    fill(state, portable, context.mesh)
    return portable, ours


def check_several_images(theirs: Any, sizes: Sequence[tuple[int, int]]) -> int:
    """Compare logits of a text with pictures of these widths and heights among its words, in fp64 to 1e-9. Returns how
    many tiles they have.
    """
    portable, ours = ours_of(theirs)
    vision, marked = VisionConfig.among(portable.groups), VLMConfig.among(portable.groups).image_token_id
    assert marked is not None, "it is written in config.json"
    tokens, places, tiles = [3, 1], [-1, -1], list[torch.Tensor]()
    generator = torch.Generator().manual_seed(5)
    for width, height in sizes:
        grid, before = grid_of(width, height, vision), sum(map(len, tiles)) * vision.features_per_tile
        run = np.concatenate(feature_runs(grid, vision))
        tokens += [*[marked] * len(run), 7, 4]
        places += [*np.where(run >= 0, run + before, run).tolist(), -1, -1]
        shape = (grid.tiles, 3, vision.img_h, vision.img_w)
        tiles.append(torch.randn(*shape, dtype=torch.float64, generator=generator))
    more: dict[str, Any] = {"pixel_values": torch.cat(tiles)}
    if vision.image_grids:
        padded = torch.nn.utils.rnn.pad_sequence(tiles, batch_first=True)
        more = {"pixel_values": padded, "image_sizes": torch.tensor([(high, wide) for wide, high in sizes])}
    ids, at, ahead = torch.tensor([tokens]), torch.tensor([places]), None
    if vision.image_attention == "bidirectional":
        ahead, more["token_type_ids"] = ahead_in_tiles(at, vision.features_per_tile), (at >= 0).long()
    with in_fp64():
        wanted = theirs(input_ids=ids, use_cache=False, **more).logits
    found = ours(ids, images=torch.cat(tiles), image_places=at, ahead=ahead).logits()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    return sum(map(len, tiles))


def check_logits_and_gradients(theirs: Any) -> None:
    """Compare logits of a text with images, and the gradient of every trained parameter, in fp64 to 1e-9."""
    portable, ours = ours_of(theirs)
    question = question_for(portable.model, portable.groups)
    assert isinstance(question, ImageQuestion)
    question = replace(question, images=question.images.double())
    with in_fp64():
        wanted = question.ask_theirs(theirs)["words"]
    found = ours(question.tokens, images=question.images, image_places=question.places, ahead=question.ahead)
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
    learned = {each: parameter.grad for each, parameter in theirs.named_parameters() if parameter.grad is not None}
    if any(".experts." in each for each in learned):  # stacked in memory, and not in files
        from transformers.core_model_loading import revert_weight_conversion

        learned = dict(revert_weight_conversion(theirs, learned))
    names = FORMAT.nested[model_type].current_names(learned)
    trained = {names[each]: gradient for each, gradient in learned.items()}
    assert trained.keys() <= back.keys()
    for each, gradient in trained.items():
        torch.testing.assert_close(back[each].make(), gradient, rtol=0, atol=1e-9)


def _lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor.clone())
