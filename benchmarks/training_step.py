"""A training step (forward, backward, AdamW) against transformers and, of GPT, plain PyTorch, on the CPU.

    python -m benchmarks.training_step --dtype bf16
    python -m benchmarks.training_step --dtype bf16 --model-type BERT
    python -m benchmarks.training_step --dtype bf16 --model-type T5
    python -m benchmarks.training_step --model-type gemma2
    python -m benchmarks.training_step --model-type mixtral-8-experts --clock processor --threads 1

Every contender lives in a process of its own, so that peak memory is its own, and they take turns for a few steps at a
time, so that whatever else the machine does falls on all of them. Printed are medians over turns, as ratios to the best
peer. In bf16 each peer enters twice, with bf16 weights and with fp32 weights under autocast; ours keeps fp32 masters.
GPT and BERT compute the exact GELU, which costs torch a sixth of the tanh form on a CPU in bf16; T5 is the original,
with ReLU. Beside a model with experts stands ours without, with as many products for each token.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import results
from benchmarks.training_families import CASES, Case, Shape

if TYPE_CHECKING:
    from megatron.core.parallel.model_context import ModelContext

Step = Callable[[], float]
OURS, DENSE = "megatron", "megatron, dense"
QUICK = Shape(layers=1, hidden=64, heads=4, sequence=64, batch=2, vocabulary=1000)
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def context_of(dtype: str) -> ModelContext:
    """A rank that computes as the training application does."""
    import torch

    from megatron.core.ops.matmul import is_fusion_faster
    from megatron.core.parallel.model_context import ModelContext
    from megatron.core.parallel.weight_gradients import WeightGradients

    context = ModelContext.single(dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
    gradients = WeightGradients(fuses_accumulation=is_fusion_faster(context.dtype, context.device))
    return dataclasses.replace(context, weight_gradients=gradients)


def megatron_step(shape: Shape, dtype: str, case: Case) -> Step:
    """This library: the family's model, flat buffers, its optimizer."""
    from megatron.config.model import ModelConfig

    config = ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.sequence,
        vocab_size=shape.vocabulary,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **{"activation": "gelu", **case.settings},
    )
    context = context_of(dtype)
    return our_step(*case.ours(shape, config, context), context)


def our_step(model: Any, compute_loss: Callable[[], Any], context: ModelContext) -> Step:
    """Flat buffers and this library's optimizer around one of its models."""
    import torch

    from megatron.config.optimizer import OptimizerConfig
    from megatron.config.precision import PrecisionConfig
    from megatron.core.distributed.buffers import build_buffers
    from megatron.core.distributed.grad_sync import GradSync
    from megatron.core.optimizer.optimizer import Optimizer
    from megatron.core.parallel.low_precision import LowPrecision

    gradients = context.weight_gradients
    buffers = build_buffers(model.named_parameters(), context, grad_dtype=torch.float32)
    grad_sync = GradSync(buffers, context, sharded=False, overlap=False, weight_gradients=gradients)
    optimizer = Optimizer(
        buffers,
        OptimizerConfig(lr=1e-4, clip_grad=0.0),
        PrecisionConfig(bf16=context.dtype == torch.bfloat16),
        context,
        low_precision=LowPrecision(),
        sharded=False,
    )

    def step() -> float:
        grad_sync.zero()
        loss = compute_loss()
        loss.backward()
        grad_sync.finish()
        optimizer.update(count=1.0, lr=1e-4, weight_decay=0.1)
        return float(loss.detach())

    return step


def peer_step(model: Any, compute_loss: Callable[[], Any], dtype: str, *, autocast: bool) -> Step:
    """The usual loop around a torch model: autocast or bf16 weights, fused AdamW."""
    import torch

    if dtype == "bf16" and not autocast:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16" and autocast):
            loss = compute_loss()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def build_step(name: str, shape: Shape, dtype: str, case: Case) -> Step:
    """The step of the contender called ``name``."""
    import torch

    if name == OURS:
        return megatron_step(shape, dtype, case)
    if name == DENSE:
        assert case.dense is not None
        return megatron_step(shape, dtype, dataclasses.replace(case, ours=case.dense))
    peer, _, variant = name.partition(" ")
    if peer.startswith("transformers"):
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    model, compute_loss = case.peers[peer](shape)
    return peer_step(model, compute_loss, dtype, autocast=variant == "autocast")


