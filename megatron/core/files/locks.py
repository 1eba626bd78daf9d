"""Locks on files of a disk or network file system; the kernel drops a lock when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
from typing import IO, Any, Literal

_HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock(
    file: IO[Any], *, wait: bool = False, inherited: bool = True
) -> Literal["locked", "held elsewhere", "no locks here"]:
    """Lock ``file``, which is open for writing, until it is closed; and whether that worked.

    ``wait`` until another process has released it. ``inherited``: forked children hold the lock, too. Raises OSError
    that names the file for a failure that isn't a lack of locks.
    """
    take = fcntl.flock if inherited else fcntl.lockf
    try:
        take(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return "held elsewhere"
        if error.errno in _NO_LOCKS:
            return "no locks here"
        raise OSError(error.errno, error.strerror, file.name) from error
    return "locked"
