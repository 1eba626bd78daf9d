"""Coordinate check: train a few steps at several widths, with muP and without, and compare sizes of activations.

With muP they are as large at every width, so settings of a narrow model fit a wide one; without, those of hidden states
and logits grow. Takes the flags of pretrain_gpt.py; --hidden-size is the width of the base model.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.flags import Settings, flag
from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError, run_command
from megatron.training.reporting.picture import COLORS, INK, legend, new_axes, save, style

if TYPE_CHECKING:
    import torch

Sizes = dict[str, float]
"""Mean size of the activations of each place in a model."""


class WidthsConfig(Settings):
    """Which widths, and how long they are trained."""

    widths: tuple[int, ...] = flag("Hidden sizes, multiples of --hidden-size.", default=(64, 128, 256, 512), at_least=1)
    steps: int = flag("Steps before the activations are measured.", default=5, at_least=1, at_most=1000)
    output: str | None = flag("File for a picture: .png, .svg or .pdf.", default=None)


def main(argv: Sequence[str]) -> int:
    """Train, print the tables, and draw them when asked."""
    family = FAMILIES["gpt"]
    base = parse_run(argv, prog="check_widths.py", about=__doc__ or "", extra_groups=(WidthsConfig, *family.groups))
    config = base.group(WidthsConfig)
    check(base, config)
    found = {}
    for title, with_mup in (("muP", True), ("without muP", False)):
        found[title] = {width: sizes(at_width(base, width, with_mup=with_mup), config.steps) for width in config.widths}
        print_table(title, found[title], steps=config.steps)
    if config.output is not None:
        draw(found, Path(config.output), steps=config.steps)
        print(f"wrote {config.output}")
    return 0


def check(base: RunConfig, config: WidthsConfig) -> None:
    """Raise ConfigError for widths that are not the base model's several times over, and for several ranks."""
    hidden = base.model.hidden_size
    if wrong := [width for width in config.widths if width % hidden]:
        raise ConfigError(
            f"--widths {wrong[0]} is no multiple of --hidden-size {hidden}; use {hidden}, {2 * hidden}, ..."
        )
    if base.world_size > 1:
        raise ConfigError(f"check_widths.py runs on one rank, and {base.world_size} were started; start one")


def at_width(base: RunConfig, width: int, *, with_mup: bool) -> RunConfig:
    """The run with a model that is ``width`` wide, with more heads as wide as the base model's."""
    import dataclasses

    model, times = base.model, width // base.model.hidden_size
    groups = model.num_query_groups * (times if model.num_query_groups == model.num_attention_heads else 1)
    wide = dataclasses.replace(
        model,
        hidden_size=width,
        num_attention_heads=model.num_attention_heads * times,
        num_query_groups=groups,
        ffn_hidden_size=model.ffn_hidden_size * times,
        use_mup=with_mup,
        mup_base_hidden_size=model.hidden_size if with_mup else None,
        mup_width_mult=None,
    )
    return dataclasses.replace(base, model=wide)


def sizes(config: RunConfig, steps: int) -> Sizes:
    """Mean absolute value of what each place of the model gives after ``steps`` steps, for the batch of the first."""
    import torch

    from megatron.core.parallel.context import ParallelContext
    from megatron.core.transformer.output_layer import VocabularyOutput
    from megatron.training.run.run import build_run
    from megatron.training.step import train_step

    run = build_run(config, FAMILIES["gpt"].train_spec, ParallelContext.single(), started=time.monotonic())
    batches, seen = run.data.training_batches(0), Sizes()
    first = next(batches)
    for step in range(steps):
        train_step(run, first if step == 0 else next(batches))
    (model,) = run.models

    def noted(name: str) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, result: Any) -> None:
            if isinstance(result, VocabularyOutput):
                result = result.logits()
            if isinstance(result, torch.Tensor):
                seen[name] = result.detach().float().abs().mean().item()

        return hook

    for name, module in [("logits", model), *model.named_modules()]:
        if place := _place(name):
            module.register_forward_hook(noted(place))
    run.optimizer.gather.finish()
    with torch.no_grad():
        model(first[0].tensors["tokens"], rng_key=first[0].rng_key)
    return seen


def _place(module: str) -> str | None:
    """What a row is called: embedding, the branches of each layer, the last hidden states, logits."""
    parts = module.split(".")
    if module in ("logits", "embedding"):
        return module
    if module.endswith("final_layernorm"):
        return "last hidden states"
    if len(parts) == 4 and parts[1] == "layers" and parts[3] in ("self_attention", "mlp"):
        return f"layer {parts[2]} {parts[3].replace('_', ' ')}"
    return None


def growth(by_width: Mapping[int, float]) -> float:
    """By what each doubling of the width multiplies a size, on average: the slope of a line through the logarithms."""
    points = [(math.log2(width), math.log2(max(size, 1e-30))) for width, size in by_width.items()]
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    spread = sum((each - x) ** 2 for each, _ in points)
    return 2.0 ** (sum((a - x) * (b - y) for a, b in points) / spread) if spread else 1.0


def print_table(title: str, found: Mapping[int, Sizes], *, steps: int) -> None:
    """Sizes by place and width, and by what a doubling of the width multiplies them."""
    places = list(next(iter(found.values())))
    print(f"{title}: mean size of activations after {steps} steps")
    print(f"{'':24}" + "".join(f"{width:>10}" for width in found) + f"{'per doubling':>15}")
    for place in places:
        row = {width: seen[place] for width, seen in found.items()}
        print(f"{place:24}" + "".join(f"{size:10.4f}" for size in row.values()) + f"{growth(row):15.2f}")


def draw(found: Mapping[str, Mapping[int, Sizes]], output: Path, *, steps: int) -> None:
    """A line for each place and parametrization, over the width; both axes are logarithmic."""
    axes = new_axes()
    for color, (title, by_width) in zip(COLORS, found.items()):
        for place in next(iter(by_width.values())):
            label = title if place == "logits" else None
            widths, size = list(by_width), [seen[place] for seen in by_width.values()]
            axes.plot(
                widths, size, color=color, linewidth=2.4 if label else 0.9, alpha=1.0 if label else 0.55, label=label
            )
            if label:
                axes.annotate("logits", (widths[-1], size[-1]), xytext=(6, 0), textcoords="offset points", color=INK)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    widths = list(next(iter(found.values())))
    axes.set_xticks(widths, [str(width) for width in widths])
    style(axes, x="hidden size", y="mean size of activations", title=f"Activations after {steps} steps")
    legend(axes, columns=2)
    save(axes, output)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
