"""Profiles of chosen iterations: what is in the files, and what needs a GPU."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.core.parallel.activity import Activity
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.loop import train_and_save
from megatron.training.reporting.profiling import annotated, profiling
from tests.harness.runs import tiny_config, tiny_run
from tests.harness.sentences import check_line, expect_error
from tests.unit.config.command_lines import parse

TORCH = "--mock-data --profile --use-pytorch-profiler"


def traced(folder: Path) -> Counter[str]:
    """How often each name occurs in the one trace of rank 0."""
    (trace,) = folder.glob("rank0.*.pt.trace.json")
    return Counter(event["name"] for event in json.loads(trace.read_text())["traceEvents"])


def test_trace_of_chosen_iterations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--profile was refused: the most common question about a slow run had no answer."""
    flags = f"{TORCH} --profile-step-start 1 --profile-step-end 3 --train-iters 4 --tensorboard-dir {tmp_path}"
    train_and_save(tiny_run(ParallelContext.single(), flags))
    names = traced(tmp_path)
    assert (names["forward-backward"], names["optimizer"]) == (2, 2)
    assert names["forward-compute"] == 2 * 4
    assert names["forward of microbatch 3 in chunk 0"] == names["backward of microbatch 3 in chunk 0"] == 2
    assert names["aten::mm"] > 10
    check_line(capsys.readouterr().out, "0, traces", tmp_path)


def test_run_that_ends_before_the_last_profiled_iteration(tmp_path: Path) -> None:
    """Its trace was begun, and should be written."""
    train_and_save(tiny_run(ParallelContext.single(), f"{TORCH} --profile-step-start 1 --tensorboard-dir {tmp_path}"))
    assert traced(tmp_path)["forward-backward"] == 2


@pytest.mark.parametrize("flag", ["--profile", "--record-memory-history", "--nvtx-ranges"])
def test_what_needs_a_gpu(flag: str) -> None:
    """CUDA's profiler would record nothing on a CPU, without a word; and --dry-run approved what then didn't start."""
    sentence = f"{flag} needs a GPU; on a CPU "
    with expect_error(ConfigError, flag):
        tiny_run(ParallelContext.single(), f"--mock-data {flag}")
    assert any(sentence in note for note in parse(f"{flag} --dry-run").notes)
    with expect_error(ConfigError, flag):
        parse(f"{flag} --dry-run --distributed-backend gloo")
    assert not parse(f"{flag} --profile-step-start 1" if flag == "--profile" else flag).notes


def test_on_a_gpu(tmp_path: Path) -> None:
    """With a stand-in for CUDA's module: what is called, when, and also when the run fails."""
    flags = f"--profile --nvtx-ranges --record-memory-history --memory-snapshot-path {tmp_path}/a.pickle"
    config = tiny_config(f"--mock-data {flags} --profile-step-start 1 --profile-step-end 2")
    context = replace(ParallelContext.single(), device=torch.device("meta"))
    device = mock.MagicMock()
    nvtx = mock.patch("torch.autograd.profiler.emit_nvtx")

    def train() -> None:
        with profiling(config, context) as profiled:
            for number in (1, 2, 3):
                with profiled(number), annotated(Activity(), config, context.device)(f"step {number}"):
                    if number == 3:
                        raise MemoryError

    with mock.patch("torch.get_device_module", return_value=device), nvtx, pytest.raises(MemoryError):
        train()
    assert [call[0] for call in device.mock_calls if "_" not in call[0]] == [
        "nvtx.range",
        "cudart",
        "cudart().cudaProfilerStart",
        "nvtx.range",
        "cudart",
        "cudart().cudaProfilerStop",
        "nvtx.range",
    ]
    device.memory._dump_snapshot.assert_called_once_with(f"{tmp_path}/a.pickle")


def test_errors_while_profiling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error in a profiled iteration left CUDA's profiler on, and a bad --memory-snapshot-path hid the error."""
    (tmp_path / "file").touch()
    flags = f"--profile --record-memory-history --memory-snapshot-path {tmp_path}/file/a.pickle"
    config = tiny_config(f"--mock-data {flags} --profile-step-start 1 --profile-step-end 3")
    context = replace(ParallelContext.single(), device=torch.device("meta"))
    device = mock.MagicMock()
    nvtx = mock.patch("torch.autograd.profiler.emit_nvtx", side_effect=MemoryError)

    def train() -> None:
        with profiling(config, context) as profiled, profiled(2):
            pass

    with mock.patch("torch.get_device_module", return_value=device), nvtx, pytest.raises(MemoryError):
        train()
    device.cudart().cudaProfilerStop.assert_called_once_with()
    device.memory._record_memory_history.assert_called_with(enabled=None)
    check_line(caplog.text, f"--memory-snapshot-path {tmp_path}/file/a.pickle")
