"""WIKITEXT103: perplexity of a corpus as one text, per token and per word; the latter compares tokenizers."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from megatron.core.inference.scoring import Sample, TextScore, perplexity, samples_of
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError
from megatron.training.evaluation.zero_shot.detokenize import detokenizer_for
from megatron.training.evaluation.zero_shot.files import read_text
from megatron.training.evaluation.zero_shot.task import Asked, Scores, ZeroShotTask

_OVERLAP = 32


class WikiText(ZeroShotTask):
    """Scores of every token but the first in overlapping windows. Words are what single blanks separate in the file."""

    shown: ClassVar[tuple[str, ...]] = ("loss", "adjusted_perplexity")
    compares: ClassVar[bool] = False

    def __init__(self, asked: Asked) -> None:
        self._asked, (path,) = asked, asked.files
        self._detokenize = detokenizer_for(path, flag=asked.flag)
        self._original = read_text(path, flag=asked.flag)
        self._words = len(self._original.strip().split(" "))
        if self._words < 2:
            raise DataError(f"{asked.flag} {path} holds {self._words} word; perplexity needs at least two")

    @override
    def samples(self, tokenizer: Tokenizer, *, length: int) -> list[Sample]:
        stride = self._asked.stride or min(_OVERLAP, length)
        return list(samples_of(tokenizer.tokenize(self._detokenize(self._original)), length=length, stride=stride))

    @override
    def scores(self, table: Tensor) -> Scores:
        nats, _, count = table.sum(dim=0).tolist()
        found, words = TextScore(nats, int(count)), self._words - 1
        ratio = found.tokens / words
        adjusted = perplexity(found.loss * ratio)
        line = (
            f" validation results on WIKITEXT103 | avg loss: {found.loss:.4E} | ppl: {perplexity(found.loss):.4E} | "
            f"adjusted ppl: {adjusted:.4E} | token ratio: {ratio} |"
        )
        metrics = {
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "adjusted_perplexity": adjusted,
            "token_ratio": ratio,
            "tokens": found.tokens,
            "words": words,
        }
        return Scores(line, metrics)
