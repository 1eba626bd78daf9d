"""Rehearsals of programs with a fault: ``python -m tests.harness.mutated_rehearsals FAULT``, a process for each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron.core.distributed import grad_sync
from megatron.core.models.registry import family_of
from megatron.core.parallel import collectives
from megatron.core.parallel.collectives import Handle
from megatron.core.transformer.mlp import MLP
from megatron.errors import ParallelError
from megatron.rehearsal.ranks import rehearse_ranks
from megatron.rehearsal.report import problems
from tests.harness.runs import tiny_config


def tensor_of_the_host() -> AbstractContextManager[Any]:
    """A tensor that was made on the CPU, in a forward pass."""
    usual = MLP.forward
    return mock.patch.object(MLP, "forward", lambda mlp, x, *rest: usual(mlp, x + torch.ones(x.shape[-1]), *rest))


def another_operation_on_one_rank() -> AbstractContextManager[Any]:
    """One of two ranks sums something first."""
    usual: Callable[..., Tensor] = collectives.reduce_scatter

    def on_one_rank_longer(x: Tensor, mesh: Any, *axes: Any, **more: Any) -> Tensor:
        if mesh.world_rank == 1:
            collectives.all_reduce(torch.zeros(3, device=x.device), mesh, "tp")
        return usual(x, mesh, *axes, **more)

    return mock.patch("megatron.core.tensor_parallel.regions.reduce_scatter", on_one_rank_longer)


def a_wait_that_is_forgotten() -> AbstractContextManager[Any]:
    """Gradients are read while they may still be summed."""
    usual = collectives.all_reduce_async

    def unwaited(x: Tensor, *rest: Any) -> Handle[Tensor]:
        usual(x, *rest)
        return Handle(x)

    return mock.patch.object(grad_sync, "all_reduce_async", unwaited)


FAULTS = {
    "tensor of the host": (tensor_of_the_host, "", 1),
    "another operation on one rank": (
        another_operation_on_one_rank,
        "--tensor-model-parallel-size 2 --sequence-parallel",
        2,
    ),
    "a wait that is forgotten": (a_wait_that_is_forgotten, "", 2),
}


if __name__ == "__main__":
    fault, flags, ranks = FAULTS[sys.argv[1]]
    config = tiny_config(f"--mock-data --bf16 --tokenizer-type NullTokenizer {flags}", ranks=ranks)
    with fault():
        try:
            found = rehearse_ranks(config, family_of(config.extra).train_spec, range(ranks), steps=1, memory=10**9)
        except ParallelError as error:
            found_wrong = [str(error)]
        else:
            found_wrong = problems(found)
    sys.stdout.write("\n".join(found_wrong))
