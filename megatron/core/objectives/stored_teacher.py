"""Distillation from stored distributions: no teacher runs, and samples carry what it said of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from megatron.config.distillation import DistillationConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.samples import SampleDataset
from megatron.core.datasets.splits import SplitName
from megatron.core.datasets.teacher_scores import (
    TEACHER_IDS,
    TEACHER_LOG_PROBS,
    TEACHER_REST,
    ScoreArrays,
    ScoredSamples,
    data_name,
    read_header,
)
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.taught import TaughtObjective
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.core.tensor_parallel.distillation import TopOfDistribution
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.errors import ConfigError, DataError

_FIELDS = (TEACHER_IDS, TEACHER_LOG_PROBS, TEACHER_REST)


class StoredTeacherObjective(TaughtObjective):
    """The divergence from the distributions in ``--teacher-scores``, and the family's own loss."""

    def __init__(self, family: TrainSpec, settings: DistillationConfig) -> None:
        super().__init__(family, settings)
        self._folder = Path(settings.scores)
        self._header = read_header(self._folder)
        self.batch_fields = {**family.batch_fields, **dict.fromkeys(_FIELDS, 1)}

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """The family's, and on the last stage the stored distributions."""
        more = _FIELDS if any(stage.is_last for stage in stages) else ()
        return super().fields(run, stages) | frozenset(more)

    @override
    def check_beside(self, run: RunConfig, tokenizer: Tokenizer) -> Sequence[str]:
        """The stored distributions, which must be of this tokenizer, length and temperature."""
        header, where = self._header, f"--teacher-scores {self._folder}"
        if header.tokenizer != tokenizer.fingerprint or header.vocab_size != run.model.vocab_size:
            raise DataError(
                f"{where} was made with another tokenizer (fingerprint {header.tokenizer[:12]}, {header.vocab_size:,} "
                f"ids) than this run's ({tokenizer.fingerprint[:12]}, {run.model.vocab_size:,}): score the data with it"
            )
        if header.seq_length != run.data.seq_length:
            raise ConfigError(
                f"{where} was made of sequences of {header.seq_length:,} tokens, and --seq-length is "
                f"{run.data.seq_length:,}: give that length, or score the data again"
            )
        if header.temperature != self._settings.temperature:
            raise ConfigError(
                f"{where} was made at temperature {header.temperature:g}, and --distill-temperature is "
                f"{self._settings.temperature:g}: distributions can't be converted to another temperature; give "
                f"--distill-temperature {header.temperature:g}, or score the data again"
            )
        there, needed = header.samples.get("train", 0), 0 if run.training.skip_train else run.train_samples
        if there < needed and run.data.dataloader_type != "cyclic":
            raise ConfigError(
                f"{where} has {there:,} training samples, and this run reads {needed:,}: score them with the flags of "
                "this run"
            )
        said = ", ".join(f"{count:,} samples of {data}" for data, count in header.samples.items())
        return (f"teacher: stored distributions of {header.teacher}, {header.top_k:,} ids a token, {said}",)

    @override
    def samples(self, dataset: SampleDataset, split: SplitName, name: str = "") -> SampleDataset:
        """Samples with their teacher's distributions; DataError for a data set that was not scored."""
        where, data = f"--teacher-scores {self._folder}", data_name(split, name)
        if data not in self._header.samples:
            known = ", ".join(self._header.samples) or "nothing"
            raise DataError(
                f"{where} has {known}, and this run reads {data}: score the data with the flags of this run"
            )
        scores = ScoreArrays(self._folder, self._header, data)
        return ScoredSamples(super().samples(dataset, split, name), scores, where=where)

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """The mix of the family's first loss and the divergence, and its other losses as they are."""
        assert isinstance(output, VocabularyOutput)
        ids, logs, rest = (microbatch.tensors[name] for name in _FIELDS)

        def by_row(stored: Tensor) -> Tensor:  # as hidden states are, [S, b]
            return stored.transpose(0, 1).flatten(0, 1)

        top = TopOfDistribution(ids=by_row(ids), log_probs=by_row(logs), rest=by_row(rest))
        return self.taught_loss(output, top, microbatch)
