"""The drills by name. Each takes a folder and a function that prints, and raises AssertionError for another end."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.core.checkpointing.find import find_checkpoint
from megatron.training.guards.ledger import LEDGER, faults_of, read_ledger
from tests.drills.job import ITERATIONS, PACE, PATIENCE, Job, paced_script
from tests.end_to_end.commands import assert_same_tensors, losses
from tests.harness.ports import free_ports

Say = Callable[[str], None]


@dataclass(frozen=True)
class Reference:
    """The run that nothing happens to: its checkpoints, and the loss of each iteration as printed."""

    save: Path
    losses: dict[int, str]


def undisturbed(folder: Path, *flags: str, ranks: int = 2, iterations: int = ITERATIONS) -> Reference:
    """The run that nothing happens to, beside the folder of a drill, where other drills find it."""
    name = "-".join(["undisturbed", str(ranks), str(iterations), *(["elastic"] if "--elastic" in flags else [])])
    save, log = folder.parent / name, folder.parent / f"{name}-0.log"
    if not (save / f"iter_{iterations:07d}").is_dir():
        job = Job(folder.parent, *flags, save=name, ranks=ranks)
        assert job.wait() == 0, job.text
        log = job.path
    return Reference(save, losses(log.read_text(encoding="utf-8")))


def compare(whole: Reference, parts: Sequence[Job], say: Say) -> None:
    """Every iteration that a start has logged has the loss of the undisturbed run, and the last weights are its own."""
    compare_logs(whole, [part.text for part in parts], say)
    assert_same_tensors(find_checkpoint(whole.save).path, find_checkpoint(parts[-1].place).path)
    say("   losses and weights are those of the undisturbed run, bit for bit")


def compare_logs(whole: Reference, logs: Sequence[str], say: Say) -> None:
    """Every iteration in ``logs`` has the loss of the undisturbed run."""
    lines = [each for log in logs for each in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", log)]
    for iteration, loss in lines:
        usual = whole.losses[int(iteration)]
        assert usual == loss, f"iteration {iteration} has loss {loss}, not {usual}"
    say(f"   iterations computed again: {len(lines) - len(whole.losses)}")


def ended(job: Job, say: Say, *, code: int | None = None) -> int:
    """The exit code of a job that has ended, printed with its errors."""
    found = job.wait()
    say(f"   exit code {found}")
    for line in dict.fromkeys(
        re.findall(r"^(?:error: .*|guard: .*|preflight: .*|ledger: .*)$", job.text, re.MULTILINE)
    ):
        say(f"   {line[:300]}")
    assert code is None or found == code, f"exit code {found}, not {code}:\n{job.text[-4000:]}"
    return found


def tell_ledger(save: Path, say: Say) -> None:
    """Print what the ledger counts."""
    entries = read_ledger(save)
    starts = sum(entry["event"] == "start" for entry in entries)
    faults = ", ".join(f"{host} {number}" for host, number in faults_of(entries).items()) or "none"
    say(f"   {LEDGER}: {starts} starts; faults by node: {faults}")


def kill_rank(folder: Path, say: Say) -> None:
    """A rank is killed, as by the kernel that is out of memory: torchrun starts all again from the last checkpoint."""
    whole, job = undisturbed(folder), Job(folder, save="killed", restarts=1)
    job.wait_for_iteration(12)
    os.kill(job.pid_of(1), signal.SIGKILL)
    ended(job, say, code=0)
    tell_ledger(job.save, say)
    assert sum(faults_of(read_ledger(job.save)).values()) == 1
    compare(whole, [job], say)


def flip_newest(save: Path) -> str:
    """Flip a bit of the largest file of the newest checkpoint; the name of that checkpoint."""
    newest = Path(str(find_checkpoint(save).path))
    victim = max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 16
    victim.write_bytes(data)
    return newest.name


def kill_launcher(folder: Path, say: Say) -> None:
    """torchrun is killed and can't end its ranks: they end within seconds, and the same command goes on."""
    whole, job = undisturbed(folder), Job(folder, save="killed")
    job.wait_for_iteration(12)
    job.kill_launcher()
    start = time.monotonic()
    ended(job, say, code=-signal.SIGKILL)
    say(f"   all ranks had ended {time.monotonic() - start:.1f} s later")
    again = Job(folder, save="killed")
    ended(again, say, code=0)
    compare(whole, [job, again], say)


def stop_process(folder: Path, say: Say, *, seconds: float = 60.0) -> None:
    """A rank is stopped for a minute: the others wait, no time-out ends the run, nothing is lost."""
    whole, job = undisturbed(folder), Job(folder, save="stopped")
    job.wait_for_iteration(12)
    pid = job.pid_of(1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)
    ended(job, say, code=0)
    say(f"   rank 1 stood still for {seconds:.0f} s")
    compare(whole, [job], say)


