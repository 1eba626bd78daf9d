"""Activation recomputation: run a layer again in the backward pass instead of keeping what it computed."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

_inside = ContextVar("inside of a function that is recomputed", default=False)


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """``function(*inputs)``, whose intermediate activations are recomputed when its gradient is needed.

    ``function`` must seed the random streams it uses (``RngStreams.enter``), which is what makes the second run draw
    the same numbers; torch's global generators are left alone.
    """
    outside = _inside.set(True)
    try:
        result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    finally:
        _inside.reset(outside)
    assert isinstance(result, Tensor)
    return result


def will_be_recomputed() -> bool:
    """Whether what is computed now is computed again in the backward pass."""
    return _inside.get()


def with_recomputed_inputs(
    function: Callable[..., Tensor], produce: Callable[..., tuple[Tensor, ...]], *given: Tensor
) -> Tensor:
    """``function(*produce(*given))``, where ``given`` is kept instead of what ``produce`` returns.

    The backward pass of ``function`` begins with running ``produce`` again, once; ``function`` itself isn't run again.
    ``produce`` draws no random numbers.
    """
    if not any(each.requires_grad for each in given):  # its weights may need gradients
        given = tuple(each.detach().requires_grad_() for each in given)
    source = _Source(produce, given)
    outputs: tuple[Tensor, ...] = _Produce.apply(source, *given)  # type: ignore[no-untyped-call]
    places = {each.untyped_storage()._cdata: place for place, each in enumerate(outputs)}

    def pack(x: Tensor) -> Any:
        place = places.get(x.untyped_storage()._cdata)
        return x if place is None else (place, x.size(), x.stride(), x.storage_offset())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        place, size, stride, offset = packed
        again: Tensor = source.outputs()[place].detach().as_strided(size, stride, offset)
        return again

    with saved_tensors_hooks(pack, unpack):
        return function(*outputs)


class _Source:
    """What ``produce`` returns for ``given``, and its graph, from the first time that a backward pass asks for it."""

    def __init__(self, produce: Callable[..., tuple[Tensor, ...]], given: tuple[Tensor, ...]) -> None:
        self.produce, self.given = produce, given
        self.leaves: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] = ()

    def outputs(self) -> tuple[Tensor, ...]:
        """What a second run of ``produce`` returned; it runs at the first call."""
        if not self._outputs:
            self.leaves = [each.detach().requires_grad_(each.requires_grad) for each in self.given]
            with torch.enable_grad():
                self._outputs = self.produce(*self.leaves)
        return self._outputs

    def release(self) -> None:
        """Forget the run."""
        self.leaves, self._outputs = [], ()


class _Produce(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, source: _Source, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.source = source
        ctx.save_for_backward(*given)  # so that autograd notices if one of them is changed in place
        return source.produce(*given)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        source: _Source = ctx.source
        outputs, leaves = source.outputs(), source.leaves
        torch.autograd.backward(outputs, grads)
        source.release()
        return None, *(each.grad for each in leaves)
