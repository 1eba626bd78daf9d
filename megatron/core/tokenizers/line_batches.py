"""Batches of whole lines, and places between lines, of files of text in any form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """A place between two lines of the input: ``offset`` bytes (decompressed) into file number ``file``."""

    file: int = 0
    line: int = 1
    offset: int = 0


START = Position()


@dataclass(frozen=True)
class LineBatch:
    """Whole lines of one file; ``end``: where the next batch begins."""

    path: str
    first_line: int
    data: bytes
    bytes_read: int  # so far, of all files as they lie on the disk
    end: Position = START
