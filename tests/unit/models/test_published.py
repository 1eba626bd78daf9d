"""Every published type computes what transformers computes: logits, loss and every gradient, in fp64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers", reason="parity needs the dev extra's transformers")

from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import load_weights
from megatron.core.models.registry import family_of
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.sharding import sharded_parameters
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.training.loss_sums import loss_weights
from tests.harness.published import PublishedBatch, fp64_model, portable_gradients, without_dropout
from tests.published import FIRST, LIKE_ANOTHER, MODELS
from tests.tiers import tiers

TOLERANCE = 1e-9


@pytest.mark.parametrize("name", tiers(MODELS, first=FIRST.values()))
def test_logits_loss_and_gradients(name: str) -> None:
    """A setting read wrong trains another model than the published one, and a wrong gradient trains it wrongly."""
    check(*MODELS[name])


@pytest.mark.parametrize("name", tiers(FIRST.values(), first={*FIRST.values()} - {*LIKE_ANOTHER}))
def test_logits_loss_and_gradients_at_drawn_sizes(name: str) -> None:
    """Sizes that cases happen to share hide what is mixed up: a width for another, an epsilon for the usual one."""
    model_type, settings = MODELS[name]
    drawn = draw_sizes(settings, random.Random(name))
    assert drawn != settings
    check(model_type, drawn)


WIDTHS = {"intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim", "d_ff"}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon")


def draw_sizes(settings: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The settings with other widths, vocabulary, layers and epsilons, of those that they have."""
    found = dict(settings)
    for each in sorted(WIDTHS & settings.keys()):
        found[each] = draw.randrange(17, 99)
    if "vocab_size" in settings:
        found["vocab_size"] = draw.randrange(103, 180)
    if "layer_types" not in settings and "num_hidden_layers" in settings:
        found["num_hidden_layers"] = draw.randrange(2, 5)
    for each in sorted({*EPSILONS} & settings.keys()):
        found[each] = 10 ** draw.uniform(-6, -3)
    return found


def check(model_type: str, settings: dict[str, Any]) -> None:
    """Compare a random model of transformers with ours of its weights."""
    theirs = fp64_model(model_type, settings)
    portable = from_transformers(theirs)
    context = ModelContext.single(dtype=torch.float64)
    config = without_dropout(portable.model)
    spec = family_of(portable.groups).train_spec
    ours = spec.build_model(config, portable.groups, context)
    for parameter in ours.parameters():
        parameter.data.fill_(torch.nan)  # as fresh memory may be, in the padding of the vocabulary, too
    load_weights(ours, portable, context.mesh)
    batch = PublishedBatch.of(portable)
    microbatch = Microbatch(batch.fields, StreamKey(0))
    counts = spec.counts(microbatch, context)
    microbatch = replace(microbatch, loss_weights=loss_weights(counts))

    expected = batch.theirs(theirs)
    output = spec.forward(ours, {}, microbatch)
    for kind, logits in batch.ours(output).items():
        torch.testing.assert_close(logits, expected[kind], rtol=0, atol=TOLERANCE, msg=kind)

    found = spec.loss(output, microbatch)
    loss = found.sum / found.count
    answers = batch.answers.items()
    losses = [functional.cross_entropy(expected[kind], labels[where]) for kind, (_, labels, where) in answers]
    expected_loss = torch.stack(losses).sum()
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=TOLERANCE, check_dtype=False)
    torch.autograd.backward((loss, expected_loss))
    gradients = portable_gradients(theirs).tensors
    for parameter_name, parameter, sharding in sharded_parameters(ours):
        if not parameter.requires_grad:  # a bias for choices, which no gradient changes
            continue
        assert parameter.grad is not None, parameter_name
        wanted = gradients[sharding.tied or parameter_name].make()
        difference = (parameter.grad[: wanted.shape[0]] - wanted).abs().max()
        assert difference <= TOLERANCE, f"{parameter_name} differs by {difference:.2e}"
