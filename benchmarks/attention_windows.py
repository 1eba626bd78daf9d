"""What a sliding window saves: attention over a window against full causal attention, of the same queries and keys.

    python -m benchmarks.attention_windows
    python -m benchmarks.attention_windows --lengths 16384 --rounds 3

Contenders take turns; the figure is the median CPU time of forward and backward, as a ratio to full attention.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import results
from megatron.core.ops.attention import AttentionOptions, AttentionRequest, attention, choose

HEADS, WIDTH = 8, 64


def seconds(inputs: Sequence[Tensor], window: int | None) -> float:
    """CPU time of a call and its gradient; ``window``: keys of a query, its own included."""
    sides = None if window is None else (window - 1, 0)
    options = AttentionOptions(causal=True, scale=WIDTH**-0.5, window=sides)
    start = time.process_time()
    q, k, v = inputs
    torch.autograd.grad(attention(q, k, v, options).sum(), inputs)
    return time.process_time() - start


def backend(inputs: Sequence[Tensor], window: int | None) -> str:
    """The one that ``auto`` takes."""
    sides = None if window is None else (window - 1, 0)
    q, k, _ = inputs
    return choose(AttentionRequest.of(q, k, AttentionOptions(causal=True, scale=1.0, window=sides))).name


def main() -> None:
    """Measure and print a table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    arguments = results.parse(parser, lengths=[256], rounds=1)
    torch.set_num_threads(1)
    dtype = torch.float32 if arguments.dtype == "fp32" else torch.bfloat16
    print(f"{arguments.dtype}, {HEADS} heads of {WIDTH}, one thread, {arguments.rounds} rounds")
    found: dict[str, float] = {}
    for length in arguments.lengths:
        inputs = [torch.randn(length, 1, HEADS, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
        shares = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 0.97)
        windows = [None, *(int(length * share) for share in shares)]
        taken: dict[int | None, list[float]] = {window: [] for window in windows}
        for _ in range(arguments.rounds):
            for window in windows:
                taken[window].append(seconds(inputs, window))
        full = statistics.median(taken[None])
        print(f"{length} tokens: full attention {full * 1e3:.0f} ms ({backend(inputs, None)})")
        for window in windows[1:]:
            ratio = statistics.median(taken[window]) / full
            print(f"  window {window:>6}  {ratio:.2f} of full ({backend(inputs, window)})")
            found[f"{length} tokens, window {window}"] = ratio
    narrowest = {f"{length} tokens, window {length // 32}" for length in arguments.lengths}
    results.save(arguments, found, watched=found.keys() - narrowest)


if __name__ == "__main__":
    main()
