"""Activation recomputation: run a layer again in the backward pass instead of keeping what it computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """``function(*inputs)``, whose intermediate activations are recomputed when its gradient is needed.

    ``function`` must seed the random streams it uses (``RngStreams.enter``), which is what makes the second run draw
    the same numbers; torch's global generators are left alone.
    """
    result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result
