"""Pictures of two scanned digits each, with captions and questions, as files beside JSON lines.

The digits are those that scikit-learn carries: 1,797 of 43 people, scanned to 8 x 8 pixels. Digits of held-out pictures
are in no training picture.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE, LARGEST, HELD_OUT = 8, 16, 360
QUESTIONS = {
    "left": "Which digit is on the left?",
    "right": "Which digit is on the right?",
    "larger": "Which digit is the larger one?",
}


def main(argv: Sequence[str]) -> int:
    """Write the pictures and the texts of both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--pictures", type=int, default=6000, help="training pictures (default 6000)")
    given = parser.parse_args(argv)
    digits = scanned()
    order = np.random.default_rng(0).permutation(len(digits))
    parts = {"train": (order[HELD_OUT:], given.pictures), "heldout": (order[:HELD_OUT], 300)}
    for part, (numbers, count) in parts.items():
        pictures = given.output_dir / "images" / part
        pictures.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(len(numbers))
        texts = dict[str, list[dict[str, object]]](captions=[], questions=[])
        for number in range(count):
            (left, a), (right, b) = (digits[each] for each in random.choice(numbers, 2))
            name = f"images/{part}/{number:05}.png"
            Image.fromarray(np.hstack([left, right])).save(given.output_dir / name)
            caption = {"from": "human", "value": "<image>\nDescribe."}, {"from": "gpt", "value": f"{a} and {b}"}
            texts["captions"].append({"kind": "caption", "image": name, "conversations": caption})
            answers = {"left": a, "right": b, "larger": max(a, b)}
            for kind in answers if part == "heldout" else [list(answers)[number % 3]]:
                asked = {"from": "human", "value": f"<image>\n{QUESTIONS[kind]}"}
                turns = asked, {"from": "gpt", "value": str(answers[kind])}
                texts["questions"].append({"kind": kind, "image": name, "conversations": turns})
        texts["texts"] = without_pictures([*texts["captions"], *texts["questions"]])
        if part == "heldout":
            texts |= {kind: [each for each in texts["questions"] if each["kind"] == kind] for kind in QUESTIONS}
        for name, lines in texts.items():
            path = given.output_dir / f"{part}_{name}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        print(f"{count} pictures of {part} in {pictures}")
    return 0


def scanned() -> list[tuple[NDArray[np.uint8], int]]:
    """The digits, white on black, and what they are."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        sys.exit("error: the digits are scikit-learn's: pip install --no-deps scikit-learn")
    with gzip.open(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    pixels = (table[:, :-1] * 255 / LARGEST).astype(np.uint8).reshape(-1, SIDE, SIDE)
    return list(zip(pixels, table[:, -1].astype(int).tolist()))


def without_pictures(lines: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Conversations as texts alone."""
    found = list[dict[str, object]]()
    for line in lines:
        turns = [{**turn, "value": turn["value"].replace("<image>\n", "")} for turn in line["conversations"]]  # type: ignore[attr-defined]
        found.append({"conversations": turns, "text": "\n".join(turn["value"] for turn in turns)})
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
