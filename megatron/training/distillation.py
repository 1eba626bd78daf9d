"""A run's teacher: the model of a checkpoint of ours, or of a folder in Hugging Face's format."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.config.distillation import DistillationConfig
from megatron.config.flags import flags_of
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.rules import failures
from megatron.config.run import RunConfig
from megatron.core.checkpointing.agreement import run_on_all
from megatron.core.conversion.companions import tokenizer_of
from megatron.core.conversion.huggingface.reading import CONFIG, read_huggingface
from megatron.core.conversion.native import read_native
from megatron.core.conversion.portable import PortableModel, fill
from megatron.core.files.remote_path import path_of
from megatron.core.models.registry import family_of
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.distillation import DistillationObjective, Teacher
from megatron.core.objectives.stored_teacher import StoredTeacherObjective
from megatron.core.objectives.taught import TaughtObjective
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError, ConfigError


def build(family: TrainSpec, run: RunConfig) -> TaughtObjective:
    """The objective of a run with ``--teacher-load`` or ``--teacher-scores``.

    Raises CheckpointError for a teacher, and DataError for stored distributions, that can't be read.
    """
    settings = run.part(DistillationConfig)
    if settings.scores:
        return StoredTeacherObjective(family, settings)
    return DistillationObjective(family, settings, teacher_of(run))


def teacher_of(run: RunConfig) -> Teacher:
    """The teacher of ``--teacher-load``, computing as the run does."""
    settings = run.part(DistillationConfig)
    portable = read_teacher(settings)
    groups = tuple(_with_own(group, run) for group in portable.groups if not getattr(group, "is_added", False))
    model = dataclasses.replace(_with_own(portable.model, run), mtp_num_layers=0)
    source = _Portable(portable, settings.teacher[0], model, groups)
    return Teacher(model, groups, family_of(groups).train_spec, source)


def read_teacher(settings: DistillationConfig) -> PortableModel:
    """The model of ``--teacher-load``; of its weights only names, shapes and types are read now."""
    load, step = settings.teacher
    place = path_of(load)
    try:
        if isinstance(place, Path) and (place / CONFIG).is_file():
            return read_huggingface(place)
        return read_native(place, step=step)
    except CheckpointError as error:
        said = str(error).replace("--ckpt-step", "--teacher-step").replace("--load ", "")
        raise CheckpointError(f"--teacher-load: {said}", exit_code=error.exit_code) from error


def _with_own(group: Any, run: RunConfig) -> Any:
    """The architecture of a teacher's settings, with how the run computes."""
    own = run.find(type(group))
    if own is None:
        return group
    kept = {spec.field: getattr(group, spec.field) for spec in flags_of(type(group)) if spec.options.architecture}
    return dataclasses.replace(own, **kept)


@dataclasses.dataclass(frozen=True)
class _Portable:
    """The weights of a readable model. ``load``: as the user named it."""

    portable: PortableModel
    load: str
    model: ModelConfig
    groups: tuple[object, ...]

    @property
    def words(self) -> str:
        """The place, and how large the model is."""
        return f"the model in {self.load}, {self.portable.num_parameters:,} parameters"

    def check(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        """Raise CheckpointError for a teacher of another vocabulary, ConfigError for one that doesn't fit the run."""
        portable, where = self.portable, f"the teacher in {self.load}"
        if not family_of(portable.groups).train_spec.continues_texts:
            raise CheckpointError(f"{where} is a {family_of(portable.groups).title}, which predicts no next tokens")
        theirs, ours = portable.model.vocab_size, run.model.vocab_size
        if theirs != ours:
            raise CheckpointError(
                f"{where} has a vocabulary of {theirs:,} ids, and this run's has {ours:,}: a student needs its "
                "teacher's tokenizer"
            )
        known = None if portable.tokenizer.tokenizer_type == "NullTokenizer" else tokenizer_of(portable.tokenizer)
        if known is not None and known.fingerprint != tokenizer.fingerprint:
            raise CheckpointError(
                f"{where} was trained with another tokenizer ({known.name}, fingerprint {known.fingerprint[:12]}) than "
                f"this run's ({tokenizer.name}, {tokenizer.fingerprint[:12]}): a student needs its teacher's"
            )

        self._check_layout(run)

    def _check_layout(self, run: RunConfig) -> None:
        """The rules of a run that hold for the student and not for the teacher; its stages are cut by the student's."""
        own = {spec.field: spec.default for spec in flags_of(ParallelConfig) if "pipeline" in spec.field}
        stages = run.parallel.pipeline_model_parallel_size
        parallel, ranks = dataclasses.replace(run.parallel, **own), run.world_size // stages
        alone = dataclasses.replace(run, parallel=parallel, world_size=ranks)
        taught = dataclasses.replace(alone, model=self.model, extra=self.groups)
        known = failures(alone)
        if problems := [each for each in failures(taught) if each not in known]:
            raise ConfigError(f"the teacher in {self.load} doesn't fit this run: {problems[0]}")

    def fill(self, state: Iterable[ShardedState], mesh: Mesh) -> None:
        """Each rank reads the teacher's tensors one after the other, and keeps its part."""
        run_on_all(lambda: fill(state, self.portable, mesh), mesh)
