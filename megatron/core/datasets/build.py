"""Training, validation and test data of a run: opened, cut, ordered and blended as the data flags say.

A family of models defines what a sample is: it turns a part of a source into a data set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron.config.data import DEFAULT_SPLIT, DataConfig
from megatron.core.datasets.blend import BlendSpec, interleave, interleave_all, normalized
from megatron.core.datasets.blended_dataset import BlendedDataset, MixedDataset
from megatron.core.datasets.image_table import ImageTable
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_format import idx_path
from megatron.core.datasets.metadata import ContentDigests, DatasetMetadata, TokenizerStamp
from megatron.core.datasets.samples import Documents, SourceDataset
from megatron.core.datasets.splits import (
    MOCK_SPLIT,
    WHOLE,
    Share,
    SplitName,
    SplitSizes,
    SplitSources,
    parse_split,
    read_sources,
)
from megatron.core.files.remote_path import is_url
from megatron.core.tokenizers.chat_settings import ChatSettings, common_settings
from megatron.errors import ConfigError, DataError
from megatron.small_files import has_file

if TYPE_CHECKING:
    from megatron.core.tokenizers.base import Tokenizer

_MEGATRON_SURPLUS = 1.005  # Megatron-LM builds each source of a blend a little larger than the blend should need


class ShortSplitError(DataError):
    """A split whose share of the data is less than one sample."""


@dataclass(frozen=True)
class DatasetSplits:
    """The data sets of a run; None for a split that isn't needed or has no share of the data.

    ``valid_sets``: with ``--multiple-validation-sets`` the sets by name, and ``valid`` is None.
    ``contents``: digests of all bytes of each prefix's files, as far as they are known. ``chat``: how the training data
    write conversations and end answers, if they are such data. ``remarks``: for the user.
    """

    train: MixedDataset | None
    valid: MixedDataset | None
    test: MixedDataset | None
    valid_sets: Mapping[str, MixedDataset] = field(default_factory=dict)
    contents: Mapping[str, ContentDigests] = field(default_factory=dict)
    chat: ChatSettings | None = None
    remarks: Sequence[str] = ()

    def named(self, split: SplitName) -> Mapping[str, MixedDataset]:
        """Data sets of one split by name; a single one has the name ``""``."""
        data = {"train": self.train, "valid": self.valid, "test": self.test}[split]
        if data is not None:
            return {"": data}
        return self.valid_sets if split == "valid" else {}

    @property
    def digest(self) -> str:
        """Hex digest of what determines the samples: equal on all ranks of a sound run."""
        each = (self.train, self.valid, self.test, *self.valid_sets.values())
        return digest_of(*(data.digest if data else None for data in each))


@dataclass(frozen=True)
class Source:
    """An opened data set; ``ids_known``: its largest id is known to be in the vocabulary.

    ``targets``: with ``--sft``, for each token whether it is trained on; ``chat``: how its conversations are written.
    ``contents``: digests of all bytes of each
    prefix's files, as far as they are known; ``remarks``: how they were compared. ``images``: which stand in the
    documents; None for texts alone.
    """

    documents: Documents
    cache: IndexCache
    ids_known: bool
    targets: Documents | None = None
    chat: ChatSettings | None = None
    contents: Mapping[str, ContentDigests] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    images: ImageTable | None = None


@dataclass(frozen=True)
class Part:
    """The part of one source that belongs to a split; ``copy``: number of earlier uses of the source in the blend.

    ``units``: what ``--split`` counts, sequences or documents.
    """

    source: Source
    split: SplitName
    units: range
    copy: int


class SampleFamily(Protocol):
    """How a family of models reads data. One that reads images says so by an attribute ``reads_images``."""

    def mock(self) -> Source:
        """Mock data; raises ConfigError where there are none."""

    def count_units(self, documents: Documents) -> int:
        """Number of the units that ``--split`` divides."""

    def dataset(self, part: Part, num_samples: int | None, *, remedy: str) -> SourceDataset:
        """Samples of a part (None: each once); raises ShortSplitError with ``remedy`` when it is too short."""


def build_splits(
    data: DataConfig, family: SampleFamily, *, sizes: SplitSizes, tokenizer: Tokenizer, vocab_size: int
) -> DatasetSplits:
    """Data sets of a run.

    ``sizes``: samples of each split; with ``--dataloader-type cyclic`` training data are one pass, whatever is asked
    for. ``tokenizer``: the run's; data made with another one are refused. ``vocab_size``: ids the model knows.
    Raises DataError for files that are missing, damaged, too short or of another tokenizer.
    """
    builder = _SplitBuilder(data, family, stamp=TokenizerStamp.of(tokenizer), vocab_size=vocab_size)
    train = builder.build("train", None if data.dataloader_type == "cyclic" and sizes.train else sizes.train)
    chat = builder.chat_so_far()
    valid = builder.build("valid", None if data.full_validation and sizes.valid else sizes.valid)
    test = builder.build("test", sizes.test)
    only = None if data.multiple_validation_sets else valid.pop("", None)
    return DatasetSplits(
        train.get(""), only, test.get(""), valid, contents=builder.contents, chat=chat, remarks=builder.remarks
    )


def sources_read(data: DataConfig, sizes: SplitSizes) -> list[str]:
    """Prefixes of the data sets that a run of these sizes opens; raises as ``build_splits`` does for a wrong list."""
    given, found = read_sources(data), list[str]()
    for split in given:
        if sizes.of(split) != 0 and _share(data, given, split) is not None:
            found += [prefix for blend in _blends(data, given, split).values() for prefix in blend.prefixes]
    return list(dict.fromkeys(found))


def _share(data: DataConfig, given: Mapping[SplitName, SplitSources], split: SplitName) -> Share | None:
    """The split's share of each of its sources; None when it has no sources or no share of them."""
    if data.mock_data:
        return parse_split(MOCK_SPLIT)[split]
    if split not in given:
        return None
    return parse_split(data.split)[split] if given[split].shared else WHOLE


