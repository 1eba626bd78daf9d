"""What Slurm does to a job, by a real one of two virtual nodes: a time limit, a preemption, a requeue by hand."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron.core.checkpointing.find import find_checkpoint
from tests.drills.drills import Reference, Say, compare_logs
from tests.drills.job import Job
from tests.end_to_end.commands import ROOT, assert_same_tensors
from tests.harness.slurm import JOB, SlurmCluster, SlurmJob, slurm_cluster

_AGAIN = r"starting from checkpoint: (\d+).*lm loss:"


def time_limit(folder: Path, say: Say) -> None:
    """A Slurm job reaches its time limit: it saves before, is queued again, and goes on where it was."""

    def reach_it(cluster: SlurmCluster, job: SlurmJob) -> None:
        hours, minutes, _ = map(int, cluster.facts(job.number)["RunTime"].split(":"))
        cluster.call("scontrol", "update", f"JobId={job.number}", f"TimeLimit={hours * 60 + minutes + 2}")
        job.until_state("PENDING", after="RUNNING")
        cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")

    signal = re.search(r"#SBATCH --signal=(.*)@", JOB.read_text(encoding="utf-8"))
    assert signal is not None
    _goes_on(folder, say, reach_it, options=f"--time 10 --signal {signal[1]}@55")


def preempted(folder: Path, say: Say) -> None:
    """A more urgent Slurm job takes the nodes: the run saves, is queued again, and goes on where it was."""

    def preempt(cluster: SlurmCluster, job: SlurmJob) -> None:
        urgent = folder / "urgent.sh"
        urgent.write_text("#!/bin/sh\nsleep 1\n")
        cluster.submit(urgent, options="--partition urgent --nodes 2 --exclusive")
        job.until_state("PENDING", after="RUNNING")

    _goes_on(folder, say, preempt, options="--exclusive")


def requeued(folder: Path, say: Say) -> None:
    """An administrator requeues a Slurm job: it goes on from its newest checkpoint."""

    def requeue(cluster: SlurmCluster, job: SlurmJob) -> None:
        cluster.until(lambda: job.saved, job.number)
        cluster.call("scontrol", "requeue", job.number)
        job.until_state("PENDING")

    _goes_on(folder, say, requeue, "--save-interval", "20", options="")


def _goes_on(
    folder: Path, say: Say, disturb: Callable[[SlurmCluster, SlurmJob], None], *flags: str, options: str
) -> None:
    """Start a job, disturb it, let it train again, end it, and compare it with an undisturbed run."""
    with slurm_cluster(folder) as cluster:
        job = SlurmJob(cluster, folder, *flags, options=options)
        job.until_log("lm loss:")
        disturb(cluster, job)
        facts = cluster.facts(job.number)
        assert (facts["JobState"], facts["Restarts"]) == ("PENDING", "1"), job.log[-4000:]
        say(f"   PENDING again, checkpoint of iteration {job.saved}")
        time.sleep(2)  # nodes refuse a start in the second of the job's end
        job.start_at_once()
        job.until_log(_AGAIN)
        say(f"   {re.findall('starting from checkpoint: [0-9]+', job.log)[-1]}")
        job.signal("--signal=TERM")  # the ranks save and end without an error
        facts = job.until_state("COMPLETED", "FAILED")
        assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.log[-4000:]
        saved = job.saved or 0
        whole = _undisturbed(folder, saved)
        compare_logs(whole, [job.log], say)
        assert_same_tensors(find_checkpoint(whole.save).path, find_checkpoint(job.run).path)
        say(f"   COMPLETED at iteration {saved}; losses and weights are those of the undisturbed run, bit for bit")


def _undisturbed(folder: Path, iterations: int) -> Reference:
    flags = ["--global-batch-size", "8", "--train-iters", "100000", "--save-interval", "100000"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py")]  # as the job's: the whole of the mock data
    job = Job(folder, *flags, "--exit-interval", str(iterations), save="undisturbed", command=command)
    assert job.wait() == 0, job.text[-4000:]
    return Reference(job.save, job.losses)
