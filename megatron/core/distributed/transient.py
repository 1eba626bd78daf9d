"""Flat tensors whose memory comes and goes while views of them stay, and parameters that lie in one.

torch reads freed memory without a check, and may crash: a parameter whose memory is freed raises an error instead, and
so does every other tensor that shares its memory, as ``weight.data`` does that a module keeps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

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
        torch.Tensor.storage_offset,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.requires_grad_,
        torch.Tensor.untyped_storage,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
    )
)


_INSTEAD = "leave --data-parallel-sharding-strategy optim_grads_params out"


class TransientTensor:
    """A 1-D tensor, ``flat``, that takes memory only between ``allocate`` and ``free``. It begins with memory.

    Views of it, and what autograd has saved of those, are valid again when it has memory again. ``parameters``: those
    that lie in it, with their names; reading one that isn't open is an error that names it and ``owner``, unless its
    ``acquired_on_reading`` can open it. So is reading another tensor in the same memory.
    """

    def __init__(self, flat: Tensor, *, owner: str = "", parameters: Mapping[str, nn.Parameter] | None = None) -> None:
        self.flat, self.is_allocated, self._owner = flat, True, owner or "gradients"
        self._storage, self._bytes = flat.untyped_storage(), flat.untyped_storage().nbytes()
        # A rehearsal's have a class of their own, and nothing to read.
        self._parameters = {each: name for name, each in (parameters or {}).items() if type(each) is nn.Parameter}
        self._aliases: list[weakref.ref[Tensor]] = []
        # Numbers of tensors in this memory, with and without a graph that saves some, of which Python has no others.
        self._harmless = {(recorded, _uses(self._storage)) for recorded in (False, True)}
        for name, parameter in (parameters or {}).items():
            parameter.missing = (  # type: ignore[attr-defined]
                f"the weight {name} was read while {owner} is released: its layer is not running; read weights outside "
                "of layers after optimizer.gather.make_whole()"
            )

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
        for alias in (found for each in self._aliases if (found := each()) is not None):
            alias.__class__ = alias.class_while_open  # type: ignore[attr-defined]
        self._aliases.clear()

    def free(self) -> None:
        """Take its memory away."""
        if self.is_allocated:
            self._resize(0)
            for parameter in self._parameters:
                parameter.__class__ = ReleasedParameter
            self.is_allocated = False
            if self._parameters:
                self._guard_aliases()

    def _guard_aliases(self) -> None:
        """Let other tensors in this memory raise errors until it is open.

        How many there are is known at once, which ones isn't: they are looked for where their number is a new one. What
        autograd has saved counts, too, but is no object of Python's.
        """
        situation = torch.is_grad_enabled(), _uses(self._storage)
        if situation in self._harmless:
            return
        others = [each for each in _tensors_in(self._storage) if each is not self.flat and each not in self._parameters]
        if not others:
            self._harmless.add(situation)
        found = [each for each in others if not isinstance(each, (ReleasedParameter, ReleasedTensor))]  # freed twice
        for alias in found:
            alias.class_while_open = type(alias)  # type: ignore[attr-defined]
            alias.missing = (  # type: ignore[attr-defined]
                f"a tensor that shares memory with the weight {self._name_at(int(alias.storage_offset()))}, such as "
                f"weight.data or a view, was read while {self._owner} is released: its layer is not running; keep a "
                "copy, weight.detach().clone(), or read the weight inside the layer's call"
            )
            try:
                alias.__class__ = ReleasedParameter if isinstance(alias, nn.Parameter) else ReleasedTensor
            except TypeError as error:
                raise ParallelError(
                    f"a module keeps a {type(alias).__name__} that shares memory with weights of {self._owner}, which "
                    f"is released: {_INSTEAD}",
                    exit_code=RESTART_CANNOT_HELP,
                ) from error
        self._aliases += [weakref.ref(each) for each in found]

    def _name_at(self, offset: int) -> str:
        """The parameter that has the element with this number, or the first one."""
        for parameter, name in self._parameters.items():
            if parameter.storage_offset() <= offset < parameter.storage_offset() + parameter.numel():
                return name
        return next(iter(self._parameters.values()))

    def _resize(self, size: int) -> None:
        try:
            self._storage.resize_(size)
        except RuntimeError as error:
            raise ParallelError(
                f"the memory of {self._owner} can't be freed, as a numpy array or another library still uses a weight "
                f"of it: copy the weight first, as weight.detach().clone().numpy() does, or {_INSTEAD}",
                exit_code=RESTART_CANNOT_HELP,
            ) from error


class _Released:
    """What a tensor whose memory is freed answers to torch's functions."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _read(func, args, kwargs or {})


class ReleasedParameter(_Released, nn.Parameter):
    """A parameter whose memory is freed: shape, type and gradient can be asked for, its values raise ParallelError."""


class ReleasedTensor(_Released, Tensor):
    """Another tensor in the memory of such a parameter."""


def _read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A call with released tensors: facts are told, and values acquired, if they can be."""
    if _is_fact(func):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    found = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, (ReleasedParameter, ReleasedTensor))]
    acquired: Callable[[], bool] | None = getattr(found[0], "acquired_on_reading", None) if found else None
    if acquired is not None and acquired():
        return func(*args, **kwargs)
    what = getattr(found[0], "missing", "a weight was read while it is released") if found else "a released weight"
    raise ParallelError(f"{what}, or {_INSTEAD}", exit_code=RESTART_CANNOT_HELP)


def _uses(storage: torch.UntypedStorage) -> int:
    """How many tensors, of Python's or not, lie in a storage, with the storage itself."""
    found: int = torch._C._storage_Use_Count(storage._cdata)
    return found


def _tensors_in(storage: torch.UntypedStorage) -> list[Tensor]:
    """All objects of Python's that are tensors in a storage."""
    classes, found = {Tensor}, list[Tensor]()
    for each in (unseen := [Tensor]):
        unseen += [derived for derived in each.__subclasses__() if derived not in classes]
        classes.update(each.__subclasses__())
    with torch._C.DisableTorchFunctionSubclass():
        for each in [each for each in gc.get_objects() if type(each) in classes]:
            try:
                if each.untyped_storage()._cdata == storage._cdata:
                    found.append(each)
            except (NotImplementedError, RuntimeError):  # it has no storage
                continue
    return found


def _is_fact(func: Callable[..., Any]) -> bool:
    if func in _FACTS:
        return True
    descriptor = getattr(func, "__self__", None)  # that of an attribute, whose func is its __get__ or __set__
    return getattr(func, "__name__", "") in ("__get__", "__set__") and (
        getattr(descriptor, "__name__", "") not in _READ_VALUES
    )
