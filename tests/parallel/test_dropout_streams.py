"""Which random numbers a rank draws: the same as others where it holds the same, its own where it doesn't."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.parallel import CpCommType
from megatron.core.context_parallel.slicing import take
from megatron.core.models.gpt.model import GPTModel
from megatron.core.ops.attention import eager
from megatron.core.ops.dropout import dropout
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import RngStreams, StreamKey
from megatron.core.transformer import embedding, layer
from tests.harness import run_ranks

LENGTH, BATCH, HIDDEN, HEADS, LAYERS = 16, 2, 16, 4, 2


@dataclass
class Draws:
    """What one forward pass drew on a rank, in order. ``hidden``: masks ``[s, b, h]``; ``scores``: ``[b, n, S, S]``.

    With context parallelism ``scores`` are those of each call, of some queries and keys.
    """

    places: list[tuple[StreamKey, str]] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


def draw(context: ModelContext, samples: tuple[int, ...] = (0,), exchange: CpCommType = "p2p") -> list[Draws]:
    """One forward pass in training for each microbatch, with every dropout mask recorded."""
    context = dataclasses.replace(context, cp_comm_types=(exchange,))
    config = ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        vocab_size=50,
        attention_dropout=0.5,
        hidden_dropout=0.5,
        attention_backend="eager",
    )
    model, draws = GPTModel(config, context, seed=1), []
    for sample in samples:
        draws.append(found := Draws())
        with contextlib.ExitStack() as recorders:
            recorders.enter_context(recording(found.hidden, embedding))
            recorders.enter_context(recording(found.hidden, layer))
            recorders.enter_context(recording(found.scores, eager))
            recorders.enter_context(mock.patch.object(RngStreams, "enter", noted(found.places)))
            tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
            held = take(tokens, context.mesh.rank("cp"), context.mesh.size("cp"), dim=1)
            model(held, rng_key=StreamKey(sample))
    return draws


def recording(masks: list[Tensor], module: object) -> mock._patch[object]:
    """The module's ``dropout``, with the mask that it draws added to ``masks``."""

    def recorded(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
        state = generator.get_state()
        masks.append(dropout(torch.ones_like(x), p, generator) != 0)
        generator.set_state(state)
        return dropout(x, p, generator)

    return mock.patch.object(module, "dropout", recorded)


def noted(places: list[tuple[StreamKey, str]]) -> object:
    """``RngStreams.enter``, with what it is called with added to ``places``."""
    original = RngStreams.enter

    def enter(self: RngStreams, key: StreamKey, place: str) -> None:
        places.append((key, place))
        original(self, key, place)

    return enter


def assert_unrelated(masks: list[Tensor]) -> None:
    """No two masks agree on more elements than chance explains."""
    for i, one in enumerate(masks):
        for other in masks[:i]:
            elements = min(one.numel(), other.numel())
            agreeing = one.flatten()[:elements] == other.flatten()[:elements]
            assert agreeing.double().mean() < 0.75, "two masks are the same"


def per_head(draws: Draws) -> list[Tensor]:
    return [head for scores in draws.scores for head in scores.transpose(0, 1).unbind(0)]


def test_whole_hidden_states_are_dropped_alike_on_all_ranks() -> None:
    """Without sequence parallelism every rank holds the same hidden states; with other masks they drift apart."""
    (first,), (second,) = run_ranks(draw, tp=2)
    assert len(first.hidden) == 1 + 2 * LAYERS
    assert first.hidden[0].shape == (LENGTH, BATCH, HIDDEN)
    for one, other in zip(first.hidden, second.hidden):
        assert torch.equal(one, other)


def test_parts_of_the_sequence_are_dropped_differently() -> None:
    """With sequence parallelism equal masks would drop the same places in each part: correlated noise."""
    (first,), (second,) = run_ranks(draw, tp=2, sequence_parallel=True)
    assert first.hidden[0].shape == (LENGTH // 2, BATCH, HIDDEN)
    assert_unrelated([*first.hidden, *second.hidden])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_heads_are_dropped_differently(sequence_parallel: bool) -> None:
    """Each rank has its own heads; equal masks on all ranks would make their dropout one."""
    (first,), (second,) = run_ranks(draw, tp=2, sequence_parallel=sequence_parallel)
    masks = [*per_head(first), *per_head(second)]
    assert len(masks) == LAYERS * HEADS
    assert_unrelated(masks)


def test_slices_of_the_sequence_are_dropped_differently() -> None:
    """Context-parallel ranks hold other tokens; tensor-parallel ones among them hold the same hidden states."""
    ranks = [draws for (draws,) in run_ranks(draw, tp=2, cp=2)]
    for first, second in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
        assert all(torch.equal(one, other) for one, other in zip(first.hidden, second.hidden))
    assert ranks[0].hidden[0].shape == (LENGTH // 2, BATCH, HIDDEN)
    assert_unrelated([*ranks[0].hidden, *ranks[2].hidden])


@pytest.mark.parametrize("exchange", ["p2p", "all_gather", "a2a"])
def test_probabilities_are_dropped_differently_wherever_they_are_computed(exchange: CpCommType) -> None:
    """Every call on every rank has queries, keys or heads of its own; a mask used twice is correlated noise."""
    ranks = [draws for (draws,) in run_ranks(draw, (0,), exchange, tp=2, cp=2)]
    calls, heads = (1, HEADS // 4) if exchange == "a2a" else (2, HEADS // 2)
    for draws in ranks:
        assert len(draws.scores) == LAYERS * calls
        assert {scores.shape[1] for scores in draws.scores} == {heads}
    masks = [mask for draws in ranks for mask in per_head(draws)]
    assert_unrelated(masks)
    kept = torch.cat([mask.flatten() for mask in masks]).double()
    assert abs(kept.mean().item() - 0.5) < 4 * 0.5 / len(kept) ** 0.5, "as many are kept as chance keeps"
    again = [draws for (draws,) in run_ranks(draw, (0,), exchange, tp=2, cp=2)]
    for draws, same in zip(ranks, again):
        assert all(torch.equal(one, other) for one, other in zip(draws.scores, same.scores))


def test_data_parallel_ranks_draw_by_sample_alone() -> None:
    """A sample's dropout must not depend on which replica gets it, and replicas must not share masks by rank."""
    (zero, two), (same_zero, same_two) = run_ranks(draw, (0, 2), dp=2)
    for one, other in ((zero, same_zero), (two, same_two)):
        for mask, again in zip(one.hidden + one.scores, other.hidden + other.scores):
            assert torch.equal(mask, again)
    assert_unrelated([*zero.hidden, *two.hidden])
    assert_unrelated([*per_head(zero), *per_head(two)])


def test_every_place_of_a_forward_pass_has_its_own_stream() -> None:
    """Two layers under one name would draw the same mask in every step of the run."""
    zero, two = draw(ModelContext.single(), (0, 2))
    counted = Counter(zero.places + two.places)
    assert len(counted) == 2 * (1 + 3 * LAYERS)
    assert set(counted.values()) == {1}
    assert {key for key, _ in zero.places} == {StreamKey(0)}
    assert_unrelated(zero.hidden)
    assert_unrelated(per_head(zero))
