"""Many faults of all kinds, one after the other, in one run, which is then that of an undisturbed one, bit for bit."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

from megatron.core.checkpointing.find import find_checkpoint
from tests.drills.drills import Reference, Say, compare_logs, ended, flip_newest, tell_ledger
from tests.drills.job import Job
from tests.end_to_end.commands import assert_same_tensors

_FLAGS = (
    *("--global-batch-size", "4", "--train-iters", "10000", "--keep-last-checkpoints", "3"),
    *("--exit-signal-handler", "--rerun-mode", "validate_results"),
)
_KINDS = (
    "kill a rank",
    "kill the launcher",
    "kill all ranks",
    "terminate",
    "stop a rank",
    "flip a bit of a file",
    "flip a bit of a gradient",
)


def soak(folder: Path, say: Say, *, faults: int | None = None) -> None:
    """Faults of all kinds, one after the other, in one run: TEST_FAULTS of them (14), drawn at random. With --folder a
    further call goes on with the run, as a call does that was cut off.
    """
    faults = int(os.environ.get("TEST_FAULTS", "14")) if faults is None else faults
    counted, done = folder / "faults.txt", list[str]()
    if counted.exists():
        done = counted.read_text().splitlines()
    start, earlier = time.monotonic(), len(done)
    for number in range(earlier, earlier + faults):
        done.append(_make_fault(folder, random.Random(number)))
        counted.write_text("".join(f"{kind}\n" for kind in done))
    each = (time.monotonic() - start) / max(1, faults)
    reached = find_checkpoint(folder / "soak").iteration + 2
    last = Job(folder, *_FLAGS, "--save-interval", "1", "--exit-interval", str(reached), save="soak", forked=True)
    ended(last, say, code=0)
    say(f"   {', '.join(f'{count} times: {kind}' for kind, count in sorted(Counter(done).items()))}")
    say(f"   {len(done)} faults in {reached} iterations, {each:.1f} s each")
    tell_ledger(last.save, say)
    whole = _undisturbed(folder, reached)
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("soak-*.log")]
    compare_logs(whole, logs, say)
    assert_same_tensors(find_checkpoint(whole.save).path, find_checkpoint(last.place).path)
    say("   losses and weights are those of the undisturbed run, bit for bit")


def _make_fault(folder: Path, draw: random.Random) -> str:
    """Start the run, let it train for some iterations, and make a fault; its kind."""
    kind, flags = draw.choice(_KINDS), ["--save-interval", str(draw.randint(1, 3))]
    if kind == "flip a bit of a gradient":
        saved = folder / "soak"
        begun = find_checkpoint(saved).iteration if saved.is_dir() and any(saved.glob("iter_*")) else 0
        flags += ["--inject-bit-flip", f"gradient:{draw.randrange(2)}:{begun + 2}"]
    job = Job(folder, *_FLAGS, *flags, save="soak", forked=True)
    job.wait_for(r"(?s)(iteration +\d+/.*){" + str(draw.randint(3, 5)) + "}")
    time.sleep(draw.uniform(0, 0.1))  # in a step as in a save
    if kind == "stop a rank":
        pid = job.pid_of(draw.randrange(2))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
    if kind in ("terminate", "stop a rank", "flip a bit of a gradient"):
        job.process.terminate()
    elif kind == "kill the launcher":
        job.kill_launcher()
    else:
        for rank in range(2) if kind == "kill all ranks" else [draw.randrange(2)]:
            os.kill(job.pid_of(rank), signal.SIGKILL)
    job.wait()
    if kind == "flip a bit of a file":
        flip_newest(job.save)
    if kind == "flip a bit of a gradient":
        assert re.search(r"guard: iteration \d+: .*transient", job.text), job.text[-4000:]
    return kind


def _undisturbed(folder: Path, iterations: int) -> Reference:
    name = f"undisturbed-{iterations}"
    flags = [*_FLAGS, "--save-interval", "10000", "--exit-interval", str(iterations)]
    job = Job(folder, *flags, save=name, forked=True, pace=0.0)
    assert job.wait() == 0, job.text[-4000:]
    return Reference(job.save, job.losses)
