"""The reward of the example: whether the number of an answer is the sum, exact or as a guess.

python examples/grpo/rewards.py ANSWERS ... prints what is right in files of tools/text_generation_cli.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def right_sum(completions: Sequence[str], sum: Sequence[int], **_: Any) -> list[float]:
    """1 for the right number, also after the ``~`` of a guess, and 0 for anything else."""
    return [float(text.strip().removeprefix("~") == str(right)) for text, right in zip(completions, sum)]


def main(files: Sequence[str]) -> None:
    """Print a line for each file of answers: how many are right, and how many are guesses."""
    for file in files:
        answers = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        texts = [each["text"] for each in answers]
        right = right_sum(texts, [each["sum"] for each in answers])
        guessed = [text.strip().startswith("~") for text in texts]
        shares = f"{sum(right) / len(texts):6.1%} right, {sum(guessed) / len(texts):6.1%} guessed"
        sys.stdout.write(f"{Path(file).stem:>12}: {shares}, of {len(texts)} answers\n")


if __name__ == "__main__":
    main(sys.argv[1:])
