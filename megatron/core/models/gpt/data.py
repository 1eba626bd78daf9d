"""Data of a GPT run: samples for next-token prediction, cut from documents that follow each other in shuffled order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.core.datasets.build import DatasetSplits, Part, ShortSplitError, Source, build_splits
from megatron.core.datasets.cut_documents import CutDocuments
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, mark_id
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.mock import MockDocuments
from megatron.core.datasets.packing import BestFitOrder, PackedDataset, PaddingFreeOrder, num_pairs
from megatron.core.datasets.pairs import check_no_pairs
from megatron.core.datasets.sample_order import EpochOrder, MegatronOrder
from megatron.core.datasets.samples import TEXT_LENGTH, Documents, Sample
from megatron.core.datasets.splits import SplitSizes
from megatron.core.datasets.token_stream import StreamDataset, stream_order

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    """What a sample holds: S tokens, the S labels after them, and what the flags ask for besides.

    ``eod``: id that ends a document.
    """

    seq_length: int
    eod: int | None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def sample(self, tokens: NDArray[np.int64], *, num_tokens: int) -> Sample:
        """Sample of S + 1 ``tokens``, of which the first ``num_tokens`` are real.

        ``tokens``, ``labels``, ``position_ids`` int64 [S]; ``loss_mask`` float32 [S], 0 for labels that aren't real;
        ``text_length`` int64: number of real labels;
        with ``reset_attention_mask`` also ``document_ids`` int32 [S]: number of the document within the sample, for
        attention within documents. A document ends with its EOD token: positions and document_ids change after it.
        """
        length = self.seq_length
        inputs = tokens[:-1]
        loss_mask, text_length = np.ones(length, np.float32), max(num_tokens - 1, 0)
        loss_mask[text_length:] = 0
        position_ids = np.arange(length, dtype=np.int64)
        sample: Sample = {"tokens": inputs, "labels": tokens[1:], "loss_mask": loss_mask, "position_ids": position_ids}
        sample[TEXT_LENGTH] = np.array(text_length, np.int64)
        if self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss:
            is_eod = inputs == self.eod
            if self.eod_mask_loss:
                loss_mask[is_eod] = 0
            document_ids = np.cumsum(is_eod, dtype=np.int32) - is_eod.astype(np.int32)
            if self.reset_position_ids:
                starts = np.concatenate([[0], np.flatnonzero(is_eod) + 1])
                position_ids -= starts[document_ids]
            if self.reset_attention_mask:
                sample["document_ids"] = document_ids
        return sample


class GPTDataset(StreamDataset):
    """Samples of ``layout.seq_length`` tokens, cut from the stream of documents.

    ``rearrange(tokens, index=…)`` turns a sample's tokens into other ones, at most as many. ``targets``: for each token
    whether it is trained on (1) or only read (0); ``cut``: documents with such targets that are longer than a sample.
    The rest as in OrderedDataset.
    """

    def __init__(
        self,
        documents: Documents,
        order: EpochOrder | MegatronOrder,
        *,
        layout: SampleLayout,
        first: int = 0,
        vocab_size: int | None = None,
        rearrange: Callable[..., NDArray[np.int64]] | None = None,
        targets: Documents | None = None,
        cut: CutDocuments | None = None,
    ) -> None:
        super().__init__(documents, order, first=first, vocab_size=vocab_size)
        self.layout, self._rearrange, self._targets, self._cut = layout, rearrange, targets, cut

    @override
    def sample(self, index: int) -> Sample:
        """What ``layout`` makes of the tokens."""
        needed = self.layout.seq_length + 1
        tokens, num_tokens = self.read(index, needed)
        if self._rearrange is not None:
            rearranged = self._rearrange(tokens[:num_tokens], index=index)
            tokens[: len(rearranged)], tokens[len(rearranged) :] = rearranged, 0
            num_tokens = len(rearranged)
        sample = self.layout.sample(tokens, num_tokens=num_tokens)
        if self._targets is not None:
            sample["loss_mask"] *= self.read(index, needed, documents=self._targets)[0][1:]
        return sample

    @override
    def describe(self) -> list[str]:
        """The source, in a line."""
        cut = self._cut.describe(self) if self._cut else ""
        return [f"{line}{cut}" for line in super().describe()]


def build_gpt_splits(
    data: DataConfig, *, seed: int, sizes: SplitSizes, tokenizer: Tokenizer, vocab_size: int | None = None
) -> DatasetSplits:
    """Data sets of a GPT run; see ``build_splits``. ``vocab_size``: the tokenizer's when not given."""
    known = tokenizer.vocab_size if vocab_size is None else vocab_size
    family = GPTDatasets(data, seed=seed, tokenizer=tokenizer, vocab_size=known)
    return build_splits(data, family, sizes=sizes, tokenizer=tokenizer, vocab_size=known)


