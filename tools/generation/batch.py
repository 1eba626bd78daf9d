"""Prompts from a file of JSON lines, answered in their order; a batch that was killed goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron.core.inference.engine import Engine, joined
from megatron.core.inference.request import Request, Result, Update
from megatron.core.tokenizers.text_files import parse_line
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.training.reporting.progress import ProgressBar
from tools.generation.local import Generator

ANSWER = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "seed")
"""What a line of answers has beside the fields of its question."""


def answer_file(generator: Generator, questions: Path, answers: Path) -> None:
    """Answer each line of ``questions`` that ``answers`` has no line for; a line depends on its place and itself alone.

    All questions are checked before the first is answered. Raises DataError for one that can't be answered and for
    files that can't be read or written, ConfigError for answers to other questions.
    """
    records, requests = list[dict[str, Any]](), list[Request]()
    for where, record in _questions(questions):
        try:
            ids = _ids(generator, record)
            requests.append(generator.request(ids, number=len(records)))
            generator.engine.check(requests[-1])
        except MegatronError as error:
            raise type(error)(f"{where}: {error}") from None
        records.append(record)
    try:
        with answers.open("ab+") as file:
            done = _answered(file, records, answers)
            if done:
                print(f"{answers} has {done:,} of {len(records):,} answers; the others follow", flush=True)
            bar = ProgressBar(len(records), initial=done)
            for record, result in zip(records[done:], in_order(generator.engine, requests[done:])):
                if result.finish.reason == "error":
                    raise DataError(f"answer {done + 1}: {result.finish.error}")
                file.write(_line(record, result))
                file.flush()
                done += 1
                bar.show(done, "answers")
            bar.clear()
    except OSError as error:
        raise DataError(f"--output-jsonl {answers} cannot be written: {error.strerror}") from None
    print(f"{len(records):,} answers in {answers}", flush=True)


def in_order(engine: Engine, requests: Sequence[Request]) -> Iterator[Result]:
    """Results in the order of ``requests``, of which the engine knows a few at a time."""
    updates = dict[str, list[Update]]()
    following, first = iter(requests), 0
    while first < len(requests):
        while len(updates) < 2 * engine.limits.max_requests and (request := next(following, None)) is not None:
            engine.submit(request)
            updates[request.id] = []
        for update in engine.step():
            updates[update.request_id].append(update)
        while first < len(requests) and (found := updates.get(requests[first].id)) and found[-1].finish is not None:
            yield joined(requests[first], updates.pop(requests[first].id))
            first += 1


def _line(record: dict[str, Any], result: Result) -> bytes:
    values = (result.text, result.finish.reason, len(result.request.prompt), len(result.tokens), result.request.seed)
    return json.dumps({**record, **dict(zip(ANSWER, values))}, ensure_ascii=False).encode() + b"\n"


def _questions(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line after its file and number; DataError for one that is no question."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--input-jsonl {path} cannot be read: {error}") from None
    found = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_line(line)
        except DataError as error:
            raise DataError(f"{path}:{number} is {error}") from None
        if not isinstance(record, dict) or (isinstance(record.get("prompt"), str) == ("messages" in record)):
            raise DataError(f'{path}:{number} is no question: it needs either a text "prompt" or a list "messages"')
        found += 1
        yield f"{path}:{number}", record
    if not found:
        raise DataError(f"--input-jsonl {path} holds no questions")


def _ids(generator: Generator, record: dict[str, Any]) -> list[int]:
    if "prompt" in record:
        return generator.tokenizer.tokenize_batch([record["prompt"]])[0]
    return generator.ids_of_conversation(record["messages"])


def _answered(file: BinaryIO, records: list[dict[str, Any]], path: Path) -> int:
    """How many questions have an answer; what a killed batch wrote of a line is cut off."""
    file.seek(0)
    whole = [line for line in file if line.endswith(b"\n")]
    file.truncate(sum(map(len, whole)))
    for number, line in enumerate(whole):
        if number >= len(records) or _question_of(line) != _without_answer(records[number]):
            raise ConfigError(
                f"--output-jsonl {path}: line {number + 1} answers another question than that of --input-jsonl; name a "
                "new file, or remove this one"
            )
    return len(whole)


def _question_of(line: bytes) -> dict[str, Any] | None:
    try:
        return _without_answer(json.loads(line))
    except (ValueError, AttributeError):  # not JSON, or no object
        return None


def _without_answer(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ANSWER}
