"""Number formats of a run, and the loss scale."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from megatron.config.flags import Settings, flag, switch

ParamsDtype = Literal["fp32", "bf16", "fp16"]


class PrecisionConfig(Settings):
    """Number formats of weights, gradients and losses, and the loss scale of fp16."""

    fp16: bool = switch("Train in fp16 with a loss scale and fp32 master weights.")
    bf16: bool = switch("Train in bf16 with fp32 master weights.")
    loss_scale: float | None = flag("Constant loss scale of fp16 instead of the dynamic one.", default=None, above=0)
    initial_loss_scale: float = flag("First dynamic loss scale.", default=2.0**32, above=0)
    min_loss_scale: float = flag("Smallest dynamic loss scale.", default=1.0, above=0)
    loss_scale_window: float = flag(
        "Consecutive steps without overflow after which the loss scale doubles.", default=1000.0, at_least=1
    )
    hysteresis: int = flag("Overflows before the loss scale is halved.", default=2, at_least=1)
    accumulate_allreduce_grads_in_fp32: bool = switch(
        "Accumulate and reduce gradients in fp32; always on with --bf16 or --fp16 unless --grad-reduce-in-bf16."
    )
    grad_reduce_in_bf16: bool = switch("Accumulate and reduce gradients in bf16.")
    main_grads_dtype: Literal["fp32", "bf16"] = flag(
        "With --use-precision-aware-optimizer; bf16 is --grad-reduce-in-bf16.", default="fp32"
    )

    @override
    def __post_init__(self) -> None:
        if self.main_grads_dtype == "bf16" and self.bf16:
            object.__setattr__(self, "grad_reduce_in_bf16", True)
        if (self.bf16 or self.fp16) and not self.grad_reduce_in_bf16:
            object.__setattr__(self, "accumulate_allreduce_grads_in_fp32", True)

    @property
    def params_dtype(self) -> ParamsDtype:
        """Format of the weights that the forward pass uses."""
        if self.bf16:
            return "bf16"
        return "fp16" if self.fp16 else "fp32"
