"""Flat tensors whose memory comes and goes while views of them stay, and parameters that lie in one.

torch reads freed memory without a check, and may crash: a parameter whose memory is freed raises an error instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from typing_extensions import override

from megatron.errors import RESTART_CANNOT_HELP, ParallelError

_READ_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
_FACTS = frozenset(
    (
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.stride,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.requires_grad_,
        torch.Tensor.untyped_storage,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
    )
)


class TransientTensor:
    """A 1-D tensor, ``flat``, that takes memory only between ``allocate`` and ``free``. It begins with memory.

    Views of it, and what autograd has saved of those, are valid again when it has memory again. ``parameters``: those
    that lie in it, with their names; reading one that isn't open is an error that names it and ``owner``, unless its
    ``acquired_on_reading`` can open it.
    """

    def __init__(self, flat: Tensor, *, owner: str = "", parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        self.flat, self.is_allocated, self._owner = flat, True, owner or "gradients"
        self._storage, self._bytes = flat.untyped_storage(), flat.untyped_storage().nbytes()
        # A rehearsal's have a class of their own, and nothing to read.
        self._parameters = tuple(each for each in (parameters or {}).values() if type(each) is nn.Parameter)
        for name, parameter in (parameters or {}).items():
            parameter.missing = f"the weight {name} was read while {owner} is released"  # type: ignore[attr-defined]

    def allocate(self) -> bool:
        """Give it memory of any content; whether it had none."""
        if self.is_allocated:
            return False
        self._resize(self._bytes)
        self.is_allocated = True
        return True

    def open(self) -> None:
        """Let its parameters be read: what it holds are their values."""
        for parameter in self._parameters:
            parameter.__class__ = nn.Parameter

    def free(self) -> None:
        """Take its memory away."""
        if self.is_allocated:
            self._resize(0)
            for parameter in self._parameters:
                parameter.__class__ = ReleasedParameter
            self.is_allocated = False

    def _resize(self, size: int) -> None:
        try:
            self._storage.resize_(size)
        except RuntimeError as error:
            raise ParallelError(
                f"the memory of {self._owner} can't be freed, as a numpy array or another library still uses a weight "
                "of it: copy the weight first, as weight.detach().clone().numpy() does, or leave "
                "--data-parallel-sharding-strategy optim_grads_params out",
                exit_code=RESTART_CANNOT_HELP,
            ) from error


class ReleasedParameter(nn.Parameter):
    """A parameter whose memory is freed: shape, type and gradient can be asked for, its values raise ParallelError."""

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _is_fact(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, ReleasedParameter)]
        acquired: Callable[[], bool] | None = getattr(found[0], "acquired_on_reading", None) if found else None
        if acquired is not None and acquired():
            return func(*args, **(kwargs or {}))
        what = getattr(found[0], "missing", "a weight was read while it is released") if found else "a released weight"
        raise ParallelError(
            f"{what}: its layer is not running; read weights outside of layers after "
            "optimizer.gather.make_whole(), or leave --data-parallel-sharding-strategy optim_grads_params out",
            exit_code=RESTART_CANNOT_HELP,
        )


def _is_fact(func: Callable[..., Any]) -> bool:
    if func in _FACTS:
        return True
    descriptor = getattr(func, "__self__", None)  # that of an attribute, whose func is its __get__ or __set__
    return getattr(func, "__name__", "") in ("__get__", "__set__") and (
        getattr(descriptor, "__name__", "") not in _READ_VALUES
    )
