"""A run's data as microbatches on the rank's device, for training from any sample on and for evaluation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.context_parallel.slicing import take
from megatron.core.datasets.blended_dataset import Phase, continue_phases, mix_of, next_phases
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.loader import Batch, BatchLoader
from megatron.core.datasets.metadata import ContentDigests
from megatron.core.datasets.pinned_ring import PinnedRing
from megatron.core.datasets.sampler import MicrobatchSampler
from megatron.core.datasets.splits import SPLITS, SplitName
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.choice import objective_of
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import StreamKey
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import RESTART_CANNOT_HELP, CheckpointError, DataError, ParallelError
from megatron.small_files import as_kind
from megatron.training.run.split_sizes import split_sizes
from megatron.training.run.stages import stages_here


@dataclass
class _Stream:
    """An open reader: the microbatches to come, and the number of samples before them."""

    position: int
    microbatches: Iterator[Microbatch]


@dataclass(frozen=True)
class _Counting:
    """Empty batches for a stage that reads no data."""

    sampler: MicrobatchSampler

    def __iter__(self) -> Iterator[Batch]:
        return ({} for _ in self.sampler)


class TrainingData:
    """The three splits of a run, read by this rank at its data-parallel coordinate.

    Raises DataError for data that are missing, damaged or too short, ParallelError when ranks see different data.
    """

    def __init__(
        self, config: RunConfig, train_spec: TrainSpec, context: ParallelContext, tokenizer: Tokenizer
    ) -> None:
        self._config, self._train_spec, self._context = config, train_spec, context
        self._ring = PinnedRing(context.device)
        self._fields = train_spec.fields(config, stages_here(config, context))
        self._splits = build_splits(config, train_spec, context, tokenizer)
        self._remarks = [f"tokenizer: {remark}" for remark in getattr(tokenizer, "remarks", ())]
        self._loaders: dict[tuple[SplitName, str], Iterable[Batch]] = {}
        self._streams: dict[tuple[SplitName, str], _Stream] = {}
        self._phases = [Phase(0, tuple(mix_of(self._splits.train)))] if self._splits.train is not None else []

    @property
    def chat(self) -> ChatSettings | None:
        """How the training data write conversations and end answers, if they are such data."""
        return self._splits.chat

    def evaluated(self, split: SplitName) -> list[str]:
        """Names of the data sets of ``split`` to evaluate on; a single one has the name ``""``."""
        return list(self._splits.named(split))

    @property
    def phases(self) -> list[dict[str, Any]]:
        """The mixes that the run has trained on, as JSON for a checkpoint."""
        return [phase.to_json() for phase in self._phases]

    def resume(self, phases: Sequence[Mapping[str, Any]], consumed_samples: int) -> None:
        """Continue after ``consumed_samples`` samples of a run with these ``phases``; the mix may differ now.

        Raises DataError for a changed mix with an order of samples that doesn't allow it.
        """
        train = self._splits.train
        if train is None or not phases:
            return
        data = self._config.data
        before = as_kind(phases, list[Phase], where="the checkpoint's data_phases", error=CheckpointError)
        if not all(phase.sources for phase in before):
            raise CheckpointError("the checkpoint's data_phases have one without sources, so it is damaged")
        self._phases = next_phases(before, mix_of(train), consumed=consumed_samples)
        if len(self._phases) > 1 and (data.data_order == "megatron" or data.dataloader_type == "cyclic"):
            flag = "--data-order megatron" if data.data_order == "megatron" else "--dataloader-type cyclic"
            raise DataError(
                f"the training data are another mix than the checkpoint's, and with {flag} samples would be skipped or "
                "repeated: give the same data and weights, or --finetune to begin anew"
            )
        train = continue_phases(train, self._phases)
        self._splits = dataclasses.replace(self._splits, train=train)

    def describe(self) -> list[str]:
        """Sources of each split, with requested and actual weights, a line each."""
        lines = [f"mix changed after {phase.start:,} samples" for phase in self._phases[1:]]
        for split in SPLITS:
            for name, data in self._splits.named(split).items():
                lines += [f"{split}{f' ({name})' if name else ''}: {line.strip()}" for line in data.describe()]
        return [*lines, *self._splits.remarks, *self._remarks]

    def training_batches(self, consumed_samples: int) -> Iterator[list[Microbatch]]:
        """This rank's microbatches of each global batch after ``consumed_samples`` samples; DataError when data end."""
        config = self._config
        stream = self._read("train", consumed_samples)
        while True:
            count = config.num_microbatches(consumed_samples)
            batch = list(itertools.islice(stream, count))
            if len(batch) < count:
                raise DataError(
                    f"the training data end after {consumed_samples} samples, before the run does: give more data, "
                    "fewer --train-iters, or leave --data-order megatron out"
                )
            yield batch
            consumed_samples += config.global_batch_size_at(consumed_samples)

    def evaluation_batches(self, split: SplitName, *, evaluation: int, name: str = "") -> Iterator[list[Microbatch]]:
        """This rank's microbatches of evaluation number ``evaluation``, which continues where the previous one ended.

        With ``--full-validation`` each evaluation reads all validation samples, and the last batch is padded. Workers
        that read ahead are kept for the next evaluation.
        """
        training = self._config.training
        per_rank = training.global_batch_size // self._config.batch_unit
        if split == "valid" and self._config.data.full_validation:
            if (split, name) not in self._loaders:
                pad_to = training.global_batch_size
                self._loaders[split, name] = self._loader(split, 0, name=name, pad_to=pad_to)
            microbatches = self._microbatches(self._loaders[split, name], split, 0)
            while batch := list(itertools.islice(microbatches, per_rank)):
                yield batch
            return
        start = evaluation * training.eval_iters * training.global_batch_size
        stream = self._streams.get((split, name))
        if stream is None or stream.position != start:
            stream = self._streams[split, name] = _Stream(start, self._read(split, start, name=name))
        for _ in range(training.eval_iters):
            batch = list(itertools.islice(stream.microbatches, per_rank))
            stream.position += training.global_batch_size
            yield batch

    def every_sample(self, split: SplitName, *, samples: int, name: str = "") -> Iterator[Microbatch]:
        """This rank's microbatches of the first ``samples`` samples, once, and of samples without loss to fill them."""
        dataset = self._splits.named(split)[name]
        if not self._fields:
            sampler = self._sampler(samples)
            return self._microbatches(_Counting(sampler), split, 0)
        loader = BatchLoader(
            self._train_spec.samples(dataset, split, name),
            self._sampler(samples),
            num_workers=self._config.data.num_workers,
            ragged=self._train_spec.ragged_fields,
        )
        return self._microbatches(loader, split, 0)

    def _sampler(self, samples: int) -> MicrobatchSampler:
        mesh, size = self._context.mesh, self._config.training.micro_batch_size
        return MicrobatchSampler(
            num_samples=samples,
            consumed=0,
            micro_batch_size=size,
            data_parallel_rank=_replica(mesh),
            data_parallel_size=mesh.size("dc", "dp"),
            pad_to=size * mesh.size("dc", "dp"),
        )

    def sizes(self, split: SplitName) -> dict[str, int]:
        """Numbers of samples of the data sets of a split, by name."""
        return {name: len(data) for name, data in self._splits.named(split).items()}

    def _read(self, split: SplitName, consumed: int, *, name: str = "") -> Iterator[Microbatch]:
        return self._microbatches(self._loader(split, consumed, name=name), split, consumed)

    def _loader(self, split: SplitName, consumed: int, *, name: str = "", pad_to: int = 1) -> Iterable[Batch]:
        """This rank's batches after ``consumed`` samples; empty ones where its stages read no data."""
        dataset, config, mesh = self._splits.named(split).get(name), self._config, self._context.mesh
        if dataset is None:
            raise DataError(f"the run needs {split} samples, but the data flags leave that split empty")
        cyclic = split == "train" and config.data.dataloader_type == "cyclic"
        sampler = MicrobatchSampler(
            num_samples=len(dataset),
            consumed=consumed,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=_replica(mesh),
            data_parallel_size=mesh.size("dc", "dp"),
            shuffle_seed=config.training.seed if cyclic else None,
            pad_to=pad_to,
        )
        if not self._fields:
            return _Counting(sampler)
        samples = self._train_spec.samples(dataset, split, name)
        ragged = self._train_spec.ragged_fields
        return BatchLoader(samples, sampler, num_workers=config.data.num_workers, ragged=ragged)

    def _microbatches(self, loader: Iterable[Batch], split: SplitName, consumed: int) -> Iterator[Microbatch]:
        mesh, size = self._context.mesh, self._config.training.micro_batch_size
        first = consumed + _replica(mesh) * size
        for number, batch in enumerate(loader):
            yield self.microbatch(batch, StreamKey(first + number * size * mesh.size("dc", "dp"), split))

    def microbatch(self, batch: Mapping[str, Tensor], key: StreamKey) -> Microbatch:
        """This rank's part of a batch of samples, on its device."""
        whole = self._train_spec.add_derived_fields(batch, self._config)
        needed = {name: tensor for name, tensor in whole.items() if name in self._fields}
        held = held_slices(needed, self._train_spec.batch_fields, self._context.mesh)
        return Microbatch(self._ring.send(held), key)