def flip_gradient(folder: Path, say: Say) -> None:
    """A bit of a gradient flips: the step is computed again, its rank is named, training goes on."""
    whole = undisturbed(folder)
    job = Job(folder, "--rerun-mode", "validate_results", "--inject-bit-flip", "gradient:1:13", save="flipped")
    ended(job, say, code=0)
    assert re.search(r"iteration 13: .* rank 1 .* transient", job.text), job.text[-4000:]
    tell_ledger(job.save, say)
    compare(whole, [job], say)


def flip_weight(folder: Path, say: Say) -> None:
    """A bit of a replica's weight flips: the rank is named, and the run goes on from the last checkpoint."""
    whole = undisturbed(folder, ranks=3)
    guards = ["--rerun-mode", "validate_results"]
    job = Job(folder, *guards, "--inject-bit-flip", "weight:2:13", save="flipped", ranks=3)
    assert ended(job, say)
    assert "weights of rank 2" in job.text, job.text[-4000:]
    tell_ledger(job.save, say)
    again = Job(folder, *guards, save="flipped", ranks=3)
    ended(again, say, code=0)
    compare(whole, [job, again], say)


def flip_file(folder: Path, say: Say) -> None:
    """A bit of the newest checkpoint flips: its checksum tells, and the run goes on from the one before."""
    whole, job = undisturbed(folder), Job(folder, "--exit-interval", "20", save="flipped")
    ended(job, say, code=0)
    damaged = flip_newest(job.save)
    again = Job(folder, save="flipped")
    ended(again, say, code=0)
    assert f"instead of the requested one: {damaged}" in again.text, again.text[:4000]
    say(f"   a file of {damaged} is damaged, and the checkpoint before was taken")
    compare(whole, [job, again], say)


def slow_rank(folder: Path, say: Say) -> None:
    """A rank is stopped for three quarters of the time: the log names it, not those that wait for it."""
    flags = ["--log-straggler", "--log-interval", "5", "--straggler-threshold", "0.7"]
    job = Job(folder, *flags, "--train-iters", "100000", save="slow", ranks=3)
    job.wait_for(r"stragglers: own time")
    pid, end = job.pid_of(1), time.monotonic() + PATIENCE
    while not (named := re.findall(r"stragglers: (rank \d+) on .*", job.text)) and time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.15)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)
    job.end()
    assert named, job.text[-4000:]
    assert set(named) == {"rank 1"}, job.text[-4000:]
    say(f"   {re.findall('stragglers: rank.*', job.text)[0]}")
    tell_ledger(job.save, say)


_JUMPING = """
import time
true, start = time.time, time.monotonic()
def jumping():
    number = int((time.monotonic() - start) / {seconds})
    return true() + (0, 86400, -86400, 31536000)[number % 4]
time.time = jumping
"""


def clock_jumps(folder: Path, say: Say) -> None:
    """The clock jumps a day ahead, a day back and a year ahead: nothing that decides reads it."""
    whole = undisturbed(folder)
    modules = folder / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(_JUMPING.format(seconds=1.0))
    job = Job(folder, "--async-save", save="jumping", variables={"PYTHONPATH": str(modules)})
    ended(job, say, code=0)
    compare(whole, [job], say)


def disk_full(folder: Path, say: Say) -> None:
    """The disk under --save is full: the run ends with a sentence and its last checkpoint, and goes on with room."""
    whole = undisturbed(folder)
    with small_disk(folder / "full", megabytes=64):
        job = Job(folder, save="full")
        job.wait_for("successfully saved checkpoint from iteration +10")
        with suppress(OSError), (job.save / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        ended(job, say, code=1)
        kept = find_checkpoint(job.save).iteration
        say(f"   the checkpoint of iteration {kept} is whole")
        (job.save / "filler").unlink()
        again = Job(folder, save="full")
        ended(again, say, code=0)
        compare(whole, [job, again], say)


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[None]:
    """A file system of its own in a folder, in memory; needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def cut_network(folder: Path, say: Say) -> None:
    """The network between two nodes, each a namespace of its own, is cut: both ends report it and end, and the same
    commands go on when it is back.
    """
    whole = undisturbed(folder)
    with two_nodes() as inside:
        jobs = [node_job(folder, rank, inside[rank]) for rank in (0, 1)]
        jobs[1].wait_for_iteration(12)  # the last rank prints the log
        subprocess.run([*inside[1], "ip", "link", "set", "v1", "down"], check=True)
        start = time.monotonic()
        codes = [ended(job, say) for job in jobs]
        say(f"   cut off; both nodes had ended {time.monotonic() - start:.0f} s later")
        assert 0 not in codes, codes
        subprocess.run([*inside[1], "ip", "link", "set", "v1", "up"], check=True)
        again = [node_job(folder, rank, inside[rank]) for rank in (0, 1)]
        for job in again:
            ended(job, say, code=0)
        compare(whole, [jobs[1], again[1]], say)


def node_job(folder: Path, rank: int, prefix: Sequence[str]) -> Job:
    """A rank in a namespace, as a batch system starts it."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": _ENDS[0],
        "MASTER_PORT": "29611",
        "GLOO_SOCKET_IFNAME": f"v{rank}",
    }
    words = [*prefix, sys.executable, paced_script(folder, PACE), "--distributed-timeout-minutes", "0.2"]
    return Job(folder, save="cut", variables=variables, command=words)


