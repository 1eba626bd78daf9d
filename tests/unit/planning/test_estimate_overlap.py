"""What the estimate holds beside layers that compute: gradients of other ranks, and activations that come back."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config import ParallelConfig, PrecisionConfig
from megatron.core.pipeline_parallel.settings import PipelineSettings
from tests.unit.config.command_lines import run_of
from tests.unit.planning.test_estimate import QUIET, memory_estimate, rank_parameters


def test_gradients_of_other_ranks_are_there_while_layers_compute() -> None:
    """--ddp-reduce-scatter-with-fp32-accumulation receives all ranks' parts; with overlap beside a backward pass."""
    bf16 = dataclasses.replace(run_of(ranks=4), precision=PrecisionConfig(bf16=True, grad_reduce_in_bf16=True))
    off, on = (
        memory_estimate(
            dataclasses.replace(
                bf16,
                parallel=ParallelConfig(
                    use_distributed_optimizer=True,
                    overlap_grad_reduce=overlaps,
                    ddp_reduce_scatter_with_fp32_accumulation=True,
                ),
            )
        )
        for overlaps in (False, True)
    )
    received = 2 * rank_parameters(bf16) + 4 * rank_parameters(bf16) // 4  # one bucket in bf16, and a shard's sum
    assert on.working - off.working == received
    assert on.updating == off.updating >= received


def test_split_backward_passes_hold_what_has_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until gradients of weights are computed: --cpu-offloading seemed to save memory with zero-bubble schedules."""
    plain = run_of(model=QUIET)
    away = dataclasses.replace(
        plain, training=dataclasses.replace(plain.training, cpu_offloading=True, min_offloaded_tensor_size=1)
    )
    assert memory_estimate(away).kept < memory_estimate(plain).kept / 2
    monkeypatch.setattr(PipelineSettings, "splits_backward", True)
    assert memory_estimate(away).kept == memory_estimate(plain).kept
