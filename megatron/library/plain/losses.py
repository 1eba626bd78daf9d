"""What a user's module or loss function returns, as a sum and a count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.config.flags import plural_s
from megatron.errors import ConfigError


def sum_and_count(returned: Any, *, samples: int, who: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The loss of a microbatch as a sum and the count to divide by: fp32 scalars, or fp64 in a model of that type.

    ``returned``: a scalar, which is a mean over the ``samples``; or a pair of a sum and a count; or a dictionary or
    object whose ``loss`` is one of these. ``who``: what returned it, for messages.
    Raises ConfigError for anything else.
    """
    if isinstance(returned, Mapping) and "loss" in returned:
        returned = returned["loss"]
    elif not isinstance(returned, (Tensor, tuple)) and hasattr(returned, "loss"):
        returned = returned.loss
    pair = returned if isinstance(returned, (tuple, list)) else (returned, None)
    total, count = pair if len(pair) == 2 else (None, None)
    if not _is_scalar(total) or not isinstance(total, Tensor) or not total.is_floating_point():
        raise ConfigError(_no_loss(returned, who=who))
    if count is not None and not _is_scalar(count):
        raise ConfigError(_no_loss(returned, who=who))
    if torch.is_grad_enabled() and not total.requires_grad:
        raise ConfigError(
            f"the loss of {who} has no gradient: it depends on no parameter that is trained, or was computed under "
            "torch.no_grad() or from .detach() or .item()"
        )
    total = total.reshape(()).to(torch.promote_types(total.dtype, torch.float32))
    if count is None:
        return total * samples, torch.full_like(total, samples, requires_grad=False)
    return total, torch.as_tensor(count, device=device).detach().reshape(()).to(total.dtype)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _no_loss(returned: Any, *, who: str) -> str:
    return (
        f"{who} returned {_described(returned)} where a loss is needed: a scalar tensor (the mean over the "
        "microbatch's samples), or a pair of its sum and the count to divide by; return one, or pass loss=FUNCTION to "
        "megatron.pretrain"
    )


def _described(returned: Any) -> str:
    if isinstance(returned, Tensor):
        return f"a tensor of shape {list(returned.shape)} and type {str(returned.dtype).removeprefix('torch.')}"
    if isinstance(returned, (tuple, list)):
        return f"{len(returned)} value{plural_s(len(returned))} ({', '.join(map(_described, returned[:4]))})"
    return "nothing" if returned is None else f"a {type(returned).__name__}"
