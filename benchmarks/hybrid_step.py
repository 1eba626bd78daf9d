"""A training step (forward, backward, AdamW) of a whole hybrid against transformers' Nemotron-H, on the CPU.

    python -m benchmarks.hybrid_step [--dtype bf16] [--rounds N]

Both begin with the same weights, so their first losses agree, and they take turns. transformers enters with several
lengths of the chunks of its scan; the ratio is to the best of them. In bf16 it has bf16 weights, and ours keeps fp32
masters. One thread; the clock is processor time.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import time

import torch

from benchmarks import results
from benchmarks.hybrid_generation import Shape, build, nemotron_h
from benchmarks.training_step import Step, context_of, our_step, peer_step

CHUNKS = (32, 64, 128)
SHAPES = {
    "hidden 256, 8 heads of 64": Shape(length=512),
    "hidden 512, 16 heads of 64": Shape(hidden=512, heads=8, mamba_heads=16, groups=8, state=128, length=512),
}
QUICK = {"hidden 64": Shape(pattern="M*-", hidden=64, state=16, vocabulary=384, length=64)}


def steps_of(shape: Shape, dtype: str, batch: int) -> dict[str, Step]:
    """Our step, and transformers' with chunks of each length."""
    context = context_of(dtype)
    model = build(shape, context)
    ids = torch.randint(shape.vocabulary, (batch, shape.length + 1), generator=torch.Generator().manual_seed(1))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    weights = torch.full(labels.shape, 1 / labels.numel())
    found: dict[str, Step] = {}
    for chunk in CHUNKS:
        peer = nemotron_h(model, shape, chunk=chunk).train()

        def loss(peer: torch.nn.Module = peer) -> torch.Tensor:
            logits = peer(tokens, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

        found[f"chunks of {chunk}"] = peer_step(peer, loss, dtype, autocast=False)
    return {"ours": our_step(model, lambda: model(tokens).cross_entropy(labels, weights), context), **found}


def compare(shape: Shape, dtype: str, *, batch: int, rounds: int) -> tuple[float, str]:
    """transformers' time over ours, the median of all rounds at its best chunk length, and a line of times."""
    steps = steps_of(shape, dtype, batch)
    losses = {name: step() for name, step in steps.items()}
    near = 1e-4 if dtype == "fp32" else 0.05
    assert max(losses.values()) - min(losses.values()) < near, f"the models differ: {losses}"
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            times[name].append(1000 * (time.process_time() - start))
    best = min((name for name in times if name != "ours"), key=lambda name: statistics.median(times[name]))
    ratio = statistics.median(theirs / mine for theirs, mine in zip(times[best], times["ours"], strict=True))
    return ratio, ", ".join(f"{name} {statistics.median(spent):.0f} ms" for name, spent in times.items())


def main() -> None:
    """Print a line for each shape."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step (default 2)")
    parser.add_argument("--rounds", type=int, default=7)
    options = results.parse(parser, rounds=1)
    torch.set_num_threads(1)
    ratios = {}
    for name, shape in (QUICK if options.quick else SHAPES).items():
        ratio, line = compare(shape, options.dtype, batch=options.batch, rounds=options.rounds)
        what = f"{options.dtype}, {shape.pattern}, {name}, {options.batch} x {shape.length} tokens"
        print(f"{what}: {line}; {ratio:.2f} x transformers' speed", flush=True)
        ratios[what] = ratio
    results.save(options, ratios)


if __name__ == "__main__":
    main()
