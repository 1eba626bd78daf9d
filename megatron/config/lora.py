"""Low-rank adapters as a part of a model: which linear layers have them, and how large they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from megatron.config.family import PartConfig, Rule
from megatron.config.flags import (
    architecture_flag,
    architecture_switch,
    flag,
    flag_of,
    flags_of,
    group_name,
    subject,
    switch,
    words,
)
from megatron.config.parameter_names import matches
from megatron.config.rules.sentence import changed_flags
from megatron.config.run import RunConfig

ADAPTERS = "*.lora.*"
"""What the names of an adapter's parameters match."""


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name, or an entry of a checkpoint for it, is of an adapter."""
    return matches(name, (ADAPTERS,))


def without_adapters(groups: Iterable[object]) -> tuple[object, ...]:
    """Groups of settings of the same model without adapters."""
    return tuple(each for each in groups if not isinstance(each, LoraConfig))


LAYERS: dict[str, tuple[str, str]] = {
    "q_proj": ("linear_qkv", "q"),
    "k_proj": ("linear_qkv", "k"),
    "v_proj": ("linear_qkv", "v"),
    "o_proj": ("linear_proj", ""),
    "gate_proj": ("linear_fc1", "gate"),
    "up_proj": ("linear_fc1", "up"),
    "down_proj": ("linear_fc2", ""),
    "linear_q": ("linear_qkv", "q"),
    "linear_k": ("linear_qkv", "k"),
    "linear_v": ("linear_qkv", "v"),
    "linear_fc1_gate": ("linear_fc1", "gate"),
    "linear_fc1_up": ("linear_fc1", "up"),
}
"""Hugging Face's and Megatron Bridge's names of matrices, each as the linear layer that holds it and its part there."""

ABSORBED = "linear_kv_up_proj"


class LoraConfig(PartConfig):
    """Low-rank adapters beside frozen linear layers (LoRA, arXiv:2106.09685)."""

    is_added: ClassVar[bool] = True

    lora_rank: int | None = architecture_flag(
        "Train low-rank adapters of this rank beside the linear layers of --lora-targets, and freeze everything else.",
        default=None,
        aliases=("--lora-r",),
        at_least=1,
        at_most=65536,
    )
    lora_alpha: float = architecture_flag(
        "What adapters add is multiplied by --lora-alpha / --lora-rank.", default=32.0, above=0
    )
    lora_targets: tuple[str, ...] = architecture_flag(
        "Linear layers with adapters, by their names here (linear_qkv, linear_proj, linear_fc1, linear_fc2, in_proj, "
        "out_proj ...) or Hugging Face's (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj).",
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        aliases=("--lora-target-modules",),
    )
    lora_rank_stabilized: bool = architecture_switch(
        "Multiply what adapters add by --lora-alpha / sqrt(--lora-rank) (rsLoRA, arXiv:2312.03732).",
    )
    lora_dropout: float = flag("Dropout on what adapters read.", default=0.0, at_least=0, below=1, from_checkpoint=True)

    lora_quantized_base: bool = switch(
        "Keep the frozen weights of a quantized checkpoint (tools/quantize.py) as codes and scales, and dequantize "
        "each for its matrix products (QLoRA, arXiv:2305.14314)."
    )

    @property
    def is_on(self) -> bool:
        """Whether the model has adapters."""
        return self.lora_rank is not None

    @property
    def rank(self) -> int:
        """The rank of adapters, where there are any."""
        return self.lora_rank or 1

    @property
    def scale(self) -> float:
        """The factor of what adapters add."""
        return self.lora_alpha / (math.sqrt(self.rank) if self.lora_rank_stabilized else self.rank)

    @property
    def dropout(self) -> float:
        """The share of an adapter's inputs that dropout zeroes."""
        return self.lora_dropout

    @property
    def has_quantized_base(self) -> bool:
        """Whether frozen weights stay in the bits of their checkpoint."""
        return self.lora_quantized_base

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of layers with adapters, as they were given."""
        return self.lora_targets

    def differences(self, other: LoraConfig) -> list[str]:
        """What adapters of ``other`` settings have another value of, with theirs."""
        own = {spec.field: getattr(self, spec.field) for spec in flags_of(type(self)) if spec.options.architecture}
        return [
            f"{flag_of(field)} {words(value)} ({words(getattr(other, field))} there)"
            for field, value in own.items()
            if value != getattr(other, field)
        ]

    @classmethod
    def is_in(cls, saved: Mapping[str, Any]) -> bool:
        """Whether the model of a run with the ``saved`` settings has adapters."""
        return (saved.get(group_name(cls)) or {}).get("lora_rank") is not None

    def parts_of(self, layer: str) -> frozenset[str] | None:
        """Parts of a linear layer of this name that have an adapter: "" stands for all; None for no adapter."""
        found = {"" for target in self.lora_targets if target == layer}
        aliases = (LAYERS[target] for target in self.lora_targets if target in LAYERS)
        found |= {part for holder, part in aliases if holder == layer}
        return frozenset(found) if self.is_on and found else None

    @property
    @override
    def trained_alone(self) -> tuple[str, ...]:
        """The adapters."""
        return (ADAPTERS,) if self.is_on else ()

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """Rank, scale and layers."""
        return (f"adapters of rank {self.lora_rank} on {', '.join(self.lora_targets)}",) if self.is_on else ()

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about layers and other parts."""
        return RULES


