"""A fault: a small wrong edit of one file, and what a user would suffer from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """A wrong edit that a person could make, as data.

    ``old`` occurs exactly once in ``file``; ``new`` replaces it. ``suffers``: what goes wrong for a user, a sentence.
    ``first``: files of tests that are tried before the other affected ones; ``FILE::PART``: there first those whose ids
    have this part. ``report``: where such a mistake of another trainer was reported in public; those faults were chosen
    without a look at our tests.
    """

    name: str
    file: str
    old: str
    new: str
    suffers: str
    first: tuple[str, ...] = ()
    report: str = ""

    def applied(self, source: str) -> str:
        """``source``, the text of ``file``, with the fault.

        Raises ValueError when it no longer applies: the text it replaces is gone, or is there twice.
        """
        found = source.count(self.old)
        if found != 1:
            raise ValueError(f"fault {self.name}: {self.file} holds the text that it replaces {found} times, not once")
        return source.replace(self.old, self.new)

    @property
    def digest(self) -> str:
        """A short digest of the edit, which tells whether a recorded verdict is of this edit."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:12]
