"""Text generation: requests in, updates out, one step of the model at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.core.inference.beams import BeamAnswer, NotFiniteError
from megatron.core.inference.detokenizer import IncrementalDetokenizer
from megatron.core.inference.drafts import Drafter, PromptLookup
from megatron.core.inference.edits import Edits
from megatron.core.inference.limits import EngineLimits
from megatron.core.inference.request import (
    Beam,
    Finish,
    GeneratedToken,
    Request,
    Result,
    TokenLogprobs,
    Update,
)
from megatron.core.inference.sampler import SampledToken, SampleRow, SamplerState, sample, token_logprobs
from megatron.core.inference.scheduled_text import ScheduledText
from megatron.core.inference.scheduler import ScheduledRow, Scheduler, SchedulerOptions
from megatron.core.inference.statistics import Statistics
from megatron.core.inference.step_plan import ModelRunner, RunningStep, StepPlan
from megatron.core.inference.stop_strings import StopStrings
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError


class _Answer:
    """What a request has got so far, and since its last update."""

    def __init__(self, text: ScheduledText, tokenizer: Tokenizer | None, edits: Edits) -> None:
        self.text, self.sampler = text, SamplerState(text.request, edits)
        self.prompt_logprobs: list[TokenLogprobs | None] = [] if text.request.prompt_logprobs is None else [None]
        request, self._tokenizer = text.request, tokenizer
        self.beams = None if request.beams is None else BeamAnswer(text, request.beams, self.sampler)
        self._stops = StopStrings(request.stop.strings, include_string=request.stop.include_string)
        self._detokenizer = None
        if tokenizer is not None:
            hidden = tokenizer.special_ids if request.skip_special_tokens else frozenset[int]()
            before = () if request.encoder_prompt else request.prompt  # a decoder's text is a whole one
            self._detokenizer = IncrementalDetokenizer(tokenizer, before, hidden=hidden)
        self._tokens: list[GeneratedToken] = []
        self._new_text = ""
        self.started: float | None = None

    @property
    def has_ended(self) -> bool:
        """Whether a request for the prompt's log-probabilities alone has all of them."""
        return self.text.request.max_tokens == 0 and not self.text.is_scoring

    def append(self, sampled: SampledToken) -> Finish | None:
        """Add a token. Returns why the text ends, if it does."""
        request, token = self.text.request, sampled.token
        self.sampler.append(token)
        is_end = token in request.stop.token_ids
        text = "" if is_end or self._detokenizer is None else self._detokenizer.add(token)
        self._tokens.append(GeneratedToken(token, sampled.logprobs, text))
        if is_end:
            return Finish("stop", stop=token)
        self._new_text += self._stops.add(text, may_stop=self.sampler.num_generated > request.sampling.min_tokens)
        if self._stops.matched is not None:
            return Finish("stop", stop=self._stops.matched)
        return Finish("length") if self.sampler.num_generated == request.max_tokens else None

    def update(self, finish: Finish | None = None) -> Update:
        """What is new. The text that was held back is shown at the end, unless a stop string has ended the text."""
        beams: tuple[Beam, ...] = ()
        if self.beams is not None and finish is not None and finish.reason in ("stop", "length"):
            beams = self.beams.found(self._tokenizer)
            self._new_text, self._tokens, finish = beams[0].text, list(beams[0].tokens), beams[0].finish
        elif finish is not None and self._detokenizer is not None and self._stops.matched is None:
            self._new_text += self._stops.finish() + self._detokenizer.finish()
        update = Update(
            request_id=self.text.request.id,
            text=self._new_text,
            tokens=tuple(self._tokens),
            finish=finish,
            prompt_logprobs=tuple(self.prompt_logprobs),
            cached_tokens=self.text.cached_tokens,
            beams=beams,
            started=self.started,
        )
        self._new_text, self._tokens, self.prompt_logprobs = "", [], []
        return update


