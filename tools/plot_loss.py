"""Draw the training and validation loss of one run or several: from TensorBoard folders, or from log files.

With --curve another curve of TensorBoard folders, such as moe/max_violation.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError, DataError, run_command
from megatron.small_files import check_regular
from megatron.training.reporting.picture import COLORS, legend, new_axes, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINING_LINE = re.compile(r" iteration +(\d+)/ *\d+ \|.*?\| global batch size: +\d+ \| (.+?): (\d\.\d+E[+-]\d+) \|")
VALIDATION_LINE = re.compile(r" validation loss at iteration (\d+)(?: on validation set)? \| (.+?) value: (\S+) \|")

Curve = dict[int, float]
"""Loss by iteration; a later value for the same iteration (after a restart) replaces the earlier one."""


@dataclass
class Losses:
    """The curves of one run."""

    label: str
    name: str = "loss"
    train: Curve = field(default_factory=dict)
    validation: Curve = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
    """Read the runs and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a TensorBoard folder or a log file")
    parser.add_argument("--output", default="loss.png", help="picture to write: .png, .svg or .pdf (default: loss.png)")
    parser.add_argument("--title", help="line above the plot")
    parser.add_argument("--curve", metavar="NAME", help="another curve than the loss, by its name in TensorBoard")
    arguments = parser.parse_args(argv)
    runs = [read_losses(Path(run), name=arguments.curve) for run in arguments.runs]
    draw(runs, Path(arguments.output), title=arguments.title)
    for run in runs:
        print(f"{run.label}: {summary(run)}")
    print(f"wrote {arguments.output}")
    return 0


def read_losses(path: Path, *, name: str | None = None) -> Losses:
    """Losses of the run whose events or log are at ``path``, or its curve of that ``name``.

    Raises DataError when it has none, ConfigError for a curve of a log file.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; give a --tensorboard-dir folder or a file with the log of a run")
    if name is not None and not path.is_dir():
        raise ConfigError(f"--curve {name} is read from TensorBoard's events and {path} is a file; give the folder")
    losses = read_events(path, name=name) if path.is_dir() else read_log(path)
    if not losses.train:
        kind = "TensorBoard events" if path.is_dir() else "log lines"
        raise DataError(
            f"{path} holds no {kind} with a training loss; give the folder or log of a run that has trained"
        )
    return losses


def read_log(path: Path) -> Losses:
    """Losses from a run's log lines."""
    check_regular(path, where=str(path), error=DataError)
    losses = Losses(path.stem)
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if found := TRAINING_LINE.search(line):
            losses.train[int(found[1])] = float(found[3])
            losses.name = found[2]
        elif found := VALIDATION_LINE.search(line):
            losses.validation[int(found[1])] = float(found[3])
    return losses


def read_events(path: Path, *, name: str | None = None) -> Losses:
    """Losses from a folder of TensorBoard events: the first curve whose name ends in ``loss``, or the one named.

    Raises DataError for a name that the folder lacks.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError:
        raise ConfigError(
            f"reading {path} needs the tensorboard package: pip install tensorboard, or give a log file instead"
        ) from None
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    losses = Losses(path.name)
    names = [tag for tag in tags if (tag.endswith("loss") if name is None else tag == name)]
    if name is not None and not names:
        raise DataError(f"{path} has no curve {name}; it has {', '.join(sorted(tags)) or 'none'}")
    if names:
        losses.name = "lm loss" if "lm loss" in names else names[0]
        losses.train = {event.step: event.value for event in events.Scalars(losses.name)}
        if f"{losses.name} validation" in tags:
            losses.validation = {event.step: event.value for event in events.Scalars(f"{losses.name} validation")}
    return losses


def summary(run: Losses) -> str:
    """First and last losses in words; the training loss as the trend that is drawn, without a step's noise."""
    parts = []
    for kind, curve, smooth in (("training", run.train, True), ("validation", run.validation, False)):
        if curve:
            iterations = sorted(curve)
            values = [curve[iteration] for iteration in iterations]
            values = trend(values) if smooth else values
            fall = f"from {values[0]:.2f} (iteration {iterations[0]}) to {values[-1]:.2f} ({iterations[-1]})"
            parts.append(f"{kind} {run.name} {fall}")
    return ", ".join(parts)


def draw(runs: list[Losses], output: Path, *, title: str | None = None) -> None:
    """Write the picture: each training curve with its trend, validation as points, last values at the right edge."""
    axes = new_axes()
    for number, run in enumerate(runs):
        color, other = COLORS[number % len(COLORS)], COLORS[(number + (len(runs) == 1)) % len(COLORS)]
        _draw_run(axes, run, color=color, validation_color=other, prefix="" if len(runs) == 1 else f"{run.label}: ")
    axes.set_xlim(left=0)
    axes.margins(x=0.02)
    unit = " (nats per token)" if runs[0].name.endswith("loss") else ""
    style(axes, x="iteration", y=runs[0].name + unit, title=title)
    legend(axes, columns=min(len(runs), 3))
    save(axes, output)


def _draw_run(axes: Axes, run: Losses, *, color: str, validation_color: str, prefix: str) -> None:
    iterations, values = sorted(run.train), [run.train[iteration] for iteration in sorted(run.train)]
    smooth = trend(values)
    axes.plot(iterations, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(iterations, smooth, color=color, linewidth=2, label=f"{prefix}training {smooth[-1]:.2f}")
    if run.validation:
        points = sorted(run.validation)
        losses = [run.validation[point] for point in points]
        axes.plot(
            points,
            losses,
            color=validation_color,
            linewidth=1.2,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label=f"{prefix}validation {losses[-1]:.2f}",
        )


def trend(values: list[float], *, share: float = 0.03) -> list[float]:
    """Mean over a centred window of ``share`` of the curve; narrower at the start, where the curve is steep."""
    half = max(1, round(len(values) * share / 2))
    means = []
    for index in range(len(values)):
        reach = min(half, index)
        window = values[index - reach : index + reach + 1]
        means.append(sum(window) / len(window))
    return means


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
