"""DeepSpeed's configuration file: taken, contradicted or refused, never read over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config import RunConfig
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse


def parse_with(folder: Path, config: dict[str, Any], changes: str = "", *, without: str = "") -> tuple[RunConfig, str]:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return parse(f"--deepspeed_config {path} {changes}", without=without, ranks=2), str(path)


def test_it_gives_what_no_flag_gives(tmp_path: Path) -> None:
    """Batch sizes, formats and ZeRO stage of a run that Megatron-DeepSpeed was told by the file alone."""
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "none"}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 3},
        "bf16": {"enabled": False},
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }
    run, path = parse_with(tmp_path, config, without="--micro-batch-size")
    assert (run.training.global_batch_size, run.training.micro_batch_size, run.optimizer.clip_grad) == (8, 4, 0.5)
    assert run.parallel.use_distributed_optimizer
    assert (run.precision.fp16, run.precision.initial_loss_scale, run.precision.hysteresis) == (True, 4096, 3)
    assert run.provenance["micro_batch_size"] == path
    assert run.notes[0] == (
        f"--deepspeed_config {path}: taken as --global-batch-size 8 --micro-batch-size 4 --clip-grad 0.5 --fp16 "
        "--hysteresis 3 --initial-loss-scale 4096.0 --use-distributed-optimizer"
    )
    assert run.notes[1] == f"--deepspeed_config {path}: zero_optimization, steps_per_print have no effect"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_its_stage_is_the_runs(stage: int, tmp_path: Path) -> None:
    """A file that asked for ZeRO 2 would train with more memory than it planned."""
    run, _ = parse_with(tmp_path, {"zero_optimization": {"stage": stage}})
    assert run.parallel.zero_stage == stage


def test_it_may_agree_or_leave_things_open(tmp_path: Path) -> None:
    """What flags say as well is no remark, and ``auto`` asks for nothing."""
    config = {"train_micro_batch_size_per_gpu": 2, "train_batch_size": "auto", "zero_optimization": {"stage": 0}}
    assert parse_with(tmp_path, config)[0].notes == ()
    (tmp_path / "hf.json").write_text(json.dumps({"bf16": {"enabled": True}}))
    assert parse(f"--deepspeed {tmp_path / 'hf.json'}").precision.bf16


@pytest.mark.parametrize(
    "config",
    [
        {"train_micro_batch_size_per_gpu": 4},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
        {"curriculum_learning": {"enabled": True}},
        {"gradient_clipping": "much"},
    ],
)
def test_contradictions_and_what_cannot_be(tmp_path: Path, config: dict[str, Any]) -> None:
    """A file that asks for something else than the flags, or for something that is not there, stops the run."""
    with expect_error(ConfigError):
        parse_with(tmp_path, config)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "[1]",
    ],
)
def test_bad_files(tmp_path: Path, text: str | None) -> None:
    """A mistake in the file is one sentence that names the flag that was given."""
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with expect_error(ConfigError, f"--deepspeed_config {path}"):
        parse(f"--deepspeed_config {path}")


def test_wrong_types_are_named_by_their_key(tmp_path: Path) -> None:
    """``"initial_scale_power": "sixteen"`` was a ValueError's traceback, 5000 an OverflowError's."""
    for wrong, fact in (
        ({"fp16": {"enabled": True, "initial_scale_power": "sixteen"}}, "fp16.initial_scale_power"),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "127"),
        ({"fp16": {"enabled": True, "initial_scale_power": []}}, "fp16.initial_scale_power"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage"),
        ({"train_batch_size": [8]}, "train_batch_size"),
        ({"fp16": {"enabled": "yes"}}, "fp16.enabled"),
    ):
        with expect_error(ConfigError, fact):
            parse_with(tmp_path, wrong)
    parse_with(tmp_path, {"zero_optimization": {"stage": {"x": 1}}})


def test_a_byte_order_mark_is_no_setting(tmp_path: Path) -> None:
    """Editors on Windows write one; the JSON was then refused, and of an ``@file`` the first flag."""
    for name, text in (("ds.json", '{"train_batch_size": 8}'), ("args.txt", "--seed 7")):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    run = parse(f"--deepspeed_config {tmp_path / 'ds.json'} @{tmp_path / 'args.txt'}")
    assert (run.training.global_batch_size, run.training.seed) == (8, 7)
