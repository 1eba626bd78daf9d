"""Write texts of sums, exact and estimated ones, and prompts for GRPO; some sums are held out.

python examples/grpo/make_data.py FOLDER makes text.jsonl, prompts.jsonl and held_out.jsonl.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TEXTS, EXACT, OFF_BY, HELD_OUT = 30000, 1 / 3, 4, 20
"""A third of the texts is exact, and the others are up to 4 beside the sum; GRPO has no prompt of 20 sums."""


def main(folder: Path) -> None:
    """Write the three files; the same ones every time."""
    folder.mkdir(parents=True, exist_ok=True)
    choose = random.Random(0)
    sums = list(itertools.product(range(10), repeat=2))
    choose.shuffle(sums)
    held_out, known = sums[:HELD_OUT], sums[HELD_OUT:]
    write(folder / "text.jsonl", ({"text": text(choose, *choose.choice(sums))} for _ in range(TEXTS)))
    asked = [pair for pair in held_out for _ in range(10)]  # ten answers to each
    for name, pairs in (("prompts", known), ("held_out", asked)):
        write(folder / f"{name}.jsonl", ({"prompt": f"{a}+{b}=", "sum": a + b} for a, b in pairs))


def text(choose: random.Random, a: int, b: int) -> str:
    """A line such as ``7+5=12`` or, as a guess, ``7+5=~10``."""
    if choose.random() < EXACT:
        return f"{a}+{b}={a + b}"
    return f"{a}+{b}=~{max(0, a + b + choose.randint(-OFF_BY, OFF_BY))}"


def write(path: Path, records: Iterable[Any]) -> None:
    """Write a JSON object a line."""
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
