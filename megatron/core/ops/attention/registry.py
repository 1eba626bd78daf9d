"""Which implementation computes an attention call: the first that supports it, or the one the user named."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.core.ops.attention import (
    chunked,
    eager,
    flash_attn,
    sdpa,
    torch_fused,
    transformer_engine,
    varlen,
)
from megatron.core.ops.attention.capabilities import Capabilities
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult
from megatron.core.ops.backend_choice import Choice
from megatron.core.ops.matmul import is_faster_in_fp32
from megatron.errors import ConfigError


class Backend(Protocol):
    """A module in this package, or an object in one."""

    def supports(self, request: AttentionRequest) -> str | None:
        """None, or why this backend cannot compute the call."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """The result of ``attention``."""
        ...

    def attend_partly(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
        """The result of ``partial_attention``."""
        ...

    def gradients_of_part(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult, options: AttentionOptions
    ) -> Gradients:
        """The result of ``partial_attention_gradients``."""
        ...


class GpuBackend(Backend, Protocol):
    """A backend for GPUs. ``takes_sinks``: its ``attend`` computes sinks; else they are made of partial calls."""

    @property
    def capabilities(self) -> Capabilities:
        """What it supports."""
        ...

    @property
    def takes_sinks(self) -> bool:
        """Whether ``attend`` computes sinks; else they are made of partial calls."""
        ...

    def missing(self) -> str | None:
        """None, or what isn't installed."""
        ...


# Those for GPUs, each with a table of what it supports.
KERNELS: dict[str, GpuBackend] = {
    "flash_attn_3": flash_attn.VERSION_3,
    "flash_attn_2": flash_attn.VERSION_2,
    "cudnn": torch_fused.cudnn,
    "efficient": torch_fused.efficient,
    "transformer_engine": transformer_engine.BACKEND,
    "varlen": varlen.BACKEND,
}
# In order of preference, on any device; the last supports everything.
EVERYWHERE: dict[str, Backend] = {"sdpa": sdpa, "chunked": chunked, "eager": eager}
BACKENDS: dict[str, Backend] = {**KERNELS, **EVERYWHERE}


def preferred(request: AttentionRequest) -> tuple[str, ...]:
    """What ``auto`` tries, in this order: the fastest kernels of the GPU's generation, then those for any device.

    It never takes ``efficient`` and ``transformer_engine``: users ask for them by name.
    """
    first: tuple[str, ...] = ()
    if request.device.type == "cpu":
        # In bf16 on a CPU torch's kernel takes twice the time of blocks of matrix products, unless it can be in fp32.
        is_slow = request.dtype == torch.bfloat16 and not is_faster_in_fp32(request.dtype, request.device)
        first = ("chunked",) if is_slow else ()
    elif request.capability is not None:
        first = ("flash_attn_2", "varlen")
        # cuDNN is called once for each document, the others once for all.
        if request.capability >= (9, 0):
            first = (*first, "cudnn") if request.document_ids else ("cudnn", *first)
        if request.capability[0] == 9:
            first = ("flash_attn_3", *first)
    return tuple(dict.fromkeys((*first, *EVERYWHERE)))


def choose(request: AttentionRequest, backend: str = "auto") -> Choice[Backend]:
    """The backend for ``request``.

    Raises ConfigError when the backend named explicitly doesn't exist or refuses the request.
    """
    if backend == "auto":
        refused: dict[str, str] = {}
        for name in preferred(request):
            if name in KERNELS and KERNELS[name].missing() is not None:
                continue
            reason = BACKENDS[name].supports(request)
            if reason is None:
                return Choice(name, BACKENDS[name], refused)
            refused[name] = reason
    if backend not in BACKENDS:
        raise ConfigError(f"--attention-backend {backend} is unknown; available: auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[backend].supports(request)
    if reason is None and backend in KERNELS and request.device.type != "meta":  # a dry run may be on another machine
        reason = KERNELS[backend].missing()
    if reason is not None:
        raise ConfigError(f"--attention-backend {backend} cannot be used: {reason}; use --attention-backend auto")
    return Choice(backend, BACKENDS[backend])


class LayerBackend:
    """The backend of one layer's calls, chosen once for each kind of them. ``name``: of ``--attention-backend``.

    Calls of a layer differ in their lengths, in what masks them, in whether they need gradients, and in where and how
    exactly a caller wants them computed; everything else about them is fixed when the layer is built.
    """

    def __init__(self, name: str) -> None:
        self._name, self._choices = name, dict[tuple[object, ...], Choice[Backend]]()

    def choose(self, q: Tensor, k: Tensor, options: AttentionOptions, *, partial: bool) -> Choice[Backend]:
        """The backend of this call; raises ConfigError as the function ``choose`` does."""
        kind = (
            *(q.shape[0], k.shape[0], q.dtype, q.device, q.requires_grad, partial),
            *(options.causal, options.window, options.dropout),
            *(options.document_ids is None, options.attention_mask is None, options.bias is None),
            options.ahead is None,
            torch.are_deterministic_algorithms_enabled(),
        )
        found = self._choices.get(kind)
        if found is None:
            request = AttentionRequest.of(q, k, options, partial=partial)
            found = self._choices[kind] = choose(request, self._name)
        return found


def choice_for(
    q: Tensor, k: Tensor, options: AttentionOptions, backend: str | LayerBackend, *, partial: bool = False
) -> Choice[Backend]:
    """The backend of a call. ``backend``: a name, or that of the layer which makes the call.

    Raises ConfigError as ``choose`` does.
    """
    if isinstance(backend, LayerBackend):
        return backend.choose(q, k, options, partial=partial)
    return choose(AttentionRequest.of(q, k, options, partial=partial), backend)


def takes_sinks(name: str) -> bool:
    """Whether the ``attend`` of a backend computes sinks."""
    return KERNELS[name].takes_sinks if name in KERNELS else name == "eager"
