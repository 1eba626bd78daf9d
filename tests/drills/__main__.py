"""``python -m tests.drills NAME …`` runs drills and prints how they end; without a name it lists them."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.drills.catalogue import DRILLS, NEED_PROGRAMS, run_drill, summary


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the drills that the command line names; 1 when one ends otherwise than documented."""
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description="Faults of machines, made on purpose.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="drills to run; all: every one; none: list them")
    parser.add_argument("--folder", type=Path, help="where logs and checkpoints stay; a temporary folder otherwise")
    given = parser.parse_args()
    if not given.names:
        for name, drill in DRILLS.items():
            sys.stdout.write(f"{name:17} {summary(drill)}\n")
        return 0
    names = [*DRILLS] if given.names == ["all"] else given.names
    if unknown := [name for name in names if name not in DRILLS]:
        parser.error(f"there is no drill {unknown[0]}; there are {', '.join(DRILLS)}")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) if given.folder is None else given.folder.resolve()
        return 1 if sum(not ends_as_documented(name, root / name) for name in names) else 0


def ends_as_documented(name: str, folder: Path) -> bool:
    """Run a drill and print how it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    say(f"== {name}: {summary(DRILLS[name])}")
    program = NEED_PROGRAMS.get(name)
    if program is not None and shutil.which(program) is None:
        say(f"   FAILED: it needs the program {program}, which is not installed")
        return False
    try:
        run_drill(name, folder, say)
    except AssertionError as error:
        say(f"   FAILED: {error}")
        return False
    say(f"   as documented, {time.monotonic() - start:.0f} s")
    return True


if __name__ == "__main__":
    sys.exit(main())
