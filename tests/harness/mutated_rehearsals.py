"""Rehearsals of programs with a fault: ``python -m tests.harness.mutated_rehearsals FAULT``, a process for each."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.distributed import grad_sync
from megatron.core.models.registry import family_of
from megatron.core.ops.dropout import dropout
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Handle
from megatron.core.transformer.mlp import MLP
from megatron.errors import ParallelError
from megatron.rehearsal import rank
from megatron.rehearsal.ranks import rehearse_ranks
from megatron.rehearsal.report import problems
from tests.harness.runs import tiny_config


def tensor_of_the_host() -> AbstractContextManager[Any]:
    """A tensor that was made on the CPU, in a forward pass."""
    usual = MLP.forward
    return mock.patch.object(MLP, "forward", lambda mlp, x, *rest: usual(mlp, x + torch.ones(x.shape[-1]), *rest))


def a_generator_of_the_host() -> AbstractContextManager[Any]:
    """A layer draws from a generator that was made on the CPU."""
    usual, generator = MLP.forward, torch.Generator()

    def forward(mlp: MLP, x: Tensor, *rest: Any) -> Tensor:
        return usual(mlp, dropout(x, 0.1, generator), *rest)

    return mock.patch.object(MLP, "forward", forward)


class _Scaled(torch.autograd.Function):
    """``x``, whose gradient goes through ``change``."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grad), None


def in_backward_passes(change: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    """A layer with a step of its own in its backward pass."""
    usual = MLP.forward

    def forward(mlp: MLP, x: Tensor, *rest: Any) -> Tensor:
        return usual(mlp, _Scaled.apply(x, change), *rest)  # type: ignore[no-untyped-call]

    return mock.patch.object(MLP, "forward", forward)


def tensor_of_the_host_in_a_backward_pass() -> AbstractContextManager[Any]:
    """A tensor that was made on the CPU."""
    return in_backward_passes(lambda grad: grad * torch.ones(grad.shape[-1]))


def a_value_of_another_thread() -> AbstractContextManager[Any]:
    """A CPU's backward pass runs on the thread that asks for it, which has the value."""
    scale = ContextVar[float]("scale")
    scale.set(1.0)
    return in_backward_passes(lambda grad: grad * scale.get())


def another_operation_on_one_rank() -> AbstractContextManager[Any]:
    """One of two ranks sums something first."""
    usual: Callable[..., Tensor] = collectives.reduce_scatter

    def on_one_rank_longer(x: Tensor, mesh: Any, *axes: Any, **more: Any) -> Tensor:
        if mesh.world_rank == 1:
            collectives.all_reduce(torch.zeros(3, device=x.device), mesh, "tp")
        return usual(x, mesh, *axes, **more)

    return mock.patch("megatron.core.tensor_parallel.regions.reduce_scatter", on_one_rank_longer)


def operations_in_another_order_on_one_rank() -> AbstractContextManager[Any]:
    """One of two ranks gathers before it sums; gloo would sum what the other gathers."""

    def ask(run: Any) -> None:
        x, mesh = torch.zeros(4, device=run.context.device), run.context.mesh
        wanted: list[Callable[[], object]] = [
            lambda: collectives.all_reduce(x, mesh, "dp"),
            lambda: collectives.all_gather_into_async(x.new_zeros(8), x, mesh, "dp").wait(),
        ]
        for each in wanted if mesh.world_rank == 0 else wanted[::-1]:
            each()

    return on_all_ranks(ask)


def a_wait_that_is_forgotten() -> AbstractContextManager[Any]:
    """Gradients are read while they may still be summed."""
    usual = collectives.all_reduce_async

    def unwaited(x: Tensor, *rest: Any) -> Handle[Tensor]:
        usual(x, *rest)
        return Handle(x)

    return mock.patch.object(grad_sync, "all_reduce_async", unwaited)


def on_one_rank(extra: Callable[[Any], object]) -> AbstractContextManager[Any]:
    """A step in which rank 1 does something first."""
    usual = rank.train_step

    def with_extra(run: Any, batch: Any) -> Any:
        if run.context.mesh.world_rank == 1:
            extra(run)
        return usual(run, batch)

    return mock.patch.object(rank, "train_step", with_extra)


def on_all_ranks(extra: Callable[[Any], object]) -> AbstractContextManager[Any]:
    """A step before which every rank does something."""
    usual = rank.train_step
    return mock.patch.object(rank, "train_step", lambda run, batch: (extra(run), usual(run, batch))[1])


def a_result_that_is_read_too_soon() -> AbstractContextManager[Any]:
    """Gathered weights are used before their handle is waited for."""

    def read(run: Any) -> None:
        whole = torch.zeros(4, device=run.context.device)
        handle = collectives.all_gather_into_async(whole, whole[:2].clone(), run.context.mesh, "dp")
        whole.sum()
        handle.wait()

    return on_all_ranks(read)


def a_tensor_that_is_changed_while_it_is_sent() -> AbstractContextManager[Any]:
    """gloo has copied it by then."""

    def change(run: Any) -> None:
        part = torch.zeros(2, device=run.context.device)
        handle = collectives.all_gather_into_async(part.new_zeros(4), part, run.context.mesh, "dp")
        part.add_(1)
        handle.wait()

    return on_all_ranks(change)


def another_reduction_on_one_rank() -> AbstractContextManager[Any]:
    """One rank takes the largest where the other adds up."""

    def reduce(run: Any) -> None:
        op: Any = "max" if run.context.mesh.world_rank == 1 else "sum"
        collectives.all_reduce(torch.zeros(3, device=run.context.device), run.context.mesh, "dp", op=op)

    return on_all_ranks(reduce)


def a_type_that_nccl_lacks() -> AbstractContextManager[Any]:
    """gloo sums integers of 16 bits."""

    def reduce(run: Any) -> None:
        collectives.all_reduce(torch.zeros(3, device=run.context.device, dtype=torch.int16), run.context.mesh, "dp")

    return on_all_ranks(reduce)


def a_group_more_on_one_rank() -> AbstractContextManager[Any]:
    """Torch names a group by the number of those before it, so the next ones are not the same on both ranks."""
    usual = rank.build_run

    def build(*arguments: Any) -> Any:
        if arguments[2].mesh.world_rank == 1:
            torch.distributed.new_group([1], use_local_synchronization=True)
        return usual(*arguments)

    return mock.patch.object(rank, "build_run", build)


def a_second_thread() -> AbstractContextManager[Any]:
    """A thread beside training that asks the other ranks something."""

    def reduce(run: Any) -> None:
        ones = torch.zeros(3, device=run.context.device)
        seen = torch.utils._python_dispatch._get_current_dispatch_mode_stack()

        def work() -> None:
            with contextlib.ExitStack() as stack:
                for mode in seen:
                    stack.enter_context(mode)
                collectives.all_reduce(ones, run.context.mesh, "dp")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    return on_all_ranks(reduce)


def a_part_of_a_state_on_the_host() -> AbstractContextManager[Any]:
    """A moment of Adam that a checkpoint would not find on the device."""
    usual = Optimizer.entries

    def entries(optimizer: Optimizer) -> Any:
        for entry in usual(optimizer):
            yield dataclasses.replace(entry, tensor=entry.tensor.cpu()) if ".exp_avg." in entry.name else entry

    return mock.patch.object(Optimizer, "entries", entries)


def scores_that_are_kept() -> AbstractContextManager[Any]:
    """A call for which torch would take its plain kernel on a GPU: a mask, and keys of fewer heads."""
    usual = MLP.forward

    def forward(mlp: MLP, x: Tensor, *rest: Any) -> Tensor:
        q, k = x[None, None].flatten(2, 3).expand(1, 4, -1, -1), x[None, None].flatten(2, 3).expand(1, 2, -1, -1)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=x.device)
        torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
        return usual(mlp, x, *rest)

    return mock.patch.object(MLP, "forward", forward)