def _settings_need_a_rank(run: RunConfig) -> str | None:
    given = [name for name in changed_flags(run, LoraConfig) if not name.startswith("--lora-rank ")]
    if run.part(LoraConfig).is_on or not given:
        return None
    return f"{subject(given, 'has', 'have')} no effect without --lora-rank; give a rank such as 16"


def _frozen_weights_are_trained_ones(run: RunConfig) -> str | None:
    """Adapters beside random weights that never change learn next to nothing."""
    lora, checkpoint = run.part(LoraConfig), run.checkpoint
    if not lora.is_on or checkpoint.load or checkpoint.pretrained_checkpoint or checkpoint.load_hf:
        return None
    return (
        f"--lora-rank {lora.lora_rank} freezes the weights of the model, and no trained ones are given: name them with "
        "--pretrained-checkpoint, --load-hf or --load"
    )


def _absorbed_matrices_have_none(run: RunConfig) -> str | None:
    """Generation multiplies the matrix that makes keys and values of latents into queries and results."""
    lora = run.part(LoraConfig)
    if not lora.is_on or ABSORBED not in lora.lora_targets:
        return None
    return (
        f"--lora-targets {ABSORBED}: generation never multiplies by this matrix itself, so an adapter beside it would "
        "be left out there; leave it out, and take linear_kv_down_proj"
    )


def _recomputed_inside(run: RunConfig) -> str | None:
    lora, recomputed = run.part(LoraConfig), run.training.recompute_modules
    if not (lora.is_on and lora.lora_dropout and "mla_up_proj" in recomputed):
        return None
    return (
        f"--lora-dropout {lora.lora_dropout:g} with --recompute-modules mla_up_proj: the second pass would draw other "
        "numbers; leave one of them out"
    )


def _quantized_base_is_read_alone(run: RunConfig) -> str | None:
    """What needs the numbers of frozen weights beside the products."""
    if not run.part(LoraConfig).lora_quantized_base:
        return None
    checkpoint = run.checkpoint
    if checkpoint.load_hf is not None:
        return (
            f"--lora-quantized-base with --load-hf {checkpoint.load_hf}: the base is a quantized checkpoint; make one "
            "with tools/checkpoint/convert.py or tools/quantize.py, and give it as --pretrained-checkpoint"
        )
    given = {
        "--zero-stage 3": run.parallel.zero_stage == 3,
        "--fp8-format": run.fp8.is_on,
        "--log-params-norm": run.reporting.log_params_norm,
        "--check-weight-hash-across-dp-replicas-interval": bool(
            run.training.check_weight_hash_across_dp_replicas_interval
        ),
        f"--rerun-mode {run.guards.rerun_mode}": run.guards.rerun_mode != "disabled",
        "--check-replay-interval": run.guards.check_replay_interval is not None,
        "--spike-action rollback": run.guards.spike_action == "rollback",
        f"--save-hf {checkpoint.save_hf}": checkpoint.save_hf is not None,
    }
    wrong = [flag for flag, is_given in given.items() if is_given]
    if not wrong:
        return None
    merge = "; tools/checkpoint/convert.py merges the adapters afterwards" if checkpoint.save_hf is not None else ""
    return (
        f"{subject(wrong, 'needs', 'need')} dequantized frozen weights, and --lora-quantized-base keeps only their "
        f"codes: leave one of them out{merge}"
    )


RULES: tuple[Rule, ...] = (
    _quantized_base_is_read_alone,
    _settings_need_a_rank,
    _frozen_weights_are_trained_ones,
    _absorbed_matrices_have_none,
    _recomputed_inside,
)
