"""A pretended accelerator: programs run on it from start to end, with shapes and no values, on a machine without one.

Its tensors are torch's fake tensors on a device type of our own, so an operator that mixes devices raises, and none
computes. Torch's hook for such a device is private; ``unavailable`` says whether this version has it.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

DEVICE_TYPE = "gpu"
_SETUP = "_setup_privateuseone_for_python_backend"
_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = Path(__file__).resolve().parents[1]
_OWN = Path(__file__).resolve().parent


def unavailable() -> str | None:
    """Why this version of torch can't pretend to have an accelerator; None if it can."""
    from torch.utils import backend_registration

    if not hasattr(backend_registration, _SETUP):
        return f"torch {torch.__version__} has no devices in Python: a rehearsal needs torch 2.11 or newer"
    return None


@dataclass
class Waits:
    """Where the host waited for the device, and how often: ``file:line in function`` of the program."""

    places: Counter[str] = field(default_factory=Counter)

    def note(self) -> None:
        """Count the program's line that is running."""
        if frame := _program_frame():
            self.places[f"{_line(frame)} in {frame.f_code.co_name}"] += 1


def place() -> str:
    """``file:line`` of the innermost frame of the program that is neither torch's nor the rehearsal's."""
    frame = _program_frame()
    return "?" if frame is None else _line(frame)


def _program_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_the_program(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).relative_to(_ROOT)}:{frame.f_lineno}"


@functools.cache
def is_of_the_program(file: str) -> bool:
    """Whether ``file`` is part of what is rehearsed."""
    path = Path(file)
    is_ours = path.is_relative_to(_PACKAGE) or (path.is_relative_to(_ROOT) and "site-packages" not in path.parts)
    return is_ours and _OWN not in path.parents


@functools.cache
def _registered() -> SimpleNamespace:
    """What ``torch.get_device_module`` returns for the device. ``memory``: bytes that it claims to have."""
    from torch.utils import backend_registration

    module: SimpleNamespace = SimpleNamespace(
        memory=0,
        is_initialized=lambda: True,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device=None: "a pretended accelerator",
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed_all=lambda seed: None,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        mem_get_info=lambda device=None: (module.memory, module.memory),
        _is_in_bad_fork=lambda: False,
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
            lambda device=None: 0,
        ),
    )
    getattr(backend_registration, _SETUP)(DEVICE_TYPE, module)
    return module


def register(*, memory: int) -> torch.device:
    """Make the device known to this process, for good; ``memory`` in bytes."""
    _registered().memory = memory
    return torch.device(DEVICE_TYPE, 0)


Observer = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]
"""A function called after each operator with the operator, its arguments by place and by name, and its result."""


@contextmanager
def pretending(
    waits: Waits, failed: Callable[[Exception], None], observers: Sequence[Observer] = ()
) -> Iterator[FakeTensorMode]:
    """In the block, tensors have shapes and no values, and reading one of the device gives ones and is noted.

    ``failed`` is called with an error in a backward pass, where torch's engine would end the process without a word.
    """
    calls = _Calls(waits, failed)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        _Operators(mode, waits, failed, observers),
        calls,
        mock.patch.object(BackwardCFunction, "apply", calls.in_backward(BackwardCFunction.apply)),
        mock.patch.object(saved_tensors_hooks, "__init__", calls.in_hooks(saved_tensors_hooks.__init__)),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch.object(torch, "Event", _event_noting(waits)),
        mock.patch.object(FakeTensor, "tolist", _listing(waits)),
    ):
        yield mode


class _Generator(torch.Generator):
    """One of the CPU for every device, as nothing is drawn. ``asked``: the type of the device that it was made for."""

    asked: str

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made: _Generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made.asked = torch.device(device).type
        return made


def _event_noting(waits: Waits) -> type:
    class Event:
        """Waiting for one is waiting for the device."""

        def __init__(self, device: torch.device) -> None:
            pass

        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            waits.note()

    return Event


def is_pretended(x: object) -> bool:
    """Whether ``x`` is a tensor of the pretended device."""
    return isinstance(x, FakeTensor) and x.device.type == DEVICE_TYPE


