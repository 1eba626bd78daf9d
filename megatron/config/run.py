"""One run: the groups together, resolved and frozen."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from megatron.config.batch_ramp import BatchRamp, read_batch_steps
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.command import CommandConfig
from megatron.config.data import DataConfig
from megatron.config.diloco import DilocoConfig
from megatron.config.family import FamilyConfig, PartConfig, Purpose
from megatron.config.flags import FlagSpec, flags_of, group_name
from megatron.config.fp8 import Fp8Config
from megatron.config.guards import GuardsConfig
from megatron.config.inference import InferenceConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.profiling import ProfilingConfig
from megatron.config.reporting import ReportingConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError
from megatron.small_files import as_kind, check_kinds

Group = TypeVar("Group")
Part = TypeVar("Part", bound=PartConfig)
CheckpointReader = Callable[[str, "int | None"], "Mapping[str, Any] | None"]
PublishedReader = Callable[[str, Sequence[type], "str | None"], "Mapping[str, Any]"]
FlagOwner = Callable[[str], "str | None"]


def nobody(spelling: str) -> None:
    """The default ``owner_of``: no other program has the flag."""


CORE_GROUPS: tuple[type, ...] = (
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    Fp8Config,
    OptimizerConfig,
    DilocoConfig,
    TrainingConfig,
    GuardsConfig,
    DataConfig,
    TokenizerConfig,
    CheckpointConfig,
    ReportingConfig,
    ProfilingConfig,
    InferenceConfig,
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run; values that follow from others are filled in when it is built.

    Building one checks nothing: ``parse.parse_run`` does, and so does ``rules.check(run)``.
    ``extra`` holds groups of a family, of parts of models, and of a command. ``provenance`` is the source of each
    field's value, ``inherited`` are the fields whose value is a checkpoint's or a published model's, and ``notes`` are
    remarks about accepted flags without effect; none of them is part of equality or digest.
    """

    model: ModelConfig
    training: TrainingConfig
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    reporting: ReportingConfig = field(default_factory=ReportingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    extra: tuple[object, ...] = ()
    world_size: int = 1
    command: CommandConfig = field(default_factory=CommandConfig, compare=False)
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    inherited: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        of_family = (g.resolved(self.model, self.data) if isinstance(g, FamilyConfig) else g for g in self.extra)
        object.__setattr__(self, "extra", tuple(of_family))
        stacks = self.stacks
        extra = tuple(g.resolved(self.model, stacks) if isinstance(g, PartConfig) else g for g in self.extra)
        object.__setattr__(self, "extra", tuple(_with_implied(extra, stacks)))
        for name, changes in self._resolved().items():
            if changes:
                object.__setattr__(self, name, dataclasses.replace(getattr(self, name), **changes))

    def _resolved(self) -> dict[str, dict[str, Any]]:
        """Values that follow from other groups, by group and field."""
        model, training, tokenizer, precision = self.model, self.training, self.tokenizer, self.precision
        found: dict[str, dict[str, Any]] = {
            name: {} for name in ("model", "training", "tokenizer", "parallel", "optimizer")
        }
        if model.max_position_embeddings is None:
            found["model"]["max_position_embeddings"] = self.family.longest_sequence(self.data)
        if training.global_batch_size is None:
            found["training"]["global_batch_size"] = self._schedule[-1][1] if self._schedule else self.batch_unit
        elif self.guards.elastic:
            found["training"]["micro_batch_size"] = self._fitting_micro_batch(training.global_batch_size)
        if precision.fp16 and precision.loss_scale is None:
            found["training"]["check_for_nan_in_loss_and_grad"] = False  # the dynamic loss scale works by overflows
        if self.purpose.only_evaluates:
            found["training"]["skip_train"] = True
        kind = tokenizer.tokenizer_type
        if kind is None:
            files = tokenizer.vocab_file or tokenizer.merge_file or tokenizer.tokenizer_model
            null = self.data.mock_data and tokenizer.vocab_size is not None and not files
            kind = found["tokenizer"]["tokenizer_type"] = "NullTokenizer" if null else self.family.usual_tokenizer
        if model.vocab_size is None and tokenizer.vocab_size is not None:
            found["model"]["vocab_size"] = tokenizer.vocab_size + (kind == "NullTokenizer")
        if self.parallel.tensor_model_parallel_size == 1:
            found["parallel"]["sequence_parallel"] = False
        ranks = self.parallel.diloco_ranks_per_worker
        if ranks is not None and self.parallel.diloco_workers is None and self.world_size % ranks == 0:
            found["parallel"]["diloco_workers"] = self.world_size // ranks
        if not self.divides_over_expert_ranks:
            found["parallel"]["expert_tensor_parallel_size"] = None
        trained_alone = {pattern for part in self.parts for pattern in part.trained_alone}
        if trained_alone - {*self.optimizer.train_only}:
            found["optimizer"]["train_only"] = tuple(sorted(trained_alone | {*self.optimizer.train_only}))
        frozen = {pattern for part in self.parts for pattern in part.frozen}
        if frozen - {*self.optimizer.freeze}:
            found["optimizer"]["freeze"] = tuple(sorted(frozen | {*self.optimizer.freeze}))
        if tokenizer.padded_vocab_size is not None:
            unit = tokenizer.padded_vocab_size // max(self.parallel.tensor_model_parallel_size, 1)
            found["model"]["make_vocab_size_divisible_by"] = max(unit, 1)
        return found

    def group(self, kind: type[Group]) -> Group:
        """The group of class ``kind``, of the core or of ``extra``."""
        found = self.find(kind)
        if found is None:
            raise KeyError(f"this run has no {kind.__name__}")
        return found

    def part(self, kind: type[Part]) -> Part:
        """The settings of a part of the model; where its family has no such part, those of a model without it."""
        return kind.among(self.extra)

    def find(self, kind: type[Group]) -> Group | None:
        """The group of class ``kind``, or None."""
        return next((each for each in self.groups() if isinstance(each, kind)), None)

    def groups(self) -> tuple[Any, ...]:
        """Every group that describes the run, in the order of the help text."""
        return (*(getattr(self, group_name(kind)) for kind in CORE_GROUPS), *self.extra)

    @property
    def family(self) -> FamilyConfig:
        """The settings that name the run's family and say what its models are like."""
        return self.find(FamilyConfig) or FamilyConfig()

    @property
    def parts(self) -> tuple[PartConfig, ...]:
        """The settings of every part that the family's models may have."""
        return tuple(group for group in self.extra if isinstance(group, PartConfig))

    @property
    def divides_over_expert_ranks(self) -> bool:
        """Whether the model has a part that expert-parallel ranks may divide."""
        return any(part.divides_over_expert_ranks for part in self.parts)

    @property
    def purpose(self) -> Purpose:
        """What the command does with the model."""
        return self.find(Purpose) or Purpose()

    @property
    def stacks(self) -> tuple[int, ...]:
        """Numbers of layers of each stack: of one, or of an encoder and then its decoder."""
        return self.family.stacks(self.model)

    @property
    def segments(self) -> tuple[int, ...]:
        """Numbers of layers of the pipeline stages, where a part of the model says how it is cut."""
        return next((part.segments for part in self.parts if part.segments), ())

    @property
    def num_layers(self) -> int:
        """Layers of the whole model, in all stacks."""
        return sum(self.stacks)

    @property
    def layers_asked(self) -> str:
        """The flags that set the number of layers, with their values."""
        return self.family.layers_asked(self.model)

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of a sample: ``--seq-length`` for each of its sequences."""
        return self.data.seq_length * self.sequences_per_sample

    @property
    def sequences_per_sample(self) -> int:
        """Sequences of ``--seq-length`` tokens in a sample."""
        return self.family.sequences_per_sample * self.purpose.sequences_per_sample

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model, context parallelism included."""
        sizes = self.parallel
        return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the experts of a layer together."""
        return self.parallel.expert_model_parallel_size * self.parallel.etp

    @property
    def data_parallel_size(self) -> int:
        """Ranks of a worker over which samples are divided and gradients summed."""
        return max(self.world_size // max(self.model_parallel_size * self.parallel.num_workers, 1), 1)

    @property
    def replicas(self) -> int:
        """Copies of the model that read samples: the data-parallel ranks of all workers."""
        return self.data_parallel_size * self.parallel.num_workers

    @property
    def batch_unit(self) -> int:
        """Samples of one microbatch on each data-parallel rank; a batch is a multiple of it."""
        return self.training.micro_batch_size * self.replicas

    def _fitting_micro_batch(self, global_batch_size: int) -> int:
        """The largest microbatch up to the one asked for of which all replicas take equally many in a step; the one
        asked for where the replicas can't share a batch.
        """
        asked, each = self.training.micro_batch_size, global_batch_size // self.replicas
        if global_batch_size % self.replicas or asked < 1:
            return asked
        return max(size for size in range(1, asked + 1) if each % size == 0)

    @cached_property
    def batch_ramp(self) -> BatchRamp:
        """The global batch size over the run."""
        full = self.training.global_batch_size
        if self.training.rampup_batch_size:
            start, increment, samples = self.training.rampup_batch_size
            return BatchRamp.growing(start=start, increment=increment, samples=samples, full=full)
        return BatchRamp.of_steps(self.batch_steps or ((0, full),))

    @property
    def batch_steps(self) -> tuple[tuple[int, int], ...]:
        """(consumed samples, size) of each entry of ``--step-batch-size-schedule``; none without it.

        Thresholds are tokens of ``--seq-length``, rounded down to samples, as Megatron-LM does.
        """
        return tuple((tokens // self.data.seq_length, size) for tokens, size in self._schedule)

    @property
    def _schedule(self) -> list[tuple[int, int]]:
        """The entries of ``--step-batch-size-schedule``; empty where it cannot be read, which a rule reports."""
        with contextlib.suppress(ConfigError):
            return read_batch_steps(" ".join(self.training.step_batch_size_schedule or ()))
        return []

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Samples of the step that begins after ``consumed_samples`` samples."""
        return self.batch_ramp.size_at(consumed_samples)

    def num_microbatches(self, consumed_samples: int = 0) -> int:
        """Forward passes of each rank in the step that begins after ``consumed_samples`` samples."""
        return self.global_batch_size_at(consumed_samples) // self.batch_unit

    @cached_property
    def train_iters(self) -> int:
        """Optimizer steps of the whole run, from ``--train-iters`` or by simulating ``--train-samples``."""
        if self.training.train_iters is not None:
            return self.training.train_iters
        return self.batch_ramp.iterations(self.training.train_samples or 0)

    @cached_property
    def train_samples(self) -> int:
        """Samples of the whole run, from ``--train-samples`` or ``--train-iters``."""
        if self.training.train_samples is not None:
            return self.training.train_samples
        return self.batch_ramp.samples_after(self.training.train_iters or 0)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word embeddings over all ranks; the vocabulary size must be known."""
        return self.model.padded_vocab_size(self.parallel.tensor_model_parallel_size)

    def with_vocab_size(self, vocab_size: int) -> RunConfig:
        """This run with the tokenizer's vocabulary size; a larger ``--vocab-size`` stays.

        Raises ConfigError when ``--vocab-size`` is smaller than the tokenizer's vocabulary.
        """
        asked = self.model.vocab_size
        source, published = self.provenance.get("vocab_size", ""), f"{self.checkpoint.load_hf}/config.json"
        if asked is not None and asked < vocab_size and (source == published or source.startswith("checkpoint ")):
            resize = f"; or give --vocab-size {vocab_size} to add rows, each the mean of those there"
            raise ConfigError(
                f"the tokenizer has {vocab_size} ids, and the model of {source} embeds {asked}: name the model's own "
                f"tokenizer{resize if source == published else ''}"
            )
        if asked is not None and asked < vocab_size:
            raise ConfigError(
                f"--vocab-size {asked} is smaller than the tokenizer's vocabulary of {vocab_size}: "
                f"leave --vocab-size out or give at least {vocab_size}"
            )
        found, padded = asked or vocab_size + self.tokenizer.extra_vocab_size, self.tokenizer.padded_vocab_size
        if padded is not None and padded < found:
            raise ConfigError(
                f"--padded-vocab-size {padded} is less than the vocabulary of {found}: leave --padded-vocab-size out "
                f"or give at least {found}"
            )
        return dataclasses.replace(self, model=dataclasses.replace(self.model, vocab_size=found))

    def flags(self) -> tuple[FlagSpec, ...]:
        """Every flag of every group of this run."""
        return tuple(spec for group in self.groups() for spec in flags_of(type(group)))

    def given(self, field: str) -> bool:
        """Whether a user, a file or a checkpoint gave the field; always False for a run that was not parsed."""
        return self.provenance.get(field, "default") not in ("default", "derived")

    def value(self, spec: FlagSpec) -> Any:
        """The value of one flag."""
        return getattr(self._by_name[spec.group], spec.field)

    @cached_property
    def _by_name(self) -> dict[str, Any]:
        return {group_name(type(group)): group for group in self.groups()}

    def diff_from_defaults(self) -> dict[str, Any]:
        """Field -> value wherever the value is not the flag's default."""
        return {spec.field: self.value(spec) for spec in self.flags() if self.value(spec) != spec.default}

    def to_json(self) -> dict[str, Any]:
        """The resolved run as JSON-able dictionaries: group -> field -> value, and ``world_size``."""
        return {"world_size": self.world_size, **groups_to_json(self.groups())}

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], *, groups: Sequence[type] = (), where: str = "the saved settings"
    ) -> RunConfig:
        """The run that ``to_json`` described: fields it lacks take their defaults. ``groups``: those that only its
        family has (``models.registry.saved_run`` finds them). ``where``: what messages call the settings.

        Raises ConfigError for settings this version does not know.
        """

        def group(kind: type) -> Any:
            return group_from_json(kind, data.get(group_name(kind), {}), where=where)

        built, extra = {group_name(kind): group(kind) for kind in CORE_GROUPS}, tuple(map(group, groups))
        check_kinds(data, {"world_size": int}, where=where, error=ConfigError)
        with _named(where):
            return cls(world_size=data.get("world_size") or 1, extra=extra, **built)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the resolved settings: equal on two ranks exactly when their settings are."""
        import hashlib  # OpenSSL's library, which takes longer to load than most files of settings

        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def _with_implied(groups: Sequence[object], stacks: Sequence[int]) -> Iterator[object]:
    """The groups, with the values of parts that follow from other parts."""
    implied = {
        field: value for each in groups if isinstance(each, PartConfig) for field, value in each.implied(stacks).items()
    }
    for group in groups:
        own = {spec.field: implied[spec.field] for spec in flags_of(type(group)) if spec.field in implied}
        yield dataclasses.replace(group, **own) if own else group  # type: ignore[type-var]  # settings are dataclasses


def groups_to_json(groups: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Groups of settings as JSON-able dictionaries: group -> field -> value."""
    return {
        group_name(type(group)): {
            field: list(value) if isinstance(value, tuple) else value
            for field, value in dataclasses.asdict(group).items()
        }
        for group in groups
        if flags_of(type(group))  # a group of facts has nothing to store
    }


