"""Which tokens of which requests the model computes next: a function of what has arrived, without model or clock.

Every request is a text, prompt first, of which the cache holds a beginning. A text can go on when it has tokens that
are not computed yet: many after it has arrived or lost its blocks, one after a token was sampled, none while its next
token is being computed. So reading a prompt in chunks, generating, and recomputing are the same thing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.inference.block_pool import BlockPool
from megatron.core.inference.request import Request
from megatron.core.inference.scheduled_text import BeamPlaces, ScheduledText
from megatron.core.inference.snapshots import StateSnapshots
from megatron.core.inference.step_plan import PlanRow, RunnerLimits


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """``max_tokens`` of a step, at least one for each slot. ``max_logits``: rows of logits of a step, to bound memory.

    ``chunked_prefill``: prompts are read in parts that fit into ``max_tokens``; without it a prompt is read whole, a
    longer one in a step of its own. ``prefix_caching``: blocks of equal beginnings of prompts are used again.
    ``num_drafts``: tokens that are guessed and verified together with a text's next one.
    """

    max_tokens: int = 2048
    max_logits: int = 1024
    chunked_prefill: bool = True
    prefix_caching: bool = True
    num_drafts: int = 0

    def possible(self, limits: RunnerLimits) -> SchedulerOptions:
        """The options without equal beginnings where states of fixed size rule them out: a state can go back to where
        two prompts differ only by a snapshot; and where all of a prompt sees itself.
        """
        has_snapshots = limits.num_snapshots > 0 or not limits.has_states
        is_whole = limits.joint_attention == "prefix"  # a prompt's words depend on later ones
        return replace(self, prefix_caching=self.prefix_caching and has_snapshots and not is_whole)


@dataclass(eq=False)
class ScheduledRow:
    """A text's part of a step.

    ``room``: how many ``drafts`` may be added. ``logits_from``: logits are wanted after the token at this position and
    all later ones. ``copies``: the block that the one of ``start`` begins as a copy of, 0 for none. ``prefix``: as in
    PlanRow.
    """

    text: ScheduledText
    attempt: int
    start: int
    tokens: tuple[int, ...]
    logits_from: int
    encoder: bool = False
    room: int = 0
    drafts: tuple[int, ...] = ()
    copies: int = 0
    prefix: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the text has ended or started again since this row was scheduled."""
        return self.text.attempt != self.attempt

    @property
    def num_logits(self) -> int:
        """Logits wanted, drafts included."""
        return self.start + len(self.tokens) - self.logits_from + len(self.drafts)

    @property
    def is_sampled(self) -> bool:
        """Whether the text's next token is sampled from the row's logits."""
        is_last = self.start + len(self.tokens) == len(self.text.tokens)
        return not self.encoder and is_last and self.text.request.max_tokens > 0

    def plan_row(self) -> PlanRow:
        """The row as the runner computes it."""
        assert self.text.slot is not None, "a row of a text without a slot"
        images = self.text.request.images
        return PlanRow(
            slot=self.text.slot,
            start=self.start,
            tokens=self.tokens + self.drafts,
            blocks=() if self.encoder else tuple(self.text.blocks),
            logits_from=self.logits_from - self.start,
            encoder=self.encoder,
            copies=self.copies,
            drafts=len(self.drafts),
            adapter=self.text.request.adapter,
            images=None if images is None else images.within(self.start, self.start + len(self.tokens + self.drafts)),
            prefix=self.prefix,
        )


