"""LM: perplexity and bits per byte of any text, comparable between tokenizers."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from megatron.core.inference.scoring import Sample, TextScore, perplexity, samples_of
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError
from megatron.training.evaluation.zero_shot.files import read_documents
from megatron.training.evaluation.zero_shot.task import Asked, Scores, ZeroShotTask


class LM(ZeroShotTask):
    """Scores of every token of every document, the first one given an end of document, as in training."""

    shown: ClassVar[tuple[str, ...]] = ("loss", "bits_per_byte")
    compares: ClassVar[bool] = False

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        files = asked.files
        self._documents = [t for path in files for t in read_documents(path, key=asked.json_key, flag=asked.flag)]
        if not any(self._documents):
            raise DataError(f"{asked.flag} {' '.join(map(str, files))} holds no text")

    @override
    def samples(self, tokenizer: Tokenizer, *, length: int) -> list[Sample]:
        stride = self._asked.stride or max(1, length // 2)
        texts = [[tokenizer.eod, *ids] for ids in tokenizer.tokenize_batch(self._documents)]
        return [each for text in texts for each in samples_of(text, length=length, stride=stride)]

    @override
    def scores(self, table: Tensor) -> Scores:
        nats, _, count = table.sum(dim=0).tolist()
        found, num_bytes = TextScore(nats, int(count)), sum(len(text.encode()) for text in self._documents)
        bits, documents = found.bits_per_byte(num_bytes), len(self._documents)
        line = (
            f" validation results on LM | avg loss: {found.loss:.4E} | ppl: {perplexity(found.loss):.4E} | "
            f"bits per byte: {bits:.4f} | documents: {documents} | tokens: {found.tokens} | bytes: {num_bytes} |"
        )
        metrics = {
            "loss": found.loss,
            "perplexity": perplexity(found.loss),
            "bits_per_byte": bits,
            "documents": documents,
            "tokens": found.tokens,
            "bytes": num_bytes,
        }
        return Scores(line, metrics)
