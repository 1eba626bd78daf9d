"""What each folder may take of the default tier: its share of the minutes in the table of CONTRIBUTING.

A run of the whole default tier measures and judges itself; ``python -m tests.budget`` writes what the last one measured
into the table, whose review grants it. Minutes are kept nowhere else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "CONTRIBUTING.md"
LAST = "tests/cpu_seconds"
"""Where pytest's cache keeps the seconds of the last run, by folder."""

LAST_RUN = ROOT / ".pytest_cache" / "v" / LAST
MOST = 16.0
"""CPU minutes of the whole default tier: eight minutes on two slow cores."""

HEAD = (
    "| folder | minutes | share | what the default tier proves there | the whole tier adds |\n|---|---|---|---|---|\n"
)
FACTOR, SLACK = 1.5, 10.0
"""How far above its share a folder may be, in times and in seconds: shares differ a little between machines."""


@dataclass(frozen=True)
class Folder:
    """What tests of a folder prove in the default tier, and what the whole tier adds."""

    proves: str
    more: str = ""


FOLDERS = {
    "tests/equivalence": Folder(
        "each variant at a rich layout and each layout once train the model of one rank; frozen parameters; "
        "Megatron-core's 20 steps",
        "all pairs of variant and layout, more random layouts",
    ),
    "tests/end_to_end": Folder(
        "the real commands train, stop, resume at another layout, convert, evaluate and serve; the quickstart; killed "
        "and failing ranks; rehearsals, and the faults that they name",
        "the other quickstarts and documents, every example's dry run, every layout's rehearsal, torchrun, Slurm, "
        "kills while saving in the background or to object storage, hostile requests",
    ),
    "tests/parallel": Folder(
        "what ranks send and save, resumed runs bit for bit, any layout from any other",
        "more pairs of layouts, larger worlds",
    ),
    "tests/unit/conversion": Folder(
        "every kind of layer to and from transformers and Megatron-LM, every version of its files",
        "every published type, those versions at every layout",
    ),
    "tests/unit": Folder(
        "pure parts: schedules, flags, data, tokenizers, checkpoints, serving, tools",
        "larger schedules, real corpora, each benchmark's `--quick`",
    ),
    "tests/architecture": Folder("sizes, types, imports, documents", "a run on a pretended accelerator"),
    "tests/faults": Folder("that faults which are put into the code are still where they are said to be"),
    "tests/harness": Folder("that a rank that fails or hangs is seen"),
    "tests/gpu": Folder("nothing, on a machine without a GPU"),
}
"""The most specific folder counts."""


def folder_of(test: str) -> str:
    """Whose minutes a test takes; its own folder's, where that has no budget."""
    above = [folder for folder in FOLDERS if test.startswith(f"{folder}/")]
    return max(above, key=len, default=test.rpartition("/")[0])


def minutes(document: str) -> dict[str, float]:
    """CPU minutes of each folder in the table of a document."""
    rows = re.findall(r"^\| `(\S+)` \| (\S+) \|", _table_in(document), re.MULTILINE)
    return {folder: float(each) for folder, each in rows}


def over(seconds: Mapping[str, float], granted: Mapping[str, float]) -> list[str]:
    """A sentence for each folder that takes more of ``seconds`` than its share of the ``granted`` minutes."""
    total, found = sum(seconds.values()), list[str]()
    for folder, value in seconds.items():
        share = granted.get(folder, 0.0) / sum(granted.values())
        if folder not in FOLDERS:
            found.append(f"{folder} has no budget: give it one in tests/budget.py")
        elif value > share * total * FACTOR + SLACK:
            found.append(
                f"{folder} takes {value:.0f} of {total:.0f} CPU seconds, {value / total:.0%}, where the table of "
                f"{DOCUMENT.name} gives it {share:.0%}: make its tests faster, mark some slow, or grant it the time "
                "with python -m tests.budget"
            )
    return found


def table(measured: Mapping[str, float]) -> str:
    """The table with these minutes of folders, and their shares."""
    rounded = {name: round(measured.get(name, 0.0), 1) for name in FOLDERS}
    total = sum(rounded.values())
    rows = [
        f"| `{name}` | {rounded[name]:.1f} | {rounded[name] / total:.0%} | {each.proves} | {each.more} |\n"
        for name, each in FOLDERS.items()
    ]
    return f"{HEAD}{''.join(rows)}| together | {total:.1f} | | | |\n"


def rewritten(document: str, measured: Mapping[str, float]) -> str:
    """A document with these minutes of folders in its table."""
    return document.replace(_table_in(document), table(measured))


def _table_in(document: str) -> str:
    return document[document.index(HEAD) :].partition("\n\n")[0] + "\n"


def main() -> int:
    """Write the last run's minutes into the table."""
    if not LAST_RUN.is_file():
        sys.stderr.write("error: no run of the whole default tier has passed here: bash tests/run.sh\n")
        return 2
    measured = {folder: seconds / 60 for folder, seconds in json.loads(LAST_RUN.read_text(encoding="utf-8")).items()}
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text(encoding="utf-8"), measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
