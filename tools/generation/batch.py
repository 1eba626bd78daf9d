"""Prompts from a file of JSON lines, answered in their order; a batch that was killed goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Request, Result, Update
from megatron.errors import ConfigError, DataError
from megatron.small_files import check_regular
from megatron.training.reporting.progress import ProgressBar
from tools.generation.local import Generator
from tools.generation.questions import ANSWER, Question, encoded, read_questions


def answer_file(generator: Generator, questions: Path, answers: Path) -> None:
    """Answer each line of ``questions`` that ``answers`` has no line for; a line depends on its place and itself alone.

    All questions are checked before the first is answered. Raises DataError for one that can't be answered and for
    files that can't be read or written, ConfigError for a file of something else than answers to these questions.
    """
    check_regular(answers, where=f"--output-jsonl {answers}", error=ConfigError)
    if answers.exists() and questions.exists() and answers.samefile(questions):
        raise ConfigError(
            f"--output-jsonl {answers} is the file of --input-jsonl, and answers would be written behind the "
            "questions: name another file"
        )
    asked = read_questions(generator, questions)
    try:
        with answers.open("ab+") as file:
            done = _answered(file, asked, answers)
            if done:
                print(f"{answers} has {done:,} of {len(asked):,} answers; the others follow", flush=True)
            bar = ProgressBar(len(asked), initial=done)
            left = asked[done:]
            for question, result in zip(left, in_order(generator.engine, (each.asked() for each in left))):
                if result.finish.reason == "error":
                    raise DataError(f"answer {done + 1}: {result.finish.error}")
                file.write(_line(question, result))
                file.flush()
                done += 1
                bar.show(done, "answers")
            bar.clear()
    except OSError as error:
        raise DataError(f"--output-jsonl {answers} cannot be written: {error.strerror}") from None
    print(f"{len(asked):,} answers in {answers}", flush=True)


def in_order(engine: Engine, requests: Iterable[Request]) -> Iterator[Result]:
    """Results in the order of ``requests``, of which the engine knows a few at a time."""
    updates, following = dict[str, list[Update]](), iter(requests)  # ids in the order of the requests
    while True:
        while len(updates) < 2 * engine.limits.max_requests and (request := next(following, None)) is not None:
            engine.submit(request)
            updates[request.id] = []
        if not updates:
            return
        for update in engine.step():
            updates[update.request_id].append(update)
        while updates and (found := next(iter(updates.values()))) and found[-1].finish is not None:
            yield Result.of(updates.pop(found[-1].request_id))


def _line(question: Question, result: Result) -> bytes:
    request = question.request
    read = len(request.encoder_prompt or request.prompt)
    values = (result.text, result.finish.reason, read, len(result.tokens), request.seed, question.fingerprint)
    own = {name: value for name, value in zip(ANSWER, values) if name not in question.record}  # it may have a seed
    return encoded({**question.record, **own}) + b"\n"


def _answered(file: BinaryIO, asked: Sequence[Question], path: Path) -> int:
    """How many questions have an answer; what a killed batch wrote of a line is cut off.

    Raises ConfigError, and leaves the file as it is, where it holds anything else than their answers.
    """
    file.seek(0)
    *whole, rest = file.read().split(b"\n")
    for number, line in enumerate(whole, start=1):
        if wrong := _why_no_answer(line, asked[number - 1] if number <= len(asked) else None):
            raise ConfigError(f"--output-jsonl {path}: line {number} {wrong}")
    if rest:
        expected = asked[len(whole)].beginning if len(whole) < len(asked) else b""
        if not expected or rest[: len(expected)] != expected[: len(rest)]:
            raise ConfigError(
                f"--output-jsonl {path}: its end is not the beginning of the next answer; name a new file"
            )
        file.truncate(sum(len(line) + 1 for line in whole))
    return len(whole)


def _why_no_answer(line: bytes, question: Question | None) -> str | None:
    """What is wrong with a line that should answer ``question``."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {*ANSWER} <= {*found}:
        return "is no answer that this tool wrote; name a new file"
    if question is None or not line.startswith(question.beginning):
        return "answers another question than that of --input-jsonl; name a new file, or remove this one"
    if found["fingerprint"] != question.fingerprint:
        return (
            "was answered with another checkpoint, tokenizer or setting (--tokens-to-generate, --seed, sampling, "
            "stops, chat template, images, --quantization, --fp32); give those of the first start, or name a new file"
        )
    return None
