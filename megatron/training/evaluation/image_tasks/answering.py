"""Answers of a model to questions about images, and how likely it finds those that are right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megatron.core.images.prompts import PromptImages
from megatron.core.inference.request import Request, Result, StopRules
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.conversations import ChatTemplate
from megatron.core.tokenizers.end_tokens import end_ids
from megatron.errors import ConfigError, DataError
from megatron.training.checkpoints.trained_model import PlacedModel
from megatron.training.evaluation.generating import engine_of_every_rank, image_prompts, template_of
from megatron.training.evaluation.image_tasks.records import ImageQuestion, without_marks
from megatron.training.evaluation.shared_out import of_all_ranks, own_share

_PORTION = 16  # requests whose images are in memory, for each that is answered at once


class Answerer:
    """Asks a model that reads images. Its methods are collectives, and share out questions among the ranks.

    ``tokens``: most of an answer. ``template``: file of the chat template, unless the model keeps one. Raises
    ConfigError for a model that reads texts alone, or needs whole texts for each token.
    """

    def __init__(self, placed: PlacedModel, *, tokens: int, template: str | None = None, flag: str = "--task") -> None:
        prompts = image_prompts(placed)
        if prompts is None:
            raise ConfigError(
                f"{flag}: questions about images are for a model that reads them, and this {placed.train_spec.name} "
                "model has no vision encoder: name another checkpoint, or another task"
            )
        self._placed, self._prompts, self._tokens, self._given = placed, prompts, tokens, template
        self._flag = flag
        self._length, self._batch = placed.config.data.seq_length, placed.config.training.micro_batch_size
        engine = engine_of_every_rank(
            placed,
            length=self._length,
            max_requests=self._batch,
            options=SchedulerOptions(prefix_caching=False),  # in training, keys and values of other weights
        )
        if engine is None:
            raise ConfigError(f"{flag}: layers of this model don't say what they keep of a text, so it can't answer")
        self._engine = engine
        self._stop = StopRules(token_ids=end_ids(placed.tokenizer, placed.chat))

    @property
    def context(self) -> ParallelContext:
        """Where the model is."""
        return self._placed.context

    def check_losses(self) -> None:
        """Raise ConfigError for a model of which ``losses`` can't be known."""
        if self._engine.limits.joint_attention == "prefix":
            raise ConfigError(
                f"{self._flag} computes losses of captions as those of a prompt, whose words see later ones in this "
                "model (--image-attention prefix): take --task VQA, which compares answers alone"
            )

    def check(self, questions: Sequence[ImageQuestion]) -> None:
        """Raise DataError for a question of this rank's share that can't be asked, with its file and line."""
        for question in questions[own_share(self._placed.context.mesh)]:
            self._answer_request(question, id="", sees=True)
            for right in question.right:
                self._right_request(question, right, id="", sees=True)

    def answers(self, questions: Sequence[ImageQuestion], *, sees: bool, progress: Callable[[int], None]) -> list[str]:
        """The most probable answer to each question, token by token; unless the model ``sees``, without its images."""

        def request(number: int) -> Request:
            return self._answer_request(questions[number], id=str(number), sees=sees)

        found = self._answered(len(questions), request, lambda result: result.text.strip(), progress)
        return [found[str(number)] for number in range(len(questions))]

    def losses(
        self, questions: Sequence[ImageQuestion], *, sees: bool, progress: Callable[[int], None]
    ) -> list[tuple[float, int]]:
        """Nats and number of the tokens of each question's right answers."""
        pairs = [(number, right) for number, question in enumerate(questions) for right in question.right]
        counts = dict[str, int]()

        def request(number: int) -> Request:
            place, right = pairs[number]
            made, counts[str(number)] = self._right_request(questions[place], right, id=str(number), sees=sees)
            return made

        def nats(result: Result) -> tuple[float, int]:
            count = counts[result.request_id]
            scored = [each.logprob for each in result.prompt_logprobs[-count:] if each is not None]
            assert len(scored) == count, "each token of the answer has a probability"
            return -sum(scored), count

        found = self._answered(len(pairs), request, nats, progress)
        totals = [(0.0, 0)] * len(questions)
        for number, (place, _) in enumerate(pairs):
            lost, count = found[str(number)]
            totals[place] = totals[place][0] + lost, totals[place][1] + count
        return totals

    def _answered(
        self,
        count: int,
        request: Callable[[int], Request],
        value: Callable[[Result], Any],
        progress: Callable[[int], None],
    ) -> dict[str, Any]:
        """The value of each request's result, by its id; images of a portion of them are in memory at a time."""
        mesh, found = self._placed.context.mesh, dict[str, Any]()
        own = range(count)[own_share(mesh)]
        for first in range(0, len(own), _PORTION * self._batch):
            for result in self._engine.generate(
                [request(each) for each in own[first : first + _PORTION * self._batch]]
            ):
                if result.finish.reason == "error":
                    raise DataError(f"question {result.request_id}: {result.finish.error}")
                found[result.request_id] = value(result)
            progress(min(count, -(-len(found) * count // len(own))))
        return of_all_ranks(found, mesh)

    def _answer_request(self, question: ImageQuestion, *, id: str, sees: bool) -> Request:
        ids, images, _ = self._asked(question, sees=sees)
        room = max(1, min(self._tokens, self._length - len(ids)))
        return self._checked(
            question,
            Request(
                id=id,
                prompt=tuple(ids),
                max_tokens=room,
                sampling=Sampling(temperature=0.0),
                stop=self._stop,
                images=images,
                skip_special_tokens=True,
            ),
        )

    def _right_request(self, question: ImageQuestion, right: str, *, id: str, sees: bool) -> tuple[Request, int]:
        """What scores a right answer, and the number of its tokens."""
        ids, images, text = self._asked(question, sees=sees)
        said = self._of_text(
            question, lambda: self._placed.tokenizer.tokenize_parts([self._behind(question, text, right, sees)])[0]
        )
        if not said:
            raise DataError(f"{question.where}: the answer has no tokens")
        if images is not None:
            places = np.concatenate([images.places, np.full(len(said), -1, np.int64)])
            images = dataclasses.replace(images, places=places)
        made = Request(
            id=id,
            prompt=(*ids, *said),
            max_tokens=0,
            sampling=Sampling(temperature=0.0),
            prompt_logprobs=0,
            images=images,
        )
        return self._checked(question, made), len(said)

    def _checked(self, question: ImageQuestion, request: Request) -> Request:
        self._of_text(question, lambda: self._engine.check(request))
        return request

    def _of_text(self, question: ImageQuestion, work: Callable[[], Any]) -> Any:
        """``work()``, whose errors name the question's file and line."""
        try:
            return work()
        except DataError as error:
            raise DataError(f"{question.where}: {error}") from None

    def _asked(self, question: ImageQuestion, *, sees: bool) -> tuple[list[int], PromptImages | None, str]:
        """Ids of a question, its images and its text."""
        pictures = question.pictures(self._prompts) if sees else []
        is_chat = bool(question.messages)

        def encoded() -> tuple[list[int], PromptImages | None, str]:
            text = question.prompt if sees else without_marks(question.prompt)
            if is_chat:
                text = self.template.prompt(self._messages(question, sees), begin_answer=True, variables={})
            return *self._prompts.encoded(text, pictures, whole=not is_chat), text

        ids, images, text = self._of_text(question, encoded)
        tokenizer = self._placed.tokenizer
        return ids or [tokenizer.eod if tokenizer.bos is None else tokenizer.bos], images, text

    def _messages(self, question: ImageQuestion, sees: bool) -> list[Mapping[str, Any]]:
        if sees:
            return list(question.messages)
        return [{**each, "content": without_marks(each["content"] or "")} for each in question.messages]

    def _behind(self, question: ImageQuestion, text: str, right: str, sees: bool) -> str:
        """A right answer as it stands behind the question: with what the template has before it, and no end."""
        if not question.messages:
            return right
        turns = [*self._messages(question, sees), {"role": "assistant", "content": right}]
        whole = self.template.prompt(turns, begin_answer=False, variables={})
        start = whole.find(right, len(text)) if whole.startswith(text) else -1
        return right if start < 0 else whole[len(text) : start + len(right)]

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises ConfigError when there is none."""
        found = template_of(self._placed, self._given)
        if found is None:
            raise ConfigError(
                "questions are written with a chat template, and neither the checkpoint nor its tokenizer has one: "
                'give one with --chat-template FILE, or lines of "prompt" and "completion"'
            )
        return found
