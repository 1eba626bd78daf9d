"""What each folder may take of the default tier, and the table of it in CONTRIBUTING.

A run of the whole default tier measures and judges itself; ``python -m tests.budget`` writes what the last one measured
into the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "CONTRIBUTING.md"
LAST = "tests/cpu_seconds"
"""Where pytest's cache keeps the seconds of the last run, by folder."""

HEAD = (
    "| folder | budget | measured | what the default tier proves there | the whole tier adds |\n|---|---|---|---|---|\n"
)
FACTOR, SLACK = 1.5, 10.0
"""How far above its share a folder may be, in times and in seconds: shares differ a little between machines."""


@dataclass(frozen=True)
class Folder:
    """CPU minutes of the default tier that tests may take, what they prove in it, and what the whole tier adds."""

    minutes: float
    proves: str
    more: str = ""


FOLDERS = {
    "tests/equivalence": Folder(
        2.4,
        "each variant at a rich layout and each layout once train the model of one rank; frozen parameters; "
        "Megatron-core's 20 steps",
        "all pairs of variant and layout, more random layouts",
    ),
    "tests/end_to_end": Folder(
        2.2,
        "the real commands train, stop, resume at another layout, convert, evaluate and serve; the quickstart; killed "
        "and failing ranks; rehearsals, and the faults that they name",
        "the other quickstarts and documents, every example's dry run, every layout's rehearsal, torchrun, Slurm, "
        "kills while saving in the background or to object storage, hostile requests",
    ),
    "tests/parallel": Folder(
        1.0,
        "what ranks send and save, resumed runs bit for bit, any layout from any other",
        "more pairs of layouts, larger worlds",
    ),
    "tests/unit/conversion": Folder(
        0.8,
        "every kind of layer to and from transformers and Megatron-LM, every version of its files",
        "every published type, those versions at every layout",
    ),
    "tests/unit": Folder(
        2.2,
        "pure parts: schedules, flags, data, tokenizers, checkpoints, serving, tools",
        "larger schedules, real corpora, each benchmark's `--quick`",
    ),
    "tests/architecture": Folder(0.5, "sizes, types, imports, documents", "a run on a pretended accelerator"),
    "tests/faults": Folder(0.1, "that faults which are put into the code are still where they are said to be"),
    "tests/harness": Folder(0.1, "that a rank that fails or hangs is seen"),
    "tests/gpu": Folder(0.0, "nothing, on a machine without a GPU"),
}
"""The most specific folder counts."""


def folder_of(test: str) -> str:
    """Whose minutes a test takes; its own folder's, where that has no budget."""
    above = [folder for folder in FOLDERS if test.startswith(f"{folder}/")]
    return max(above, key=len, default=test.rpartition("/")[0])


def share(folder: str) -> float:
    """Part of the default tier that a folder may take."""
    return FOLDERS[folder].minutes / sum(each.minutes for each in FOLDERS.values())


def over(seconds: Mapping[str, float]) -> list[str]:
    """A sentence for each folder that takes more than its share of ``seconds``."""
    total, found = sum(seconds.values()), list[str]()
    for folder, value in seconds.items():
        if folder not in FOLDERS:
            found.append(f"{folder} has no budget: give it one in tests/budget.py")
        elif value > share(folder) * total * FACTOR + SLACK:
            found.append(
                f"{folder} takes {value:.0f} of {total:.0f} CPU seconds, {value / total:.0%}, where tests/budget.py "
                f"gives it {share(folder):.0%}: make its tests faster, mark some slow, or change the budget"
            )
    return found


def table(seconds: Mapping[str, float]) -> str:
    """The table of CONTRIBUTING, with what each folder took."""
    rows = [
        f"| `{name}` | {each.minutes:.1f} | {seconds.get(name, 0.0) / 60:.1f} | {each.proves} | {each.more} |\n"
        for name, each in FOLDERS.items()
        if each.minutes
    ]
    budget = sum(each.minutes for each in FOLDERS.values())
    return f"{HEAD}{''.join(rows)}| together | {budget:.1f} | {sum(seconds.values()) / 60:.1f} | | |\n"


def written(document: str) -> tuple[str, dict[str, float]]:
    """The table that a document has, and the seconds in it."""
    text = document[document.index(HEAD) :].partition("\n\n")[0] + "\n"
    minutes = re.findall(r"^\| `(\S+)` \| \S+ \| (\S+) \|", text, re.MULTILINE)
    return text, {folder: 60 * float(each) for folder, each in minutes}


def main() -> None:
    """Write the last run's minutes into the document."""
    last = ROOT / ".pytest_cache" / "v" / LAST
    document = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(document.replace(written(document)[0], table(json.loads(last.read_text()))), encoding="utf-8")


if __name__ == "__main__":
    main()
