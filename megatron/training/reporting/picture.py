"""The common style of pictures. Needs matplotlib, an optional library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2a6fb0", "#c8553d", "#3d8b5f", "#8a5aa8", "#b8862b", "#4a4a4a")
INK, FAINT = "#222222", "#dddddd"


def new_axes(*, size: tuple[float, float] = (9, 5)) -> Axes:
    """Axes of a new picture, of ``size`` in inches; raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError("drawing needs the matplotlib package: pip install matplotlib") from None
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def style(axes: Axes, *, x: str, y: str, title: str | None = None) -> None:
    """Label the axes; no frame, a light grid."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.tick_params(length=0, labelcolor=INK)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    if title:
        axes.set_title(title, loc="left", color=INK, fontsize=13, pad=12)


def legend(axes: Axes, *, columns: int = 1) -> None:
    """The legend, below the axes, where it covers no curve."""
    figure: Figure = axes.get_figure()  # type: ignore[assignment]
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, labelcolor=INK, fontsize=9)


def save(axes: Axes, output: Path, *, flag: str = "--output") -> None:
    """Write the picture; raises ConfigError when the file can't be written or its suffix is no picture format's."""
    figure: Figure = axes.get_figure()  # type: ignore[assignment]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {output} cannot be written: {error}") from None
