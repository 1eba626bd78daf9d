"""Training on rated answers that compares the model with the one that it starts from: what such objectives share."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.preference import PreferenceConfig
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits, build_splits
from megatron.core.datasets.scored import ScoredDataset, ScoredDatasets, unique_samples
from megatron.core.datasets.splits import SplitSizes
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.files.writable import try_to_write
from megatron.core.models.first_pass import FirstPass, OnFirst
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.base import Objective
from megatron.core.objectives.reference import FILE_NAME, Reference
from megatron.core.parallel.collectives import all_reduce
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError, ConfigError

CHOSEN_LOSS = "chosen lm loss"
"""The cross entropy of chosen answers, as it is reported."""
_STATE = "reference"


class ComparedObjective(Objective):
    """Learns from answers of which it is known how good they are, and what the initial model thought of them.

    A subclass builds data sets, which it keeps as ``_datasets``, and while ``_recorded`` is a table its ``loss`` writes
    log-probabilities of answers into it, ``[samples, 2]``. ``settings``: of the run.
    """

    def __init__(self, family: TrainSpec, settings: PreferenceConfig) -> None:
        super().__init__(family)
        assert settings.preference_loss is not None
        self.settings, self.loss_name = settings, settings.preference_loss
        self._datasets: Sequence[ScoredDataset] = ()
        self._digest: str | None = None
        self._recorded: Tensor | None = None

    @abstractmethod
    def _reader(self, data: DataConfig, *, seed: int, vocab_size: int) -> ScoredDatasets:
        """How the answers are read."""

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """Answers from ``--data-path`` and its relatives."""
        assert run.model.vocab_size is not None
        data, vocab_size = dataclasses.replace(run.data, sft=True), run.model.vocab_size
        reader = self._reader(data, seed=run.training.seed, vocab_size=vocab_size)
        found = build_splits(data, reader, sizes=sizes, tokenizer=tokenizer, vocab_size=vocab_size)
        self._datasets = reader.datasets
        return found

    @override
    def state(self) -> Mapping[str, Any]:
        """A digest of the initial model's log-probabilities."""
        return {} if self._digest is None else {_STATE: self._digest}

    @override
    def before_training(self, first: FirstPass) -> Sequence[str]:
        """Compute the log-probabilities of the initial model, or take them from their file.

        Raises ConfigError for a file of another model or other answers, and, before anything is computed, for one that
        can't be written; CheckpointError for one that a run that goes on needs and that is missing or another one.
        """
        if not self.settings.has_reference:
            return ()
        sources, given = unique_samples(self._datasets), self.settings.preference_reference
        place = path_of(given) if given else None if first.save is None else first.save / FILE_NAME
        earlier = None if given or first.load is None else first.load / FILE_NAME
        path = next((each for each in (place, earlier) if each is not None and first.on_first(each.exists)), None)
        stored = None if path is None else first.on_first(partial(Reference.read, path))
        if saved := first.state.get(_STATE):
            found = _same_as_before(stored, path or place or earlier, saved)
            found.check(path, model=found.model, sources=sources)
        elif stored is not None and path == place:
            found = stored
            found.check(path, model=first.model, sources=sources)
        else:
            if given:
                _check_writable(path_of(given), first.on_first)
            found, path = self._computed(first, sources), None
        if place is not None and path != place:
            first.on_first(partial(found.write, place))
        for dataset, _ in sources:
            dataset.scores.values[:] = found.scores[dataset.scores.digest]
        self._digest = found.digest
        how = f"read from {path}" if path else f"computed, and kept in {place}" if place else "computed"
        return (f"log-probabilities of the initial model: {how}",)

    def _computed(self, first: FirstPass, sources: Sequence[tuple[ScoredDataset, NDArray[np.int64]]]) -> Reference:
        mesh, size = first.context.mesh, first.config.training.micro_batch_size
        replica, replicas = mesh.rank("dp") * mesh.size("dc") + mesh.rank("dc"), mesh.size("dc", "dp")
        scores = dict[str, NDArray[np.float64]]()
        for dataset, numbers in sources:
            table = self._recorded = torch.zeros(dataset.scores.values.shape, dtype=torch.float64)
            mine = numbers[replica::replicas]
            for start in range(0, -(-len(numbers) // replicas), size * first.at_once):
                starts = range(start, start + size * first.at_once, size)
                for part in range(dataset.parts):
                    first.forward([_batch(dataset, mine[each : each + size], part, size=size) for each in starts])
            self._recorded = None
            whole = all_reduce(table.to(first.context.device), mesh, "dc", "pp", "dp", "cp").cpu().numpy()
            scores[dataset.scores.digest] = np.full_like(dataset.scores.values, np.nan)
            scores[dataset.scores.digest][numbers] = whole[numbers]
        return Reference(first.model, scores)


def _check_writable(path: AnyPath, on_first: OnFirst) -> None:
    """Make the folder of a file that will be written; raises ConfigError where it can't be. A collective."""
    try:
        on_first(partial(try_to_write, path.parent))
    except CheckpointError as error:
        raise ConfigError(
            f"--preference-reference {path} cannot be written: {error}; name a file in a folder that can be written",
            exit_code=error.exit_code,
        ) from error


def _same_as_before(stored: Reference | None, path: AnyPath | None, saved: str) -> Reference:
    """The file that the checkpoint was trained with; raises CheckpointError."""
    if stored is None:
        raise CheckpointError(
            f"{path} is missing, which holds the log-probabilities that the checkpoint was trained with: put the file "
            "back, or begin anew with --finetune"
        )
    if stored.digest != saved:
        raise CheckpointError(
            f"{path} holds other log-probabilities than those that the checkpoint was trained with: put back the file "
            "that was there, or begin anew with --finetune"
        )
    return stored


def _batch(dataset: ScoredDataset, numbers: NDArray[np.int64], part: int, *, size: int) -> dict[str, Tensor]:
    """Samples by their numbers as a microbatch to score, filled up with samples that have no loss."""
    samples = [dataset.to_score(number, part) for number in numbers.tolist()]
    if len(samples) < size:
        filling = dataset.without_loss(dataset.to_score(dataset.order.numbers.item(0), part))
        samples += [filling] * (size - len(samples))
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
