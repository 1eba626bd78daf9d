"""Ports for servers of tests, which no client of another test takes meanwhile."""

from __future__ import annotations

import errno
import itertools
import os
import socket

_FIRST, _LAST = 20_000, 32_000  # below those that Linux gives to connections, so that none of them is one of these
_numbers = itertools.count()


def free_ports(number: int) -> list[int]:
    """Ports of the loopback interface that nothing listens on; the next call in this process gives others."""
    found: list[int] = []
    while len(found) < number:
        port = _FIRST + (os.getpid() * 97 + next(_numbers)) % (_LAST - _FIRST)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        found.append(port)
    return found
