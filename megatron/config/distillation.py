"""Distillation: the teacher from which a run's model learns, and how its losses are weighed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from megatron.config.family import Rule
from megatron.config.files import read_settings
from megatron.config.flags import REAL, flag, flags_of, subject
from megatron.config.model import ModelConfig
from megatron.config.objective import PARAMETERS, ObjectiveConfig
from megatron.config.rules.sentence import changed_flags
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


Distance = Literal["cosine", "mse"]


@dataclass(frozen=True)
class HiddenPair:
    """A layer of the student and one of the teacher, whose outputs are compared; None: the norm after the last."""

    student: int | None
    teacher: int | None
    distance: Distance = "cosine"

    @property
    def name(self) -> str:
        """What is reported, a mean over the tokens of the loss."""
        ours, theirs = ("final" if each is None else each for each in (self.student, self.teacher))
        return f"hidden states {ours}-{theirs} {self.distance}"

    @property
    def parameter(self) -> str:
        """Name of the matrix that projects the student's hidden states, where widths differ."""
        ours, theirs = ("final" if each is None else each for each in (self.student, self.teacher))
        return f"{PARAMETERS}projection_{ours}_{theirs}"


def hidden_pair(written: str) -> HiddenPair:
    """The pair that ``--distill-hidden-states`` says in a word; ConfigError for any other word."""
    found = _PAIR.fullmatch(written)
    if found is None:
        raise ConfigError(
            f"--distill-hidden-states {written}: give a layer of the student and one of the teacher, numbered from 0, "
            "such as 3:7, 3:7:mse or final:final"
        )
    student, teacher = (None if each == "final" else int(each) for each in found.group(1, 2))
    return HiddenPair(student, teacher, "mse" if found[3] == "mse" else "cosine")


_PAIR = re.compile(r"(final|\d{1,5}):(final|\d{1,5})(?::(cosine|mse))?")
_MODULE = re.compile(r"decoder\.layers\.(\d{1,5})|decoder\.(final)_layernorm")


