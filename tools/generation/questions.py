"""Lines of ``--input-jsonl`` as requests of the engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megatron.core.checkpointing.manifest import MANIFEST
from megatron.core.datasets.image_records import names_of, with_marks
from megatron.core.images.decoding import decoded
from megatron.core.images.files import ImageFolder, from_data_url
from megatron.core.images.prompts import CutImage, PromptImages
from megatron.core.inference.request import Request
from megatron.core.tokenizers.base import fingerprint_of
from megatron.core.tokenizers.messages import normalized_messages
from megatron.core.tokenizers.text_files import parse_line
from megatron.errors import DataError, MegatronError
from megatron.serving.fields import CHAT, COMPLETION
from megatron.serving.megatron_api import FIELDS
from megatron.serving.schema import checked
from megatron.small_files import check_regular, shown
from tools.generation.local import Generator

ANSWER = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "seed", "fingerprint")
"""What a line of answers has beside the fields of its question."""
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
HONOURED = ("max_tokens", *SAMPLING, "stop", "seed", "model")
"""Fields of a line that replace flags; ranges and meaning are those of /v1/completions."""
_CARRIED = ("prompt", "messages", "user", "metadata", "request_id")
_SCHEMAS = {field.name: field.schema for field in (*COMPLETION, *CHAT)} | {
    "max_tokens": {"type": "integer", "minimum": 1}
}
_OF_REQUESTS = {field.name for field in (*COMPLETION, *CHAT, *FIELDS)}


@dataclass(frozen=True)
class Question:
    """A line: its fields, and what the engine is asked, but for images. ``fingerprint`` of the request and the
    checkpoint. ``images`` reads those of the line, which are not held in memory.
    """

    record: dict[str, Any]
    request: Request
    fingerprint: str
    images: Callable[[], PromptImages | None] = lambda: None

    def asked(self) -> Request:
        """The request with its images."""
        return dataclasses.replace(self.request, images=self.images())

    @cached_property
    def beginning(self) -> bytes:
        """How the line of its answer begins, up to the text."""
        return encoded(self.record)[:-1] + b', "text": '


def encoded(record: Mapping[str, Any]) -> bytes:
    """A line of JSON; ASCII alone where it holds half a character, which UTF-8 can't spell."""
    try:
        return json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(record).encode()


def read_questions(generator: Generator, path: Path) -> list[Question]:
    """Every line as a request that the engine can answer; raises DataError with the line's number."""
    checkpoint = hashlib.sha256((generator.folder.path / MANIFEST).read_bytes()).hexdigest()
    found = list[Question]()
    for where, record in _records(path):
        try:
            read = partial(_asked, generator, record, folder=str(path.parent))
            request = _request(generator, record, read(), number=len(found))
            generator.engine.check(request)
        except MegatronError as error:
            raise DataError(f"{where}: {error}") from None
        bare = dataclasses.replace(request, images=None)
        asked = dataclasses.asdict(dataclasses.replace(bare, id=""))
        asked.pop("images")  # where there are none, fingerprints are those of versions without images
        if request.images is not None:
            asked["images"] = request.images.digest
        # Where there is none, fingerprints are those of versions without adapters.
        if number := asked.pop("adapter"):
            asked["adapter"] = dataclasses.astuple([*generator.adapters.values()][number - 1])
        fingerprint = fingerprint_of(
            [
                f"{checkpoint}{generator.engine.quantization or ''}{'fp32' * generator.is_upcast}",
                json.dumps(asked, sort_keys=True, default=sorted),
            ]
        )[:16]
        found.append(Question(record, bare, fingerprint, lambda read=read: read()[1]))  # type: ignore[misc]
    if not found:
        raise DataError(f"--input-jsonl {path} holds no questions")
    return found


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line after its file and number, without fields of requests that are null."""
    check_regular(path, where=f"--input-jsonl {path}", error=DataError)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--input-jsonl {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = parse_line(line)
        except DataError as error:
            raise DataError(f"{where} is {error}") from None
        if isinstance(record, dict):
            record = {name: value for name, value in record.items() if value is not None or name not in _OF_REQUESTS}
        if not isinstance(record, dict) or (isinstance(record.get("prompt"), str) == ("messages" in record)):
            raise DataError(f'{where} is no question: it needs either a text "prompt" or a list "messages"')
        yield where, record


def _asked(generator: Generator, record: dict[str, Any], *, folder: str) -> tuple[list[int], PromptImages | None]:
    """Ids of a line's prompt or conversation, and its images. Raises MegatronError."""
    marked, names = with_marks(record)
    names += names_of(record)
    pictures = [_picture(generator, name, folder) for name in names]
    if "prompt" in record:
        if not names:
            return generator.tokenizer.tokenize_batch([record["prompt"]])[0], None
        return generator.image_prompts.encoded(generator.marked(record["prompt"], len(names)), pictures, whole=True)
    messages = normalized_messages(checked(marked["messages"], _SCHEMAS["messages"], "messages"))
    if names and not any(generator.has_mark(each["content"] or "") for each in messages):
        first = next((each for each in messages if each["role"] == "user"), messages[0])
        first["content"] = generator.marked(first["content"] or "", len(names))
    return generator.conversation_about(pictures, messages)


def _picture(generator: Generator, name: str, folder: str) -> CutImage:
    """An image beside the file of questions, or in a data URL."""
    vision = generator.image_prompts.vision
    try:
        content = from_data_url(name) if name.startswith("data:") else ImageFolder(folder).read(name)
        return CutImage.of(decoded(content), vision)
    except DataError as error:
        raise DataError(f"image {shown(name[:80])} {error}") from None


def _request(
    generator: Generator, record: dict[str, Any], asked: tuple[list[int], PromptImages | None], *, number: int
) -> Request:
    """The request with the line's own settings. Raises MegatronError for fields that can't have an effect."""
    for name in record:
        if name in ANSWER and name not in HONOURED:
            raise DataError(f"the answer has a field {name}, too, which would replace the line's own: rename that")
        if name in _OF_REQUESTS and name not in (*HONOURED, *_CARRIED):
            raise DataError(
                f"the field {name} has no effect here: leave it out (a line may have {', '.join(HONOURED)} of its own)"
            )
    own = {name: checked(record[name], _SCHEMAS[name], name) for name in HONOURED if name in record}
    request = generator.request(asked[0], number=number, images=asked[1])
    sampling = {name: own[name] for name in SAMPLING if name in own}
    if "top_k" in sampling:
        sampling["top_k"] = max(0, sampling["top_k"])
    stop = own.get("stop", request.stop.strings)
    adapter = generator.number_of(own["model"], what="model") if "model" in own else request.adapter
    most, settings = own.get("max_tokens", request.max_tokens), dataclasses.replace(request.sampling, **sampling)
    if settings.min_tokens > most:
        raise DataError(f"min_tokens {settings.min_tokens} is more than max_tokens {most}")
    return dataclasses.replace(
        request,
        max_tokens=most,
        seed=own.get("seed", request.seed),
        adapter=adapter,
        sampling=settings,
        stop=dataclasses.replace(request.stop, strings=(stop,) if isinstance(stop, str) else tuple(stop)),
    )