def _blends(data: DataConfig, given: Mapping[SplitName, SplitSources], split: SplitName) -> dict[str, BlendSpec]:
    return given[split].blends(by_name=split == "valid" and data.multiple_validation_sets)


def open_source(prefix: str, data: DataConfig, *, stamp: TokenizerStamp | None, vocab_size: int | None) -> Source:
    """A data set, checked against the run's tokenizer and vocabulary as far as these are known.

    With ``--verify-data`` all bytes are read and compared with their digests. Raises DataError for files that are
    missing, damaged or of another tokenizer.
    """
    cache = Path(data.data_cache_path) if data.data_cache_path else None
    documents = IndexedDataset(prefix, mmap=data.mmap_bin_files, cache=cache)
    if documents.dtype.kind not in "iu":
        raise DataError(f"{prefix}.bin holds {documents.dtype} values, but token ids are integers")
    metadata = DatasetMetadata.read(documents.local_prefix)
    if metadata is not None:
        metadata.check_counts(prefix, num_tokens=documents.num_tokens, num_sequences=len(documents))
        if stamp is not None:
            metadata.check_tokenizer(prefix, stamp)
        if vocab_size is not None:
            metadata.check_vocabulary(prefix, vocab_size=vocab_size)
    targets = _targets_of(documents, cache=cache) if data.sft else None
    contents, remarks = dict[str, ContentDigests](), list[str]()
    for each in [documents] if targets is None else [documents, targets]:
        stored = DatasetMetadata.read(each.local_prefix)
        known = stored.sha256 if stored else None
        if data.verify_data:
            found = each.digests()
            if stored is not None:
                stored.check_content(each.local_prefix, found)
            compared = "as written" if known else "the same on every rank, and there is no digest to compare with"
            remarks.append(f"{each.prefix}: all bytes are {compared} (--verify-data)")
            known = found
        if known is not None:
            contents[each.prefix] = known
    index_cache = IndexCache(cache or Path(f"{prefix}_index_cache"))
    chat = metadata.chat if metadata is not None and data.sft else None
    images = None
    if metadata is not None and metadata.num_images is not None:
        counts = {"num_documents": len(documents), "num_tokens": documents.num_tokens}
        written = metadata.sha256.bin if metadata.sha256 else None
        images = ImageTable(documents.local_prefix, **counts, tokens_sha256=written)
    return Source(documents, index_cache, metadata is not None, targets, chat, contents, remarks, images)


