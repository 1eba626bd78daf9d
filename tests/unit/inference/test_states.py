"""Layers with a state of fixed size: each token must be that of a forward pass over its whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage
from megatron.core.inference.drafts import DraftModel
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampler import SamplerState
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import ScheduledRow, SchedulerOptions
from megatron.core.inference.step_plan import PlanRow, RunnerLimits, StepPlan
from megatron.core.models.gpt.model import GPTModel
from megatron.core.ops.text_cache import Slotted, States
from megatron.core.parallel.model_context import ModelContext
from megatron.core.ssm.gated_delta_net import delta_net_branch
from megatron.core.ssm.mamba import mamba_branch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.initialization import input_init, output_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import FEED_FORWARD, SELF_ATTENTION, Branch, StackConfig
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error

VOCABULARY = 40
LIMITS = RunnerLimits(num_blocks=40, block_size=4, max_requests=4, max_length=64, vocabulary=VOCABULARY)
GREEDY = Sampling(temperature=0.0)


class MovingAverage(nn.Module):
    """A mixer with two states: a moving average, changed in place, and the last two inputs, which change places."""

    def __init__(self, place: BranchPlace) -> None:
        super().__init__()
        config, context, self._number = place.stack.model, place.context, place.number
        hidden = config.hidden_size
        self.linear_in = ColumnParallelLinear(hidden, hidden, context, init=input_init(config), bias=False)
        self.linear_out = RowParallelLinear(hidden, hidden, context, init=output_init(place.stack), bias=False)

    @property
    def text_state(self) -> Slotted:
        shape, dtype = (self.linear_out.weight.shape[1],), self.linear_out.weight.dtype
        names = ("last", "before", "mean")
        return Slotted(dict.fromkeys(names, shape), dict.fromkeys(names, dtype))

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        inner = self.linear_in(x)
        if inputs.cache is None:
            zeros = {name: torch.zeros_like(inner[0]) for name in ("last", "before", "mean")}
            mixed, _ = self._advance(zeros, inner)
        else:
            mixed = inputs.cache.advance(self._number, self._advance, inner)
        out: Tensor = self.linear_out(mixed)
        return out

    def _advance(self, states: States, inner: Tensor) -> tuple[Tensor, States]:
        mean, last, before, outputs = states["mean"], states["last"], states["before"], []
        for now in inner:
            mean.mul_(0.8).add_(now)
            outputs.append((mean + last - before) * now.sigmoid())
            last, before = now, last
        return torch.stack(outputs), {"mean": mean, "last": last, "before": before}


AVERAGE = Branch("average", "pre_average_layernorm", "average", MovingAverage)
MAMBA = mamba_branch(MambaConfig(mamba_state_dim=8, mamba_head_dim=16, mamba_num_groups=2, mamba_chunk_size=4))
DELTA_NET = delta_net_branch(
    GatedDeltaNetConfig(
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_attention_chunk_size=4,
    )
)


def model(
    pattern: str, context: ModelContext | None = None, *, branch: Branch = AVERAGE, stage: Stage | None = None
) -> GPTModel:
    """Layers of ``pattern``: ``a`` a moving average, or ``branch``, ``*`` attention."""
    config = ModelConfig(
        num_layers=len(pattern),
        hidden_size=32,
        num_attention_heads=4,
        position_embedding_type="rope",
        max_position_embeddings=64,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
    )
    layers = tuple(((branch if letter == "a" else SELF_ATTENTION), FEED_FORWARD) for letter in pattern)
    stack = StackConfig(config, causal=True, pattern=layers)
    context = context or ModelContext.single(dtype=torch.float64)
    return GPTModel(config, context, stage=stage, stack=stack, seed=5).eval().requires_grad_(False)


@cache
def hybrid() -> GPTModel:
    return model("a*aa")


def runner(of: GPTModel, limits: RunnerLimits = LIMITS, *, is_batch_invariant: bool | None = None) -> CachedRunner:
    return CachedRunner(of, of._config, of._context, limits, is_batch_invariant=is_batch_invariant)


def whole_text(of: GPTModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """The greedy continuation by forward passes over the whole text."""
    ids = [*prompt]
    for _ in range(count):
        ids.append(int(of(torch.tensor([ids])).logits()[0, -1].argmax()))
    return ids[len(prompt) :]


PROMPTS = [tuple(random.Random(n).choices(range(VOCABULARY), k=k)) for n, k in enumerate((1, 2, 7, 8, 9, 9, 20, 31))]


@pytest.mark.parametrize(
    ("pattern", "branch"),
    [("a*aa", AVERAGE), ("aa", AVERAGE), ("a*a", MAMBA)],
    ids=["averages and attention", "averages", "Mamba-2 and attention"],
)
def test_texts_beside_each_other_are_those_of_whole_forward_passes(pattern: str, branch: Branch) -> None:
    """A layer with a state of its own generated another text, and beside a second text another one still.

    Prompts of many lengths, read in parts, more of them than slots, and so few blocks that texts lose theirs.
    """
    of = model(pattern, branch=branch)
    limits = replace(LIMITS, num_blocks=16, max_requests=3, num_snapshots=1)
    engine = Engine(runner(of, limits), options=SchedulerOptions(max_tokens=11))
    requests = [Request(id=str(n), prompt=prompt, max_tokens=22, sampling=GREEDY) for n, prompt in enumerate(PROMPTS)]
    found = [result.ids for result in engine.generate(requests)]
    assert found == [whole_text(of, prompt, 22) for prompt in PROMPTS]
    assert engine.statistics.preemptions == 3


def test_beams_go_on_from_copies_of_their_text_s_state() -> None:
    """Beams of one text went on in each other's state. The best answers are those of a search over whole texts."""
    engine = Engine(runner(hybrid()), options=SchedulerOptions(max_tokens=4))
    asked = [
        Request(id="search", prompt=PROMPTS[3], max_tokens=6, beams=BeamSearch(width=3)),
        Request(id="beside", prompt=PROMPTS[4], max_tokens=9, sampling=GREEDY),
    ]
    search, beside = engine.generate(asked)
    texts = [(0.0, PROMPTS[3])]
    for _ in range(6):
        scores = [hybrid()(torch.tensor([text])).logits()[0, -1].log_softmax(0) for _, text in texts]
        going_on = [
            (value + float(score[token]), (*text, token))
            for (value, text), score in zip(texts, scores)
            for token in range(VOCABULARY)
        ]
        texts = sorted(going_on, reverse=True)[:3]
    assert [[token.id for token in beam.tokens] for beam in search.beams] == [[*text[8:]] for _, text in texts]
    assert beside.ids == whole_text(hybrid(), PROMPTS[4], 9)


