"""The reward of the example: whether an answer is the sum of its prompt's digits.

python examples/grpo/rewards.py HELD_OUT ANSWERS ... prints the share of right answers in files of
tools/text_generation_cli.py, beside what guessing gives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUMS = 19  # from 0 to 18


def right_sum(completions: Sequence[str], digits: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """1 for the right sum, 0 for anything else."""
    return [float(text.strip() == str(sum(each))) for text, each in zip(completions, digits)]


def main(files: Sequence[str]) -> None:
    """Print a line for each file of answers."""
    for file in files:
        answers = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
        rewards = right_sum([each["text"] for each in answers], [each["digits"] for each in answers])
        say(Path(file).stem, sum(rewards) / len(rewards), f"of {len(rewards)} answers are right")
    say("guessing", 1 / SUMS)


def say(name: str, share: float, what: str = "") -> None:
    """Print a line of the table."""
    sys.stdout.write(f"{name:>12}: {share:6.1%} {what}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
