"""Whether files could be written somewhere, found out without leaving anything there."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile


def why_not_writable(folder: Path) -> str | None:
    """Why no file could be put into ``folder``, or None when it can be, after making the folder if it is missing."""
    for path in (folder, *folder.absolute().parents):
        try:
            if path.is_symlink() and not path.exists():
                return f"{path} is a link to nothing"
            if path.exists():
                with TemporaryFile(dir=path):  # permissions alone don't tell: root, networks, read-only mounts
                    return None
        except OSError as error:  # also of looking, in a folder that may not be searched
            return f"{path}: {error.strerror}"
    return None
