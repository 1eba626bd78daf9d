"""Draw a pipeline schedule, as text and on request as a picture: who computes what when, bubbles, kept activations."""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.flags import Settings, flag
from megatron.config.parallel import PipelineScheduleName
from megatron.config.parse import parse_groups
from megatron.config.pipeline import too_long_to_schedule
from megatron.core.pipeline_parallel.actions import Kind
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.pipeline_parallel.simulate import Durations, Simulation, draw, simulate
from megatron.errors import ConfigError, run_command
from megatron.training.reporting.picture import FAINT, INK, legend, new_axes, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS: dict[Kind, str] = {"F": "#2a6fb0", "B": "#3d8b5f", "I": "#8a5aa8", "W": "#b8862b"}
MEANINGS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of inputs",
    "W": "backward, gradients of weights",
}
MOST_LABELLED = 2000  # boxes; more of them hide their labels


class ScheduleConfig(Settings):
    """Which schedule, on how many ranks, and how long its passes take."""

    pipeline_schedule: PipelineScheduleName = flag("Order of forward and backward passes.", default="1f1b")
    pipeline_model_parallel_size: int = flag("Ranks of the pipeline.", default=4, at_least=1)
    num_microbatches: int = flag("Microbatches of a step.", default=8, at_least=1)
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        "Interleaved schedule: model chunks on each rank; 2 unless given.", default=None, at_least=1
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(
        "Interleaved schedule: microbatches that pass one chunk before the next chunk runs; one per rank unless given.",
        default=None,
        at_least=1,
    )
    forward_time: float = flag(
        "Forward time of one microbatch through one model chunk (any unit).", default=1.0, above=0
    )
    input_backward_time: float = flag("Time for the gradients of a chunk's inputs.", default=1.0, above=0)
    weight_backward_time: float = flag("Time for the gradients of a chunk's weights.", default=1.0, above=0)
    transfer_time: float = flag("Time of a transfer between two ranks.", default=0.0, at_least=0)
    output: str | None = flag("File for a picture: .png, .svg or .pdf.", default=None)


def main(argv: Sequence[str]) -> int:
    """Simulate the schedule, print it, and draw it when asked."""
    (config,) = parse_groups(argv, ScheduleConfig, prog="print_schedule.py", about=__doc__ or "")
    check_interleaved(config)
    chunks = {"interleaved": config.num_virtual_stages_per_pipeline_rank or 2, "zb-v": 2}.get(
        config.pipeline_schedule, 1
    )
    stages = config.pipeline_model_parallel_size * chunks
    if wrong := too_long_to_schedule(stages=stages, microbatches=config.num_microbatches):
        raise ConfigError(wrong)
    durations = Durations(
        forward=config.forward_time,
        input_backward=config.input_backward_time,
        weight_backward=config.weight_backward_time,
        transfer=config.transfer_time,
    )
    settings = PipelineSettings(
        config.pipeline_schedule,
        config.pipeline_model_parallel_size,
        chunks,
        config.microbatch_group_size_per_virtual_pipeline_stage,
    )
    simulation = simulate(settings.schedule(config.num_microbatches), durations)
    unit = min(durations.forward, durations.input_backward, durations.weight_backward)
    print(draw(simulation.rows, unit=unit))
    print("\n".join(["", *facts(simulation)]))
    if config.output is not None:
        draw_picture(simulation, Path(config.output))
        print(f"wrote {config.output}")
    return 0


def check_interleaved(config: ScheduleConfig) -> None:
    """Raise ConfigError for flags of the interleaved schedule with another one."""
    fields = ("num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_virtual_pipeline_stage")
    named = [f"--{field.replace('_', '-')}" for field in fields if getattr(config, field) is not None]
    if named and config.pipeline_schedule != "interleaved":
        raise ConfigError(
            f"{' and '.join(named)} have no effect on --pipeline-schedule {config.pipeline_schedule}; use interleaved"
        )


def facts(simulation: Simulation) -> list[str]:
    """What the schedule costs, for all ranks together and for each."""
    placement = simulation.schedule.placement
    lines = [
        f"{simulation.schedule.name}: {placement.num_stages} stages on {placement.num_ranks} ranks, a step takes "
        f"{simulation.makespan:g}; ranks wait for {100 * simulation.bubble:.1f} % of the time they compute"
    ]
    peaks = simulation.peak_live()
    for rank, (peak, idle) in enumerate(zip(peaks, simulation.idle_within)):
        stages = ", ".join(map(str, placement.stages_of(rank)))
        busy = simulation.busy(rank)
        lines.append(
            f"rank {rank:<2} stages {stages}: computes {busy:g}, waits {simulation.makespan - busy:g} "
            f"({idle:g} in the middle), keeps up to {peak:g} microbatches of a chunk"
        )
    return lines


def draw_picture(simulation: Simulation, output: Path) -> None:
    """A row for each rank, a box for each pass; chunks after the first are lighter."""
    ranks = len(simulation.rows)
    width = min(40.0, max(8.0, 0.28 * sum(len(row) for row in simulation.rows) / ranks + 3.0))
    axes = new_axes(size=(width, 0.45 * ranks + 1.6))
    _draw_rows(axes, simulation)
    _style(axes, simulation)
    save(axes, output)


def _draw_rows(axes: Axes, simulation: Simulation) -> None:
    chunks = simulation.schedule.placement.num_chunks
    labelled = sum(map(len, simulation.rows)) <= MOST_LABELLED
    for rank, row in enumerate(simulation.rows):
        for interval in row:
            action, length = interval.action, interval.end - interval.start
            strength = strength_of(action.chunk, chunks)
            color = COLORS[action.kind]
            axes.barh(rank, length, left=interval.start, height=0.86, color=color, alpha=strength, edgecolor="white")
            if labelled:
                ink = "white" if strength > 0.6 else INK
                middle = interval.start + length / 2
                axes.text(middle, rank, str(action.microbatch), ha="center", va="center", color=ink, fontsize=7)


def strength_of(chunk: int, chunks: int) -> float:
    """How opaque the boxes of a chunk are."""
    return 1.0 - 0.65 * chunk / max(chunks - 1, 1)


def _style(axes: Axes, simulation: Simulation) -> None:
    schedule, peaks = simulation.schedule, simulation.peak_live()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.set_yticks(range(len(peaks)), [f"rank {rank}, keeps {peak:g}" for rank, peak in enumerate(peaks)])
    axes.invert_yaxis()
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_xlim(0, simulation.makespan)
    axes.set_xlabel("time", color=INK)
    used = {action.kind for order in schedule.orders for action in order}
    kinds, chunks = [kind for kind in MEANINGS if kind in used], schedule.placement.num_chunks
    for kind in kinds:
        for chunk in range(chunks):
            label = MEANINGS[kind] + (f", chunk {chunk}" if chunks > 1 else "")
            axes.barh([0], [0], color=COLORS[kind], alpha=strength_of(chunk, chunks), label=label)
    legend(axes, columns=len(kinds))
    title = f"{schedule.name}: bubble {100 * simulation.bubble:.1f} %, a step takes {simulation.makespan:g}"
    axes.set_title(title, loc="left", color=INK, fontsize=11, pad=10)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