class Engine:
    """Generates many texts at once.

    One thread calls it; only rank 0 has one, see ``workers``. A text depends on its own request alone. ``tokenizer``
    makes text of tokens; without it updates have tokens only. ``drafter``: guesses ``options.num_drafts`` tokens; None:
    from the text so far. ``limits``: what the engine has room for.
    ``quantization``: of the model's weights, which fingerprints of answers name. ``is_batch_invariant``: whether a
    text's logits have the same bits in any batch, which reports say. ``on_step``: called with the number of
    tokens of each step before it is computed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        tokenizer: Tokenizer | None = None,
        options: SchedulerOptions | None = None,
        drafter: Drafter | None = None,
        quantization: str | None = None,
        is_batch_invariant: bool = False,
    ) -> None:
        self.quantization, self.is_batch_invariant = quantization, is_batch_invariant
        self.on_step: Callable[[int], None] = lambda num_tokens: None
        self._error: Exception | None = None
        self._runner, self._tokenizer = runner, tokenizer
        options = (options or SchedulerOptions()).possible(runner.limits)
        self._drafter = (drafter or PromptLookup()) if options.num_drafts else None
        self._scheduler = Scheduler(runner.limits, options, depth=runner.depth)
        self.limits = EngineLimits(
            max_requests=runner.limits.max_requests,
            context_length=runner.limits.max_length,
            num_blocks=self._scheduler.pool.num_blocks,
            block_size=runner.limits.block_size,
            vocabulary=runner.limits.vocabulary,
            max_encoder_length=runner.limits.max_encoder_length,
            has_tokenizer=tokenizer is not None,
            num_adapters=runner.limits.num_adapters,
            image_shape=runner.limits.image_shape,
            joint_attention=runner.limits.joint_attention,
        )
        self._answers: dict[str, _Answer] = {}
        self._edits: Edits | None = None  # of the latest request: its prompt's other choices share them
        self._in_flight: deque[tuple[Sequence[ScheduledRow], RunningStep]] = deque()
        self._early: list[Update] = []  # for the next step to return
        self._generated = self._drafted = self._accepted = self._steps = self._step_tokens = 0

    @property
    def error(self) -> Exception | None:
        """Why no request can be answered any more, such as a lost rank; None while all is well.

        ``step`` raises it. A rank may also be lost while the engine has no work: check here while waiting for requests.
        """
        return self._runner.failure or self._error  # a lost rank is why a step failed

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would compute something or return an update."""
        return bool(self._answers or self._early or self._in_flight)

    @property
    def statistics(self) -> Statistics:
        """Gauges and counters at this moment."""
        scheduler = self._scheduler
        return Statistics(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            cache_usage=scheduler.pool.num_held / scheduler.pool.num_blocks,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=self._generated,
            prefix_queries=scheduler.prompt_tokens if scheduler.options.prefix_caching else 0,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            steps=self._steps,
            step_tokens=self._step_tokens,
        )

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DataError for one that can never be answered, and what a tokenizer raises."""
        self.check(request)
        self._edits = Edits.of(request, self._edits)
        text = self._scheduler.add(request)
        try:
            answer = self._answers[request.id] = _Answer(text, self._tokenizer, self._edits)
        except Exception:  # a tokenizer's: the request is not queued
            self._scheduler.remove(text)
            raise
        if answer.has_ended:
            self._early.append(self._finished(answer, Finish("length")))

    def abort(self, request_id: str) -> None:
        """End a request at once, whatever its state; ``step`` returns its last update. An unknown id is ignored."""
        if (answer := self._answers.get(request_id)) is not None:
            self._early.append(self._finished(answer, Finish("abort")))

    def step(self) -> list[Update]:
        """Compute one step. Returns at most one update for each request, and those of ``abort``."""
        try:
            return self._step()
        except Exception as error:
            self._error = error
            raise

    def generate(
        self, requests: Sequence[Request], *, on_update: Callable[[Update], None] = lambda update: None
    ) -> list[Result]:
        """Answer requests, in their order. ``on_update`` is called with each update as soon as there is one."""
        for request in requests:
            self.check(request)
        updates: dict[str, list[Update]] = {request.id: [] for request in requests}
        for request in requests:
            self.submit(request)
        while self.has_work:
            for update in self.step():
                updates[update.request_id].append(update)
                on_update(update)
        return [Result.of(updates[request.id]) for request in requests]

    def close(self) -> None:
        """End the runner, and with it the other ranks' work; requests that are not finished are dropped."""
        if self.error is None:
            for _, running in self._in_flight:
                running.logits()
        self._in_flight.clear()
        self._runner.close()

    @torch.inference_mode()
    def _step(self) -> list[Update]:
        while len(self._in_flight) < self._runner.depth and (rows := self._scheduler.next_step()):
            copies = self._scheduler.take_state_copies()
            if self._drafter is not None:
                self._drafter.propose(rows, [self._answers[row.text.request.id].sampler for row in rows], copies)
            now = time.monotonic()
            plan = StepPlan(tuple(row.plan_row() for row in rows), copies)
            for row in rows:
                answer = self._answers[row.text.request.id]
                answer.started = answer.started or now
            self._steps += 1
            self._step_tokens += plan.num_tokens
            self.on_step(plan.num_tokens)
            self._in_flight.append((rows, self._runner.start(plan)))
        updates, self._early = self._early, []
        if self._in_flight:
            computed, running = self._in_flight.popleft()
            updates += self._advance(computed, running.logits())
        return updates

    def _advance(self, rows: Sequence[ScheduledRow], logits: Tensor) -> list[Update]:
        """Take the logits of a step: score prompts, sample tokens, end texts."""
        updates, sampling, places = [], list[tuple[_Answer, ScheduledRow]](), list[int]()
        first = 0
        for row in rows:
            end = first + row.num_logits
            if row.num_logits and not row.is_stale:
                answer = self._answers[row.text.request.id]
                self._score(answer, row, logits[first:end])
                if answer.has_ended:
                    updates.append(self._finished(answer, Finish("length")))
                elif row.is_sampled and answer.beams is not None:
                    updates += self._search(answer, answer.beams, row.text, logits[end - 1])
                elif row.is_sampled:
                    sampling.append((answer, row))
                    places += range(end - 1 - len(row.drafts), end)
                elif answer.prompt_logprobs:
                    updates.append(answer.update())
            first = end
        if not sampling:
            return updates
        wanted = [
            SampleRow(answer.sampler, row.drafts[:n]) for answer, row in sampling for n in range(1 + len(row.drafts))
        ]
        sampled = iter(sample(logits if len(places) == len(logits) else logits[places], wanted))
        for answer, row in sampling:
            finish = self._accept(answer, row, [next(sampled) for _ in range(1 + len(row.drafts))])
            updates.append(answer.update() if finish is None else self._finished(answer, finish))
        return updates

    def _search(self, answer: _Answer, beams: BeamAnswer, text: ScheduledText, logits: Tensor) -> list[Update]:
        """Take the logits of a beam's next token. Once all beams have theirs, the search advances."""
        try:
            moves = beams.take(text, logits)
        except ValueError as error:
            finish = Finish("error", error=str(error), is_refusal=not isinstance(error, NotFiniteError))
            return [self._finished(answer, finish)]
        if moves is None:
            return [answer.update()] if answer.prompt_logprobs else []
        self._generated += len(beams.texts)
        if not moves:
            return [self._finished(answer, Finish("length"))]
        beams.texts = self._scheduler.branch(beams.texts, moves)
        return [answer.update()] if answer.prompt_logprobs else []

    def _score(self, answer: _Answer, row: ScheduledRow, logits: Tensor) -> None:
        """Take log-probabilities of the prompt from the logits of one row."""
        text, prompt, top = row.text, row.text.request.prompt, row.text.request.prompt_logprobs
        count = min(len(prompt) - 1, row.start + len(row.tokens)) - row.logits_from
        if top is not None and count > 0 and text.is_scoring:
            targets = prompt[row.logits_from + 1 : row.logits_from + 1 + count]
            answer.prompt_logprobs += token_logprobs(logits[:count], targets, top=top)
            text.num_scored += count

    def _accept(self, answer: _Answer, row: ScheduledRow, sampled: Sequence[SampledToken]) -> Finish | None:
        """Add tokens to a text as long as the drafts are right. Returns why the text ends, if it does."""
        tokens: list[int] = []
        finish: Finish | None = None
        for number, each in enumerate(sampled):
            if each.error is not None:
                finish = Finish("error", error=each.error, is_refusal=each.is_refusal)
                break
            tokens.append(each.token)
            try:
                finish = answer.append(each)
            except Exception as error:  # a tokenizer's or a grammar's, which no other request has a part in
                finish = _broken(error)
            if finish is not None or number == len(row.drafts) or each.token != row.drafts[number]:
                break
        self._generated += len(tokens)
        self._drafted += len(row.drafts)
        self._accepted += max(0, len(tokens) - 1)
        if tokens:
            self._scheduler.advance(row, tokens)
        return finish

    def _finished(self, answer: _Answer, finish: Finish) -> Update:
        del self._answers[answer.text.request.id]
        self._scheduler.remove(answer.text, is_broken=finish.reason == "error")
        try:
            return answer.update(finish)
        except Exception as error:  # as in `_accept`
            return Update(request_id=answer.text.request.id, finish=_broken(error))

    def check(self, request: Request) -> None:
        """Raise DataError or ConfigError for a request that can never be answered."""
        if request.id in self._answers:
            raise DataError(f"request {request.id!r} is still being answered; give each request an id of its own")
        self.limits.check(request)


def _broken(error: Exception) -> Finish:
    """The end of a request whose text can't be written."""
    return Finish("error", error=f"its text could not be written: {type(error).__name__}: {error}"[:300])
