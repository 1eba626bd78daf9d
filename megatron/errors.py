"""Exceptions for a user's mistakes and for failures of the machine.

A message has three parts: what is wrong with the actual values, which flag or file says so, and what would work.
The exit code tells a scheduler whether to start the same command again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

RESTART_MAY_HELP = 1
"""Exit code when the machine failed: a disk, a network, a process, a lost rank, a stall, a loss that is not finite."""
RESTART_CANNOT_HELP = 2
"""Exit code for a user's mistake: settings, and files that they name, which are missing, damaged or the wrong ones."""
RUN_ELSEWHERE = 16
"""Exit code, as Megatron-LM's, for a bad result that was the same twice: the same command on other nodes tells whether
data and model or a device are at fault."""
RESULT_REFUSED = 17
"""Exit code, as Megatron-LM's, for a bad result that is the same on other devices, or another one each time."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

_NOBODY_READS = 141  # what shells give for a command that SIGPIPE ended

# Reasons of the operating system that the next start would meet as well; a full disk or a broken link may pass.
_LASTING = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
}


# Reasons that may pass while a process waits: a server that restarts, a cut network, a service that is overloaded.
_PASSING = {
    errno.EIO,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EPIPE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ESHUTDOWN,
}


# A word of more than a path's length is some file's content; its beginning is enough.
_LONG_WORD = re.compile(r"(\S{200})\S{3896,}")


# What a terminal obeys, and halves of pairs, which no file and no terminal takes.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def visible(text: str) -> str:
    """A text for people in which characters that a terminal obeys stand as escapes; lines and tabs remain."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class MegatronError(Exception):
    """Base of every error meant for a user; ``exit_code``: what the process ends with, where not as its class says."""

    exit_code = RESTART_MAY_HELP

    def __init__(self, message: str = "", *, exit_code: int | None = None) -> None:
        super().__init__(visible(_LONG_WORD.sub(r"\1…", message)))
        if exit_code is not None:
            self.exit_code = exit_code


class ConfigError(MegatronError):
    """Settings that cannot work: wrong flags, sizes that are not divisible, settings that are mutually exclusive."""

    exit_code = RESTART_CANNOT_HELP


class DataError(MegatronError):
    """Input files that are missing, damaged, or made for another tokenizer."""

    exit_code = RESTART_CANNOT_HELP


class CheckpointError(MegatronError):
    """A checkpoint that is missing, incomplete, damaged, or of another architecture."""

    exit_code = RESTART_CANNOT_HELP


class StorageAwayError(CheckpointError):
    """A storage that failed in a way that may pass: what was asked of it can be tried again."""

    exit_code = RESTART_MAY_HELP


class ParallelError(MegatronError):
    """Ranks that failed, stalled or disagree; the message names their coordinates."""


def exit_code_of(error: OSError) -> int:
    """Exit code for an OSError: a user's mistake, or a failure of the disk or network."""
    return RESTART_CANNOT_HELP if error.errno in _LASTING else RESTART_MAY_HELP


def may_pass(error: OSError) -> bool:
    """Whether an OSError may have passed in a while, without anybody doing anything."""
    return error.errno in _PASSING


def enumeration(words: Iterable[str], last: str = "and") -> str:
    """Words of a sentence, as ``a, b and c``."""
    *first, end = words
    return f"{', '.join(first)} {last} {end}" if first else end


@contextmanager
def kept_on_interrupt(what: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C in the block, print ``what`` is kept and lost, unless it is empty; the innermost block is used."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(*(interrupt.args or (what(),))) from None


@contextmanager
def read_errors(path: object) -> Iterator[None]:
    """Turn a missing permission, a failed disk and the like into a DataError that names the file, or else ``path``."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or path} cannot be read: {error.strerror or error}", exit_code=exit_code_of(error)
        ) from error


def _limit_in(error: Exception) -> str | None:
    """A sentence about the limit of the machine that an error of the system or of torch speaks of; None for others."""
    text = str(error)
    if "Too many open files" in text:
        return "too many open files: raise the limit with ulimit -n 65536, or give fewer --num-workers"
    last = traceback.extract_tb(error.__traceback__)[-1:]  # the system doesn't name the file of a semaphore
    of_semaphore = any(frame.filename.endswith("multiprocessing/synchronize.py") for frame in last)
    in_shared_memory = of_semaphore or any(each in text for each in ("</torch_", "shared memory", "Bus error"))
    if in_shared_memory and any(
        each in text for each in ("No space left", "Cannot allocate", "out of shared", "Bus error")
    ):
        return (
            "/dev/shm is full: free it, give a container more of it (docker run --shm-size 8g), or give fewer "
            "--num-workers; 0 needs none"
        )
    return None


def _tell_torchrun(sentence: str) -> None:
    """Leave ``sentence`` for torchrun, whose report of a failed rank then ends with it, below its own traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": sentence.rstrip(), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's ``main`` and leave the process: a user's mistake is one sentence on stderr, never a traceback."""
    said = ""
    try:
        code = main() or 0
    except MegatronError as error:
        code, said = error.exit_code, f"error: {error}\n"
        _tell_torchrun(said)
    except PermissionError as error:
        reason = f"{error.filename}: {error.strerror}; allow this user to read and write it, or name another one"
        code, said = RESTART_CANNOT_HELP, f"error: {reason if error.filename else error}\n"
        _tell_torchrun(said)
    except KeyboardInterrupt as interrupt:
        code = INTERRUPTED
        if interrupt.args != ("",):  # another rank reports it
            said = ": ".join(["interrupted", *map(str, interrupt.args)]) + "\n"
    except BrokenPipeError:
        code = _NOBODY_READS
    except (OSError, RuntimeError) as error:
        limit = _limit_in(error)
        if limit is None:
            raise
        code, said = RESTART_MAY_HELP, f"error: {limit}\n"
        _tell_torchrun(said)
    for stream, text in ((sys.stdout, ""), (sys.stderr, said)):
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:  # also when Ctrl-C has ended the reader of the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # quiet the flush at exit
            code = code or _NOBODY_READS
        except OSError:  # its disk is full; the other stream may still work
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            code = code or RESTART_MAY_HELP
    sys.exit(code)
