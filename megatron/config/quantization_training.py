"""Training with weights that are rounded to a few bits in every product."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from typing_extensions import override

from megatron.config.family import PartConfig, Rule
from megatron.config.flags import flag
from megatron.config.lora import LoraConfig

_GROUPED = ("int4", "int4-asym", "int3")


def without_rounding(groups: Iterable[object]) -> tuple[object, ...]:
    """Groups of settings of the same model whose products are of its weights as they are."""
    return tuple(each for each in groups if not isinstance(each, QuantizationTrainingConfig))


class QuantizationTrainingConfig(PartConfig):
    """Quantization-aware training of the linear layers of attention, mixers, MLPs and experts."""

    is_added: ClassVar[bool] = True

    quantization_aware_training: Literal["int8", "int4", "int4-asym", "int3", "w8a8", "fp8", "fp8-tensor"] | None = (
        flag(
            "Round the weights of linear layers to this scheme in training, with w8a8, fp8 and fp8-tensor also "
            "activations, and pass gradients straight through. Quantizing the result to the same scheme gives the "
            "codes that were trained: by convert.py --quantize, or for int3 and fp8-tensor by tools/quantize.py.",
            default=None,
            refused_values={
                "fp8-block": "an export rearranges rows, which would change the blocks; use fp8 or fp8-tensor",
            },
        )
    )
    qat_group_size: int | None = flag(
        "With --quantization-aware-training int4 or int3: inputs that share a scale; 128 unless given.",
        default=None,
        at_least=1,
    )

    @property
    def rounding(self) -> tuple[str, int | None] | None:
        """Name of the scheme to which weights are rounded, and the size of its groups if given; None: they aren't."""
        scheme = self.quantization_aware_training
        return None if scheme is None else (scheme, self.qat_group_size)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for who converts a checkpoint."""
        scheme = self.quantization_aware_training
        if scheme is None:
            return ()
        group = "" if self.qat_group_size is None else f" --qat-group-size {self.qat_group_size}"
        return (
            f"note: trained with --quantization-aware-training {scheme}{group}; the checkpoint holds the weights "
            "before rounding: quantize them to the same scheme and groups to get what was trained",
        )

    @override
    def rules(self) -> Sequence[Rule]:
        """The scheme has groups if their size is given, weights are trained, and nothing else multiplies in 8 bits."""
        return (_group_size_has_effect, _not_with_fp8, _not_with_adapters)

    @override
    def described(self, run: Any) -> Sequence[str]:
        """The scheme, in the line about the model."""
        scheme = self.quantization_aware_training
        return () if scheme is None else (f"trained with weights in {scheme}",)


def _group_size_has_effect(run: Any) -> str | None:
    part = run.part(QuantizationTrainingConfig)
    if part.qat_group_size is None or part.quantization_aware_training in _GROUPED:
        return None
    return (
        f"--qat-group-size {part.qat_group_size} is for --quantization-aware-training {', '.join(_GROUPED)}; "
        "leave it out"
    )


def _not_with_adapters(run: Any) -> str | None:
    scheme, rank = run.part(QuantizationTrainingConfig).quantization_aware_training, run.part(LoraConfig).lora_rank
    if scheme is None or rank is None:
        return None
    return (
        f"--quantization-aware-training {scheme} trains the weights that it rounds, and --lora-rank {rank} freezes "
        "them: leave one of them out"
    )


def _not_with_fp8(run: Any) -> str | None:
    scheme = run.part(QuantizationTrainingConfig).quantization_aware_training
    if scheme is None or not run.fp8.is_on:
        return None
    return (
        f"--quantization-aware-training {scheme} rounds what is multiplied, and --fp8-format {run.fp8.fp8_format} "
        "rounds it to another grid: leave one of them out"
    )
