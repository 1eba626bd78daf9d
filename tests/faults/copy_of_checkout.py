"""A copy of the checkout in which tests run with a fault; the checkout itself is never touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import plugin
from tests.faults.fault import REPOSITORY, Fault

MARK = "FAULT_RUN"


class StoppedError(Exception):
    """The run was stopped from outside: its processes have been killed, and it is no verdict on the fault."""


@dataclass
class Run:
    """What a run of pytest left: exit code (None: it hung, or had no time left), notes, and the end of its output."""

    code: int | None
    hung: bool = False
    failed: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    running: str = ""
    output: str = ""


class CheckoutCopy:
    """The files of the checkout that git knows or would add, copied to a folder, with ``.venv`` linked.

    Tests, their subprocesses and ranks import this copy: it is their working folder, the path of their own files and
    the first entry of PYTHONPATH.
    """

    def __init__(self, folder: Path, *, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self.root = folder / "checkout"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, check=True).stdout.decode().split("\0")
        for name in filter(None, names):
            if (REPOSITORY / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, self.root / name)
        (self.root / ".venv").symlink_to(Path(sys.prefix))
        self._edits = 0

    def imported_from(self) -> str:
        """The file that ``import megatron.errors`` finds in a process of its own, started somewhere else."""
        program = "import megatron.errors; print(megatron.errors.__file__)"
        environment = self._environment("")
        done = subprocess.run(
            [sys.executable, "-c", program], cwd="/", env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        """Write a file with a new modification time, as Python compares compiled files by size and second."""
        path = self.root / name
        path.write_text(text, encoding="utf-8")
        self._edits += 1
        moment = time.time() - 1_000_000 + 10 * self._edits
        os.utime(path, (moment, moment))

    @contextmanager
    def edited(self, fault: Fault) -> Iterator[None]:
        """Apply a fault for the time of the block."""
        source = (self.root / fault.file).read_text(encoding="utf-8")
        self.write(fault.file, fault.applied(source))
        try:
            yield
        finally:
            self.write(fault.file, source)

    def pytest(
        self, parts: Sequence[str], *, first: Sequence[str] = (), only: bool = False, hang: float, until: float
    ) -> Run:
        """Run the default tier of ``parts`` up to the first failure; with ``only``, all of the tests ``first`` alone.

        ``hang``: seconds after which a test that has not ended is one that hangs. ``until``: of ``time.monotonic()``,
        when everything is stopped.
        """
        mark, notes, log = uuid.uuid4().hex, self.temporary / "notes", self.temporary / "log"
        notes.write_text("")
        environment = self._environment(mark) | {plugin.NOTES: str(notes), plugin.FIRST: json.dumps(list(first))}
        words = ["-q", "-p", "tests.faults.plugin", "-p", "no:cacheprovider", "-p", "no:randomly"]
        words += [] if only else ["-x"]
        environment |= {plugin.ONLY: "1"} if only else {}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *words, *parts],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            hung, started = False, time.time()
            try:
                while process.poll() is None and not (hung or self._stop.is_set()) and time.monotonic() < until:
                    time.sleep(0.1)
                    hung = time.time() - max(notes.stat().st_mtime, started) > hang
            finally:
                process.kill()  # first: a test whose ranks are killed would fail
                kill_marked(mark)
                process.wait()
        if self._stop.is_set():
            raise StoppedError
        ended = process.returncode >= 0 and not hung
        events = [json.loads(line) for line in notes.read_text().splitlines()]
        begun = [test for event, test in events if event == "begins"]
        run = Run(process.returncode if ended else None, hung, running=begun[-1] if begun else "")
        run.failed = [test for event, test in events if event == "failed"]
        run.passed = [test for event, test in events if event == "passed"]
        run.output = log.read_text(errors="replace")[-4000:]
        return run

    def _environment(self, mark: str) -> dict[str, str]:
        own = {"PYTHONPATH": str(self.root), "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", MARK: mark}
        return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | own


def kill_marked(mark: str) -> None:
    """Kill every process of a run, wherever it is by now: all of them inherit the mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:  # it has ended, or belongs to somebody else
                continue
