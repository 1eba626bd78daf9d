"""Memory figures must say what they measure: a resident set is not an allocator's count."""

from __future__ import annotations

import mmap

import torch

from megatron.training.memory import memory_line, memory_scalars, memory_use

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
