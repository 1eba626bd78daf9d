"""Units of ZeRO 2 and 3 that no device holds."""

from __future__ import annotations

import pytest

from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.planning.dry_run import dry_run_report
from megatron.training.reporting import memory
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error

WIDE = (
    "--mock-data --num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 64 --vocab-size 499 --data-parallel-sharding-strategy optim_grads_params"
)


def test_a_unit_that_no_device_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose shards fit began, and ran out of memory in its first layer."""
    config = tiny_config(f"{WIDE} --dry-run --device-memory-gb 0.07", ranks=64)
    with expect_error(ConfigError, "decoder.layers.", "100.8 MB", "70.0 MB", "--tensor-model-parallel-size 2"):
        dry_run_report(config, GPTSpec())
    config = tiny_config(WIDE, ranks=64).with_vocab_size(499)
    monkeypatch.setattr(memory, "total_memory", lambda device: int(0.07e9))
    with expect_error(ConfigError, "decoder.layers.", "100.8 MB", "70.0 MB", "--tensor-model-parallel-size 2"):
        memory.check_memory(config, GPTSpec(), ParallelContext.single())
