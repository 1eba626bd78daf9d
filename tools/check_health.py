"""Tell a supervisor by its exit code whether the run that writes a health file is alive: a probe, a health check."""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import json
import time

from megatron.config.flags import Settings, flag
from megatron.config.parse import parse_groups
from megatron.errors import run_command

# No torch: a probe runs every few seconds beside the ranks that train.


class CheckHealthConfig(Settings):
    """Which file, and how old it may be."""

    file: str = flag("The --health-file of the run; may be given as the first word, without the flag.")
    max_age: float = flag("Seconds since the last write, of which there is one every 10.", default=60.0, above=0)
    max_standstill: float | None = flag(
        "Seconds at one place of the run, such as an iteration; any number unless given.", default=None, above=0
    )


def unhealthy(path: str, *, max_age: float, max_standstill: float | None, now: float) -> str:
    """The reason why a run is not healthy in a sentence, or nothing. Times in seconds."""
    try:
        with open(path, encoding="utf-8") as file:
            told = json.load(file)
        age, state, stands = now - float(told["time"]), str(told["state"]), now - float(told["since"])
    except FileNotFoundError:
        return f"there is no health file {path}: the run has not started, or has no --health-file {path}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the health file {path} can't be read ({type(error).__name__}: {error})"
    if state == "failed":
        return f"the run has failed at {told.get('place')}"
    if state == "running" and age > max_age:
        return (
            f"the run last wrote {path} {age:.0f} s ago, at {told.get('place')}; more than {max_age:.0f} s is too long"
        )
    if state == "running" and max_standstill is not None and stands > max_standstill:
        return (
            f"the run has been at {told.get('place')} for {stands:.0f} s; more than {max_standstill:.0f} s is too long"
        )
    return ""


def main() -> int:
    """The exit code: 0 for a run that is alive or has finished, 1 for another."""
    argv = sys.argv[1:]
    if argv and not argv[0].startswith("-"):
        argv.insert(0, "--file")
    (asked,) = parse_groups(argv, CheckHealthConfig, prog="check_health.py", about=__doc__ or "")
    reason = unhealthy(asked.file, max_age=asked.max_age, max_standstill=asked.max_standstill, now=time.time())
    print(reason or "healthy")
    return 1 if reason else 0


if __name__ == "__main__":
    run_command(main)
