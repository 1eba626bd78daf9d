"""A run, or two side by side, as one HTML page without scripts and without network: curves, time, events, settings."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import TYPE_CHECKING, Any

from megatron.errors import visible
from megatron.training.reporting.events import Event
from megatron.training.reporting.history import Curve, History
from megatron.training.reporting.picture import COLORS, legend, new_axes, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SAMPLES = 3  # iterations whose samples are shown
_EVENTS = 200  # newest that are shown
_LONGEST = 80  # characters of a label
_HIGHEST = 1e100  # of values that matplotlib can scale
_CHARTS = {
    "tokens_per_second": "Tokens a second",
    "seconds_per_iteration": "Seconds an iteration",
    "learning_rate": "Learning rate",
    "grad_norm": "Norm of the gradients",
    "mfu": "Model FLOPs utilization",
}
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; overflow-wrap: anywhere; }
th { font-weight: 600; color: #555; }
tr + tr td { border-top: 1px solid #eee; }
.differs { background: #fdf3d7; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1rem; }
.charts .wide { grid-column: 1 / -1; }
figure { margin: 0; }
svg { width: 100%; height: auto; }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .6rem; margin: .3rem 0; overflow-wrap: anywhere; }
.warning { color: #8a5a00; }
.failed { color: #a02020; }
"""


def report_page(runs: Sequence[History]) -> str:
    """The page of ``runs``, of which each has a column in every table. Raises ConfigError without matplotlib."""
    title = " and ".join(run.label for run in runs)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _summary(runs),
        "<h2>Curves</h2>",
        _charts(runs),
        "<h2>Where the time went</h2>",
        _time(runs),
        "<h2>Settings that are not the defaults</h2>",
        _settings(runs),
        "<h2>Data</h2>",
        _data(runs),
        "<h2>Samples</h2>",
        _samples(runs),
        "<h2>Events</h2>",
        *(_events(run, named=len(runs) > 1) for run in runs),
    ]
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head = f"<head>{meta}<title>{escape(title)}</title><style>{_CSS}</style></head>"
    body = "\n".join(parts)
    return visible(f'<!doctype html>\n<html lang="en">{head}<body>\n{body}\n</body></html>\n')


def _table(runs: Sequence[History], rows: Mapping[str, Sequence[str]], *, marks_differences: bool = False) -> str:
    """A row for each name with a column for each run, whose cells are HTML."""
    head = "".join(f"<th>{escape(run.label)}</th>" for run in runs) if len(runs) > 1 else ""
    lines = [f"<tr><th></th>{head}</tr>"] if head else []
    for name, cells in rows.items():
        differs = ' class="differs"' if marks_differences and len(set(cells)) > 1 else ""
        lines.append(f"<tr{differs}><th>{escape(name)}</th>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(lines)}</table>"


def _summary(runs: Sequence[History]) -> str:
    rows = {
        "state": [escape(_state(run)) for run in runs],
        "model": [escape(_model(run.start)) for run in runs],
        "ranks": [escape(_ranks(run.start)) for run in runs],
    }
    for name in _names(run.losses for run in runs):
        rows[f"last {name}"] = [_newest(run.curves.get(name)) for run in runs]
    for name in _names(run.validation for run in runs):
        rows[f"best validation {name}"] = [_lowest(run.validation.get(name)) for run in runs]
    for name in _names(run.numbers for run in runs):
        rows[name] = [_newest(run.numbers.get(name)) for run in runs]
    rows["tokens a second (median)"] = [_median(run.curves.get("tokens_per_second")) for run in runs]
    rows["goodput"] = [f"{100 * run.goodput.share:.1f}%" for run in runs]
    rows["version"] = [escape(str(run.start.get("version", "?"))) for run in runs]
    return _table(runs, rows)


def _state(run: History) -> str:
    return f"{run.state} at iteration {run.iteration:,} of {run.start.get('train_iterations', '?')}"


def _model(start: Mapping[str, Any]) -> str:
    return f"{start.get('model', '?')}, {start.get('parameters', 0):,} parameters"


def _ranks(start: Mapping[str, Any]) -> str:
    sizes = " × ".join(f"{axis} {size}" for axis, size in start.get("layout", {}).items() if size > 1)
    return f"{start.get('world_size', '?')} on {start.get('device', '?')}" + (f": {sizes}" if sizes else "")


def _names(of_runs: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in of_runs for name in names))


def _newest(curve: Curve | None) -> str:
    return "" if not curve else f"{curve[max(curve)]:.6g} (iteration {max(curve):,})"


def _lowest(curve: Curve | None) -> str:
    if not curve:
        return ""
    at = min(curve, key=lambda iteration: curve[iteration])
    return f"{curve[at]:.6g} (iteration {at:,})"


def _median(curve: Curve | None) -> str:
    return f"{statistics.median(curve.values()):,.0f}" if curve else ""


def _charts(runs: Sequence[History]) -> str:
    charts = []
    for number, loss in enumerate(_names(run.losses for run in runs)):
        dots = dict[str, Curve]()
        for run in runs:
            for name, curve in run.validation.items():
                if name.startswith(loss):
                    dots[f"{run.label}, validation{name.removeprefix(loss)}"] = curve
        charts.append(_chart(loss, _of(runs, loss), dots, wide=number == 0))
    charts += [_chart(title, _of(runs, name), {}) for name, title in _CHARTS.items()]
    for name in _names(run.numbers for run in runs):
        charts.append(_chart(name, {}, {run.label: run.numbers.get(name, {}) for run in runs}))
    return f'<div class="charts">{"".join(charts)}</div>'


