"""Speculative decoding: draft tokens, which the model verifies together in one step.

The engine samples each token as it would without drafts, and goes on as long as that is the draft. So a guess
changes how many steps a text takes, and never the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from megatron.core.inference.sampler import SampleRow, SamplerState, sample
from megatron.core.inference.scheduled_text import ScheduledText
from megatron.core.inference.scheduler import ScheduledRow
from megatron.core.inference.step_plan import ModelRunner, PlanRow, StepPlan


class Drafter(Protocol):
    """A source of guessed tokens for speculative decoding."""

    def propose(
        self, rows: Sequence[ScheduledRow], states: Sequence[SamplerState], copies: Sequence[tuple[int, int]]
    ) -> None:
        """Set ``drafts`` of the rows of a step, up to ``room`` of them. ``states``: of the rows' requests. ``copies``:
        the step's ``state_copies``.
        """
        ...


class PromptLookup:
    """Guesses that a text goes on as it did after an earlier place with the same last tokens, the most recent one.

    It costs nothing, and is often right in answers that repeat parts of the prompt, such as summaries, and code.
    """

    def __init__(self, *, longest: int = 4, shortest: int = 2) -> None:
        self._lengths = range(longest, shortest - 1, -1)

    def propose(
        self, rows: Sequence[ScheduledRow], states: Sequence[SamplerState], copies: Sequence[tuple[int, int]]
    ) -> None:
        """Set ``drafts`` of the rows of a step to what followed their last tokens earlier in the text."""
        for row in rows:
            if row.room:
                row.drafts = self.after(row.text.tokens, row.room)

    def after(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """What followed the last tokens earlier in the text, at most ``count`` tokens; none where those are new."""
        text = array("q", tokens).tobytes()
        for length in self._lengths:
            if (start := _last_place(text, 8 * length)) >= 0:
                return tuple(tokens[start + length : start + length + count])
        return ()


def _last_place(text: bytes, length: int) -> int:
    """The last token before the end from which the last ``length`` bytes are repeated; -1 without one."""
    end = len(text) - 8
    while (place := text.rfind(text[-length:], 0, end)) >= 0 and place % 8:
        end = place + length - 1
    return place // 8


class DraftModel:
    """Guesses what a smaller model would say, with the same random numbers.

    ``runner`` has the model's limits, and blocks and states for the same texts, at the same places: it computes every
    text's tokens just before the model does, except what the beams of a search add to their prompt.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._computed: WeakKeyDictionary[ScheduledText, tuple[int, int]] = WeakKeyDictionary()  # attempt, tokens
        self._copies: tuple[tuple[int, int], ...] = ()  # for the next plan

    def propose(
        self, rows: Sequence[ScheduledRow], states: Sequence[SamplerState], copies: Sequence[tuple[int, int]]
    ) -> None:
        """Set ``drafts`` of the rows of a step to tokens that the draft model samples.

        With states of fixed size, which are kept before the first draft, each draft is computed after all earlier ones.
        """
        self._copies += tuple(copies)
        texts = [(row, state) for row, state in zip(rows, states, strict=True) if not row.encoder and _is_known(row)]
        plan_rows = [row.plan_row() for row in rows if row.encoder] + [self._known(row) for row, _ in texts]
        drafting = [pair for pair in texts if pair[0].room]
        while plan_rows:
            logits = self._runner.start(StepPlan(tuple(plan_rows), self._copies)).logits()
            self._copies = ()
            sampled = sample(logits, [SampleRow(state, row.drafts) for row, state in drafting]) if drafting else []
            for (row, _), guess in zip(drafting, sampled, strict=True):
                row.drafts += (guess.token,) if guess.error is None else ()
                row.room = row.room if guess.error is None else len(row.drafts)
            drafting = [pair for pair in drafting if len(pair[0].drafts) < pair[0].room]
            plan_rows = [self._guessed(row) for row, _ in drafting]
        for row, _ in texts:
            self._computed[row.text] = (row.attempt, row.start + len(row.tokens) + self._num_kept(row))

    def _num_kept(self, row: ScheduledRow) -> int:
        """How many of the row's drafts need not be computed again."""
        return 0 if self._runner.limits.has_states else max(0, len(row.drafts) - 1)

    def _known(self, row: ScheduledRow) -> PlanRow:
        """The row's tokens, after one that was accepted without having been computed here."""
        attempt, computed = self._computed.get(row.text, (-1, 0))
        start = min(computed, row.start) if attempt == row.attempt else row.start
        tokens = tuple(row.text.tokens[start : row.start + len(row.tokens)])
        return _row(row, start=start, tokens=tokens, logits_from=len(tokens) - (row.room > 0))

    def _guessed(self, row: ScheduledRow) -> PlanRow:
        """The row's last draft, to find the one after it, and before it those that are not kept."""
        start = self._num_kept(row)
        tokens = row.drafts[start:]
        after = row.start + len(row.tokens) + start
        return _row(row, start=after, tokens=tokens, logits_from=len(tokens) - 1, drafts=len(tokens))


def _is_known(row: ScheduledRow) -> bool:
    """Whether the row is a part of a text's only continuation, not of a beam's."""
    return row.text.places is None or row.start < len(row.text.request.prompt)


def _row(row: ScheduledRow, *, start: int, tokens: tuple[int, ...], logits_from: int, drafts: int = 0) -> PlanRow:
    of = row.plan_row()
    return PlanRow(slot=of.slot, start=start, tokens=tokens, blocks=of.blocks, logits_from=logits_from, drafts=drafts)
