"""The gated delta rule by the Triton kernels of flash-linear-attention, releases 0.3 and newer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.core.ops.attention.flash import document_ends, imported
from megatron.core.ops.attention.masks import document_lengths
from megatron.core.ops.delta_rule.request import DeltaInputs, DeltaOptions, first_state

_MODULE = "fla.ops.gated_delta_rule"
_WIDEST_KEY = 256


def missing() -> str | None:
    """None, or what isn't installed."""
    return None if imported(_MODULE) is not None else "the package flash-linear-attention is not installed"


def refusal(device: torch.device, dtype: torch.dtype, key_width: int) -> str | None:
    """None, or why the kernels cannot serve such a layer."""
    if device.type == "cpu":
        return "flash-linear-attention runs on GPUs only"
    if dtype == torch.float64:
        return "flash-linear-attention does not support float64"
    if key_width > _WIDEST_KEY:
        return f"flash-linear-attention has no keys of {key_width} channels, only up to {_WIDEST_KEY}"
    return None


def apply(inputs: DeltaInputs, options: DeltaOptions, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Results ``[b, l, h, dv]`` in the type of ``v``, and the state ``[b, h, dk, dv]`` after the last token.

    Documents are given as texts of one batch: the first of each sample goes on with the sample's state.
    """
    kernels, documents = imported(_MODULE), inputs.document_ids
    assert kernels is not None, "the registry asks first"
    call: Callable[..., tuple[Tensor, Tensor]] = kernels.chunk_gated_delta_rule
    repeats = inputs.v.shape[2] // inputs.k.shape[2]  # not all releases share keys among heads of values
    q, k = (x if repeats == 1 else x.repeat_interleave(repeats, 2) for x in (inputs.q, inputs.k))
    tensors = (q, k, *inputs.tensors[2:])
    state = first_state(inputs, initial_state)
    settings: dict[str, Any] = {
        "scale": options.scale,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": options.normalizes,
    }
    if documents is None:
        out, final = call(*tensors, initial_state=state, **settings)
        return out.to(inputs.v.dtype), final
    ends, _ = document_ends(documents, inputs.v.device)
    counts = torch.tensor([len(lengths) for lengths in document_lengths(documents)], device=ends.device)
    last = counts.cumsum(0) - 1
    states = state.new_zeros(len(ends) - 1, *state.shape[1:]).index_copy(0, last - counts + 1, state)
    flat = (x.flatten(0, 1).unsqueeze(0) for x in tensors)
    out, final = call(*flat, initial_state=states, cu_seqlens=ends.long(), **settings)
    return out.view_as(inputs.v).to(inputs.v.dtype), final[last]
