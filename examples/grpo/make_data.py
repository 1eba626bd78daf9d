"""Write texts of sums of two digits, of which many are wrong, and prompts for GRPO; some sums are held out.

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

TEXTS, RIGHT, HELD_OUT = 20000, 0.4, 20


def main(folder: Path) -> None:
    """Write the three files; the same ones every time."""
    folder.mkdir(parents=True, exist_ok=True)
    choose = random.Random(0)
    sums = [list(each) for each in itertools.product(range(10), repeat=2)]
    choose.shuffle(sums)
    held_out, known = sums[:HELD_OUT], sums[HELD_OUT:]  # by GRPO: texts have all
    texts = []
    for _ in range(TEXTS):
        digits = choose.choice(sums)
        answer = sum(digits) if choose.random() < RIGHT else max(0, sum(digits) + choose.randint(-2, 2))
        texts.append({"text": f"{prompt(digits)}{answer}"})
    write(folder / "text.jsonl", texts)
    write(folder / "prompts.jsonl", ({"prompt": prompt(digits), "digits": digits} for digits in known))
    asked = [digits for digits in held_out for _ in range(10)]  # ten answers to each
    write(folder / "held_out.jsonl", ({"prompt": prompt(digits), "digits": digits} for digits in asked))


def prompt(digits: list[int]) -> str:
    """The sum as a question."""
    return f"{'+'.join(map(str, digits))}="


def write(path: Path, records: Iterable[Any]) -> None:
    """Write a JSON object a line."""
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
