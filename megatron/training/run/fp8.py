"""Which layers of a run multiply in FP8, and by what."""

from __future__ import annotations

import torch

from megatron.config.run import RunConfig
from megatron.core.ops.fp8_matmul import implementation_on, refusal
from megatron.errors import ConfigError


def check_fp8(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError when the device has no products for ``--fp8-recipe``."""
    reason = refusal(config.fp8.fp8_recipe, device) if config.fp8.is_on else None
    if reason is None:
        return
    recipe = config.fp8.fp8_recipe
    others = [each for each in ("blockwise", "tensorwise") if each != recipe and refusal(each, device) is None]
    instead = f"give --fp8-recipe {others[0]}" if others else "leave out --fp8-format"
    raise ConfigError(f"--fp8-recipe {recipe} cannot be used: {reason}; {instead}")


def describe_fp8(config: RunConfig, device: torch.device) -> str:
    """Text about FP8 for the start-up report; empty for a run without it."""
    fp8, layers = config.fp8, range(config.num_layers)
    if not fp8.is_on:
        return ""
    served = [layer for layer in layers if fp8.serves(layer, num_layers=len(layers))]
    which = (
        "all layers" if len(served) == len(layers) else f"layers {served[0] + 1} to {served[-1] + 1} of {len(layers)}"
    )
    gradients = "E5M2" if fp8.fp8_format == "hybrid" else "E4M3"
    weights = "" if fp8.fp8_wgrad else f", gradients of weights in {config.precision.params_dtype}"
    by = implementation_on(device)
    how = "kernels of the device" if by == "device" else "emulated: the numbers of FP8, not its speed"
    return f"{fp8.fp8_recipe}, {which}, E4M3 with gradients in {gradients}{weights}; {how}"
