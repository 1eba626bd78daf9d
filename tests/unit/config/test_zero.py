"""Every flag that names a stage of ZeRO, of Megatron-LM, its forks and DeepSpeed, and the stage that it means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.models.gpt.config import GROUPS
from megatron.errors import ConfigError
from tests.harness.sentences import check_line, expect_error
from tests.unit.config.command_lines import parse

STAGES = {
    "": 0,
    "--zero-stage 0": 0,
    "--use-distributed-optimizer": 1,
    "--zero-stage 1": 1,
    "--data-parallel-sharding-strategy optim": 1,
    "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads": 2,
    "--zero-stage 2": 2,
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads": 2,
    "--zero-stage 3": 3,
    "--use-megatron-fsdp": 3,
    "--use-custom-fsdp": 3,
    "--use-torch-fsdp2": 3,
    "--use-distributed-optimizer --use-torch-fsdp2": 3,
    "--use-megatron-fsdp --megatron-fsdp-main-params-dtype fp32 --outer-dp-sharding-strategy no_shard": 3,
    "--use-megatron-fsdp --enable-full-sharding-in-hsdp": 3,
    "--use-megatron-fsdp --fsdp-double-buffer --megatron-fsdp-version 2": 3,
}


@pytest.mark.parametrize("flags", STAGES)
def test_a_flag_means_its_stage(flags: str) -> None:
    """A spelling of ZeRO was taken for another stage, or for none: weights were whole where they should be divided."""
    assert parse(flags, ranks=2).parallel.zero_stage == STAGES[flags]


COPIES = {
    "--use-distributed-optimizer --num-distributed-optimizer-instances 4": (4, "optimizer state"),
    "--use-megatron-fsdp --num-distributed-optimizer-instances 4 --enable-full-sharding-in-hsdp": (4, "divides"),
    "--use-megatron-fsdp --num-distributed-optimizer-instances 2 --num-experts 4 --expert-model-parallel-size 2": (
        "each expert",
    ),
    "--use-megatron-fsdp --outer-dp-sharding-strategy optim": (
        "--outer-dp-sharding-strategy",
        "--num-distributed-optimizer-instances",
    ),
}
"""Copies of what 4 ranks divide, and facts of the remark about them."""


@pytest.mark.parametrize("flags", COPIES)
def test_copies_that_divide_less_are_remarked(flags: str) -> None:
    """Who asked for ZeRO got the memory of plain data parallelism, and no word."""
    notes = parse(flags, ranks=4, extra_groups=GROUPS).notes
    check_line("\n".join(notes), "--num-distributed-optimizer-instances", *COPIES[flags])


def test_a_format_of_megatron_fsdp_is_honoured() -> None:
    """Gradients were asked for in bf16 and sent in fp32."""
    run = parse("--bf16 --use-megatron-fsdp --megatron-fsdp-grad-comm-dtype bf16", ranks=2)
    assert run.precision.grad_reduce_in_bf16


@pytest.mark.parametrize(
    ("settings", "copies", "over_copies"),
    [
        ({"stage": 3, "mics_shard_size": 2}, 4, "no_shard"),
        ({"stage": 1, "mics_shard_size": 8}, 1, "no_shard"),
        ({"stage": 3, "mics_shard_size": -1, "zero_hpz_partition_size": 4}, 2, "optim"),
        ({"stage": 3, "zero_hpz_partition_size": 1}, 1, "no_shard"),
    ],
)
def test_deepspeeds_file_says_how_many_ranks_form_a_copy(
    settings: dict[str, int], copies: int, over_copies: str, tmp_path: Path
) -> None:
    """MiCS and hpZ keep gathers of weights inside of nodes; without a word they went over all ranks."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": settings}))
    line = f"--deepspeed_config {tmp_path / 'ds.json'} --tensor-model-parallel-size 2"
    for run in (parse(line, ranks=16), parse(f"{line} --dry-run --world-size 16")):
        parallel = run.parallel
        assert (parallel.num_distributed_optimizer_instances, parallel.outer_dp_sharding_strategy) == (
            copies,
            over_copies,
        )


def test_a_copy_of_deepspeeds_file_divides_the_ranks(tmp_path: Path) -> None:
    """Three ranks of eight can't be a copy."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}))
    with expect_error(ConfigError, "mics_shard_size 3", "8 ranks"):
        parse(f"--deepspeed_config {tmp_path / 'ds.json'}", ranks=8)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_file_names_the_stage(tmp_path: Path, stage: int) -> None:
    """A file of DeepSpeed that asked for ZeRO 2 got another stage."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    assert parse(f"--deepspeed_config {tmp_path / 'ds.json'}", ranks=2).parallel.zero_stage == stage