def _of(runs: Sequence[History], name: str) -> dict[str, Curve]:
    return {run.label: run.curves.get(name, {}) for run in runs}


def _chart(title: str, lines: Mapping[str, Curve], dots: Mapping[str, Curve], *, wide: bool = False) -> str:
    """Curves as an SVG picture; nothing where no run has points."""
    if not any((*lines.values(), *dots.values())):
        return ""
    axes = new_axes(size=(9, 3.6) if wide else (5.4, 3.2))
    for (label, curve), color in zip(lines.items(), itertools.cycle(COLORS)):
        axes.plot(list(curve), _heights(curve), color=color, linewidth=1.6, label=_drawn(label))
    for (label, curve), color in zip(dots.items(), itertools.cycle(COLORS)):
        axes.plot(list(curve), _heights(curve), "o--", color=color, linewidth=0.8, markersize=4, label=_drawn(label))
    style(axes, x="iteration", y="", title=_drawn(title))
    if len(lines) + len(dots) > 1:
        legend(axes, columns=2)
    written = io.StringIO()
    figure: Figure = axes.figure  # type: ignore[assignment]
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    picture = written.getvalue()
    picture = re.sub(r"<metadata>.*?</metadata>", "", picture[picture.index("<svg") :], flags=re.DOTALL)
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}>{picture}</figure>"


def _heights(curve: Curve) -> list[float]:
    return [value if abs(value) < _HIGHEST else math.nan for value in curve.values()]  # NaN is a gap in the line


def _drawn(words: str) -> str:
    """``words`` as matplotlib draws them: no formula between dollars, no label that a first underscore hides, and no
    character without a picture.
    """
    plain = visible(words)[:_LONGEST].replace("$", r"\$")
    return f" {plain}" if plain.startswith("_") else plain


def _time(runs: Sequence[History]) -> str:
    def cell(seconds: float, run: History) -> str:
        return f"{seconds:,.1f} s ({100 * seconds / run.goodput.total:.1f}%)" if run.goodput.total else ""

    rows = {
        "since the first launch": [f"{run.goodput.total:,.1f} s in {run.goodput.launches} launches" for run in runs],
        "steps that are kept": [cell(run.goodput.training, run) for run in runs],
    }
    lost = [run.goodput.lost() for run in runs]
    rows |= {why: [cell(each[why], run) for each, run in zip(lost, runs)] for why in lost[0]}
    return _table(runs, rows)


def _settings(runs: Sequence[History]) -> str:
    flags = []
    for run in runs:
        said = [line.split("  ", 1) for line in run.start.get("settings", ())]
        flags.append({text.split(" ", 1)[0]: (text.partition(" ")[2] or "on") for text, *_ in said if text})
    rows = {
        name: [f"<code>{escape(each[name])}</code>" if name in each else "the default" for each in flags]
        for name in _names(flags)
    }
    return _table(runs, rows, marks_differences=True)


def _data(runs: Sequence[History]) -> str:
    return _table(runs, {"": ["<br>".join(escape(str(line)) for line in run.start.get("data", ())) for run in runs]})


def _samples(runs: Sequence[History]) -> str:
    parts = []
    for run in runs:
        for iteration in sorted(run.samples)[-_SAMPLES:]:
            parts.append(f"<p>{escape(run.label)}, iteration {iteration:,}</p>")
            for prompt, text in run.samples[iteration]:
                parts.append(f"<pre><b>{escape(prompt)}</b>{escape(text)}</pre>")
    return "".join(parts) or "<p>None: --generate-samples-interval asks for them.</p>"


def _events(run: History, *, named: bool) -> str:
    rows = []
    for event in run.events[-_EVENTS:]:
        kind = "failed" if event.fields.get("state") == "failed" else event.name
        cells = (f"{datetime.fromtimestamp(event.time):%Y-%m-%d %H:%M:%S}", event.name, _told(event))
        rows.append(f'<tr class="{escape(kind)}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    older = len(run.events) - _EVENTS
    before = f"<p>{older:,} older ones are in the file.</p>" if older > 0 else ""
    return (f"<h3>{escape(run.label)}</h3>" if named else "") + before + f"<table>{''.join(rows)}</table>"


def _told(event: Event) -> str:
    fields = event.fields
    match event.name:
        case "start":
            return f"from iteration {fields.get('iteration')} on {fields.get('world_size')} ranks, {fields.get('host')}"
        case "validation":
            return f"{fields.get('where')}: " + ", ".join(f"{name} {loss}" for name, loss in fields["losses"].items())
        case "saved":
            return f"checkpoint of iteration {fields.get('iteration')}"
        case "save-failed":
            return f"attempt {fields.get('attempt')}: {fields.get('text')}"
        case "warning":
            return str(fields.get("text"))
        case "end":
            return f"{fields.get('state')} at iteration {fields.get('iteration')} {fields.get('error', '')}"
        case _:
            return ", ".join(f"{name} {value}" for name, value in fields.items())
