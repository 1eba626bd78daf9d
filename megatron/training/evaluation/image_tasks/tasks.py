"""CAPTION and VQA: what a model says of images, compared with what people said."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
from typing_extensions import override

from megatron.core.checkpointing.agreement import run_on_all
from megatron.core.inference.scoring import perplexity
from megatron.training.checkpoints.trained_model import PlacedModel
from megatron.training.evaluation.image_tasks.answering import Answerer
from megatron.training.evaluation.image_tasks.records import ImageQuestion, read_questions
from megatron.training.evaluation.image_tasks.scoring import accuracy, bleu, most_frequent
from megatron.training.evaluation.zero_shot.files import FLAG
from megatron.training.evaluation.zero_shot.task import Scores, report_progress

_BLIND = "without images"


@dataclass(frozen=True, kw_only=True)
class AskedOfImages:
    """What a task about images measures on, and how.

    ``files``: those that ``flag`` names. ``folder``: of their images, else each file's own. ``without_images``: ask
    without them as well. ``tokens``: most of an answer. ``template``: file of a chat template.
    """

    files: tuple[Path, ...]
    flag: str = FLAG
    folder: str | None = None
    without_images: bool = False
    tokens: int = 32
    template: str | None = None


@dataclass(frozen=True)
class Said:
    """What a model says to the questions of a file. ``losses``: nats and tokens of the right answers, if asked for."""

    questions: Sequence[ImageQuestion]
    answers: Sequence[str]
    losses: Sequence[tuple[float, int]]


class ImageTask:
    """Base of the tasks. The constructor reads files, and raises DataError for those that don't fit.

    ``shown``: the metrics that are worth a curve.
    """

    name: ClassVar[str]
    shown: ClassVar[tuple[str, ...]]
    _has_losses: ClassVar[bool] = False

    def __init__(self, asked: AskedOfImages) -> None:
        self.asked = asked
        self.sets = {path: read_questions(path, flag=asked.flag, folder=asked.folder) for path in asked.files}
        self._answerer: Answerer | None = None

    @abstractmethod
    def metrics(self, said: Said) -> dict[str, float]:
        """The numbers of a file, or of all together."""

    def prepare(self, placed: PlacedModel) -> None:
        """Take a model to ask, and check every question and image of this rank's share. A collective.

        Raises ConfigError for a model that can't answer or whose losses can't be known, DataError with file and line
        for an image that can't be read and for a question that is too long.
        """
        asked = self.asked
        self._answerer = Answerer(placed, tokens=asked.tokens, template=asked.template, flag=f"--task {self.name}")
        if self._has_losses:
            self._answerer.check_losses()
        for questions in self.sets.values():
            run_on_all(partial(self._answerer.check, questions), placed.context.mesh)

    def measure(self, *, reports: bool = True) -> Measured:
        """Ask everything, on all ranks. A collective."""
        seen = {path: self._said(path, sees=True, reports=reports) for path in self.sets}
        blind = {path: self._said(path, sees=False, reports=reports) for path in self.sets if self.asked.without_images}
        return Measured(self, seen, blind)

    def _said(self, path: Path, *, sees: bool, reports: bool) -> Said:
        assert self._answerer is not None, "a model was given"
        questions, context = self.sets[path], self._answerer.context

        def progress(total: int) -> Callable[[int], None]:
            return report_progress(context, total) if reports else lambda done: None

        answers = self._answerer.answers(questions, sees=sees, progress=progress(len(questions)))
        losses = list[tuple[float, int]]()
        if self._has_losses:
            total = sum(len(each.right) for each in questions)
            losses = self._answerer.losses(questions, sees=sees, progress=progress(total))
        return Said(questions, answers, losses)


class Vqa(ImageTask):
    """Questions about images: the share of right answers, as VQA counts them."""

    name = "VQA"
    shown = ("accuracy",)

    @override
    def metrics(self, said: Said) -> dict[str, float]:
        right = [each.right for each in said.questions]
        scored = [accuracy(answer, each) for answer, each in zip(said.answers, right, strict=True)]
        return {
            "accuracy": float(np.mean(scored)),
            "questions": len(scored),
            "most frequent answer": most_frequent(right),
        }


class Caption(ImageTask):
    """Captions of images: how likely those of people are, and how like them the model's own."""

    name = "CAPTION"
    shown = ("loss", "bleu4")
    _has_losses = True

    @override
    def metrics(self, said: Said) -> dict[str, float]:
        right = [each.right for each in said.questions]
        nats, tokens = (sum(column) for column in zip(*said.losses, strict=True))
        loss = nats / tokens
        alike = bleu(said.answers, right)
        exact = [any(answer.split() == each.split() for each in texts) for answer, texts in zip(said.answers, right)]
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            **({} if alike is None else {"bleu4": alike}),
            "exact": float(np.mean(exact)),
            "captions": len(right),
            "tokens": int(tokens),
        }


IMAGE_TASKS: Mapping[str, Callable[[AskedOfImages], ImageTask]] = {"CAPTION": Caption, "VQA": Vqa}


@dataclass(frozen=True)
class Measured:
    """What a model said to each file's questions: ``seen`` with the images, ``blind`` without, if that was asked."""

    task: ImageTask
    seen: Mapping[Path, Said]
    blind: Mapping[Path, Said]

    @property
    def scores(self) -> Scores:
        """The numbers of all files together, with those without images beside them."""
        found = self.task.metrics(_together(self.seen.values()))
        if self.blind:
            unseen = self.task.metrics(_together(self.blind.values()))
            counts = ("questions", "captions", "tokens", "most frequent answer")
            found |= {f"{name} {_BLIND}": value for name, value in unseen.items() if name not in counts}
        return Scores(f" validation results on {self.task.name} | {_shown(found)} |", found)

    @property
    def by_file(self) -> list[str]:
        """A line for each of several files."""
        lines = []
        for path in self.seen if len(self.seen) > 1 else ():
            own = Measured(self.task, {path: self.seen[path]}, {path: self.blind[path]} if self.blind else {})
            lines.append(f" > {path.name} | {_shown(own.scores.metrics)} |")
        return lines

    def answers_of(self, path: Path) -> str:
        """What was asked and said for a file, as JSON lines."""
        seen, blind, lines = self.seen[path], self.blind.get(path), []
        for number, question in enumerate(seen.questions):
            answer = seen.answers[number]
            record = {
                "id": question.id,
                "where": question.where,
                "images": question.images,
                "question": question.text,
                "answer": answer,
                "right": question.right,
                "accuracy": accuracy(answer, question.right),
            }
            if blind is not None:
                record[f"answer {_BLIND}"] = blind.answers[number]
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        return "".join(lines)


def _together(said: Iterable[Said]) -> Said:
    parts = list(said)
    return Said(
        [each for part in parts for each in part.questions],
        [each for part in parts for each in part.answers],
        [each for part in parts for each in part.losses],
    )


def _shown(metrics: Mapping[str, float]) -> str:
    return " | ".join(
        f"{name}: {value}" if isinstance(value, int) else f"{name}: {value:.4E}" for name, value in metrics.items()
    )
