"""Training, validation and test data of a GPT run."""

from __future__ import annotations

import numpy as np

from megatron.config.data import DataConfig
from megatron.core.datasets.build import DatasetSplits, Part, Source, build_splits
from megatron.core.datasets.gpt_samples import Documents, GPTDataset, SampleLayout
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.metadata import DescribesTokenizer
from megatron.core.datasets.mock import MockDocuments
from megatron.core.datasets.sample_order import EpochOrder, MegatronOrder, SampleOrder
from megatron.core.datasets.splits import SplitSizes
from megatron.errors import DataError

__all__ = ["DatasetSplits", "GPTFamily", "build_gpt_splits"]


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
    family = GPTFamily(data, seed=seed, tokenizer=tokenizer, vocab_size=known)
    return build_splits(data, family, sizes=sizes, tokenizer=tokenizer, vocab_size=known)


class GPTFamily:
    """Samples for next-token prediction; ``--split`` counts sequences."""

    def __init__(self, data: DataConfig, *, seed: int, tokenizer: DescribesTokenizer, vocab_size: int) -> None:
        self._data, self._seed, self._eod, self._vocab_size = data, seed, tokenizer.eod, vocab_size
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

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> GPTDataset:
        """Samples of a part; raises DataError when it has too few tokens for one."""
        data, cache = self._data, part.source.cache
        lengths = part.source.documents.lengths[part.units.start : part.units.stop]
        tokens, needed = int(lengths.sum(dtype=np.int64)), data.seq_length + 1
        if tokens < needed:
            raise DataError(
                f"{part.source.documents.prefix}: the {part.split} split has {tokens} tokens in {len(lengths)} "
                f"documents, but a sample takes {needed} (--seq-length and one label): give {remedy}, or a smaller "
                "--seq-length"
            )
        order: SampleOrder
        if data.data_order == "megatron":
            order = MegatronOrder(
                lengths, seed=self._seed, seq_length=data.seq_length, num_samples=num_samples, cache=cache
            )
        else:
            order = EpochOrder(
                lengths,
                seed=self._seed,
                seq_length=data.seq_length,
                num_samples=num_samples,
                cache=cache,
                copy=part.copy,
            )
        return GPTDataset(
            part.source.documents,
            order,
            layout=self._layout,
            first=part.units.start,
            vocab_size=None if part.source.ids_known else self._vocab_size,
        )
