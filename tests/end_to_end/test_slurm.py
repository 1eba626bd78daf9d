"""The Slurm job of the examples on a real Slurm: it loses nothing at its time limit, and ends when it should."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, losses
from tests.harness.slurm import JOB, SMALL, TRAINING, SlurmCluster, SlurmJob, slurm_cluster

pytestmark = pytest.mark.slow  # Slurm takes its time to start jobs; test_slurm_job.py has a stand-in


def script(rank: str) -> str:
    """A training script whose ranks run ``rank`` in Python, and whose dry run finds nothing wrong."""
    return f"""#!/usr/bin/env bash
if [ "${{LAUNCH:-}}" = srun ]; then exec bash {ROOT}/examples/launch.sh -c "{rank}"; fi
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def test_job_saves_at_its_time_limit_and_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A TERM to srun killed the ranks instead of reaching them: all work since the last checkpoint was lost."""
    signal = re.search(r"#SBATCH --signal=(.*)@", JOB.read_text(encoding="utf-8"))
    assert signal is not None
    job = SlurmJob(cluster, tmp_path, options=f"--time 10 --signal {signal[1]}@55")
    job.until_log("lm loss:")  # and only now a limit, which a slow machine would reach while it starts
    hours, minutes, _ = map(int, cluster.facts(job.number)["RunTime"].split(":"))
    cluster.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={hours * 60 + minutes + 2}")
    assert job.until_state("PENDING", after="RUNNING")["Restarts"] == "1", job.log
    saved = job.saved
    assert saved is not None and saved == max(losses(job.log)), job.log

    cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")
    job.start_at_once()
    job.until_log(r"starting from checkpoint: \d+.*lm loss:")
    assert f"starting from checkpoint: {saved}" in job.log
    job.signal("--signal=TERM")  # the ranks save and end without an error
    facts = job.until_state("COMPLETED", "FAILED")
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    assert sorted(losses(job.log)) == list(range(1, (job.saved or 0) + 1))


def test_cancelled_job_saves_and_is_not_queued_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Slurm signals a cancelled job as it does one that shall leave: it went back into the queue and started again."""
    job = SlurmJob(cluster, tmp_path)
    job.until_log("lm loss:")
    job.signal()
    facts = job.until_state("CANCELLED", "PENDING")
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), job.log
    if cluster.has_cgroups:
        assert f"cancelled; newest checkpoint: {job.saved}" in job.log
        assert job.saved == max(losses(job.log))


def test_job_without_a_checkpoint_goes_back_into_the_queue(cluster: SlurmCluster, tmp_path: Path) -> None:
    """One that is preempted while it starts ended for good; one that can never save should not turn in circles."""
    job = SlurmJob(cluster, tmp_path, text=script("import time; time.sleep(100)"))
    job.until_log("starting from")
    job.signal("--signal=USR1", "--batch")
    assert job.until_state("PENDING", "FAILED", "COMPLETED")["Restarts"] == "1", job.log
    assert "stopped and requeued; will resume from checkpoint: none" in job.log
    with (job.run / f"starts-without-checkpoint-{job.number}").open("a") as file:
        file.write("none\n")  # a second one
    job.start_at_once()
    job.until_log("(starting from.*){2}")
    job.signal("--signal=USR1", "--batch")
    assert job.until_state("PENDING", "FAILED", "COMPLETED")["JobState"] == "FAILED", job.log
    assert "gave up after three starts in a row without a new checkpoint" in job.log


@pytest.mark.parametrize(("code", "starts"), [(1, 3), (2, 1)])
def test_failing_rank(code: int, starts: int, cluster: SlurmCluster, tmp_path: Path) -> None:
    """srun ended the other ranks of one that failed, and so a wrong setting (2) became 143, which was tried again."""
    fail = f"import os, sys, time; time.sleep(int(os.environ['SLURM_PROCID'])); sys.exit({code})"
    job = SlurmJob(cluster, tmp_path, text=script(fail))
    facts = job.until_state("FAILED", "COMPLETED", "PENDING", after="RUNNING")
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", f"{code}:0", "0"), job.log
    assert job.log.count("starting from checkpoint: none") == starts


def test_ranks_have_the_cpus_of_their_task(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Since 22.05 srun doesn't take --cpus-per-task from the job: eight CPUs a rank were one."""
    show = "import os; os.system('scontrol show step $SLURM_JOB_ID.$SLURM_STEP_ID')"
    job = SlurmJob(cluster, tmp_path, text=script(show))
    job.until_state("COMPLETED", "FAILED")
    assert job.log.count("CPUs=4 Tasks=2 ") == 2, job.log  # of the step: two tasks of two


def test_preempted_job_saves_and_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    """A preemption reaches the ranks alone: the job took their end for that of the training, or started them again."""
    job = SlurmJob(cluster, tmp_path, options="--exclusive")
    job.until_log("lm loss:")
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 1\n")
    cluster.submit(urgent, options="--partition urgent --nodes 2 --exclusive")
    facts = job.until_state("PENDING", "COMPLETED", "FAILED", "CANCELLED", after="RUNNING")
    assert (facts["JobState"], facts["Restarts"]) == ("PENDING", "1"), job.log
    assert job.saved is not None and job.saved == max(losses(job.log)), job.log
    assert job.log.count("starting from checkpoint") == 1, job.log


def test_tasks_of_an_array_are_runs_of_their_own(cluster: SlurmCluster, tmp_path: Path) -> None:
    """All tasks wrote into one folder, of which the first to start kept the others out."""
    (tmp_path / "sweep").write_text("--seed 1 --train-iters 2\n--seed 2 --train-iters 3\n")
    settings = tmp_path / "train_tiny.sh"
    settings.write_text(TRAINING)
    variables = {"SCRIPT": str(settings), "CHECKPOINT_PATH": str(tmp_path / "run"), "SWEEP": str(tmp_path / "sweep")}
    number = cluster.submit(JOB, options=f"{SMALL} --array 0-1", **variables)
    trackers = [tmp_path / "run" / f"task-{task}" / "latest_checkpointed_iteration.txt" for task in range(2)]

    def saved() -> list[int]:
        return [int(tracker.read_text()) for tracker in trackers if tracker.exists()]

    cluster.until(lambda: saved() == [2, 3], number)
    assert saved() == [2, 3]


def test_ranks_of_a_heterogeneous_job_are_one_run(cluster: SlurmCluster, tmp_path: Path) -> None:
    """srun starts a step on the first part of the job alone unless it is told of the others."""
    show = "from megatron.core.parallel.environment import launch_environment as e; print('rank', vars(e()))"
    more = ": --nodes 1 --ntasks-per-node 2 --gpus-per-node 2"
    job = SlurmJob(cluster, tmp_path, text=script(show), options=more.replace(":", "--nodes 1 :"))
    job.until_state("COMPLETED", "FAILED")
    found = re.findall(r"'rank': (\d+), 'world_size': (\d+), 'local_rank': (\d+), 'local_world_size': (\d+)", job.log)
    assert sorted(found) == [("0", "3", "0", "1"), ("1", "3", "0", "2"), ("2", "3", "1", "2")], job.log
