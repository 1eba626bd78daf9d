"""Write one HTML page about a run, or about two and more side by side: curves, throughput, lost time, settings, events.

The page needs no network and holds no scripts.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
from pathlib import Path

from megatron.core.files.durable import write_errors
from megatron.errors import DataError, read_errors, run_command
from megatron.training.reporting.events import EVENTS_FILE, read_events
from megatron.training.reporting.history import History
from megatron.training.reporting.report_page import report_page

REMEDY = "name the --save folder of a run that has trained, or the file of its --log-json"


def main(argv: list[str] | None = None) -> int:
    """Read the runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a --save folder, or a file of --log-json")
    parser.add_argument("--output", default="report.html", help="page to write (default: report.html)")
    arguments = parser.parse_args(argv)
    labels = labels_of(arguments.runs)
    files = [events_of(Path(run)) for run in arguments.runs]
    runs = [History.of(label, read_events(file, remedy=REMEDY)) for label, file in zip(labels, files)]
    output, page = Path(arguments.output), report_page(runs)
    with write_errors(output, remedy="name another file with --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8")
    for run in runs:
        print(f"{run.label}: {run.state} at iteration {run.iteration}; {run.goodput}")
    print(f"wrote {output}")
    return 0


def events_of(run: Path) -> Path:
    """The file with the events of ``run``. Raises DataError when there is none."""
    with read_errors(run):  # a name that is too long, a folder that nobody may look into
        path = run / EVENTS_FILE if run.is_dir() else run
        is_there = path.exists()
    if not is_there:
        raise DataError(f"{run} has no {EVENTS_FILE}; {REMEDY}" if run.is_dir() else f"{run} does not exist; {REMEDY}")
    return path


def labels_of(runs: list[str]) -> list[str]:
    """A short name for each run, unlike the others'."""
    short = [Path(run).resolve().name for run in runs]
    return short if len(set(short)) == len(short) else runs


if __name__ == "__main__":
    run_command(main)
