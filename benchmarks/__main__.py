"""The benchmarks: what each measures, its peers and its goal; or all of them, with one table of ratios against goals.

    python -m benchmarks                          # the list
    python -m benchmarks all                      # one after the other: an hour or two on two cores
    python -m benchmarks all --quick              # tiny: shows that they run
    python -m benchmarks all experts generation --json ratios.json

Each runs in a process of its own, whose output is shown as it comes. One that fails doesn't end the others: the exit
code is 1 then. A goal that is missed is a row of the table, and no failure.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import json
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.catalogue import CATALOGUE, Benchmark, first_line
from megatron.errors import ConfigError, run_command

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Outcome:
    """What became of a benchmark. ``rows``: its ratios; ``skipped`` or ``failed``: why it has none."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""
    failed: str = ""


def processor() -> str:
    """The processor's name and how many cores may be used, as in "AMD EPYC 9004, 2 cores"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{(names or [platform.processor() or platform.machine()])[0]}, {cores} cores"


def listing() -> str:
    """Every benchmark in four lines."""
    lines = []
    for name, each in CATALOGUE.items():
        lines += [f"{name}: {first_line(name)}", f"    peers: {each.peers}", f"    goal: {each.goal} ({each.ratio})"]
    return "\n".join(lines)


def run(name: str, *, quick: bool) -> Outcome:
    """One benchmark, in a process of its own."""
    if CATALOGUE[name].needs_gpu and not quick:
        from megatron.core.device import gpus

        if not gpus():
            return Outcome(name, skipped="it needs a GPU; --quick runs it in small on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "ratios.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--ratios", str(saved), *(["--quick"] if quick else [])]
        print(f"== {name}", flush=True)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return Outcome(name, failed=f"exit code {code}")
        if not saved.exists():
            return Outcome(name, failed="it saved no ratios")
        found = json.loads(saved.read_text())
    return Outcome(name, skipped=found["skipped"]) if "skipped" in found else judged(name, found["ratios"], quick=quick)


def judged(name: str, found: Sequence[dict[str, Any]], *, quick: bool) -> Outcome:
    """Ratios of one benchmark beside its goal. ``reached`` is None without a goal, and of tiny sizes."""
    goal: Benchmark = CATALOGUE[name]
    rows = [
        {
            "benchmark": name,
            "what": row["what"],
            "ratio": row["ratio"],
            "goal": goal.goal if row["has_goal"] else "none",
            "reached": goal.reaches(row["ratio"]) if row["has_goal"] and not quick else None,
        }
        for row in found
    ]
    return Outcome(name, rows)


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown, a row for each ratio and for each benchmark without one."""
    lines = ["| benchmark | what | ratio | goal | |", "|---|---|--:|--:|---|"]
    said = {True: "reached", False: "missed", None: ""}
    for each in outcomes:
        for row in each.rows:
            lines.append(
                f"| {each.name} | {row['what']} | {row['ratio']:.3f} | {row['goal']} | {said[row['reached']]} |"
            )
        if not each.rows:
            why = f"FAILED: {each.failed}" if each.failed else f"skipped: {each.skipped}"
            lines.append(f"| {each.name} | {why} | | {CATALOGUE[each.name].goal} | |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """List the benchmarks or run them; 1 when one failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="?", choices=["list", "all"], default="list", help="list them (default) or run them"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="those to run; default all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that they run, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also save the table here")
    options = parser.parse_intermixed_args(argv)
    if options.what == "list" and options.names:
        raise ConfigError(f"benchmarks are run by: python -m benchmarks all {' '.join(options.names)}")
    if options.what == "list":
        print(listing())
        return 0
    if unknown := sorted({*options.names} - {*CATALOGUE}):
        raise ConfigError(f"no benchmark is called {', '.join(unknown)}: there are {', '.join(CATALOGUE)}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        raise ConfigError(f"--json {options.json}: the folder {options.json.resolve().parent} does not exist")
    outcomes = [run(name, quick=options.quick) for name in options.names or CATALOGUE]
    machine = processor()
    print(f"== {machine}{'; --quick, so ratios are not judged' if options.quick else ''}")
    print(table(outcomes))
    if options.json is not None:
        saved = {
            "processor": machine,
            "quick": options.quick,
            "ratios": [row for each in outcomes for row in each.rows],
            "skipped": {each.name: each.skipped for each in outcomes if each.skipped},
            "failed": {each.name: each.failed for each in outcomes if each.failed},
        }
        options.json.write_text(json.dumps(saved, indent=1) + "\n")
    return 1 if any(each.failed for each in outcomes) else 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
