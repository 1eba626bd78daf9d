"""Memory figures must say what they measure: a resident set is not an allocator's count."""

from __future__ import annotations

import mmap

import pytest
import torch

from megatron.core.models.gpt.train_spec import TRAIN_SPEC
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.reporting.memory import (
    check_memory,
    memory_line,
    memory_scalars,
    memory_use,
    sized_allocations,
    total_memory,
)
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse

CPU = torch.device("cpu")


def test_resident_set_grows_by_what_is_touched() -> None:
    before = memory_use(CPU)["resident"]
    held = mmap.mmap(-1, 64 << 20)
    held.write(b"\1" * (64 << 20))
    grown = memory_use(CPU)["resident"] - before
    assert 60 << 20 < grown < 160 << 20
    held.close()


def test_highest_is_at_least_current() -> None:
    use = memory_use(CPU)
    assert 0 < use["resident"] <= use["max resident"]


def test_line_on_an_accelerator_is_megatrons() -> None:
    use = {"allocated": 3 << 20, "max allocated": 5 << 20, "reserved": 8 << 20, "max reserved": 9 << 20}
    assert memory_line(use, rank=3, iteration=100) == (
        "[Rank 3] (after 100 iterations) memory (MB) | allocated: 3.0 | max allocated: 5.0 | reserved: 8.0 | "
        "max reserved: 9.0"
    )


def test_line_on_cpu_says_resident() -> None:
    line = memory_line(memory_use(CPU), rank=0, iteration=1)
    assert line.startswith("[Rank 0] (after 1 iterations) memory (MB) | resident: ")
    assert "allocated" not in line


def test_curves_on_cpu_do_not_pretend_to_be_an_allocators() -> None:
    assert set(memory_scalars(CPU)) == {"mem-resident-bytes", "mem-max-resident-bytes"}


def test_a_model_that_does_not_fit_is_refused_before_it_is_built() -> None:
    """--hidden-size 4000000 ended in the allocator's traceback."""
    for changes in ("--hidden-size 4000000", "--num-layers 100 --hidden-size 400000", "--seq-length 2000000000"):
        with expect_error(ConfigError, "GB"):
            check_memory(parse(changes), TRAIN_SPEC, ParallelContext.single())
    check_memory(parse(), TRAIN_SPEC, ParallelContext.single())


def test_activations_that_cannot_fit_are_refused() -> None:
    """--micro-batch-size 100000000 was killed by the kernel, or ended in the allocator's traceback."""
    rope = "--position-embedding-type rope"
    for changes in ("--micro-batch-size 100000000", f"--seq-length 2000000000 {rope}"):
        with expect_error(ConfigError, "--micro-batch-size", "--seq-length") as raised:
            check_memory(parse(changes), TRAIN_SPEC, ParallelContext.single())
        assert raised.value.exit_code == 2


def test_ranks_on_one_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight ranks was compared with all of the machine's memory, and the kernel killed them."""
    alone = total_memory(CPU)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert total_memory(CPU) == alone // 4


def test_running_out_of_memory_is_one_sentence() -> None:
    """Activations may still be too much: torch's own reason is kept, only a run that has done an iteration since its
    start may be started again (a first one too large was tried for ever), and other errors stay what they are.
    """
    context = ParallelContext.single()
    torchs_words = r"(?<=\()[^()]*allocate memory.*(?=\): this)"
    for progress, steps, code in (("start", 0, 2), ("iteration 7", 0, 2), ("iteration 7", 1, 1)):
        context.mesh.activity.progress, context.mesh.activity.steps = progress, steps
        with (
            expect_error(ConfigError, progress, exit_code=code, hide=[torchs_words]),
            sized_allocations(parse(), TRAIN_SPEC, context),
        ):
            torch.empty(10**15)
    with pytest.raises(RuntimeError, match="another"), sized_allocations(parse(), TRAIN_SPEC, context):
        raise RuntimeError("another")
