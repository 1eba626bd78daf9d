"""Options that every benchmark has, and the ratios that it hands over to be put beside its goal."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with ``--quick`` and ``--ratios``, whose help is the benchmark's docstring as it is written."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds: shows that it runs, no more")
    parser.add_argument("--ratios", type=Path, metavar="FILE", help="also save ratios here, as JSON")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None, **quick: Any) -> argparse.Namespace:
    """The options; with ``--quick`` those in ``quick`` are the defaults, and flags that are given still count."""
    options = parser.parse_args(argv)
    if not options.quick:
        return options
    parser.set_defaults(**quick)
    return parser.parse_args(argv)


def save(options: argparse.Namespace, ratios: Mapping[str, float], *, watched: Collection[str] = ()) -> None:
    """Save ratios where ``--ratios`` says. ``watched``: those that the goal is not about.

    Raises ValueError when there is no ratio to save, and for one that is no number.
    """
    if options.ratios is None:
        return
    if wrong := [what for what, ratio in ratios.items() if not math.isfinite(ratio)]:
        raise ValueError(f"no number was found for {', '.join(wrong)}")
    if not ratios:
        raise ValueError("the benchmark found no ratio")
    rows = [{"what": what, "ratio": ratio, "has_goal": what not in watched} for what, ratio in ratios.items()]
    options.ratios.write_text(json.dumps({"ratios": rows}, indent=1) + "\n")


def skip(options: argparse.Namespace, reason: str) -> None:
    """Say in one line why the benchmark can't run here, and save that where ``--ratios`` says."""
    print(f"skipped: {reason}")
    if options.ratios is not None:
        options.ratios.write_text(json.dumps({"skipped": reason}) + "\n")