def _replica(mesh: Mesh) -> int:
    """This rank's turn to read a microbatch. Workers take turns before data-parallel ranks do, so that what a worker
    reads doesn't depend on how its own ranks divide it.
    """
    return mesh.rank("dp") * mesh.size("dc") + mesh.rank("dc")


def held_slices(batch: Mapping[str, Tensor], sequence_dims: Mapping[str, int | None], mesh: Mesh) -> dict[str, Tensor]:
    """This context-parallel rank's slice of each tensor. ``sequence_dims``: dimensions along the sequence, or None."""
    rank, ranks = mesh.rank("cp"), mesh.size("cp")
    return {
        name: tensor if (dim := sequence_dims[name]) is None else take(tensor, rank, ranks, dim=dim)
        for name, tensor in batch.items()
    }


def offline_splits(config: RunConfig, train_spec: TrainSpec) -> tuple[DatasetSplits, Tokenizer]:
    """The data sets and tokenizer of a run without its ranks, for tools."""
    tokenizer = build_tokenizer(config.tokenizer)
    config = config.with_vocab_size(tokenizer.vocab_size)
    return objective_of(config, train_spec).build_datasets(config, tokenizer, split_sizes(config)), tokenizer


def build_splits(
    config: RunConfig, train_spec: TrainSpec, context: ParallelContext, tokenizer: Tokenizer
) -> DatasetSplits:
    """Build the data sets on every rank; ParallelError when ranks see other data or bytes. A collective."""
    splits = train_spec.build_datasets(config, tokenizer, split_sizes(config))
    views = gather_objects((splits.digest, splits.contents), context.mesh)
    contents = dict[str, tuple[int, ContentDigests]]()
    for rank, (digest, known) in enumerate(views):
        if digest != views[0][0]:
            raise ParallelError(
                f"rank {rank} reads other data than rank 0 (digests {digest[:12]} and {views[0][0][:12]}): "
                "data must be the same on every rank: copy the files of --data-path again, or make equal data sets",
                exit_code=RESTART_CANNOT_HELP,
            )
        for prefix, content in known.items():
            first, expected = contents.setdefault(prefix, (rank, content))
            if content != expected:
                raise ParallelError(
                    f"rank {rank} reads other bytes from {prefix} than rank {first}: the files must be the same on "
                    "every node; copy them again",
                    exit_code=RESTART_CANNOT_HELP,
                )
    return splits
