"""Rules for all tests: one thread a process, no stray environment, the same examples, two tiers, GPUs if any."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

import tests.mock_data  # noqa: F401
from tests import cpu_seconds, selection
from tests.harness import sentences

settings.register_profile("same examples in each run", deadline=None, derandomize=True)
settings.load_profile("same examples in each run")
GPU_TESTS = Path(__file__).parent / "gpu"
LAUNCHERS = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURM_PROCID SLURM_STEP_NUM_TASKS"

os.environ["OMP_NUM_THREADS"] = "1"  # before anyone imports torch: tests share few cores, and results must repeat
for variable in LAUNCHERS.split():  # a suite that runs inside somebody's Slurm job still sees a world of one
    os.environ.pop(variable, None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: commands under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """The tiers, what they cost, and the sentences that users read."""
    pluginmanager.register(selection)
    pluginmanager.register(cpu_seconds)
    pluginmanager.register(sentences)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note tiers before tests are left out, and skip those below tests/gpu on a machine without a GPU."""
    config.stash[selection.DEFAULT_TESTS] = selection.default_tests(config, items)
    on_gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
