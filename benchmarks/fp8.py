"""The loss that products in FP8 cost: a small GPT on a text, with each recipe, beside bf16 and fp32.

    python -m benchmarks.fp8 --text FILE [--steps N] [--recipes NAME ...]

All start from the same weights and see the same samples in the same order. Tokens are the bytes of the text. Printed
are the mean training loss of the last quarter of the steps, the loss on the last tenth of the text, which isn't
trained on, their distance from bf16, and the time of a step: products are emulated on a CPU, so that it says nothing
of a GPU's.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import contextlib
import io
import re
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.training.loop import train_from_start_to_end

SHAPE = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --micro-batch-size 4 "
    "--global-batch-size 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--ffn-hidden-size 384 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 256 "
    "--lr 1e-3 --lr-warmup-fraction 0.05 --lr-decay-style cosine --min-lr 1e-4 --num-workers 0 --log-interval 1 "
    "--split 90,10,0 --eval-iters 8"
)
RECIPES = {
    "bf16": "--bf16",
    "fp32": "",
    "tensorwise, hybrid": "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "tensorwise, e4m3": "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise",
    "delayed, hybrid": "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "delayed, hybrid, history of 16": "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 "
    "--fp8-amax-compute-algo max",
    "blockwise, e4m3": "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8, e4m3": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8",
}


@dataclass(frozen=True)
class Curve:
    """Training losses by step, the loss on unseen text after the last one, and the seconds of a step."""

    losses: list[float]
    unseen: float
    seconds: float

    @property
    def end(self) -> float:
        """The mean of the last quarter."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 4) :])


def train(prefix: Path, precision: str, *, steps: int, seed: int) -> Curve:
    """Train on one rank with the flags of ``precision``."""
    words = f"{SHAPE} {precision} --data-path {prefix} --train-iters {steps} --eval-interval {steps} --seed {seed}"
    config = parse_run(words.split(), extra_groups=GPT_GROUPS)
    dtype = torch.bfloat16 if config.precision.bf16 else torch.float32
    started = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        context = ParallelContext.single(dtype=dtype, seed=seed)
        train_from_start_to_end(config, GPTSpec(), context, started=time.monotonic())
    log = said.getvalue()
    losses = [float(each) for each in re.findall(r"iteration +\d+/.*?lm loss: (\S+)", log)]
    unseen = re.findall(r"validation loss at iteration.*?lm loss value: (\S+)", log)
    assert len(losses) == steps and unseen, log
    return Curve(losses, float(unseen[-1]), (time.perf_counter() - started) / steps)


def text_of(file: Path | None) -> bytes:
    """The file's, or all documents of this project, one after the other."""
    root = Path(__file__).resolve().parents[1]
    files = [file] if file else sorted([*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("benchmarks/*.md")])
    return b"\n\n".join(each.read_bytes() for each in files)


def table(curves: dict[str, Curve]) -> str:
    """A line for each recipe, with its distance from bf16."""
    base = curves["bf16"]
    lines = ["| products | loss | from bf16 | unseen text | from bf16 | ms/step |", "|---|--:|--:|--:|--:|--:|"]
    for name, each in curves.items():
        gaps = [(found / wanted - 1) * 100 for found, wanted in ((each.end, base.end), (each.unseen, base.unseen))]
        lines.append(
            f"| {name} | {each.end:.4f} | {gaps[0]:+.2f} % | {each.unseen:.4f} | {gaps[1]:+.2f} % | "
            f"{1000 * each.seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train once with each recipe and print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--text", type=Path, help="a text of 100 kB or more; by default all documents of this project")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--recipes", nargs="*", choices=[*RECIPES], default=[*RECIPES], metavar="NAME")
    args = results.parse(parser, steps=4, recipes=["tensorwise, hybrid"])
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "text"
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for part in text_of(args.text).split(b"\n\n"):
                writer.add_document(np.frombuffer(part + b"\n\n", dtype=np.uint8))
        for name in dict.fromkeys(["bf16", *args.recipes]):
            curves[name] = train(prefix, RECIPES[name], steps=args.steps, seed=args.seed)
            print(f"{name}: {curves[name].end:.4f}", file=sys.stderr, flush=True)
    print(table(curves))
    losses = {name: curve.end / curves["bf16"].end for name, curve in curves.items() if name != "bf16"}
    results.save(args, losses)


if __name__ == "__main__":
    main()
