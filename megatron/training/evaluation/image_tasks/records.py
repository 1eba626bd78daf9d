"""Files of images with questions or captions, as what a model is asked and the answers that are right.

| a line | asks |
|---|---|
| ``image``, ``question``, ``answer`` or ``answers`` | the question; ``answers``: texts, or VQA's ``{"answer": ...}`` |
| ``image``, ``caption`` or ``captions`` | nothing but the image, as such data are trained on |
| LLaVA's ``conversations``, OpenAI's ``messages`` | each turn of the user's, after the turns before it |
| ``prompt`` and ``completion``, ``instruction`` and ``output`` | the first |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.image_records import FIELDS, read_image_record
from megatron.core.images.decoding import decoded
from megatron.core.images.expansion import MARKER
from megatron.core.images.files import ImageFolder
from megatron.core.images.prompts import CutImage
from megatron.core.inference.image_prompts import ImagePrompts
from megatron.core.tokenizers.json_records import read_records
from megatron.core.tokenizers.records import Pair
from megatron.errors import DataError
from megatron.small_files import shown
from megatron.training.evaluation.zero_shot.files import read_text

_OWN = ("question", "answer", "answers", "captions", "question_id", "id")


@dataclass(frozen=True)
class ImageQuestion:
    """What a model is asked: ``messages`` of a conversation, or a ``prompt`` that it continues.

    ``where``: its file and line. ``id``: the record's own, if it has one. ``images``: names of files, in the order of
    the marks in the text. ``right``: the right answers.
    """

    where: str
    id: Any
    folder: ImageFolder
    images: tuple[str, ...]
    right: tuple[str, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str = ""

    @property
    def text(self) -> str:
        """What is asked last, without marks of images."""
        last = self.messages[-1]["content"] if self.messages else self.prompt
        return without_marks(last)

    def pictures(self, prompts: ImagePrompts) -> list[CutImage]:
        """Read its images as tiles; raises DataError for one that can't be read."""
        found = list[CutImage]()
        for name in self.images:
            try:
                found.append(CutImage.of(decoded(self.folder.read(name)), prompts.vision))
            except DataError as error:
                raise DataError(f"{self.where}: image {shown(name)} {error}") from None
        return found


def without_marks(text: str) -> str:
    """A text without the marks of images, and the line ends behind them."""
    return text.replace(f"{MARKER}\n", "").replace(MARKER, "")


def read_questions(path: Path, *, flag: str, folder: str | None = None) -> list[ImageQuestion]:
    """All questions of a file of JSON lines, or of a JSON list. ``folder``: of its images, else the file's own.

    Raises DataError, with file and line, for a record that asks nothing or has no answer.
    """
    read_text(path, flag=flag)  # names the flag of a file that can't be read
    images, found = ImageFolder(folder or str(path.parent)), list[ImageQuestion]()
    for _, line, record in read_records([str(path)], columns=(*FIELDS, *_OWN)):
        where = f"{path}:{line}"
        try:
            if isinstance(record, DataError):
                raise record
            asked = list(_questions(record, where=where, folder=images))
            if not asked:
                raise DataError("no turn is an answer of the assistant's: there is nothing to compare with")
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        found += asked
    if not found:
        raise DataError(f"{flag} {path} holds no questions: give JSON lines with an image, a question and an answer")
    return found


def _questions(record: Mapping[str, Any], *, where: str, folder: ImageFolder) -> Iterator[ImageQuestion]:
    known = next((record[key] for key in ("question_id", "id") if record.get(key) is not None), None)
    has = {name for name, value in record.items() if value is not None}
    if "question" in has or ("captions" in has and "caption" not in has):
        yield _plain(record, known, where=where, folder=folder)
        return
    found = read_image_record(record)
    sample, images = found.sample, found.images
    if isinstance(sample, Pair):
        right = (_answer(sample.completion),)
        yield ImageQuestion(where, known, folder, images, right, prompt=sample.prompt)
        return
    for number, message in enumerate(sample.messages):
        if message["role"] != "assistant" or not sample.has_loss(number):
            continue
        before = tuple(sample.messages[:number])
        if not before:
            raise DataError("the first turn is the assistant's, which answers nothing")
        seen = sum((each["content"] or "").count(MARKER) for each in before)
        yield ImageQuestion(where, known, folder, images[:seen], (_answer(message["content"]),), messages=before)


def _plain(record: Mapping[str, Any], known: Any, *, where: str, folder: ImageFolder) -> ImageQuestion:
    """A record of an image with a question and answers, or with several captions."""
    question = record.get("question")
    keys = ("answer", "answers") if question is not None else ("captions",)
    given = [record[key] for key in keys if record.get(key) is not None]
    if len(given) != 1:
        raise DataError('has both "answer" and "answers"; give one' if given else f'has no "{keys[0]}" to compare with')
    listed = given[0] if isinstance(given[0], list) else [given[0]]
    right = tuple(_answer(each.get("answer") if isinstance(each, dict) else each) for each in listed)
    if not right:
        raise DataError(f'has an empty list of "{keys[-1]}": nothing to compare with')
    named = {key: record[key] for key in ("image", "images") if record.get(key) is not None}
    if not named:
        raise DataError('has no "image" that it is about')
    if question is None:
        made = read_image_record({**named, "caption": right[0]})
        assert isinstance(made.sample, Pair), "an image with a caption"
        return ImageQuestion(where, known, folder, made.images, right, prompt=made.sample.prompt)
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"the question is {shown(question)}; it must be a text")
    count = len(_listed(named))
    marked = question if MARKER in question else f"{MARKER}\n" * count + question
    turns = [{"role": "user", "content": marked}, {"role": "assistant", "content": right[0]}]
    made = read_image_record({**named, "messages": turns})
    assert not isinstance(made.sample, Pair), "messages make a conversation"
    return ImageQuestion(where, known, folder, made.images, right, messages=tuple(made.sample.messages[:1]))


def _listed(named: Mapping[str, Any]) -> Sequence[Any]:
    value = next(iter(named.values()))
    return value if isinstance(value, list) else [value]


def _answer(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"an answer is {shown(value)}; it must be a text with a word")
    return value
