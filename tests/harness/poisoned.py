"""Communication that is late: what has been started arrives when it is waited for, and not before.

gloo often has a result before anyone waits for it, so a missing wait changes nothing on a CPU; on a GPU it is a race.
In ``poisoned`` the result of everything that is started is NaN until its wait, and input and result must not be
changed by others until then. It writes to ``x.data``, which autograd doesn't take for a change of ``x``.
``POISON_COLLECTIVES=1`` does so in all ranks of ``run_ranks``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel import collectives

POISON = -(2**7) + 1
"""For integers, which have no NaN."""


@dataclass
class _Late:
    """A started operation. ``private``: where its result arrives; ``result``: where it goes; ``given``: its input."""

    name: str
    work: Any
    private: Tensor | None = None
    result: Tensor | None = None
    given: Tensor | None = None

    def __post_init__(self) -> None:
        own = None if self.given is None else self.given.clone()
        if self.result is not None:
            _poison(self.result)
            if self.given is not None and own is not None and self.name != "reduce_scatter":
                self.given.copy_(own)  # a rank's own part of a gathered tensor stays where it is
        self._before = [None if each is None else _bytes(each) for each in (self.result, self.given)]

    def wait(self, *_: Any) -> bool:
        """The result arrives. Raises AssertionError for a tensor that was changed in the meantime."""
        self.work.wait()
        for what, each, before in zip(("result", "input"), (self.result, self.given), self._before):
            assert each is None or before is None or torch.equal(_bytes(each), before), (
                f"the {what} of {self.name} was changed between its start and its wait"
            )
        if self.result is not None and self.private is not None:
            self.result.copy_(self.private)
        return True


def _poison(x: Tensor) -> None:
    if x.is_floating_point():
        x.detach().fill_(float("nan"))
    else:
        x.fill_(True if x.dtype == torch.bool else 129 if x.dtype == torch.uint8 else POISON)


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8).clone()


def _all_reduce(usual: Callable[..., Any]) -> Callable[..., Any]:
    def start(x: Tensor, *args: Any, async_op: bool = False, **more: Any) -> Any:
        if not async_op:
            return usual(x, *args, **more)
        private = x.detach().clone()
        return _Late("all_reduce", usual(private, *args, async_op=True, **more), private, x.data)

    return start


def _into(usual: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Of operations that are called with their result and their input."""

    def start(out: Tensor, x: Tensor, *args: Any, async_op: bool = False, **more: Any) -> Any:
        if not async_op:
            return usual(out, x, *args, **more)
        private, given = torch.empty_like(out), x.detach().clone()
        work = usual(private, given, *args, async_op=True, **more)
        return _Late(name, work, private, out.data, x.data)

    return start


def _send(usual: Callable[..., Any]) -> Callable[..., Any]:
    def start(x: Tensor, *args: Any, **more: Any) -> Any:
        return _Late("isend", usual(x.detach().clone(), *args, **more), given=x.data)

    return start


def _receive(usual: Callable[..., Any]) -> Callable[..., Any]:
    def start(x: Tensor, *args: Any, **more: Any) -> Any:
        private = torch.empty_like(x)
        return _Late("irecv", usual(private, *args, **more), private, x.data)

    return start


@contextmanager
def poisoned() -> Iterator[None]:
    """In the block, results of started communication are NaN until they are waited for."""
    send, receive = _send(dist.isend), _receive(dist.irecv)

    class Message:
        """Stands for P2POp."""

        def __init__(self, operation: Any, x: Tensor, peer: int, group: Any = None, tag: int = 0) -> None:
            self.start: Callable[[], Any] = functools.partial(operation, x, peer, group=group, tag=tag)

    def batch(messages: Sequence[Message]) -> list[Any]:
        return [message.start() for message in messages]

    with (
        mock.patch.object(dist, "all_reduce", _all_reduce(dist.all_reduce)),
        mock.patch.object(collectives, "_gather_tensor", _into(collectives._gather_tensor, "all_gather")),
        mock.patch.object(collectives, "_scatter_tensor", _into(collectives._scatter_tensor, "reduce_scatter")),
        mock.patch.object(dist, "all_to_all_single", _into(dist.all_to_all_single, "all_to_all")),
        mock.patch.object(dist, "isend", send),
        mock.patch.object(dist, "irecv", receive),
        mock.patch.object(dist, "P2POp", Message),
        mock.patch.object(dist, "batch_isend_irecv", batch),
    ):
        yield
