"""The Slurm job of the examples where there is no Slurm, with stand-ins for its commands; see test_slurm.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, TINY, environment, losses
from tests.harness.sentences import check_line

JOB = ROOT / "examples" / "slurm" / "train_gpt.sbatch"
# Two tasks on this machine. Like Slurm's, it kills them at a TERM; scancel signals the tasks themselves. In the first
# one of all a rank dies once there is a checkpoint.
SRUN = """#!/usr/bin/env bash
shift 2
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=127.0.0.1 SLURM_STEP_TASKS_PER_NODE=2
tasks=()
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks+=($!); done
echo "${tasks[@]}" >"$TASKS"
trap 'kill -KILL "${tasks[@]}"' TERM
if [ ! -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; then
    (until [ -e "$CHECKPOINT_PATH/latest_checkpointed_iteration.txt" ]; do sleep 0.05; done; kill -KILL "${tasks[1]}") &
fi
highest=0
for task in "${tasks[@]}"; do
    code=0
    wait "$task" || code=$?
    if [ "$code" -gt "$highest" ]; then highest=$code; fi
done
exit "$highest"
"""
COMMANDS = {"scontrol": 'echo "scontrol $*"', "scancel": "kill -TERM $(cat $TASKS)", "squeue": "echo RUNNING"}
SCRIPT = f"""#!/usr/bin/env bash
exec bash {ROOT}/examples/launch.sh pretrain_gpt.py {TINY} --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \\
    --train-iters 100000 --save-interval 4 "$@"
"""


class Cluster:
    """A folder with the stand-ins; jobs started here write one log, as requeued ones do."""

    def __init__(self, folder: Path, *, srun: str = SRUN) -> None:
        self.run, self.script, self._log = folder / "run", folder / "train_tiny.sh", folder / "log"
        self.script.write_text(SCRIPT)
        for name, text in {"srun": srun, **{name: f"#!/bin/sh\n{line}\n" for name, line in COMMANDS.items()}}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self._variables = environment() | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": str(os.getpid()),  # ranks derive their port from it
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS_PER_NODE": "2",
            "SCRIPT": str(self.script),
            "CHECKPOINT_PATH": str(self.run),
            "TASKS": str(folder / "tasks"),
            "RESTART_SECONDS": "0",
        }

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """Begin a job."""
        with self._log.open("ab") as log:
            command = ["bash", str(JOB), *flags]
            return subprocess.Popen(command, env=self._variables, stdout=log, stderr=subprocess.STDOUT)

    def job(self, *flags: str) -> int:
        """A whole job; its exit code."""
        return self.start(*flags).wait(timeout=120)

    @property
    def log(self) -> str:
        """What all jobs have said."""
        return self._log.read_text(encoding="utf-8")


@pytest.mark.slow  # minutes of waiting; a real Slurm does the same in test_slurm.py
def test_job_goes_on_after_a_failure_and_after_its_time_limit(tmp_path: Path) -> None:
    """Runs last longer than any queue allows, and ranks die at night: nobody should have to look."""
    cluster = Cluster(tmp_path)
    job = cluster.start()
    deadline = time.monotonic() + 150
    while not re.search(r"checkpoint: \d.*lm loss", cluster.log, re.DOTALL):  # it has taken a step after the failure
        assert job.poll() is None, cluster.log
        assert time.monotonic() < deadline, cluster.log
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=600) == 0, cluster.log
    saved = int((cluster.run / "latest_checkpointed_iteration.txt").read_text())
    assert cluster.log.rstrip().endswith(f"scontrol requeue {os.getpid()}")
    assert re.search(r"failed with exit code \d+; restarting", cluster.log)

    assert cluster.job("--exit-interval", "20") == 0, cluster.log
    starts = re.findall(r"starting from checkpoint: (\w+)", cluster.log)
    assert starts[0] == "none"
    assert int(starts[1]) % 4 == 0
    assert starts[2:] == [str(saved)]
    assert cluster.log.rstrip().endswith("finished")
    assert sorted(losses(cluster.log)) == list(range(1, max(losses(cluster.log)) + 1))


@pytest.mark.parametrize(("code", "starts"), [(1, 3), (2, 1)])
def test_run_that_always_fails_is_given_up(code: int, starts: int, tmp_path: Path) -> None:
    """Without progress three times in a row, and at once where the settings are wrong."""
    cluster = Cluster(tmp_path, srun=f"#!/bin/sh\nexit {code}\n")
    assert cluster.job() == code
    assert cluster.log.count("starting from checkpoint: none") == starts


def test_job_checks_its_flags_before_it_starts_anything(tmp_path: Path) -> None:
    """By a dry run on the ranks that the job has."""
    cluster = Cluster(tmp_path)
    assert cluster.job("--tensor-model-parallel-size", "4") == 2
    check_line(cluster.log, "2", "--tensor-model-parallel-size 4")
    assert "starting" not in cluster.log
