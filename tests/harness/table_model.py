"""A table as model: the next token is a hash of all tokens before it, read back from blocks as a cache would be.

A scheduler that hands out a block twice, forgets a token or shows a request another one's text makes it answer
differently, in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.inference.step_plan import PlanRow, RunnerLimits, RunningStep, StepPlan
from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.rng import derive_seed

EMPTY = -1
NOISE = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(1))


@dataclass
class Table:
    """A :class:`ModelRunner` whose cache holds the tokens themselves.

    ``broken``: tokens after which all logits are NaN. ``is_draft``: of a smaller model, which is wrong after every
    third text, and may miss the last token of a block that it shares.
    ``encoders``: the encoder prompt of each slot. ``cache``: at each place of each block the
    token, and the encoder prompt, on which a model's keys and values depend, too. ``states``: in a model that has
    some, of each slot the text whose tokens it has taken in, from which the next token follows.
    """

    limits: RunnerLimits
    depth: int = 1
    broken: frozenset[int] = frozenset()
    is_draft: bool = False
    plans: list[StepPlan] = field(default_factory=list)
    is_closed: bool = False
    encoders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cache: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    states: dict[int, list[int]] = field(default_factory=dict)
    in_flight: int = 0
    failure: Exception | None = None

    def start(self, plan: StepPlan) -> RunningTable:
        """Write the plan's tokens into blocks, then read each text back from its blocks."""
        assert not self.is_closed
        assert self.in_flight < self.depth, "more plans in flight than the runner has stages"
        self.in_flight += 1
        self.plans.append(plan)
        assert len({(row.slot, row.encoder) for row in plan.rows}) == len(plan.rows), "a slot twice in a plan"
        logits: list[Tensor] = []
        copies = [(row, self._block(row.copies)) for row in plan.rows if row.copies]
        for row, content in copies:
            block, _ = self._place(row, row.start)
            self.cache |= {(block, offset): content[offset] for offset in content}
        for source, target in plan.state_copies:
            assert self.limits.has_states and max(source, target) < self.limits.num_slots
            self.states[target] = [*self.states[source]]
        for row in plan.rows:
            assert 0 <= row.slot < self.limits.max_requests
            if row.encoder:
                self.encoders[row.slot] = row.tokens
            else:
                self._write(row)
        for row in plan.rows:
            if not row.encoder:
                logits += self._logits(row)
        stacked = torch.stack(logits) if logits else torch.empty(0, self.limits.vocabulary)
        assert len(stacked) == plan.num_logits
        return RunningTable(Handle([stacked]), self)

    def close(self) -> None:
        """No more plans."""
        self.is_closed = True

    def _write(self, row: PlanRow) -> None:
        for position, token in enumerate(row.tokens, start=row.start):
            self.cache[self._place(row, position)] = (token, self.encoders.get(row.slot, ()))
        if self.limits.has_states:
            before = [] if row.start == 0 else self.states[row.slot]
            assert len(before) == row.start, f"slot {row.slot} goes on at {row.start} from a state at {len(before)}"
            self.states[row.slot] = [*before, *row.tokens[: len(row.tokens) - row.drafts]]

    def _block(self, number: int) -> dict[int, tuple[int, tuple[int, ...]]]:
        return {offset: content for (block, offset), content in self.cache.items() if block == number}

    def _place(self, row: PlanRow, position: int) -> tuple[int, int]:
        assert position < self.limits.max_length, "a model may have no such position"
        block = row.blocks[position // self.limits.block_size]
        assert 0 < block < self.limits.num_blocks
        return block, position % self.limits.block_size

    def _logits(self, row: PlanRow) -> list[Tensor]:
        places = [self._place(row, position) for position in range(row.start + len(row.tokens))]
        encoder = self.encoders.get(row.slot, ())
        found = [self.cache.get(place, (EMPTY, encoder)) for place in places]
        text = [token for token, _ in found]
        assert self.is_draft or EMPTY not in text, f"slot {row.slot} reads a place that nobody has written"
        assert not self.limits.max_encoder_length or {each for _, each in found} == {encoder}, "another's encoder"
        if self.limits.has_states:
            state = self.states[row.slot]
            known = text[: len(text) - row.drafts]
            read = [own if self.is_draft and token == EMPTY else token for token, own in zip(known, state)]
            assert len(known) == len(state) and read == state, "blocks hold another text than the state"
        ends = range(row.start + row.logits_from + 1, len(text) + 1)
        return [self.logits_after(text[:end], encoder) for end in ends]

    def logits_after(self, text: list[int], encoder: tuple[int, ...] = ()) -> Tensor:
        """Logits of the token after a text."""
        if text[-1] in self.broken:
            return torch.full((self.limits.vocabulary,), float("nan"))
        seed = derive_seed(*(encoder if self.limits.max_encoder_length else ()), "|", *text)
        logits = NOISE[seed % 1000, : self.limits.vocabulary].clone()
        logits[(seed + (self.is_draft and seed % 3 == 0)) % self.limits.vocabulary] += 2.0
        return logits


@dataclass(frozen=True)
class RunningTable(RunningStep):
    """A step of a :class:`Table`."""

    table: Table

    @override
    def logits(self) -> Tensor:
        """The logits, once."""
        self.table.in_flight -= 1
        return super().logits()


def table(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_requests: int = 4,
    max_length: int = 200,
    vocabulary: int = 30,
    max_encoder_length: int = 0,
    depth: int = 1,
    broken: frozenset[int] = frozenset(),
    is_draft: bool = False,
    has_states: bool = False,
    num_snapshots: int = 0,
) -> Table:
    """A table of these limits."""
    limits = RunnerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_requests=max_requests,
        max_length=max_length,
        vocabulary=vocabulary,
        max_encoder_length=max_encoder_length,
        has_states=has_states,
        num_snapshots=num_snapshots,
    )
    return Table(limits, depth=depth, broken=broken, is_draft=is_draft)
