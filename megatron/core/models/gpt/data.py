"""Training, validation and test data of a GPT run."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np

from megatron.config.data import DataConfig
from megatron.core.datasets.build import DatasetSplits, Part, ShortSplitError, Source, build_splits
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, TextTokenizer, mark_id
from megatron.core.datasets.index_build import Lengths
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.metadata import DescribesTokenizer
from megatron.core.datasets.mock import MockDocuments
from megatron.core.datasets.packed_samples import BestFitOrder, PackedDataset, PaddingFreeOrder
from megatron.core.datasets.packing import num_pairs
from megatron.core.datasets.sample_order import EpochOrder, MegatronOrder, SampleOrder
from megatron.core.datasets.samples import Documents
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.samples import GPTDataset, SampleLayout


def build_gpt_splits(
    data: DataConfig,
    *,
    seed: int,
    sizes: SplitSizes,
    tokenizer: DescribesTokenizer,
    vocab_size: int | None = None,
) -> DatasetSplits:
    """Data sets of a GPT run; see ``build_splits``. ``vocab_size``: the tokenizer's when not given."""
    known = tokenizer.vocab_size if vocab_size is None else vocab_size
    family = GPTDatasets(data, seed=seed, tokenizer=tokenizer, vocab_size=known)
    return build_splits(data, family, sizes=sizes, tokenizer=tokenizer, vocab_size=known)


class GPTDatasets:
    """Samples for next-token prediction; ``--split`` counts sequences."""

    def __init__(self, data: DataConfig, *, seed: int, tokenizer: DescribesTokenizer, vocab_size: int) -> None:
        self._data, self._seed, self._eod, self._vocab_size = data, seed, tokenizer.eod, vocab_size
        self._fim = _fill_in_the_middle(data, tokenizer, seed=seed)
        self._layout = SampleLayout(
            seq_length=data.seq_length,
            eod=tokenizer.eod,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )

    def mock(self) -> Source:
        """Documents that count."""
        assert self._eod is not None
        return Source(MockDocuments(eod=self._eod, vocab_size=self._vocab_size), IndexCache(None), ids_known=True)

    def count_units(self, documents: Documents) -> int:
        """Sequences."""
        return len(documents.lengths)

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> GPTDataset | PackedDataset:
        """Samples of a part; raises ShortSplitError when it has too few tokens for one."""
        data, documents, first = self._data, part.source.documents, part.units.start
        lengths = documents.lengths[first : part.units.stop]
        self._check_size(part, lengths, remedy=remedy)
        vocab_size = None if part.source.ids_known else self._vocab_size
        where: dict[str, Any] = {
            "seed": self._seed,
            "seq_length": data.seq_length,
            "num_samples": num_samples,
            "cache": part.source.cache,
        }
        if data.packing != "stream":
            kind = BestFitOrder if data.packing == "best-fit" else PaddingFreeOrder
            return PackedDataset(
                documents,
                kind(lengths, copy=part.copy, **where),
                seq_length=data.seq_length,
                first=first,
                vocab_size=vocab_size,
                targets=part.source.targets,
            )
        samples: SampleOrder = (
            MegatronOrder(lengths, **where)
            if data.data_order == "megatron"
            else EpochOrder(lengths, copy=part.copy, **where)
        )
        fim = self._fim if part.split == "train" else None
        return GPTDataset(
            documents,
            samples,
            layout=self._layout,
            first=first,
            vocab_size=vocab_size,
            rearrange=None if fim is None else partial(fim, copy=part.copy),
            targets=part.source.targets,
        )

    def _check_size(self, part: Part, lengths: Lengths, *, remedy: str) -> None:
        """Raise DataError when there is too little for a sample: one pair where samples are padded, else a full one."""
        packed, seq_length = self._data.packing != "stream", self._data.seq_length
        tokens, pairs = int(lengths.sum(dtype=np.int64)), int(num_pairs(lengths).sum(dtype=np.int64))
        needed = 2 if self._data.packing == "best-fit" else seq_length + 1
        if (pairs + 1 if packed else tokens) < needed:
            raise ShortSplitError(
                f"{part.source.documents.prefix}: the {part.split} split has {tokens} tokens in {len(lengths)} "
                f"documents, but a sample takes {needed} (--seq-length and one label): give {remedy}, or a smaller "
                "--seq-length"
            )


def _fill_in_the_middle(data: DataConfig, tokenizer: DescribesTokenizer, *, seed: int) -> FillInTheMiddle | None:
    if not data.fim_rate:
        return None
    texts, eod = cast("TextTokenizer", tokenizer), tokenizer.eod
    assert eod is not None
    return FillInTheMiddle(
        tokenizer=texts,
        eod=eod,
        seed=seed,
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        prefix=mark_id(texts, data.fim_prefix_token, flag="--fim-prefix-token"),
        middle=mark_id(texts, data.fim_middle_token, flag="--fim-middle-token"),
        suffix=mark_id(texts, data.fim_suffix_token, flag="--fim-suffix-token"),
    )
