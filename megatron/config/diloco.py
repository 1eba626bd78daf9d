"""Outer steps between workers that train apart (DiLoCo); ``--diloco-workers`` is among the settings of parallelism."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import COUNT, Settings, flag

WireType = Literal["fp32", "bf16", "int8", "fp4"]


class DilocoConfig(Settings):
    """When workers meet, and how the mean of what they have learned moves the weights they share."""

    diloco_sync_interval: int = flag(
        "DiLoCo: steps of each worker between two outer steps.", default=100, at_least=1, at_most=COUNT
    )
    diloco_outer_lr: float = flag("DiLoCo: learning rate of the outer step.", default=0.7, above=0)
    diloco_outer_momentum: float = flag(
        "DiLoCo: Nesterov momentum of the outer step.", default=0.9, at_least=0, below=1
    )
    diloco_fragments: int = flag(
        "Streaming DiLoCo: fragments that the layers are dealt to in turn; each has its own outer steps, at equal "
        "distances in the interval.",
        default=1,
        at_least=1,
    )
    diloco_overlap_steps: int = flag(
        "Streaming DiLoCo: steps that workers go on between sending a fragment and applying its outer step.",
        default=0,
        at_least=0,
    )
    diloco_mixing: float | None = flag(
        "Streaming DiLoCo: part of its own weights that a worker keeps when an outer step is applied; unless given: 0, "
        "and 0.5 with --diloco-overlap-steps.",
        default=None,
        at_least=0,
        below=1,
    )
    diloco_dtype: WireType = flag(
        "DiLoCo: format of the differences that workers send; they are summed in fp32. int8 and fp4 (sign and three "
        "bits of exponent) share a scale among 256 numbers.",
        default="fp32",
        renamed_values={"e3m0": ("fp4", "")},
    )

    @property
    def mixing(self) -> float:
        """The part of its own weights that a worker keeps."""
        if self.diloco_mixing is not None:
            return self.diloco_mixing
        return 0.5 if self.diloco_overlap_steps else 0.0

    def offset(self, fragment: int) -> int:
        """Steps into the interval at which a fragment is sent."""
        return fragment * self.diloco_sync_interval // self.diloco_fragments
