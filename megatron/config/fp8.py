"""Training with matrix products in 8 bits."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import Settings, flag, switch


class Fp8Config(Settings):
    """Matrix products of layers in FP8: which formats, how they are scaled, and in which layers."""

    fp8_format: Literal["e4m3", "hybrid"] | None = flag(
        "Multiply in FP8 in the linear layers of attention, MLPs and experts: e4m3, or hybrid, with gradients in E5M2.",
        default=None,
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = flag(
        "How FP8 tensors are scaled. tensorwise: by their largest value; delayed: by the largest value of earlier "
        "iterations; blockwise: in blocks of 128, or 128 x 128 for weights; mxfp8: in blocks of 32.",
        default="delayed",
        refused_values={"custom": "quantizer factories are not supported; choose one of the listed recipes"},
    )
    fp8_margin: int = flag(
        "With --fp8-recipe delayed: scales are divided by 2 to the power of this.", default=0, at_least=0, at_most=100
    )
    fp8_amax_history_len: int = flag(
        "With --fp8-recipe delayed: iterations whose largest values are kept.", default=1, at_least=1, at_most=100_000
    )
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag(
        "With --fp8-recipe delayed: scale by the last iteration's largest value, or by the largest of those kept.",
        default="most_recent",
    )
    fp8_param_gather: bool = switch(
        "With ZeRO 1, 2 or 3: gather and keep weights of FP8 layers in 8 bits, half the bytes of bf16."
    )
    fp8_wgrad: bool = switch("Compute gradients of weights without FP8.", off="--no-fp8-wgrad")
    first_last_layers_bf16: bool = switch("Compute the first and last layers without FP8.")
    num_layers_at_start_in_bf16: int = flag(
        "With --first-last-layers-bf16: number of first layers.", default=1, at_least=0
    )
    num_layers_at_end_in_bf16: int = flag(
        "With --first-last-layers-bf16: number of last layers.", default=1, at_least=0
    )

    @property
    def is_on(self) -> bool:
        """Whether any layer multiplies in FP8."""
        return self.fp8_format is not None

    def serves(self, layer: int, *, num_layers: int) -> bool:
        """Whether layer number ``layer`` of the whole model multiplies in FP8; those of multi-token prediction, whose
        numbers come after, do.
        """
        if not self.first_last_layers_bf16:
            return self.is_on
        last = num_layers - self.num_layers_at_end_in_bf16
        return self.is_on and layer >= self.num_layers_at_start_in_bf16 and not last <= layer < num_layers
