"""Training on preferences: pairs of answers of which one is better (DPO and others), or rated answers (KTO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from typing_extensions import override

from megatron.config.family import Rule
from megatron.config.flags import flag
from megatron.config.objective import ObjectiveConfig
from megatron.config.rules.sentence import changed_flags, rule
from megatron.config.run import RunConfig

WITHOUT_REFERENCE = ("orpo", "simpo")
"""Losses of the trained model alone."""
UNPAIRED = ("kto", "apo_zero_unpaired")
"""Losses of answers that are rated alone."""
_SMOOTHED = ("dpo", "robust", "exo_pair", "simpo")
"""Losses with a share of pairs that are labelled the wrong way round."""


class PreferenceConfig(ObjectiveConfig):
    """Learning from pairs of a chosen and a rejected answer (DPO, arXiv:2305.18290, and its variants), or from answers
    that are rated alone (KTO, arXiv:2402.01306).
    """

    module: ClassVar[str] = "megatron.core.objectives.preference"

    preference_loss: (
        Literal[
            "dpo",
            "ipo",
            "hinge",
            "robust",
            "exo_pair",
            "nca_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "orpo",
            "simpo",
            "kto",
            "apo_zero_unpaired",
        ]
        | None
    ) = flag(
        "Train on pairs of answers prepared by tools/preprocess_preferences.py, with this loss; with kto and "
        "apo_zero_unpaired on answers that are rated alone. dpo is trl's sigmoid; all losses but orpo and simpo "
        "compare with the initial model.",
        default=None,
        implies=lambda loss: {} if loss is None else {"packing": "best-fit"},
        refused_values={"sigmoid": "it is called dpo here"},
    )
    preference_beta: float | None = flag(
        "How strongly the model is kept near the initial one: the factor of rewards; 0.1 unless given, for simpo 2.",
        default=None,
        above=0,
        aliases=("--dpo-beta",),
    )
    preference_label_smoothing: float = flag(
        "The share of pairs that are assumed to be labelled the wrong way round, for dpo (conservative DPO), robust, "
        "exo_pair and simpo.",
        default=0.0,
        at_least=0,
        below=0.5,
    )
    preference_sft_weight: float | None = flag(
        "Add this times the cross entropy of chosen answers, a mean over their tokens; 0 unless given, for orpo 1.",
        default=None,
        at_least=0,
    )
    desirable_weight: float = flag(
        "With kto and apo_zero_unpaired: the factor of the loss of desirable answers.", default=1.0, above=0
    )
    undesirable_weight: float = flag("The factor of that of undesirable answers.", default=1.0, above=0)
    simpo_gamma: float = flag("With simpo: the margin that the difference of rewards should have.", default=0.5)
    preference_reference: str | None = flag(
        "File of the initial model's log-probabilities, written if it doesn't exist; reference_log_probs.npz in --save "
        "unless given.",
        default=None,
    )

    @property
    @override
    def is_chosen(self) -> bool:
        """Whether the run trains on preferences."""
        return self.preference_loss is not None

    @property
    @override
    def averages_answers(self) -> bool:
        """Pairs, or answers that are rated alone."""
        return self.is_chosen

    @property
    def rates_single_answers(self) -> bool:
        """Whether the loss is of answers that are rated alone, not of pairs."""
        return self.preference_loss in UNPAIRED

    @property
    def has_baseline(self) -> bool:
        """Whether rewards are compared with the divergence from the initial model."""
        return self.preference_loss == "kto"

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the initial model."""
        return self.preference_loss not in WITHOUT_REFERENCE

    @property
    def beta(self) -> float:
        """The factor of rewards."""
        usual = 2.0 if self.preference_loss == "simpo" else 0.1
        return usual if self.preference_beta is None else self.preference_beta

    @property
    def sft_weight(self) -> float:
        """The factor of the cross entropy of chosen answers."""
        usual = 1.0 if self.preference_loss == "orpo" else 0.0
        return usual if self.preference_sft_weight is None else self.preference_sft_weight

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about the loss, the data and the model that training starts from."""
        return (*super().rules(), *_RULES)

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """The loss, in the line about the model."""
        return (f"trained on preferences ({self.preference_loss}, beta {self.beta:g})",) if self.is_chosen else ()


def _of(run: RunConfig) -> PreferenceConfig:
    return run.part(PreferenceConfig)


def _settings_need_a_loss(run: RunConfig) -> str | None:
    given = changed_flags(run, PreferenceConfig)
    if _of(run).is_chosen or not given:
        return None
    return f"{given[0]} has no effect without --preference-loss; give one, such as dpo"


def _smoothing_has_effect(run: RunConfig) -> str | None:
    found = _of(run)
    smoothing = found.preference_label_smoothing
    if found.preference_loss == "exo_pair" and smoothing == 0:
        return "--preference-loss exo_pair needs --preference-label-smoothing above 0, such as 0.001"
    if not (found.is_chosen and smoothing) or found.preference_loss in _SMOOTHED:
        return None
    return (
        f"--preference-label-smoothing {smoothing:g} has no effect on --preference-loss {found.preference_loss}; it is "
        f"for {', '.join(_SMOOTHED)}"
    )


def _weights_have_effect(run: RunConfig) -> str | None:
    found = _of(run)
    given = [each for each in changed_flags(run, PreferenceConfig) if "desirable-weight" in each]
    if not (found.is_chosen and given) or found.rates_single_answers:
        return None
    return (
        f"{given[0]} has no effect on --preference-loss {found.preference_loss}, whose answers come in pairs; it is "
        f"for {' and '.join(UNPAIRED)}"
    )


def _gamma_has_effect(run: RunConfig) -> str | None:
    found = _of(run)
    if found.preference_loss in (None, "simpo") or found.simpo_gamma == PreferenceConfig().simpo_gamma:
        return None
    return f"--simpo-gamma {found.simpo_gamma:g} is for --preference-loss simpo; leave it out"


def _reference_has_effect(run: RunConfig) -> str | None:
    found = _of(run)
    if not found.is_chosen or found.has_reference or found.preference_reference is None:
        return None
    return (
        f"--preference-reference {found.preference_reference}: --preference-loss {found.preference_loss} compares with "
        "no initial model; leave it out"
    )


def _starts_from_a_trained_model(run: RunConfig) -> str | None:
    found, checkpoint = _of(run), run.checkpoint
    if not found.is_chosen or checkpoint.load or checkpoint.pretrained_checkpoint or checkpoint.load_hf:
        return None
    return (
        f"--preference-loss {found.preference_loss} improves a trained model, and none is given: name it with "
        "--pretrained-checkpoint, --load-hf or --load"
    )


def _pairs_are_samples(run: RunConfig) -> str | None:
    if not _of(run).is_chosen:
        return None
    given = [each for each in run.data.given_document_flags() if each not in ("--sft", "--packing")]
    if run.data.packing != "best-fit":
        given.append(f"--packing {run.data.packing}")
    if not given:
        return None
    return f"{given[0]} has no effect with --preference-loss: a sample is a pair, or a rated answer; leave it out"


_RULES: tuple[Rule, ...] = (
    _settings_need_a_loss,
    _smoothing_has_effect,
    _weights_have_effect,
    _gamma_has_effect,
    _reference_has_effect,
    _starts_from_a_trained_model,
    _pairs_are_samples,
    rule(
        "--mtp-num-layers {run.model.mtp_num_layers}: --preference-loss trains no prediction of further tokens; give "
        "--mtp-num-layers 0",
        lambda run: _of(run).is_chosen and run.model.mtp_num_layers,
    ),
    rule(
        "--z-loss-coeff {run.model.z_loss_coeff:g}: --preference-loss has no such term; leave it out",
        lambda run: _of(run).is_chosen and run.model.z_loss_coeff,
    ),
)