@pytest.mark.parametrize("num_snapshots", [3, 0])
def test_an_equal_beginning_is_read_once_where_its_state_is_kept(num_snapshots: int) -> None:
    """The states of equal beginnings could not be found again, so each choice of a prompt read all of it."""
    engine = Engine(runner(hybrid(), replace(LIMITS, num_snapshots=num_snapshots)))
    begin, more = PROMPTS[7][:21], PROMPTS[6]
    prompts = [begin, begin, begin, (*begin, *more), begin[:20], begin[:12]]
    requests = [Request(id=str(n), prompt=each, max_tokens=5, sampling=GREEDY) for n, each in enumerate(prompts)]
    found = [result.ids for result in engine.generate(requests)]
    assert found == [whole_text(hybrid(), prompt, 5) for prompt in prompts]
    assert engine.statistics.prefix_hits == (3 * 20 if num_snapshots else 0)


class Guesses:
    """Guesses of which every third is wrong. ``texts``: what each prompt goes on with."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self._texts = texts

    def propose(self, rows: Sequence[ScheduledRow], states: Sequence[SamplerState], copies: object) -> None:
        for row in rows:
            done, ids = row.text.num_generated, self._texts[row.text.request.prompt]
            right = ids[done : done + row.room] if row.room else []
            row.drafts = tuple((token + (done + n) % 3 // 2) % VOCABULARY for n, token in enumerate(right))


@pytest.mark.parametrize(
    ("pattern", "branch"), [("a*aa", AVERAGE), ("a*a", MAMBA), ("a*a", DELTA_NET)], ids=["averages", "Mamba-2", "delta"]
)
def test_drafts_leave_each_text_as_it_is(pattern: str, branch: Branch) -> None:
    """A state took in guesses that were wrong, so drafts had no effect in a model with one.

    Guesses are right in part, or always, by a draft model with states of its own. Texts lose their blocks, and begin at
    snapshots.
    """
    of = model(pattern, branch=branch)
    limits = replace(LIMITS, num_blocks=18, max_requests=3, num_snapshots=2)
    prompts = [*PROMPTS, PROMPTS[6]]
    expected = {prompt: whole_text(of, prompt, 22) for prompt in PROMPTS}
    for drafter in (Guesses(expected), DraftModel(runner(of, limits))):
        engine = Engine(runner(of, limits), options=SchedulerOptions(max_tokens=17, num_drafts=3), drafter=drafter)
        asked = [Request(id=str(n), prompt=each, max_tokens=22, sampling=GREEDY) for n, each in enumerate(prompts)]
        assert [result.ids for result in engine.generate(asked)] == [expected[prompt] for prompt in prompts]
        numbers = engine.statistics
        assert numbers.preemptions and numbers.prefix_hits
        right = numbers.accepted_tokens / numbers.drafted_tokens
        assert right == 1.0 if isinstance(drafter, DraftModel) else 0.3 < right < 0.8


def steps_of(steps: CachedRunner) -> list[Tensor]:
    """The logits of three prompts, and of twelve steps of one token each, whose texts change their order."""
    lengths, found = {0: 3, 1: 1, 2: 6}, []
    rows = [
        PlanRow(slot=slot, start=0, tokens=PROMPTS[7][:length], blocks=(5 * slot + 1, 5 * slot + 2), logits_from=0)
        for slot, length in lengths.items()
    ]
    blocks = {slot: tuple(range(1 + 5 * slot, 6 + 5 * slot)) for slot in lengths}
    found.append(steps.start(StepPlan(tuple(rows))).logits())
    for number in range(12):
        order = [0, 1, 2] if number % 3 else [2, 0, 1]
        rows = [
            PlanRow(slot=slot, start=lengths[slot], tokens=(number,), blocks=blocks[slot], logits_from=0)
            for slot in order
        ]
        lengths = {slot: length + 1 for slot, length in lengths.items()}
        found.append(steps.start(StepPlan(tuple(rows))).logits())
    return found


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_replayed_steps_keep_the_states_of_computed_ones(is_batch_invariant: bool) -> None:
    """The step that is computed and replayed for comparison took each token into the state twice."""
    computed, replayed = (runner(hybrid(), is_batch_invariant=is_batch_invariant) for _ in "12")
    computed._records = False
    assert all(map(torch.equal, steps_of(computed), steps_of(replayed)))
    assert [program is not None for program in replayed._recorded._programs.values()] == [True]
    tables = zip(computed._cache.states._all(), replayed._cache.states._all(), strict=True)
    assert all(torch.equal(one, other) for one, other in tables)


class Forgetful(MovingAverage):
    """Looks like a torch function to no recorder: it keeps a number that the recorder doesn't see."""

    @override
    def _advance(self, states: States, inner: Tensor) -> tuple[Tensor, States]:
        out, after = super()._advance(states, inner)
        unseen = torch.from_numpy(inner[-1].numpy().copy())
        return out, {**after, "last": unseen}


