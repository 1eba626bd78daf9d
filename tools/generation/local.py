"""Generation with a model in this process: prompts, and a conversation in the terminal."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megatron.core.images.decoding import decoded
from megatron.core.images.expansion import MARKER
from megatron.core.images.files import read_image
from megatron.core.images.prompts import CutImage, PromptImages
from megatron.core.inference.engine import Engine
from megatron.core.inference.image_prompts import ImagePrompts
from megatron.core.inference.limits import NamedFolder
from megatron.core.inference.request import Request, StopRules, Update
from megatron.core.inference.sampling import Sampling
from megatron.core.tokenizers.conversations import ChatTemplate
from megatron.core.tokenizers.end_tokens import described, end_ids
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.small_files import check_regular
from megatron.training.checkpoints.trained_model import TrainedModel
from megatron.training.evaluation.generating import decoder_start, image_prompts, template_of
from tools.generation.settings import DEFAULT_SEED, GenerateConfig, LocalConfig


class Generator:
    """Prompts in, texts out, on rank 0."""

    def __init__(
        self,
        trained: TrainedModel,
        engine: Engine,
        config: GenerateConfig,
        local: LocalConfig,
        adapters: Sequence[NamedFolder] = (),
    ) -> None:
        """Raises ConfigError and DataError for settings and templates that can't be used. ``adapters``: those of the
        engine, in the order of their numbers.
        """
        self.adapters = {each.name: each for each in adapters}
        self._adapter = self.number_of(local.lora_module, what="--lora-module")
        self.tokenizer, self.engine, self.folder = trained.tokenizer, engine, trained.folder
        self.is_upcast = trained.is_upcast
        self._config, self._local, self._trained = config, local, trained
        self._sampling = Sampling(**config.sampling(), **local.sampling())
        self._stop = StopRules(token_ids=end_ids(self.tokenizer, trained.chat, local.end_tokens), strings=local.stop)
        self._interrupted = False
        self._start = decoder_start(trained)
        self._prompts = image_prompts(trained)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises ConfigError when there is none."""
        found = template_of(self._trained, self._local.chat_template)
        if found is None:
            raise ConfigError(
                "neither the checkpoint nor its tokenizer has a chat template; give one with --chat-template FILE"
            )
        return found

    def number_of(self, name: str | None, *, what: str) -> int:
        """The number of an adapter by its name, 0 for None. ``what``: names it. Raises ConfigError for another."""
        if name is None:
            return 0
        if name not in self.adapters:
            has = f"there are {', '.join(self.adapters)}" if self.adapters else "none was given"
            raise ConfigError(f"{what} {name} is not an adapter of --lora-modules; {has}")
        return 1 + [*self.adapters].index(name)

    def _conversation(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], PromptImages | None]:
        return self.conversation_about(self._pictures, messages)

    def conversation_about(
        self, pictures: Sequence[CutImage], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], PromptImages | None]:
        """Ids of a conversation up to the beginning of its answer, and the images at its marks."""
        text = self.template.prompt(messages, begin_answer=True, variables={})
        if pictures:
            return self.image_prompts.encoded(text, pictures)
        return self.tokenizer.tokenize_parts([text])[0], None

    @property
    def image_prompts(self) -> ImagePrompts:
        """What makes prompts with images. Raises ConfigError for a model of texts alone."""
        if self._prompts is None:
            raise ConfigError("images are for models that read them, and this one reads texts alone: leave them out")
        return self._prompts

    @cached_property
    def _pictures(self) -> list[CutImage]:
        """The images of ``--image``. Raises ConfigError for a model of texts alone, DataError for what is no image."""
        if self._local.image and self._prompts is None:
            raise ConfigError("--image is for models that read images, and this one reads only text: leave it out")
        return [self._cut(path) for path in self._local.image]

    def _cut(self, path: str) -> CutImage:
        assert self._prompts is not None, "a model that reads images"
        check_regular(Path(path), where=f"--image {path}", error=DataError)
        try:
            return CutImage.of(decoded(read_image(os.path.realpath(path))), self._prompts.vision)
        except DataError as error:
            raise DataError(f"--image {path} {error}") from None

    def _marked(self, text: str) -> str:
        return self.marked(text, len(self._pictures))

    def marked(self, text: str, count: int) -> str:
        """A text with a mark for each image; those of one without any are before it."""
        return text if self.has_mark(text) else f"{MARKER}\n" * count + text

    def has_mark(self, text: str) -> bool:
        """Whether an image stands in a text."""
        return MARKER in text or (self._prompts is not None and self._prompts.marker in text)

    def _encoded(self, prompts: Sequence[str]) -> list[tuple[list[int], PromptImages | None]]:
        """Ids of prompts and their images."""
        if not self._pictures:
            return [(ids, None) for ids in self.tokenizer.tokenize_batch(list(prompts))]
        assert self._prompts is not None, "a model that reads images has read some"
        return [self._prompts.encoded(self._marked(each), self._pictures, whole=True) for each in prompts]

    def request(self, ids: Sequence[int], *, number: int, images: PromptImages | None = None) -> Request:
        """The request for the prompt with this number, which its seed depends on.

        An encoder reads the prompt of a model that has one, and the text begins with what decoders begin with.
        """
        seed = DEFAULT_SEED if self._config.seed is None else self._config.seed
        return Request(
            id=str(number),
            prompt=tuple(ids) if self._start is None else (self._start,),
            encoder_prompt=() if self._start is None else tuple(ids),
            max_tokens=self._config.tokens_to_generate,
            sampling=self._sampling,
            stop=self._stop,
            seed=seed + number,
            adapter=self._adapter,
            images=images,
        )

    def answer(self, prompts: Sequence[str]) -> None:
        """Print all prompts with their continuations, in order and as they come."""
        asked = self._encoded(prompts)
        waiting = [""] * len(prompts)
        ended = [False] * len(prompts)
        shown = -1

        def begin(number: int) -> None:
            heading = f"-- {number + 1}\n" if len(prompts) > 1 else ""
            between = "" if self._start is None else "\n=> "
            print(f"{heading}{prompts[number]}{between}{waiting[number]}", end="", flush=True)

        def show(update: Update) -> None:
            nonlocal shown
            self._end_if_interrupted(update)
            number = int(update.request_id)
            ended[number] = update.finish is not None
            if number == shown:
                print(update.text, end="", flush=True)
            else:
                waiting[number] += update.text
            while shown < 0 or (shown < len(prompts) and ended[shown]):
                if shown >= 0:
                    print(flush=True)
                shown += 1
                if shown < len(prompts):
                    begin(shown)

        requests = [self.request(ids, number=number, images=images) for number, (ids, images) in enumerate(asked)]
        for number, request in enumerate(requests, start=1):
            try:
                self.engine.check(request)
            except MegatronError as error:
                raise type(error)(f"prompt {number}: {error}") from None
        for result in self.engine.generate(requests, on_update=show):
            if result.finish.reason == "error":
                raise DataError(f"prompt {int(result.request_id) + 1}: {result.finish.error}")

    def converse(self) -> None:
        """Ask for prompts until the input ends; Ctrl-C ends a text."""
        while (prompt := _asked("prompt> ")) is not None:
            if prompt:
                self._until_interrupted(partial(self.answer, [prompt]))

    def chat(self) -> None:
        """Hold a conversation until the input ends; Ctrl-C ends an answer.

        The engine's cache keeps the keys and values of what was said before.
        """
        messages: list[dict[str, str]] = []
        if self._local.system is not None:
            messages.append({"role": "system", "content": self._local.system})
        self.template  # noqa: B018  (refused before the first question)
        print(f"answers end with {described(self._stop.token_ids, self.tokenizer)}", file=sys.stderr, flush=True)
        while (said := _asked("you> ")) is not None:
            if not said:
                continue
            is_first = not any(each["role"] == "user" for each in messages)
            messages.append({"role": "user", "content": self._marked(said) if is_first else said})
            answer: list[str] = []
            self._until_interrupted(partial(self._reply, messages, answer))
            print(flush=True)
            if answer:
                messages.append({"role": "assistant", "content": "".join(answer)})
            else:  # refused, or ended before the first word
                messages.pop()

    def _reply(self, messages: Sequence[Mapping[str, str]], answer: list[str]) -> None:
        ids, images = self._conversation(messages)
        room = self.engine.limits.max_length - (len(ids) if self._start is None else 1)
        if room < 1:
            raise DataError(
                f"the conversation has {len(ids)} tokens, and the model sees "
                f"{self.engine.limits.max_length}: begin anew"
            )
        request = self.request(ids, number=sum(each["role"] == "user" for each in messages) - 1, images=images)
        request = dataclasses.replace(request, max_tokens=min(request.max_tokens, room))

        def show(update: Update) -> None:
            self._end_if_interrupted(update)
            print(update.text, end="", flush=True)
            answer.append(update.text)

        [result] = self.engine.generate([request], on_update=show)
        if result.finish.reason == "error":
            raise DataError(str(result.finish.error))

    def _until_interrupted(self, work: Callable[[], None]) -> None:
        """Run ``work``; print a user's mistake; Ctrl-C ends the text alone."""
        self._interrupted, before = False, signal.signal(signal.SIGINT, lambda *_: setattr(self, "_interrupted", True))
        try:
            work()
        except MegatronError as error:
            print(f"error: {error}", file=sys.stderr)
        finally:
            signal.signal(signal.SIGINT, before)

    def _end_if_interrupted(self, update: Update) -> None:
        if self._interrupted and update.finish is None:
            self.engine.abort(update.request_id)


def _asked(prompt: str) -> str | None:
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None
