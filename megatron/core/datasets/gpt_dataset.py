"""Training, validation and test data of a GPT run, from what the data flags say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.config.data import DataConfig
from megatron.core.datasets.blend import BlendSpec, Interleaving, interleave, interleave_all, normalized, parse_blend
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_samples import Documents, GPTDataset, SampleDataset, SampleLayout
from megatron.core.datasets.index_build import Lengths
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.metadata import DatasetMetadata, DescribesTokenizer, TokenizerStamp
from megatron.core.datasets.mock import MOCK_SPLIT, MockDocuments
from megatron.core.datasets.sample_order import EpochOrder, MegatronOrder, SampleOrder
from megatron.core.datasets.splits import SPLITS, WHOLE, Share, SplitName, SplitSizes, parse_split
from megatron.errors import ConfigError, DataError

_MEGATRON_SURPLUS = 1.005  # Megatron-LM builds each source of a blend a little larger than it should be needed


@dataclass(frozen=True)
class DatasetSplits:
    """The data sets of a run; None for a split that isn't needed or has no share of the data."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None

    def of(self, split: SplitName) -> SampleDataset | None:
        """Data set of one split."""
        return {"train": self.train, "valid": self.valid, "test": self.test}[split]

    @property
    def digest(self) -> str:
        """Hex digest of what decides which samples are read: equal on all ranks of a sound run."""
        return digest_of(*(data.digest if data else None for data in (self.train, self.valid, self.test)))


def build_gpt_splits(
    data: DataConfig,
    *,
    seed: int,
    sizes: SplitSizes,
    tokenizer: DescribesTokenizer,
    vocab_size: int | None = None,
) -> DatasetSplits:
    """Data sets of a run.

    ``sizes``: samples of each split; with ``--dataloader-type cyclic`` training data are one pass, whatever is asked.
    ``tokenizer``: the run's; data made with another one are refused. ``vocab_size``: ids the model knows, the
    tokenizer's when not given. Raises DataError for files that are missing, damaged, too short or of another tokenizer.
    """
    if not (data.mock_data or any(_entries(data, split) for split in SPLITS)):
        raise ConfigError(
            "there are no data: give --data-path PREFIX, or --train-data-path and its like, or --mock-data"
        )
    builder = _SplitBuilder(data, seed=seed, stamp=TokenizerStamp.of(tokenizer), vocab_size=vocab_size)
    train = builder.build("train", None if data.dataloader_type == "cyclic" and sizes.train else sizes.train)
    return DatasetSplits(train, builder.build("valid", sizes.valid), builder.build("test", sizes.test))


@dataclass(frozen=True)
class _Source:
    """An opened data set; ``ids_known`` when its largest id is known to lie in the vocabulary."""

    documents: Documents
    cache: IndexCache
    ids_known: bool


@dataclass(frozen=True)
class _Part:
    """The part of one source that belongs to a split; ``copy`` counts earlier uses of the source in the same blend."""

    source: _Source
    split: SplitName
    documents: range
    copy: int

    @property
    def lengths(self) -> Lengths:
        """Tokens of each document."""
        return self.source.documents.lengths[self.documents.start : self.documents.stop]


