"""Layers with a state of fixed size: each token must be that of a forward pass over its whole text."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.models.gpt.model import GPTModel
from megatron.core.ops.text_cache import Slotted, States
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.initialization import input_init, output_init
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import FEED_FORWARD, SELF_ATTENTION, Branch, StackConfig

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


def model(pattern: str, context: ModelContext | None = None) -> GPTModel:
    """Layers of ``pattern``: ``a`` a moving average, ``*`` attention."""
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
    layers = tuple(((AVERAGE if letter == "a" else SELF_ATTENTION), FEED_FORWARD) for letter in pattern)
    stack = StackConfig(config, causal=True, pattern=layers)
    context = context or ModelContext.single(dtype=torch.float64)
    return GPTModel(config, context, stack=stack, seed=5).eval().requires_grad_(False)


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


@pytest.mark.parametrize("pattern", ["a*aa", "aa"])
def test_texts_beside_each_other_are_those_of_whole_forward_passes(pattern: str) -> None:
    """A layer with a state of its own generated another text, and beside a second text another one still.

    Prompts of many lengths, read in parts, more of them than slots, and so few blocks that texts lose theirs.
    """
    of = model(pattern)
    limits = replace(LIMITS, num_blocks=16, max_requests=3)
    engine = Engine(runner(of, limits), options=SchedulerOptions(max_tokens=11))
    requests = [Request(id=str(n), prompt=prompt, max_tokens=22, sampling=GREEDY) for n, prompt in enumerate(PROMPTS)]
    found = [result.ids for result in engine.generate(requests)]
    assert found == [whole_text(of, prompt, 22) for prompt in PROMPTS]
    assert engine.statistics.preemptions > 0


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