def test_a_state_that_a_recorder_does_not_see_is_not_replayed() -> None:
    """Its outputs are right for one step, and the state behind them would be that of the recorded step for ever."""
    of = model("aa", branch=replace(AVERAGE, build=Forgetful))
    computed, replayed = runner(of), runner(of)
    computed._records = False
    assert all(map(torch.equal, steps_of(computed), steps_of(replayed)))


class Scanned(MovingAverage):
    """Computes the means of a prompt at once, by products with powers of the decay, as a scan does."""

    @override
    def _advance(self, states: States, inner: Tensor) -> tuple[Tensor, States]:
        ages = torch.arange(len(inner)) - torch.arange(len(inner))[:, None]
        shares = torch.where(ages < 0, 0.0, torch.tensor(0.8, dtype=inner.dtype) ** ages)
        before = states["mean"] * 0.8 ** torch.arange(1, 1 + len(inner))[:, None, None]
        means = torch.einsum("st,snh->tnh", shares.to(inner.dtype), inner) + before.to(inner.dtype)
        return means * inner.sigmoid(), {**states, "mean": means[-1]}


def test_bits_do_not_depend_on_neighbours_where_that_is_wanted() -> None:
    """With --batch-invariant a text alone, in one part, has the bits of a text in parts, with drafts, among others."""
    of = model("a*aa", ModelContext.single(dtype=torch.float32), branch=replace(AVERAGE, build=Scanned))
    texts = [PROMPTS[7], PROMPTS[6], PROMPTS[4]]
    row = PlanRow(slot=0, start=0, tokens=texts[0], blocks=tuple(range(1, 9)), logits_from=0)
    alone = runner(of, is_batch_invariant=True).start(StepPlan((row,))).logits()
    crowded, parts = runner(of, is_batch_invariant=True), list[Tensor]()
    for start, stop in ((0, 5), (5, 6), (6, 20), (20, 31)):
        part = replace(row, start=start, tokens=(*texts[0][start:stop], 1, 2)[: 32 - start], drafts=min(2, 32 - stop))
        others = [
            PlanRow(
                slot=n, start=start, tokens=text[start:stop], blocks=tuple(range(1 + 8 * n, 9 + 8 * n)), logits_from=0
            )
            for n, text in enumerate(texts[1:], start=1)
            if text[start:stop]
        ]
        parts.append(crowded.start(StepPlan((*others, part))).logits()[-len(part.tokens) :][: stop - start])
    assert torch.equal(torch.cat(parts), alone)
    half = model("a", ModelContext.single(dtype=torch.bfloat16))
    assert not runner(half)._is_batch_invariant  # a default that would read prompts token by token


