"""A task says how long it will read: a line on a terminal, a word now and then in a log."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from typing_extensions import override

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams
from megatron.training.evaluation.zero_shot.task import report_progress


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("watched", [True, False])
def test_time_remaining(watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Evaluation told how much was read, and nothing of when it would be done."""
    mesh, cpu, now, terminal = Mesh.single(), torch.device("cpu"), [100.0], Terminal()
    context = ParallelContext(mesh=mesh, rng=RngStreams(1, mesh, cpu), device=cpu, dtype=torch.float32)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    if watched:
        monkeypatch.setattr(sys, "stderr", terminal)
    tell = report_progress(context, 40)
    for done in (10, 20, 30, 40):
        now[0] += 10.0
        tell(done)
    if watched:
        assert "10/40 (25%)  samples  00:30 left" in terminal.getvalue()
        assert terminal.getvalue().endswith(" \r")
    assert capsys.readouterr().out == ("" if watched else "  20 of 40 samples, 00:20 left\n")
