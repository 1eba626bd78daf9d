"""Preprocessing on the real things: a Slurm job array with a killed task, and Ray with a killed worker."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, environment
from tests.harness.sentences import check_line
from tests.harness.slurm import slurm_cluster
from tools import preprocess_data

pytestmark = pytest.mark.slow  # Slurm and Ray take their time to start; tests/unit/preprocessing divides the same work

ENDINGS = (".bin", ".idx", ".meta.json")
JOB = ROOT / "examples" / "slurm" / "preprocess_data.sbatch"

# What Python imports at its start, in the first task alone: as soon as it has finished two pieces, it is killed.
KILLED_ONCE = """
import os, pathlib, signal, threading, time
def kill():
    while len(list(pathlib.Path("{pieces}").glob("*.piece"))) < 2:
        time.sleep(0.001)
    open("{once}", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("SLURM_ARRAY_TASK_ID") == "0" and not os.path.exists("{once}"):
    threading.Thread(target=kill, daemon=True).start()
"""


def corpus(folder: Path, *, lines: int) -> list[str]:
    """Flags of a preprocessing, and its text: one huge file, a few bad lines."""
    draw = random.Random(1)
    with (folder / "in.jsonl").open("w") as file:
        for number in range(lines):
            text = " ".join(draw.choices("0123456789", k=draw.randrange(400)))
            file.write(json.dumps({"text": text}) + "\n" if number % 900 else "oops\n")
    words = f"--input {folder}/in.jsonl --tokenizer-type NullTokenizer --vocab-size 9 --on-bad-line skip"
    return [*words.split(), "--piece-megabytes", "0.3"]


def files(prefix: Path) -> dict[str, bytes]:
    return {ending: Path(f"{prefix}_text_document{ending}").read_bytes() for ending in ENDINGS}


def skipped(text: str) -> list[str]:
    return re.findall(r"skipped .*", text)


def test_a_slurm_array_with_a_killed_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Joining waits for all tasks; the killed one is queued again and encodes what it has not finished."""
    flags = corpus(tmp_path, lines=12_000)
    preprocess_data.main([*flags, "--output-prefix", str(tmp_path / "one"), "--workers", "1"])
    of_one = skipped(capsys.readouterr().err)
    pieces, words = tmp_path / "all_pieces", [*flags, "--output-prefix", str(tmp_path / "all")]
    (tmp_path / "sitecustomize.py").write_text(KILLED_ONCE.format(pieces=pieces, once=tmp_path / "killed"))
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm") as cluster:
        path = os.pathsep.join((str(tmp_path), environment().get("PYTHONPATH", "")))
        job = cluster.submit(JOB, *words, options="--array 0-2%1 --cpus-per-task 1", PYTHONPATH=path)
        cluster.until_state(f"{job}_0", "FAILED", "COMPLETED")
        state = cluster.facts(f"{job}_0")["JobState"]
        cluster.until_state(f"{job}_2", "COMPLETED")
        early = cluster.submit(JOB, *words, options="--cpus-per-task 1", MERGE="1")
        cluster.until_state(early, "FAILED")
        cluster.call("scontrol", "requeue", f"{job}_0")
        time.sleep(2)
        cluster.call("scontrol", "update", f"JobId={job}_0", "StartTime=now")
        cluster.until_state(f"{job}_0", "COMPLETED")
        join = cluster.submit(JOB, *words, options="--cpus-per-task 1", MERGE="1")
        cluster.until_state(join, "COMPLETED")
        log = cluster.log(join)
    assert state == "FAILED"
    check_line(cluster.log(early), "pieces are missing", "--shard 1/3", hide=[r"\d+ \(.*?\)(, )?"])
    assert files(tmp_path / "all") == files(tmp_path / "one")
    assert skipped(log) == of_one
    assert not pieces.exists()


def ray_workers() -> list[int]:
    """Processes of Ray that encode a piece now."""
    shown = subprocess.run(["ps", "-e", "-o", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in re.findall(r"^ *(\d+) ray::encode_piece", shown, re.MULTILINE)]


def test_ray_with_a_killed_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its piece is encoded by another worker, and said; Ctrl-C keeps what is finished."""
    pytest.importorskip("ray", reason="ray is not installed: pip install ray")
    flags = corpus(tmp_path, lines=60_000)
    preprocess_data.main([*flags, "--output-prefix", str(tmp_path / "one"), "--workers", "1"])
    of_one = skipped(capsys.readouterr().err)
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *flags]
    command += ["--output-prefix", str(tmp_path / "all"), "--ray", "local"]
    pieces = tmp_path / "all_pieces"

    log = tmp_path / "log"

    def started() -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(command, env=environment(), stderr=file, stdout=file)

    process, deadline = started(), time.monotonic() + 240
    while "Ray worker was lost" not in log.read_text() or len(list(pieces.glob("*.piece"))) < 12:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
        if pieces.exists() and "Ray worker was lost" not in log.read_text():  # one killed after its piece is no loss
            for worker in ray_workers()[:1]:
                os.kill(worker, signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 130, log.read_text()
    check_line(log.read_text(), "Ray worker was lost", hide=[r"piece \d+"])
    check_line(log.read_text(), "interrupted", hide=[r"\d+ of \d+"])
    assert not list(tmp_path.glob("all_text*"))
    assert started().wait(timeout=400) == 0, log.read_text()
    assert files(tmp_path / "all") == files(tmp_path / "one")
    assert skipped(log.read_text()) == of_one