def group_from_json(kind: type, values: Any, *, where: str, others: bool = False) -> Any:
    """A group of settings from the ``values`` that ``groups_to_json`` gave. ``others``: fields that this version does
    not know are left out.

    Raises ConfigError, which names ``where`` and the field, for anything else than this group's values.
    """
    name = group_name(kind)
    given: dict[str, Any] = as_kind(values, dict[str, Any], where=f"{where}: {name}", error=ConfigError)
    known = {spec.field: spec for spec in flags_of(kind)}
    unknown = sorted(set(given) - set(known))
    if unknown and not others:
        raise ConfigError(
            f"{where} have {name}.{unknown[0]}, which this version does not know: they were written by another version"
        )
    nulls = sorted(field for field, value in given.items() if value is None and field in known)
    if wrong := [field for field in nulls if not known[field].required and known[field].default is not None]:
        raise ConfigError(f"{where}: {name}.{wrong[0]} is null, which only settings without a default may be")
    missing = sorted(field for field, spec in known.items() if spec.required and given.get(field) is None)
    if missing:
        raise ConfigError(f"{where} lack {name}.{missing[0]}")
    restored = {each: spec.restore(given[each], where=where) for each, spec in known.items() if each in given}
    with _named(f"{where}: {name}"):
        return kind(**restored)


@contextlib.contextmanager
def _named(where: str) -> Iterator[None]:
    """Put ``where`` before what is wrong with a setting."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