_COPIES = ("to", "_to_copy", "copy_")  # "to", and "item" below, in inference mode


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A number read from the device is one. Copies between host and device wait, unless asked not to."""

    def __init__(
        self, mode: FakeTensorMode, waits: Waits, failed: Callable[[Exception], None], observers: Sequence[Observer]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode, self._waits, self._failed, self._observers = mode, waits, failed, observers

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func._opname in ("item", "_local_scalar_dense") and isinstance(args[0], FakeTensor):
            if is_pretended(args[0]):
                self._waits.note()
            return _one(args[0].dtype)
        if copies := func._opname in _COPIES:  # known numbers would be copied for real, which the device can't
            source = args[0] if isinstance(args[0], FakeTensor) else self._mode.from_tensor(args[0])
            source.constant = None
            args = (source, *args[1:])
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if torch._C._current_graph_task_id() != -1:
                self._failed(error)
            raise
        if copies and is_pretended(args[func._opname == "copy_"]) != is_pretended(result):
            given = {each.name: value for each, value in zip(func._schema.arguments, args)} | dict(kwargs)
            if not given.get("non_blocking"):
                self._waits.note()
        for observe in self._observers:
            observe(func, args, kwargs, result)
        return result


def _one(dtype: torch.dtype) -> bool | float | int:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


class _Calls(TorchFunctionMode):
    """Calls that a fake tensor can't answer, or that the device has no kernel for."""

    def __init__(self, waits: Waits, failed: Callable[[Exception], None]) -> None:
        super().__init__()
        self._waits, self._failed = waits, failed

    def in_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which a backward pass calls: on a thread of torch's engine, which doesn't know this mode. Its
        errors are told.
        """

        def call(*args: Any) -> Any:
            try:
                with nullcontext() if torch._C._len_torch_function_stack() else self:
                    return function(*args)
            except Exception as error:
                self._failed(error)
                raise

        return call

    def in_hooks(self, usual: Callable[..., None]) -> Callable[..., None]:
        """The constructor of hooks of saved tensors, of which a backward pass calls the second."""

        def begin(hooks: saved_tensors_hooks, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
            usual(hooks, pack, self.in_backward(unpack))

        return begin

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_new = torch.device(kwargs.get("device") or "cpu").type == DEVICE_TYPE
        generator, draws_there = kwargs.get("generator"), is_new or any(map(is_pretended, args))
        asked = DEVICE_TYPE if generator is None else getattr(generator, "asked", "cpu")
        if draws_there and asked != DEVICE_TYPE:  # as an accelerator's kernels do
            raise RuntimeError(f"expected a generator of the device {DEVICE_TYPE}, and found one of {asked}")
        if func is torch.tensor and is_new:
            self._waits.note()  # its numbers are copied from the host's memory, which isn't pinned
            with unset_fake_temporarily():
                known = torch.tensor(*args, **{**kwargs, "device": "cpu"})
            return torch.empty(known.shape, dtype=known.dtype, device=kwargs["device"])
        if func is functional.scaled_dot_product_attention and is_pretended(args[0]):
            return _fused_attention(*args, **kwargs)
        if args and isinstance(args[0], FakeTensor):
            x, name = args[0], getattr(func, "__name__", "")
            if name in ("register_hook", "register_post_accumulate_grad_hook"):
                return func(x, self.in_backward(args[1]))
            if name == "pin_memory":
                return x
            if name == "data_ptr":  # no address, but the same for the same place
                return x.untyped_storage()._cdata + x.storage_offset() * x.element_size()
            if name == "nonzero" and is_pretended(x):
                self._waits.note()
                return x.new_zeros((0, x.dim()), dtype=torch.int64)
        return func(*args, **kwargs)


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that torch takes on a GPU: flash attention, which reads keys of fewer heads as they are, and with a
    mask or in fp32 the memory-efficient one, which can't. For a device of our own it would take plain products, which
    keep all scores.
    """
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return cast(Tensor, flash(q, k, v, dropout_p, is_causal, scale=scale)[0])
    assert not enable_gqa, "torch would take the kernel that keeps all scores"
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return cast(Tensor, efficient(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0])


def _listing(waits: Waits) -> Callable[[FakeTensor], Any]:
    """``tolist`` with one wait for all elements; that of fake tensors reads one by one."""

    def tolist(x: FakeTensor) -> Any:
        if is_pretended(x):
            waits.note()
        found: Any = _one(x.dtype)
        for size in reversed(x.shape):
            found = [found] * size
        return found

    return tolist
