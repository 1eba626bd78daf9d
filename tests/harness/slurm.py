"""A real Slurm for tests: a controller and two virtual nodes on this machine, with ports and state of their own.

Skips the test where Slurm isn't installed (Debian: ``apt-get install slurm-wlm``).
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.commands import ROOT, TINY, environment
from tests.harness.ports import free_ports

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
# Nodes are named by addresses of the loopback interface, so that ranks can find rank 0 by its node's name.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=20
CredType=cred/none
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
FirstJobId={first_job}
KillWait=30
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 Gres=gpu:8
NodeName=127.0.0.2 NodeHostname=localhost NodeAddr=127.0.0.2 Port={ports[2]} CPUs=64 Gres=gpu:8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2 PreemptMode=OFF
"""
JOB = ROOT / "examples" / "slurm" / "train_gpt.sbatch"
SMALL = "--nodes 2 --ntasks-per-node 1 --gpus-per-node 1 --cpus-per-task 2 --job-name test"
TRAINING = f"""#!/usr/bin/env bash
exec bash {ROOT}/examples/launch.sh pretrain_gpt.py {TINY} --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" \\
    --train-iters 100000 --save-interval 100000 "$@"
"""


class SlurmCluster:
    """Jobs on a running Slurm. ``folder``: where their logs and the cluster's files are.

    ``has_cgroups``: processes are tracked as on real clusters, where ``scancel JOB`` signals a job's script and its
    ranks; where they can't be, it signals srun as well, which then kills the ranks at once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_cgroups = os.access("/sys/fs/cgroup/freezer", os.W_OK)

    def call(self, *command: str, **variables: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.variables | variables, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    @property
    def variables(self) -> dict[str, str]:
        """Environment of everything that talks to this cluster."""
        return environment() | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, job: Path, *flags: str, options: str, **variables: str) -> str:
        """Queue a batch script with options of sbatch and ``flags`` of its own; its number."""
        log = self.folder / "%j.log"
        return self.call("sbatch", "--parsable", "--output", str(log), *options.split(), str(job), *flags, **variables)

    def log(self, job: str) -> str:
        """What a job has printed so far, over all its starts."""
        path = self.folder / f"{job}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def facts(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says: JobState, Restarts, ExitCode, Reason, …"""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job)))

    def until(self, condition: Callable[[], object], job: str, *, seconds: float = 240.0) -> None:
        """Wait for ``condition``; the job's log and state are shown when it doesn't come."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.facts(job)}\n{self.log(job)[-5000:]}"
            time.sleep(0.2)

    def until_state(self, job: str, *states: str, seconds: float = 240.0) -> None:
        """Wait until the job is in one of ``states``."""
        self.until(lambda: self.facts(job)["JobState"] in states, job, seconds=seconds)


class SlurmJob:
    """A job of the examples' batch script, whose script is ``text``; by default two ranks train.

    ``run``: where its checkpoints are.
    """

    def __init__(
        self, cluster: SlurmCluster, folder: Path, *flags: str, text: str = TRAINING, options: str = ""
    ) -> None:
        script, self.run, self._cluster = folder / "train_tiny.sh", folder / "run", cluster
        script.write_text(text)
        variables = {"SCRIPT": str(script), "CHECKPOINT_PATH": str(self.run), "RESTART_SECONDS": "0"}
        self.number = cluster.submit(JOB, *flags, options=f"{SMALL} {options}", **variables)

    @property
    def log(self) -> str:
        """What it has printed so far, over all its starts."""
        return self._cluster.log(self.number)

    @property
    def saved(self) -> int | None:
        """Iteration of the newest checkpoint."""
        tracker = self.run / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else None

    def until_log(self, pattern: str) -> None:
        """Wait until the log has ``pattern``."""
        self._cluster.until(lambda: re.search(pattern, self.log, re.DOTALL), self.number)

    def until_state(self, *states: str, after: str = "") -> dict[str, str]:
        """Wait until the job is in one of ``states``, if need be after another; what is known of it then."""
        if after:
            self._cluster.until_state(self.number, after, *set(states) - {"PENDING"})
        self._cluster.until_state(self.number, *states)
        return self._cluster.facts(self.number)

    def signal(self, *words: str) -> None:
        """Send a signal, as scancel's ``words`` say."""
        self._cluster.call("scancel", *words, self.number)

    def start_at_once(self) -> None:
        """Don't wait as a requeued job does, whose nodes refuse a start in the second of its end as the old one."""
        time.sleep(2)
        self._cluster.call("scontrol", "update", f"JobId={self.number}", "StartTime=now")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start the daemons for the length of a ``with`` block; skip the test where there are none."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no Slurm here ({', '.join(missing)} not found); on Debian: apt-get install slurm-wlm")
    user = pwd.getpwuid(os.getuid()).pw_name
    cluster = SlurmCluster(folder)
    settings = {"user": user, "folder": folder, "ports": free_ports(3), "first_job": 1000 + os.getpid()}
    settings["tracking"] = "cgroup" if cluster.has_cgroups else "linuxproc"
    (folder / "slurm.conf").write_text(CONFIGURATION.format(**settings))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")  # counted, never opened
    for number in range(8):
        (folder / f"gpu{number}").touch()
    with ExitStack() as running:
        for daemon in ("slurmctld -D -c", "slurmd -D -N 127.0.0.1", "slurmd -D -N 127.0.0.2"):
            running.enter_context(_daemon(daemon.split(), cluster))
        deadline = time.monotonic() + 30
        while _nodes(cluster) != "2 idle":
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text(encoding="utf-8")
            time.sleep(0.2)
        yield cluster
        cluster.call("scancel", "--user", user, "--signal=KILL", "--full")


def _nodes(cluster: SlurmCluster) -> str:
    try:
        return cluster.call("sinfo", "--noheader", "--format=%D %T")
    except AssertionError:  # the controller isn't up yet
        return ""


@contextmanager
def _daemon(command: Sequence[str], cluster: SlurmCluster) -> Iterator[None]:
    with (cluster.folder / "daemons.log").open("ab") as log:
        process = subprocess.Popen(command, env=cluster.variables, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)