class _SplitBuilder:
    """Opens each source once and cuts, orders and blends it for each split."""

    def __init__(self, data: DataConfig, *, seed: int, stamp: TokenizerStamp, vocab_size: int | None) -> None:
        self._data, self._seed, self._stamp = data, seed, stamp
        self._vocab_size = stamp.vocab_size if vocab_size is None else vocab_size
        self._sources: dict[str, _Source] = {}
        self._layout = SampleLayout(
            seq_length=data.seq_length,
            eod=stamp.eod,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )

    def build(self, split: SplitName, num_samples: int | None) -> SampleDataset | None:
        """Data set of a split; None when no samples are asked of it, or it has no share of the data."""
        share, entries = self._share(split), _entries(self._data, split)
        if num_samples == 0 or share is None or not (entries or self._data.mock_data):
            return None
        if self._data.mock_data:
            return self._dataset(self._part(self._mock(), split=split, share=share, copy=0), num_samples)
        flag = "--data-path" if self._data.data_path else f"--{split}-data-path"
        spec = parse_blend(entries, flag=flag)
        parts = [
            self._part(self._open(prefix), split=split, share=share, copy=spec.prefixes[:i].count(prefix))
            for i, prefix in enumerate(spec.prefixes)
        ]
        if len(parts) == 1 and (spec.weights is None or self._data.data_order == "epoch"):
            return self._dataset(parts[0], num_samples)
        return self._blend(spec, parts, num_samples)

    def _share(self, split: SplitName) -> Share | None:
        if self._data.mock_data:
            return parse_split(MOCK_SPLIT)[split]
        return parse_split(self._data.split)[split] if self._data.data_path else WHOLE

    def _mock(self) -> _Source:
        assert self._stamp.eod is not None
        documents = MockDocuments(eod=self._stamp.eod, vocab_size=self._vocab_size)
        return _Source(documents, IndexCache(None), ids_known=True)

    def _open(self, prefix: str) -> _Source:
        if prefix not in self._sources:
            documents = IndexedDataset(prefix, mmap=self._data.mmap_bin_files)
            if documents.dtype.kind not in "iu":
                raise DataError(f"{prefix}.bin holds {documents.dtype} values, but token ids are integers")
            metadata = DatasetMetadata.read(prefix)
            if metadata is not None:
                metadata.check_counts(prefix, num_tokens=documents.num_tokens, num_sequences=len(documents))
                metadata.check_tokenizer(prefix, self._stamp)
                metadata.check_vocabulary(prefix, vocab_size=self._vocab_size)
            folder = Path(self._data.data_cache_path or f"{prefix}_index_cache")
            self._sources[prefix] = _Source(documents, IndexCache(folder), ids_known=metadata is not None)
        return self._sources[prefix]

    def _part(self, source: _Source, *, split: SplitName, share: Share, copy: int) -> _Part:
        part = _Part(source, split, share.documents(len(source.documents.lengths)), copy)
        tokens, needed = int(part.lengths.sum(dtype=np.int64)), self._data.seq_length + 1
        if tokens < needed:
            remedy = "a larger share in --split" if self._data.data_path else "more data"
            raise DataError(
                f"{source.documents.prefix}: the {split} split has {tokens} tokens in {len(part.documents)} documents, "
                f"but a sample takes {needed} (--seq-length and one label): give {remedy}, or a smaller --seq-length"
            )
        return part

    def _dataset(self, part: _Part, num_samples: int | None) -> GPTDataset:
        lengths, cache, seq_length = part.lengths, part.source.cache, self._data.seq_length
        order: SampleOrder
        if self._data.data_order == "megatron":
            order = MegatronOrder(lengths, seed=self._seed, seq_length=seq_length, num_samples=num_samples, cache=cache)
        else:
            order = EpochOrder(
                lengths, seed=self._seed, seq_length=seq_length, num_samples=num_samples, cache=cache, copy=part.copy
            )
        return GPTDataset(
            part.source.documents,
            order,
            layout=self._layout,
            first=part.documents.start,
            vocab_size=None if part.source.ids_known else self._vocab_size,
        )

    def _blend(self, spec: BlendSpec, parts: Sequence[_Part], num_samples: int | None) -> BlendedDataset:
        weights: Sequence[float] | None = spec.weights
        once = [self._dataset(part, None) for part in parts] if num_samples is None or weights is None else []
        weights = weights or [len(dataset) for dataset in once]
        if num_samples is None:
            return BlendedDataset(once, interleave_all(weights, sizes=[len(d) for d in once]), weights=weights)
        if self._data.data_order == "epoch":
            mixed = interleave(weights, size=num_samples)
            requests = mixed.counts.tolist()
        elif spec.weights is None:
            return self._megatron_unweighted(once, num_samples)
        else:
            mixed, requests = _megatron_requests(weights, num_samples)
        sources = [self._dataset(part, request) for part, request in zip(parts, requests)]
        return BlendedDataset(sources, mixed, weights=weights)

    def _megatron_unweighted(self, once: Sequence[GPTDataset], num_samples: int) -> BlendedDataset:
        """Without weights Megatron-LM makes one pass over the sources; a run that asks for more crashes at its end."""
        sizes = [len(dataset) for dataset in once]
        if num_samples > sum(sizes):
            raise DataError(
                f"the run asks for {num_samples} samples, but with --data-order megatron and no weights the sources "
                f"give {sum(sizes)}, one pass: give weights, or leave --data-order megatron out"
            )
        return BlendedDataset(once, interleave(sizes, size=num_samples), weights=sizes)


def _megatron_requests(weights: Sequence[float], num_samples: int) -> tuple[Interleaving, list[int]]:
    """Megatron-LM's blend and how many samples it asks of each source.

    Where its request is too small for its own blend (it then fails), the blend's need counts.
    """
    targets = [math.ceil(num_samples * share) for share in normalized(weights).tolist()]
    mixed = interleave(weights, size=sum(targets))
    requests = [math.ceil(target * _MEGATRON_SURPLUS) for target in targets]
    return mixed, [max(request, int(count)) for request, count in zip(requests, mixed.counts)]


def _entries(data: DataConfig, split: SplitName) -> tuple[str, ...]:
    per_split = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    return tuple(data.data_path or per_split[split])