class Silent(nn.Module):
    """A mixer that says nothing of what it keeps."""

    def __init__(self, place: BranchPlace) -> None:
        super().__init__()
        self._number = place.number

    @override
    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        assert inputs.cache is not None
        return inputs.cache.advance(self._number, lambda states, x: (x, states), x)


def test_a_mixer_that_declares_no_state_is_refused_in_one_sentence() -> None:
    """Its text was another one, or a KeyError."""
    branch = replace(AVERAGE, build=Silent)
    with expect_error(ConfigError, "Silent"):
        runner(model("a*", branch=branch))
    Silent.text_state = None  # type: ignore[attr-defined]
    row = PlanRow(slot=0, start=0, tokens=(1, 2), blocks=(1,), logits_from=1)
    with expect_error(ConfigError, "text_state"):
        runner(model("a*", branch=branch)).start(StepPlan((row,)))


def test_memory_of_states_counts_in_that_of_the_cache() -> None:
    """The report and the limit of memory left out what grows with texts, not with tokens."""
    found, attention = (runner(model(pattern)).cache_bytes for pattern in ("a*aa", "*"))
    assert found - attention == 3 * 3 * 32 * 8 * LIMITS.max_requests
    states = hybrid().layer_states()
    assert states.bytes_per_text == 3 * 3 * 32 * 8
    assert states.bytes_per_token(torch.float64) == 2 * 32 * 8