def serve(name: str, shape: Shape, dtype: str, *, case: Case, threads: int, clock: Callable[[], float]) -> None:
    """A contender's process: for each line ``N`` on stdin run N steps, and answer with time, loss and memory."""
    import torch

    torch.set_num_threads(threads)
    step = build_step(name, shape, dtype, case)
    for line in sys.stdin:
        loss, began = 0.0, clock()
        for _ in range(int(line)):
            loss = step()
        seconds = clock() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_mib": peak}), flush=True)


@dataclass
class Contender:
    """A process that takes its turns when told to."""

    name: str
    process: subprocess.Popen[str]
    turns: list[float] = field(default_factory=list)  # seconds a step
    peak_mib: float = 0.0
    loss: float = 0.0

    @classmethod
    def start(cls, name: str, options: argparse.Namespace) -> Contender:
        command = [sys.executable, __file__, "--serve", name, "--dtype", options.dtype, "--shape", options.shape]
        command += ["--model-type", options.model_type, "--clock", options.clock]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(options.threads),
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        }
        process = subprocess.Popen(
            [*command, "--threads", str(options.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        return cls(name, process)

    def turn(self, steps: int, *, counted: bool = True) -> None:
        """Let the process run ``steps`` steps while all others wait."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(steps, file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        self.peak_mib, self.loss = answer["peak_mib"], answer["loss"]
        if counted:
            self.turns.append(answer["seconds"] / steps)

    @property
    def seconds(self) -> float:
        return statistics.median(self.turns)


def report(contenders: list[Contender], shape: Shape) -> float | None:
    """The table, ours first, and the two ratios that count; that by medians, or None without a peer."""
    ours = contenders[0]
    peers = [each for each in contenders[1:] if each.name != DENSE]
    print(f"{'':26}{'ms/step':>9}{'best':>9}{'tokens/s':>10}{'peak MiB':>10}{'loss':>8}")
    for each in contenders:
        rate = shape.tokens / each.seconds
        times = f"{each.seconds * 1e3:9.0f}{min(each.turns) * 1e3:9.0f}"
        print(f"{each.name:26}{times}{rate:10.0f}{each.peak_mib:10.0f}{each.loss:8.3f}")
    for each in contenders:
        if each.name == DENSE:
            print(f"speed: {each.seconds / ours.seconds:.0%} of that of ours without experts, with as many products")
    if not peers:
        return None
    best = min(peers, key=lambda peer: peer.seconds)
    quickest = min(peers, key=lambda peer: min(peer.turns))
    speed, speed_of_best = best.seconds / ours.seconds, min(quickest.turns) / min(ours.turns)
    print(f"speed: {speed:.2f} times {best.name} by medians, {speed_of_best:.2f} times {quickest.name} by best turns")
    for peer in peers:
        print(f"memory: {ours.peak_mib / peer.peak_mib:.2f} of {peer.name}")
    return speed


def main() -> None:
    parser = results.parser_of(__doc__)
    parser.add_argument("--model-type", choices=list(CASES), default="GPT", help="family of the model (default GPT)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (default 7)")
    parser.add_argument("--steps", type=int, default=2, help="steps a turn (default 2)")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="processor: for busy machines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="contenders to run; default all")
    parser.add_argument("--shape", default=json.dumps(asdict(Shape())), help="JSON with layers, hidden, heads, …")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = results.parse(parser, rounds=1, steps=1, shape=json.dumps(asdict(QUICK)))
    shape, case = Shape(**json.loads(options.shape)), CASES[options.model_type]
    if options.serve:
        serve(options.serve, shape, options.dtype, case=case, threads=options.threads, clock=CLOCKS[options.clock])
        return
    variants = ["autocast", "weights"] if options.dtype == "bf16" else [""]
    own = [OURS, DENSE] if case.dense else [OURS]
    names = options.only or own + [f"{peer} {variant}".strip() for peer in case.peers for variant in variants]
    contenders = [Contender.start(name, options) for name in names]
    try:
        for each in contenders:
            each.turn(2, counted=False)
        for _ in range(options.rounds):
            for each in contenders:
                each.turn(options.steps)
        speed = report(contenders, shape)
    finally:
        for each in contenders:
            each.process.kill()
            each.process.wait()
    if speed is not None:
        results.save(options, {f"{options.model_type}, {options.dtype}": speed})


if __name__ == "__main__":
    main()
