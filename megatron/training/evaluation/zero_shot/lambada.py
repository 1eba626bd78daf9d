"""LAMBADA: whether the model predicts the last word of a sample that only its whole context gives away.

Paperno et al. 2016, https://arxiv.org/abs/1606.06031; the file is GPT-2's, JSON lines with ``text``.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor
from typing_extensions import override

from megatron.core.inference.scoring import Sample
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError
from megatron.training.evaluation.zero_shot.files import json_lines
from megatron.training.evaluation.zero_shot.task import Asked, Scores, ZeroShotTask


class Lambada(ZeroShotTask):
    """Greedy predictions of each passage's last token, or of all tokens of its last word."""

    shown: ClassVar[tuple[str, ...]] = ("accuracy", "loss")
    compares: ClassVar[bool] = True

    def __init__(self, asked: Asked) -> None:
        self._asked, (path,) = asked, asked.files
        self._texts = list(json_lines(path, key="text", flag=asked.flag))
        if not self._texts:
            raise DataError(f"{asked.flag} {path} holds no passages")

    @override
    def samples(self, tokenizer: Tokenizer, *, length: int) -> list[Sample]:
        split = last_words if self._asked.whole_word else last_tokens
        pairs = split([text for _, text in self._texts], tokenizer)
        return [
            sample_of(context_ids, target, limit=length, where=where)
            for (where, _), (context_ids, target) in zip(self._texts, pairs)
        ]

    @override
    def scores(self, table: Tensor) -> Scores:
        correct, total = int((table[:, 1] == 0).sum()), len(table)
        accuracy = correct / total
        line = (
            f" validation results on LAMBADA | number correct: {correct:.4E} | total examples: {total:.4E} | "
            f"avg accuracy: {accuracy:.4E}"
        )
        loss = float(table[:, 0].sum()) / total
        return Scores(line, {"correct": correct, "total": total, "accuracy": accuracy, "loss": loss})


def last_tokens(texts: list[str], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Context and target of each text: the last token, which may be a piece of a word."""
    return [(ids[:-1], ids[-1:]) for ids in tokenizer.tokenize_batch(texts)]


def last_words(texts: list[str], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Context and target of each text: the last word, after a blank."""
    words = [(text.split() or [""])[-1] for text in texts]
    contexts = [text[: text.rfind(word)].strip() for text, word in zip(texts, words)]
    return list(zip(tokenizer.tokenize_batch(contexts), tokenizer.tokenize_batch([f" {word}" for word in words])))


def sample_of(context: list[int], target: list[int], *, limit: int, where: str) -> Sample:
    """The target after as much of its context as the model sees at once; DataError when one of the two is missing."""
    if not context or not target:
        raise DataError(f"{where} is not a passage with a last word to predict: it has no context, or no text at all")
    ids = (context + target)[-(limit + 1) :]
    return Sample(np.array(ids), first_scored=max(0, len(ids) - 1 - len(target)))