class DistillationConfig(ObjectiveConfig):
    """Distillation of a teacher's distributions over the vocabulary (arXiv:1503.02531)."""

    module: ClassVar[str] = "megatron.training.distillation"

    teacher_load: str | None = flag(
        "Learn from the model of this checkpoint (a folder of checkpoints, or a model in Hugging Face's format): it "
        "runs frozen beside the model that is trained, at the same layout.",
        default=None,
        aliases=("--export-kd-teacher-load",),
    )
    teacher_step: int | None = flag("Iteration of --teacher-load; the newest unless given.", default=None, at_least=0)
    teacher_scores: str | None = flag(
        "Learn from the distributions that tools/score_with_teacher.py has stored in this folder for the samples of "
        "this run, in place of a teacher that runs beside it.",
        default=None,
    )
    distill_share: float = flag(
        "Share of the divergence from the teacher in the loss; the cross entropy of the labels has the rest.",
        default=1.0,
        at_least=0,
        at_most=1,
    )
    distill_temperature: float = flag(
        "Divide the logits of both models by this temperature in the divergence, KL(teacher, student).",
        default=1.0,
        above=0,
    )
    distill_scale: float | None = flag(
        "Factor of the divergence; the square of --distill-temperature unless given, which keeps the size of gradients "
        "about the same at any temperature.",
        default=None,
        above=0,
    )

    distill_hidden_states: tuple[str, ...] = flag(
        "Pairs of layers whose hidden states are compared, STUDENT:TEACHER or STUDENT:TEACHER:mse, numbered from 0 as "
        "in parameter names; final: the norm after the last layer. Distances are 1 - cosine unless mse, the mean "
        "squared difference, is named. Where widths differ a trained matrix projects the student's hidden states.",
        default=(),
    )
    distill_hidden_scale: float = flag(
        "Factor, in the loss, of the mean distance of --distill-hidden-states.", default=1.0, above=0
    )

    distill_cfg: str | None = flag(
        "YAML file with settings of Megatron-LM's distillation (logit_layers, intermediate_layer_pairs, skip_lm_loss, "
        "logit_kl_temperature ...), in place of the other --distill flags but --distill-hidden-scale.",
        default=None,
        aliases=("--export-kd-cfg",),
    )

    @override
    def resolved(self, model: ModelConfig, stacks: Sequence[int]) -> Self:
        """The settings with those of ``--distill-cfg``, which they then don't name any more.

        Without a teacher they still do, and a rule refuses it. Raises ConfigError for what has no counterpart here.
        """
        if self.distill_cfg is None or not self.is_chosen:
            return self
        return dataclasses.replace(self, distill_cfg=None, **modelopt_settings(self.distill_cfg))

    @property
    @override
    def is_chosen(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher_load is not None or self.teacher_scores is not None

    @property
    def teacher(self) -> tuple[str, int | None]:
        """Place of the teacher's checkpoint, and its iteration if one is chosen."""
        return self.teacher_load or "", self.teacher_step

    @property
    def scores(self) -> str:
        """The folder of stored distributions; none where a teacher runs."""
        return self.teacher_scores or ""

    @property
    def share(self) -> float:
        """The divergence's share of the loss."""
        return self.distill_share

    @property
    def temperature(self) -> float:
        """The number by which logits are divided in the divergence."""
        return self.distill_temperature

    @property
    def scale(self) -> float:
        """The factor of the divergence before its share."""
        return self.distill_temperature**2 if self.distill_scale is None else self.distill_scale

    @property
    def hidden_pairs(self) -> tuple[HiddenPair, ...]:
        """The pairs of layers whose hidden states are compared; ConfigError for one that isn't written as such."""
        return tuple(map(hidden_pair, self.distill_hidden_states))

    @override
    def described(self, run: Any) -> Sequence[str]:
        """The teacher and the weights of the losses, in the line about the model."""
        if not self.is_chosen:
            return ()
        share = f"{self.distill_share:g} of the loss"
        warmth = "" if self.distill_temperature == 1 else f" at temperature {self.distill_temperature:g}"
        return (f"distilled from {self.teacher_load or self.teacher_scores}, {share}{warmth}",)

    @override
    def rules(self) -> Sequence[Rule]:
        """Settings have a teacher, and something to teach."""
        own = (_settings_need_a_teacher, _there_is_one_teacher, _a_file_stands_alone, _pairs_are_layers)
        return (*super().rules(), *own)


def _settings_need_a_teacher(run: Any) -> str | None:
    given = changed_flags(run, DistillationConfig)
    if run.part(DistillationConfig).is_chosen or not given:
        return None
    return f"{subject(given, 'has', 'have')} no effect without a teacher; name its checkpoint with --teacher-load"


def _there_is_one_teacher(run: Any) -> str | None:
    part = run.part(DistillationConfig)
    if part.teacher_load is None or part.teacher_scores is None:
        return None
    return (
        f"--teacher-scores {part.teacher_scores} replaces a teacher that runs beside the model, --teacher-load "
        f"{part.teacher_load}: leave one of them out"
    )


def _pairs_are_layers(run: Any) -> str | None:
    part = run.part(DistillationConfig)
    if part.distill_hidden_states and part.teacher_scores is not None:
        return (
            "--distill-hidden-states compares hidden states of a teacher that runs beside the model, and "
            "--teacher-scores has its distributions alone: give --teacher-load"
        )
    try:
        pairs = part.hidden_pairs
    except ConfigError as error:
        return str(error)
    if len({pair.parameter for pair in pairs}) < len(pairs):
        return "--distill-hidden-states names a pair of layers twice: name it once"
    beyond = [pair.student for pair in pairs if pair.student is not None and pair.student >= run.model.num_layers]
    if not beyond:
        return None
    return (
        f"--distill-hidden-states names layer {beyond[0]} of the student, whose layers are 0 to "
        f"{run.model.num_layers - 1}"
    )


def _a_file_stands_alone(run: Any) -> str | None:
    weights = ("distill_share", "distill_temperature", "distill_scale", "distill_hidden_states")
    given = [spec.positive for spec in flags_of(DistillationConfig) if spec.field in weights and run.given(spec.field)]
    if not run.given("distill_cfg") or not given:
        return None
    it = "it" if len(given) == 1 else "them"
    return (
        f"{subject(given, 'is', 'are')} given beside --distill-cfg, whose file sets the weights of the losses: leave "
        f"{it} out, or leave --distill-cfg out"
    )


def modelopt_settings(path: str) -> dict[str, Any]:
    """Fields for the settings of Megatron-LM's distillation in a YAML file: there the divergence alone is the loss, and
    no factor makes up for a temperature. Raises ConfigError that names what has no counterpart here.
    """
    where = f"--distill-cfg {path}"
    given = read_settings(path, flag="--distill-cfg")
    for name, value in given.items():
        if name not in _MODELOPT:
            raise ConfigError(f"{where}: {name} is not known; known are {', '.join(_MODELOPT)}")
        is_taken, advice = _MODELOPT[name]
        if not is_taken(value):
            raise ConfigError(f"{where}: {name} {value!r} {advice}")
    temperature = float(given.get("logit_kl_temperature", 1.0))
    pairs = tuple(map(_written_pair, given.get("intermediate_layer_pairs") or ()))
    scales: dict[str, Any] = {"distill_share": 1.0, "distill_temperature": temperature, "distill_scale": 1.0}
    return scales | {"distill_hidden_states": pairs}


def _written_pair(given: Any) -> str:
    """A pair of names in ModelOpt's files, as ``--distill-hidden-states`` writes it; "" for any other thing."""
    if not isinstance(given, (list, tuple)) or not 2 <= len(given) <= 3 or not all(isinstance(e, str) for e in given):
        return ""
    found = [_MODULE.fullmatch(name) for name in given[:2]]
    if None in found or given[2:3] not in ([], ["cosine"], ["mse"], (), ("cosine",), ("mse",)):
        return ""
    return ":".join([*(each[1] or each[2] for each in found if each is not None), *given[2:]])


_MODELOPT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "logit_layers": (
        lambda value: value in (["output_layer", "output_layer"], ("output_layer", "output_layer")),
        "names other modules than both models' output_layer, whose logits are compared here; leave it out",
    ),
    "intermediate_layer_pairs": (
        lambda value: not value or (isinstance(value, (list, tuple)) and all(map(_written_pair, value))),
        "names other modules than decoder.layers.N and decoder.final_layernorm, or another distance than cosine and "
        "mse; write pairs such as [decoder.layers.3, decoder.layers.7, mse]",
    ),
    "skip_lm_loss": (
        lambda value: value is True,
        "adds a divergence that each microbatch scales to its own cross entropy, so gradients would depend on how a "
        "batch is divided; write true, and choose a fixed share with --distill-share in place of this file",
    ),
    "kd_loss_scale": (
        lambda value: value == 1,
        "is a factor beside the cross entropy, which skip_lm_loss leaves out; write 1.0, or give --distill-share in "
        "place of this file",
    ),
    "logit_kl_temperature": (
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= REAL,
        f"is no temperature; write a number above 0, at most {REAL:g}",
    ),
    "logit_kl_topk": (
        lambda value: value is None,
        "compares the likeliest ids alone, as if there were no others; leave it out",
    ),
}
"""Names in ModelOpt's files: which values are taken, and what is said of others."""