class _SplitBuilder:
    """Opens each source once and cuts, orders and blends it for each split."""

    def __init__(self, data: DataConfig, family: SampleFamily, *, stamp: TokenizerStamp, vocab_size: int) -> None:
        self._data, self._family, self._stamp, self._vocab_size = data, family, stamp, vocab_size
        self._given = read_sources(data)
        if not (data.mock_data or self._given):
            raise ConfigError(
                "there is no data: give --data-path PREFIX, or --train-data-path and its like, or --mock-data"
            )
        self._opened: dict[str, Source] = {}
        self.contents: dict[str, ContentDigests] = {}
        self.remarks: list[str] = []

    def chat_so_far(self) -> ChatSettings | None:
        """How conversations of the sources that are open are written; a remark says where these differ."""
        settings, remark = common_settings({prefix: source.chat for prefix, source in self._opened.items()})
        self.remarks += [remark] if remark else []
        return settings

    def build(self, split: SplitName, num_samples: int | None) -> dict[str, MixedDataset]:
        """Data sets of a split by name, a single one as ``""``; none where it has no share or nothing is asked for."""
        share = _share(self._data, self._given, split)
        if num_samples == 0 or share is None:
            return {}
        if self._data.mock_data:
            return {"": self._dataset(self._part(self._family.mock(), split, share), num_samples)}
        specs = _blends(self._data, self._given, split)
        built = {name: self._build_blend(spec, split, share, num_samples) for name, spec in specs.items()}
        return {name: dataset for name, dataset in built.items() if dataset is not None}

    def _build_blend(
        self, spec: BlendSpec, split: SplitName, share: Share, num_samples: int | None
    ) -> MixedDataset | None:
        """The blend; under the default ``--split``, evaluation leaves out sources that are too small for it."""
        try:
            return self._mixed(spec, split, share, num_samples)
        except ShortSplitError:
            if split == "train" or not self._given[split].shared or self._data.split != DEFAULT_SPLIT:
                raise
        small = list[str]()
        for prefix in dict.fromkeys(spec.prefixes):
            try:
                self._dataset(self._part(self._open(prefix), split, share), None)
            except ShortSplitError:
                small.append(prefix)
        rest, subject = spec.without(small), "it is" if len(small) == 1 else "they are"
        self.remarks.append(
            f"{split}: nothing is evaluated on {' and '.join(small)}, as {subject} too small: the share under the "
            f"default --split {DEFAULT_SPLIT} is less than one sample"
        )
        return self._mixed(rest, split, share, num_samples) if rest.prefixes else None

    def _mixed(self, spec: BlendSpec, split: SplitName, share: Share, num_samples: int | None) -> MixedDataset:
        parts = [
            self._part(self._open(prefix), split, share, copy=spec.prefixes[:i].count(prefix))
            for i, prefix in enumerate(spec.prefixes)
        ]
        blended = spec.weights is not None and self._data.data_order == "megatron" and self._given[split].shared
        if len(parts) == 1 and not blended:
            return self._dataset(parts[0], num_samples)
        return self._blend(spec, parts, num_samples)

    def _open(self, prefix: str) -> Source:
        if prefix not in self._opened:
            source = open_source(prefix, self._data, stamp=self._stamp, vocab_size=self._vocab_size)
            if source.images is not None and not getattr(self._family, "reads_images", False):
                raise DataError(
                    f"{prefix} holds places of images, which a model of texts doesn't read: train one that has a "
                    "vision encoder, or preprocess only texts"
                )
            self.contents |= source.contents
            self.remarks += source.remarks
            self._opened[prefix] = source
        return self._opened[prefix]

    def _part(self, source: Source, split: SplitName, share: Share, *, copy: int = 0) -> Part:
        return Part(source, split, share.units(self._family.count_units(source.documents)), copy)

    def _dataset(self, part: Part, num_samples: int | None) -> SourceDataset:
        shared = not self._data.mock_data and self._given[part.split].shared
        remedy = f"a larger share in --split (which is {self._data.split})" if shared else "more data"
        if shared and part.split != "train":
            remedy += ", or --split 1,0,0 to train on all data and evaluate nothing"
        return self._family.dataset(part, num_samples, remedy=remedy)

    def _blend(self, spec: BlendSpec, parts: Sequence[Part], num_samples: int | None) -> BlendedDataset:
        once = [self._dataset(part, None) for part in parts] if num_samples is None or spec.weights is None else []
        shares = normalized(spec.weights or [len(dataset) for dataset in once])
        if num_samples is None:
            return BlendedDataset(once, interleave_all(shares, sizes=[len(d) for d in once]), shares=shares)
        if self._data.data_order == "epoch":
            mixed = interleave(shares, size=num_samples)
            requests = mixed.counts.tolist()
        elif spec.weights is None:
            # Megatron-LM makes one pass over the sources; a run that asks for more crashes at its end.
            if num_samples > (available := sum(len(dataset) for dataset in once)):
                raise DataError(
                    f"the run asks for {num_samples} samples, but with --data-order megatron and no weights the "
                    f"sources give {available}, one pass: give weights, or leave --data-order megatron out"
                )
            return BlendedDataset(once, interleave(shares, size=num_samples), shares=shares)
        else:
            targets = [math.ceil(num_samples * share) for share in shares]
            shares = normalized(shares)  # again, as Megatron-LM's blended data set does: that may change the last bit
            mixed = interleave(shares, size=sum(targets))
            requests = [  # where Megatron-LM's is too small for its own blend (and fails), as many as the blend needs
                max(math.ceil(target * _MEGATRON_SURPLUS), int(count)) for target, count in zip(targets, mixed.counts)
            ]
        sources = [self._dataset(part, request) for part, request in zip(parts, requests)]
        return BlendedDataset(sources, mixed, shares=shares)


def _targets_of(documents: IndexedDataset, *, cache: Path | None) -> IndexedDataset:
    """The loss mask stored beside a data set; DataError when there is none, or it belongs to another data set."""
    prefix = targets_prefix(documents.prefix)
    if not (is_url(prefix) or has_file(idx_path(prefix), error=DataError)):
        raise DataError(
            f"{idx_path(prefix)} is missing: with --sft it marks the tokens with a loss; make the data with "
            "tools/preprocess_sft.py, or leave --sft out"
        )
    targets = IndexedDataset(prefix, mmap=documents.mmap, cache=cache)
    if not np.array_equal(targets.lengths, documents.lengths):
        raise DataError(f"{prefix} and {documents.prefix} have documents of different lengths: write both again")
    return targets


def targets_prefix(prefix: str) -> str:
    """Prefix of the mask of a data set for fine-tuning on targets."""
    return f"{prefix}_targets"