_ENDS = ("10.78.0.1", "10.78.0.2")


@contextmanager
def two_nodes() -> Iterator[list[list[str]]]:
    """Two network namespaces joined by virtual interfaces; yields how to run a command in each. Needs root."""
    names = [f"drill{os.getpid()}-{number}" for number in (0, 1)]
    inside = [["ip", "netns", "exec", name] for name in names]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        first = ["link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1"]
        subprocess.run(["ip", *first, "netns", names[1]], check=True)
        for number, prefix in enumerate(inside):
            for words in (
                ["link", "set", "lo", "up"],
                ["addr", "add", f"{_ENDS[number]}/24", "dev", f"v{number}"],
                ["link", "set", f"v{number}", "up"],
            ):
                subprocess.run([*prefix, "ip", *words], check=True)
        yield inside
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


class Node:
    """A node of an elastic job: a torchrun of one rank, which finds the others by a port of this machine."""

    def __init__(self, folder: Path, number: int, *, port: int) -> None:
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2:4", "--nproc_per_node=1", "--max-restarts=20"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=drill"),
            f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=3,join_timeout=300,keep_alive_interval=1,"
            "keep_alive_max_attempt=3",
            "--local-addr=127.0.0.1",
            paced_script(folder, 0.4),
        ]
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or ranks that stay meet at the store of one that is gone
        self.job = Job(folder, *ELASTIC, "--exit-signal-handler", save="elastic", command=words, variables=own)


ELASTIC = ("--elastic", "--micro-batch-size", "2", "--hidden-dropout", "0", "--attention-dropout", "0")


def elastic(folder: Path, say: Say) -> None:
    """Nodes come and go: 4, 3, 2 and 4 ranks train as those of a fixed size, from the last checkpoint each time."""
    whole = undisturbed(folder, *ELASTIC, ranks=4)
    save, (port,) = folder / "elastic", free_ports(1)
    nodes = {number: Node(folder, number, port=port) for number in range(4)}
    gone = list[Node]()

    def newest() -> int:
        return max((number for node in (*nodes.values(), *gone) for number in node.job.losses), default=0)

    def sizes() -> list[int]:
        return [int(entry["ranks"]) for entry in read_ledger(save) if entry["event"] == "start"]

    def until(condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            logs = "\n".join(node.job.text[-1500:] for node in nodes.values())
            assert time.monotonic() < end, f"{what} did not come:\n{logs}"
            time.sleep(0.1)

    try:
        for size, number in ((3, 3), (2, 2)):
            begun = newest()
            until(lambda: newest() >= begun + 7, "the next iterations")  # noqa: B023  # called in this round
            nodes[number].job.end()
            gone.append(nodes.pop(number))
            until(lambda: sizes()[-1] == size, f"a start with {size} ranks")  # noqa: B023
            say(f"   node {number} killed; goes on with {size} ranks")
        begun = newest()
        until(lambda: newest() >= begun + 3, "the next iterations")
        nodes |= {number: Node(folder, number, port=port) for number in (2, 3)}
        until(lambda: sizes()[-1] == 4, "a start with 4 ranks")
        say("   two nodes joined; goes on with 4 ranks")
        for node in nodes.values():
            assert node.job.wait() == 0, node.job.text[-4000:]
    finally:
        for node in [*nodes.values(), *gone]:
            node.job.end()
    assert [size for size, _ in itertools.groupby(sizes())] == [4, 3, 2, 4], sizes()
    furthest = 0.0
    for node in [*nodes.values(), *gone]:
        for iteration, loss in node.job.losses.items():
            furthest = max(furthest, abs(float(loss) / float(whole.losses[iteration]) - 1))
    assert furthest < 1e-4, furthest
    say(f"   ranks of the starts: {sizes()}; losses of 4 ranks all along, to {furthest:.1e} of their value (fp32)")