class GPTDatasets:
    """Samples for next-token prediction; ``--split`` counts sequences."""

    def __init__(self, data: DataConfig, *, seed: int, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._data, self._seed, self._eod, self._vocab_size = data, seed, tokenizer.eod, vocab_size
        self._layout = SampleLayout(
            seq_length=data.seq_length,
            eod=tokenizer.eod,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )
        self._fim: FillInTheMiddle | None = None
        if data.fim_rate:
            self._fim = FillInTheMiddle(
                tokenizer=tokenizer,
                eod=tokenizer.eod,
                seed=seed,
                rate=data.fim_rate,
                spm_rate=data.fim_spm_rate,
                prefix=mark_id(tokenizer, data.fim_prefix_token, flag="--fim-prefix-token"),
                middle=mark_id(tokenizer, data.fim_middle_token, flag="--fim-middle-token"),
                suffix=mark_id(tokenizer, data.fim_suffix_token, flag="--fim-suffix-token"),
            )

    def mock(self) -> Source:
        """Documents that count 1, 2, 3 …"""
        return Source(MockDocuments(eod=self._eod, vocab_size=self._vocab_size), IndexCache(None), ids_known=True)

    def count_units(self, documents: Documents) -> int:
        """Number of sequences."""
        return len(documents.lengths)

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> GPTDataset | PackedDataset:
        """Samples of a part; raises ShortSplitError when it has too few tokens for one."""
        data, source, first = self._data, part.source, part.units.start
        lengths, seq_length = source.documents.lengths[first : part.units.stop], data.seq_length
        tokens, pairs = int(lengths.sum(dtype=np.int64)), int(num_pairs(lengths).sum(dtype=np.int64))
        check_no_pairs(source.documents)
        needed = 2 if data.packing == "best-fit" else seq_length + 1  # one pair where samples are padded
        if (tokens if data.packing == "stream" else pairs + 1) < needed:
            raise ShortSplitError(
                f"{source.documents.prefix}: the {part.split} split has {tokens} tokens in {len(lengths)} "
                f"documents, but a sample takes {needed} (--seq-length and one label): give {remedy}, or a smaller "
                "--seq-length"
            )
        where: dict[str, Any] = {
            "first": first,
            "vocab_size": None if source.ids_known else self._vocab_size,
            "targets": source.targets,
            "cut": CutDocuments.of(lengths, seq_length=seq_length) if source.targets else None,
        }
        if data.packing != "stream":
            kind = BestFitOrder if data.packing == "best-fit" else PaddingFreeOrder
            packed = kind(
                lengths,
                seed=self._seed,
                seq_length=seq_length,
                num_samples=num_samples,
                cache=source.cache,
                copy=part.copy,
            )
            return PackedDataset(source.documents, packed, seq_length=seq_length, **where)
        samples = stream_order(part, data, seed=self._seed, seq_length=seq_length, num_samples=num_samples)
        rearrange = partial(self._fim, copy=part.copy) if self._fim and part.split == "train" else None
        return GPTDataset(source.documents, samples, layout=self._layout, rearrange=rearrange, **where)