def logits_that_are_whole() -> AbstractContextManager[Any]:
    """Rows of a step times a vocabulary, in one tensor of more than 2³¹ elements."""
    usual = MLP.forward

    def forward(mlp: MLP, x: Tensor, *rest: Any) -> Tensor:
        x.new_empty(1 << 16, 1 << 15).add_(1).logsumexp(-1)
        return usual(mlp, x, *rest)

    return mock.patch.object(MLP, "forward", forward)


def a_number_read_in_a_layer() -> AbstractContextManager[Any]:
    """A number of the device that the host waits for."""
    usual = MLP.forward

    def forward(mlp: MLP, x: Tensor, *rest: Any) -> Tensor:
        return usual(mlp, x * x.detach().abs().max().item(), *rest)

    return mock.patch.object(MLP, "forward", forward)


FAULTS = {
    "tensor of the host": (tensor_of_the_host, "", 1),
    "a generator of the host": (a_generator_of_the_host, "", 1),
    "scores that are kept": (scores_that_are_kept, "", 1),
    "logits that are whole": (logits_that_are_whole, "", 1),
    "operations in another order on one rank": (operations_in_another_order_on_one_rank, "", 2),
    "tensor of the host in a backward pass": (tensor_of_the_host_in_a_backward_pass, "", 1),
    "a value of another thread": (a_value_of_another_thread, "", 1),
    "another operation on one rank": (
        another_operation_on_one_rank,
        "--tensor-model-parallel-size 2 --sequence-parallel",
        2,
    ),
    "a wait that is forgotten": (a_wait_that_is_forgotten, "", 2),
    "a result that is read too soon": (a_result_that_is_read_too_soon, "", 2),
    "a tensor that is changed while it is sent": (a_tensor_that_is_changed_while_it_is_sent, "", 2),
    "another reduction on one rank": (another_reduction_on_one_rank, "", 2),
    "a type that NCCL lacks": (a_type_that_nccl_lacks, "", 2),
    "a group more on one rank": (a_group_more_on_one_rank, "--pipeline-model-parallel-size 2 --num-layers 2", 4),
    "a second thread": (a_second_thread, "", 2),
    "a part of a state on the host": (a_part_of_a_state_on_the_host, "", 1),
    "a number read in a layer": (a_number_read_in_a_layer, "", 1),
}


SMALL = "--num-layers 1 --micro-batch-size 1 --global-batch-size 2"
"""A fault shows in one layer, and in as many microbatches as two replicas need."""


def found_wrong(fault: str) -> list[str]:
    """What a rehearsal says of a program with the fault."""
    inject, flags, ranks = FAULTS[fault]
    config = tiny_config(f"--mock-data --bf16 --tokenizer-type NullTokenizer {SMALL} {flags}", ranks=ranks)
    with inject():
        try:
            found = rehearse_ranks(config, family_of(config.extra).train_spec, range(ranks), steps=1, memory=10**9)
        except ParallelError as error:
            return [str(error)]
    waits = [place for each in found.values() for place in each.waits if not place.endswith(" in on_host")]
    return [*problems(found), *(f"the host waits at {place}" for place in waits)]


if __name__ == "__main__":
    for fault in sys.argv[1:]:
        sys.stdout.write("\n".join([f"== {fault}", *found_wrong(fault), ""]))
