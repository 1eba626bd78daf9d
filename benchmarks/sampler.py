"""What sampling costs beside a step: milliseconds for rows of random logits, one thread, by settings.

    .venv/bin/python -m benchmarks.sampler --rows 8 --vocabulary 32000 --step-ms 6.7

``--step-ms``: a step of the model at as many rows (see benchmarks/generation.py), of which each time is a share. Logits
are normal numbers times ``--scale``: 1 is nearly the flat distribution of an untrained model, where top-p keeps
thousands of tokens; 4 is as peaked as a trained one.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from benchmarks import results
from megatron.core.inference.request import Request
from megatron.core.inference.sampler import SampleRow, SamplerState, sample
from megatron.core.inference.sampling import Sampling

SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature 0.8": Sampling(temperature=0.8),
    "top-k 50": Sampling(top_k=50),
    "top-p 0.9": Sampling(top_p=0.9),
    "top-k 50, top-p 0.9": Sampling(top_k=50, top_p=0.9),
    "min-p 0.05": Sampling(min_p=0.05),
    "repetition penalty 1.1": Sampling(repetition_penalty=1.1),
}


def least_ms(logits: Tensor, sampling: Sampling, *, runs: int) -> float:
    """The least CPU time of one call: other programs on the machine only add to it."""
    requests = [
        Request(id=str(row), prompt=tuple(range(500)), max_tokens=1, seed=row, sampling=sampling)
        for row in range(len(logits))
    ]
    rows = [SampleRow(SamplerState(request)) for request in requests]
    times = []
    for _ in range(runs):
        start = time.thread_time()
        sample(logits, rows)
        times.append(time.thread_time() - start)
    return 1000 * min(times)


def main() -> None:
    """Print a table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--scale", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--step-ms", type=float)
    options = results.parse(parser, rows=2, vocabulary=1000, runs=3)
    ratios: dict[str, float] = {}
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(options.rows, options.vocabulary, generator=generator)
    for scale in options.scale:
        greedy = 0.0
        for name, sampling in SETTINGS.items():
            found = least_ms(normal * scale, sampling, runs=options.runs)
            share = "" if options.step_ms is None else f"  {found / options.step_ms:6.1%} of a step"
            print(f"scale {scale:g}  {name:24} {found:7.3f} ms{share}")
            greedy = greedy or found
            ratios |= {} if name == "greedy" else {f"scale {scale:g}, {name}": found / greedy}
    results.save(options, ratios)


if __name__ == "__main__":
    main()