class Scheduler:
    """Owns queue, slots and block tables.

    Running texts go first, oldest first, those that generate before those that are still being read; then
    waiting ones in order of arrival. When blocks run out, the youngest running text loses its own and starts again from
    the head of the queue. ``depth``: steps in flight at once; each gets its share of the generating texts. Beams of a
    search are texts that share blocks: a beam that writes to a shared one gets a copy first.

    States of fixed size are copied as a whole. Of each prompt's state at the end of its last full block a snapshot is
    kept, at which texts with an equal beginning start. Such a state is kept before the drafts of a step, so those that
    are accepted are computed again, in the next step of their text.
    """

    def __init__(self, limits: RunnerLimits, options: SchedulerOptions, *, depth: int = 1) -> None:
        self.limits, self.options = limits, options.possible(limits)
        self.pool = BlockPool(limits.num_blocks)
        self.running: list[ScheduledText] = []  # oldest first
        self.waiting: deque[ScheduledText] = deque()
        self.preemptions = self.prompt_tokens = self.prefix_hits = 0
        self._depth = depth
        self._slots = list(range(limits.max_requests - 1, -1, -1))
        self._searches: list[BeamPlaces] = []
        self._arrivals = 0
        self._keyed: ScheduledText | None = None
        has_snapshots = limits.has_states and self.options.prefix_caching
        self._snapshots = StateSnapshots(range(limits.max_requests, limits.num_slots)) if has_snapshots else None
        self._state_copies: list[tuple[int, int]] = []
        self._at_ends: list[tuple[ScheduledText, int]] = []  # texts whose state is to be kept, and their attempt

    def take_state_copies(self) -> tuple[tuple[int, int], ...]:
        """Pairs of slots whose states the next plan copies, from the first to the second, before its rows."""
        copies, self._state_copies = tuple(self._state_copies), []
        return copies

    def add(self, request: Request) -> ScheduledText:
        """Queue a request, which must fit ``limits``."""
        text = ScheduledText(request, self._arrivals)
        self._arrivals += 1
        self.waiting.append(text)
        return text

    def remove(self, text: ScheduledText, *, is_broken: bool = False) -> None:
        """End a text, wherever it is, and all beams of its search; the content of its blocks is kept for others, unless
        ``is_broken``.
        """
        if is_broken and self._snapshots is not None:
            self._snapshots.forget(text.keys)
        if text.places is not None:
            for each in list(text.places.texts):
                if is_broken:
                    self.pool.forget(each.blocks)
                self._leave(each)
            self._slots += text.places.slots
            self._searches.remove(text.places)
            return
        if text.slot is None:
            self.waiting.remove(text)
            text.attempt += 1
            return
        if is_broken:
            self.pool.forget(text.blocks)
        self._leave(text)

    def advance(self, row: ScheduledRow, sampled: list[int]) -> None:
        """Add the tokens that were sampled after a row: accepted drafts and one more. The drafts are computed, unless
        the states that are kept are those before them.
        """
        row.text.tokens += sampled
        if not self.limits.has_states:
            row.text.computed += len(sampled) - 1
        self._register(row.text)

    def branch(self, texts: Sequence[ScheduledText], moves: Sequence[tuple[int, int]]) -> list[ScheduledText]:
        """The beams of a search a token later: ``moves`` are pairs of a beam's number and its next token.

        A beam may go on several times; beams that don't go on leave.
        """
        places, going_on = texts[0].places, {number for number, _ in moves}
        assert places is not None, "no beam of a search"
        for number, text in enumerate(texts):
            if number not in going_on:
                self._leave(text)
        found: list[ScheduledText] = []
        for place, (number, _) in enumerate(moves):
            is_first = number not in (earlier for earlier, _ in moves[:place])
            found.append(texts[number] if is_first else self._fork(texts[number], places))
        for text, (_, token) in zip(found, moves):
            text.tokens.append(token)
            self._register(text)
        return found

    def next_step(self) -> list[ScheduledRow]:
        """The rows of the next step, whose tokens count as computed from now on; drafts may be added to them. No
        rows while every text waits for a step in flight.
        """
        self._take_snapshots()
        rows: dict[ScheduledText, ScheduledRow] = {}
        limit = -(-len(self.running) // self._depth)
        most = 1 + self.options.num_drafts if self.limits.has_states else 1  # what the last step sampled
        for text in sorted(self.running, key=lambda text: text.remaining > most):
            is_generating = text.remaining <= most
            if text.slot is not None and text.remaining > 0 and (limit > 0 or not is_generating):
                self._schedule(text, rows)
                limit -= is_generating and text in rows  # one that waits for blocks leaves its share to others
        for text in list(self.waiting):
            if len(self._slots) < text.request.width or not self._admit(text, rows):
                break
        self._make_room_for_drafts(rows)
        for row in rows.values():
            if row.encoder:
                row.text.is_encoded = True
                if row.text.places is not None and row.text.slot is not None:
                    row.text.places.encoded.add(row.text.slot)
            else:
                row.text.computed += len(row.tokens)
                self._register(row.text)
                if row.text.computed == self._end_of_snapshot(row.text):
                    self._at_ends.append((row.text, row.attempt))
        return list(rows.values())

    def _admit(self, text: ScheduledText, rows: dict[ScheduledText, ScheduledRow]) -> bool:
        """Give a waiting text a slot and its first row. False if it and all later ones must wait."""
        shared: list[int] = []
        if self.options.prefix_caching:
            self._find_keys(text)
            if not text.is_scoring:
                if text.awaited is not None and self._is_being_computed(text, text.awaited):
                    return True  # as in the last step
                keys = text.keys[: (len(text.tokens) - 1) // self.limits.block_size]
                shared = self.pool.find(keys)
                if self._snapshots is not None:
                    shared = shared[: self._snapshots.longest(keys[: len(shared)])]
                    if self._is_being_read(keys, len(shared)):
                        return True
                elif len(shared) < len(keys) and self._is_being_computed(text, len(shared)):
                    return True  # it waits for an equal prompt; those behind it need not
        reserved = text.request.num_blocks(self.limits.block_size)  # of a search, for all beams at their full length
        needed = reserved if text.request.beams else self._num_blocks(len(text.tokens) + 1)
        needed -= len(shared)
        available = self._num_available(text) - self.pool.num_cached_of(shared)
        # A block more for each running text, or the new one would soon lose its own to them.
        if self.running and available < needed + len(self.running):
            return False
        if not self._row_length(text, rows, start=len(shared) * self.limits.block_size):
            return False
        self.waiting.remove(text)
        self.running.append(text)
        self.running.sort(key=lambda text: text.arrival)
        if text.request.beams is not None:
            slots = [self._slots.pop() for _ in range(text.request.beams.width)]
            text.places = BeamPlaces(slots, reserved, [text])
            self._searches.append(text.places)
            text.slot = slots.pop()
        else:
            text.slot = self._slots.pop()
        self.pool.hold(shared)
        if shared and self._snapshots is not None:
            self._state_copies.append((self._snapshots.use(text.keys[len(shared) - 1]), text.slot))
        text.blocks = shared
        text.computed = len(shared) * self.limits.block_size
        text.num_registered = len(shared)
        if text.attempt == 0:
            text.cached_tokens = text.computed
            self.prompt_tokens += len(text.tokens)
            self.prefix_hits += text.computed
        self._schedule(text, rows)
        return True

    def _find_keys(self, text: ScheduledText) -> None:
        """Compute the text's keys, or take those of the last text where both have one prompt, as choices have."""
        if (last := self._keyed) is not None and not text.keys and last.has_prompt_of(text):
            text.keys = last.keys[: len(text.request.prompt) // self.limits.block_size]
        text.extend_keys(self.limits.block_size)
        self._keyed = text

    def _is_being_computed(self, text: ScheduledText, number: int) -> bool:
        """Whether a running text has block ``number`` of a chain still to compute, of which ``text`` waits for all
        blocks that both have.
        """
        key, end = text.keys[number], (number + 1) * self.limits.block_size
        for other in self.running:
            if other.computed < end <= len(other.tokens) and other.keys[number] == key:
                common = range(number + 1, min(len(other.keys), len(text.keys)))
                text.awaited = number + bisect_left(common, True, key=lambda n: other.keys[n] != text.keys[n])
                return True
        return False

    def _end_of_snapshot(self, text: ScheduledText) -> int:
        """Where the text's prompt is cut to keep its state; 0 for a prompt without a full block before its last
        token, and where no states are kept.
        """
        size = self.limits.block_size
        return 0 if self._snapshots is None else (len(text.request.prompt) - 1) // size * size

    def _is_being_read(self, keys: Sequence[bytes], number: int) -> bool:
        """Whether a running text is on its way to a snapshot of more than ``number`` blocks with these ``keys``."""
        for other in self.running:
            last = (end := self._end_of_snapshot(other)) // self.limits.block_size
            if number < last <= len(keys) and other.computed < end and other.keys[last - 1] == keys[last - 1]:
                return True
        return False

    def _take_snapshots(self) -> None:
        """Keep the states of texts that have come to the end of their snapshot in the last step."""
        for text, attempt in self._at_ends:
            if text.attempt == attempt and text.slot is not None and self._snapshots is not None:
                key = text.keys[self._end_of_snapshot(text) // self.limits.block_size - 1]
                if (slot := self._snapshots.add(key)) is not None:
                    self._state_copies.append((text.slot, slot))
        self._at_ends = []

    def _schedule(self, text: ScheduledText, rows: dict[ScheduledText, ScheduledRow]) -> None:
        """Add a row for the text, if budget and blocks allow it."""
        count = self._row_length(text, rows, start=text.computed)
        if not count:
            return
        if not text.is_encoded:
            rows[text] = ScheduledRow(text, text.attempt, 0, text.request.encoder_prompt, count, encoder=True)
            return
        end, copies = text.computed + count, self._shared_block(text)
        while self._num_available(text) < self._num_blocks(end) - len(text.blocks) + (copies > 0):
            if (youngest := next(each for each in reversed(self.running) if each.places is None)) is text:
                return  # older texts take its blocks when they need them
            self._preempt(youngest)
            rows.pop(youngest, None)
        if copies:
            text.blocks[-1:] = self.pool.allocate(1, after=text.blocks[-2] if len(text.blocks) > 1 else None)
            self.pool.release([copies])
        self._grow(text, end)
        if text.is_scoring and text.computed < len(text.request.prompt):
            logits_from = min(end, max(text.computed, text.num_scored))
        else:
            logits_from = end - 1 if end == len(text.tokens) else end
        tokens = tuple(text.tokens[text.computed : end])
        prefix = len(text.request.prompt) if self.limits.joint_attention == "prefix" else 0
        rows[text] = ScheduledRow(text, text.attempt, text.computed, tokens, logits_from, copies=copies, prefix=prefix)

    def _row_length(self, text: ScheduledText, rows: dict[ScheduledText, ScheduledRow], *, start: int) -> int:
        """How many tokens of the text from ``start`` on the step has room for."""
        budget = self.options.max_tokens - sum(len(row.tokens) for row in rows.values())
        if not text.is_encoded:
            length = len(text.request.encoder_prompt)
            return length if length <= budget or not rows else 0
        length = text.remaining + text.computed - start
        if text.is_scoring and start < len(text.request.prompt):
            wanted = sum(row.start + len(row.tokens) - row.logits_from for row in rows.values())
            unscored = max(0, text.num_scored - start) + max(1, self.options.max_logits - wanted)
            length = min(length, len(text.request.prompt) - start, unscored)
        if start < (end := self._end_of_snapshot(text)) < start + length:
            length = end - start
        if self.options.chunked_prefill:
            length = min(length, budget)
        first, last = text.seen_together(start + length, self.limits.joint_attention)
        if length > 0 and first != last:
            length = (first if first > start else last) - start
        return length if length <= budget or not rows else 0

    def _make_room_for_drafts(self, rows: dict[ScheduledText, ScheduledRow]) -> None:
        """Let rows that generate have drafts, of what budget and blocks are left."""
        budget = self.options.max_tokens - sum(len(row.tokens) for row in rows.values())
        for text, row in rows.items():
            if row.encoder or text.remaining != len(row.tokens) or text.request.max_tokens == 0 or text.places:
                continue
            end = row.start + len(row.tokens)
            most = min(self.options.num_drafts, text.request.max_tokens - text.num_generated - 1, budget)
            spare = (len(text.blocks) + self._num_available(text)) * self.limits.block_size - end
            row.room = max(0, min(most, spare))
            budget -= row.room
            self._grow(text, end + row.room)

    def _preempt(self, text: ScheduledText) -> None:
        self._leave(text)
        self.preemptions += 1
        older = sum(waiting.arrival < text.arrival for waiting in self.waiting)
        self.waiting.insert(older, text)

    def _leave(self, text: ScheduledText) -> None:
        """Give slot and blocks back; whatever is on the way for the text is stale."""
        assert text.slot is not None, "a text without a slot has nothing to give back"
        self.pool.release(text.blocks)
        if text.places is None:
            self._slots.append(text.slot)
        else:
            text.places.slots.append(text.slot)
            text.places.texts.remove(text)
        self.running.remove(text)
        text.slot, text.blocks, text.computed, text.num_registered = None, [], 0, 0
        text.is_encoded = not text.request.encoder_prompt
        text.attempt += 1

    def _fork(self, text: ScheduledText, places: BeamPlaces) -> ScheduledText:
        """Another beam with the same tokens, in the same blocks."""
        assert text.computed == len(text.tokens), "a beam goes on when its tokens are computed"
        beam = replace(
            text, slot=places.slots.pop(), blocks=list(text.blocks), keys=list(text.keys), cached_tokens=0, attempt=1
        )
        beam.tokens = list(text.tokens)
        beam.is_encoded = not text.request.encoder_prompt or beam.slot in places.encoded
        self.pool.hold(beam.blocks)
        if self.limits.has_states:
            assert text.slot is not None and beam.slot is not None, "beams have slots"
            self._state_copies.append((text.slot, beam.slot))
        places.texts.append(beam)
        self.running.insert(self.running.index(text) + 1, beam)
        return beam

    def _shared_block(self, text: ScheduledText) -> int:
        """The block that the text's next token would be written to, if other beams hold it; else 0."""
        if text.places is None or not text.computed % self.limits.block_size:
            return 0
        block = text.blocks[text.computed // self.limits.block_size]
        return block if self.pool.is_shared(block) else 0

    def _num_available(self, text: ScheduledText) -> int:
        """Blocks that the text may be given: not those that are kept for other searches."""
        kept = sum(each.num_missing for each in self._searches if each is not text.places)
        return self.pool.num_available - kept

    def _grow(self, text: ScheduledText, length: int) -> None:
        missing = self._num_blocks(length) - len(text.blocks)
        if missing > 0:
            text.blocks += self.pool.allocate(missing, after=text.blocks[-1] if text.blocks else None)

    def _register(self, text: ScheduledText) -> None:
        """Let others find the text's blocks that are full."""
        if not self.options.prefix_caching:
            return
        text.extend_keys(self.limits.block_size)
        for number in range(text.num_registered, text.computed // self.limits.block_size):
            self.pool.register(text.blocks[number], text.keys[number])
            text.num_registered = number + 1

    def _num_blocks(self, length: int) -> int:
        return -(-length // self.limits.block_size)
