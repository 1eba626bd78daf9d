"""What can go wrong for a user, as exceptions whose message is the whole story.

A message has three parts: what is wrong with the actual values, which flag or file says so, and what would work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


class MegatronError(Exception):
    """Base of every error meant for a user; ``exit_code`` is what the process ends with."""

    exit_code = 1


class ConfigError(MegatronError):
    """Settings that cannot work: wrong flags, sizes that don't divide, settings that exclude each other."""

    exit_code = 2


class DataError(MegatronError):
    """Input files that are missing, damaged, or made for another tokenizer."""


class CheckpointError(MegatronError):
    """A checkpoint that is missing, incomplete, damaged, or of another architecture."""


class ParallelError(MegatronError):
    """Ranks that failed, stalled or disagree; the message names their coordinates."""


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's ``main`` and leave the process: a user's mistake is one sentence on stderr, never a traceback."""
    try:
        code = main() or 0
    except MegatronError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # quiet the flush at exit
        code = 141
    sys.exit(code)
