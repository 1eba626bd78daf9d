"""The ledger: which nodes have failed, and whether a run only starts and fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError, DataError, ParallelError
from megatron.training.guards.ledger import (
    LEDGER,
    Ledger,
    check_progress,
    faults_of,
    ledger,
    lemon_lines,
    lost_hosts,
    read_ledger,
    starts_without_progress,
)
from megatron.training.guards.suspect import SUSPECT, read_suspect, rejected_iterations
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error


def start(run: str, hosts: dict[str, int], **facts: object) -> dict[str, Any]:
    return {"run": run, "event": "start", "hosts": hosts, "launch": "job", "iteration": 0, **facts}


def test_torchrun_counts_on_the_node_whose_rank_failed() -> None:
    """A killed rank writes nothing; a node that is gone neither. Another launch has other nodes."""
    entries = [start("a", {"n1": 0, "n2": 3})]
    assert lost_hosts(entries, {"n1": 0, "n2": 4}, "job") == ["n2"]
    assert lost_hosts(entries, {"n1": 0}, "job") == ["n2"]
    assert lost_hosts(entries, {"n1": 0, "n2": 3, "n3": 0}, "job") == []
    assert lost_hosts(entries, {"n1": 0}, "another job") == []
    told = {"run": "a", "event": "end", "how": "failed"}
    assert lost_hosts([*entries, told], {"n1": 0}, "job") == []
    waited = {**told, "what": "lost another rank"}  # of a rank that had the time to say so before torchrun ended it
    assert lost_hosts([*entries, waited], {"n1": 0, "n2": 4}, "job") == ["n2"]


def test_a_node_counts_once_a_start_and_is_named_from_the_second_on() -> None:
    """One fault is chance."""
    fault: dict[str, Any] = {"event": "fault", "host": "n2"}
    entries: list[dict[str, Any]] = [start("a", {}), {**fault, "run": "a"}, {**fault, "run": "a"}, start("b", {})]
    assert faults_of(entries) == {"n2": 1}
    assert lemon_lines(entries, ["n1", "n2"]) == []
    entries.append({**fault, "run": "b"})
    (line,) = lemon_lines(entries, ["n1", "n2"])
    assert "n2" in line
    assert "2 of the last 2 starts" in line
    assert lemon_lines(entries, ["n1"]) == []


def test_starts_that_fail_at_one_iteration_end_the_run(tmp_path: Path) -> None:
    """A launcher would start the same failure for days. Progress, an end that was asked for, and Ctrl-C count anew."""
    failed = {"event": "end", "how": "failed", "what": "NonFiniteError: lm loss is nan"}
    entries: list[dict[str, Any]] = []
    for run in "abc":
        entries += [start(run, {}, iteration=40), {**failed, "run": run}]
    assert len(starts_without_progress(entries, 40)) == 3
    assert starts_without_progress(entries, 50) == []
    with expect_error(ConfigError, "3 starts", "iteration 40", "lm loss is nan", "--max-starts-without-progress 3"):
        check_progress(entries, 40, most=3, folder=tmp_path)
    check_progress(entries, 40, most=4, folder=tmp_path)
    check_progress(entries, 40, most=0, folder=tmp_path)
    stopped = [*entries, start("d", {}, iteration=40), {"run": "d", "event": "end", "how": "interrupted"}]
    assert starts_without_progress(stopped, 40) == []
    killed = [*entries, start("d", {}, iteration=40)]
    assert len(starts_without_progress(killed, 40)) == 4


def test_ends_are_written_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    """A crash amid a write must not cost the next start."""
    config = tiny_config(f"--mock-data --save {tmp_path} --node-ledger")
    context = ParallelContext.single()
    with ledger(config, context, iteration=0, say=pytest.fail) as book:
        assert book is not None
    with pytest.raises(RuntimeError), ledger(config, context, iteration=0, say=pytest.fail):
        raise RuntimeError("a kernel failed")
    with pytest.raises(ParallelError), ledger(config, context, iteration=0, say=pytest.fail):
        raise ParallelError("ranks disagree")
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"run": "torn", "ev')
    entries = read_ledger(tmp_path)
    assert [entry["event"] for entry in entries] == ["start", "end", "start", "fault", "end", "start", "end"]
    assert [entry["how"] for entry in entries if entry["event"] == "end"] == ["finished", "failed", "failed"]
    assert "a kernel failed" in entries[3]["what"]
    Ledger(tmp_path / "missing", run="a", host="n1").add("start")  # costs a warning alone


def test_damaged_ledger_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """A byte that is no UTF-8, or a field of another type, ended each further start with a traceback."""
    path, whole = tmp_path / "ledger.jsonl", start("a", {"n1": 0})
    wrong = [("run", [1]), ("event", {}), ("host", [1]), ("hosts", [1]), ("hosts", {"n1": "x"}), ("what", {"a": 1})]
    lines = [json.dumps({**whole, name: value}) for name, value in wrong]
    path.write_bytes(b"\xff\n" + "\n".join([*lines, "[" * 100_000, json.dumps(whole)]).encode())
    assert read_ledger(tmp_path) == [whole]
    path.unlink()
    os.mkfifo(path)
    with expect_error(CheckpointError, tmp_path):
        read_ledger(tmp_path)


def test_damaged_files_of_bad_results_are_refused(tmp_path: Path) -> None:
    """Bytes that are no text were a traceback, a named pipe held the start up, and 1.7 was iteration 1."""
    for content in (b"\xff", b"[" * 100_000, b'{"iteration": 1}'):
        (tmp_path / SUSPECT).write_bytes(content)
        with expect_error(CheckpointError, tmp_path):
            read_suspect(str(tmp_path))
    for content in (b"\xff", b"[]", b'{"iteration": 1.7}', b'{"iteration": -3}', b'{"a": 1}'):
        (tmp_path / "rejected").write_bytes(b'{"iteration": 2}\n' + content)
        with expect_error(DataError, tmp_path):
            rejected_iterations(str(tmp_path / "rejected"))
    os.mkfifo(tmp_path / "pipe")
    with expect_error(DataError, tmp_path):
        rejected_iterations(str(tmp_path / "pipe"))
