"""Training steps that benchmarks/gpu.py compares: this program's, and those of plain PyTorch, as ranks run them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_plain import PlainLlama, Size
from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.config.vocabulary import vocabulary_size
from megatron.core.device import without_tf32
from megatron.core.models.registry import FAMILIES
from megatron.core.ops.compiled import compile_bodies
from megatron.core.parallel.environment import launch_environment
from megatron.core.parallel.launch import choose_device, parallel_context
from megatron.planning.estimate import flops_per_sample, memory_estimate, model_parameters
from megatron.training.reporting.flops import device_peak
from megatron.training.reporting.memory import memory_use
from megatron.training.run.run import build_run
from megatron.training.step import train_step

SPEC = FAMILIES["gpt"].train_spec
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTE = {  # by its words in the table, after a comma
    "": "",
    ", recomputing norms and MLPs": "--recompute-granularity selective --recompute-modules layernorm mlp",
    ", recomputing layers": "--recompute-granularity full",
}


@dataclass(frozen=True)
class Taken:
    """Steps on rank 0: the seconds and the loss of each, and the most memory that the process held, in bytes."""

    seconds: list[float]
    losses: list[float]
    peak: int


def run_of(flags: Sequence[str], ranks: int) -> RunConfig:
    """The run of ``flags``, with the size of its vocabulary."""
    run = parse_run([*flags], world_size=ranks, extra_groups=FAMILIES["gpt"].groups)
    return run.with_vocab_size(vocabulary_size(run))


def take_steps(step: Callable[[], float], number: int, device: torch.device, *, unmeasured: int) -> Taken:
    """``number`` steps after ``unmeasured`` ones. Each ends when its loss is known. Raises ValueError for a loss that
    isn't finite.
    """
    seconds, losses = list[float](), list[float]()
    for _ in range(unmeasured + number):
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    if not torch.tensor(losses).isfinite().all():
        raise ValueError(f"losses that aren't finite: {losses}")
    use = memory_use(device)
    return Taken(seconds[unmeasured:], losses[unmeasured:], use.get("max allocated", use.get("max resident", 0)))


def our_steps(flags: Sequence[str], number: int, unmeasured: int) -> Taken:
    """Time steps of ``pretrain_gpt.py FLAGS``: its model, data, loop of microbatches, optimizer."""
    launch = launch_environment()
    config = run_of(flags, launch.world_size)
    precision, seed = config.precision.params_dtype, config.training.seed
    with parallel_context(config.parallel, launch, params_dtype=precision, seed=seed) as context:
        compile_bodies(config.training.compile, context.device)
        with contextlib.redirect_stdout(io.StringIO()):
            run = build_run(config, SPEC, context)
        batches = run.data.training_batches(0)

        def step() -> float:
            return train_step(run, next(batches)).losses["lm loss"]

        return take_steps(step, number, context.device, unmeasured=unmeasured)


@dataclass(frozen=True)
class PlainSettings:
    """How a plain step goes through its ``samples`` on a rank."""

    samples: int
    microbatch: int
    recomputes: bool = False
    compiled: bool = False


def plain_step(size: Size, settings: PlainSettings, device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """Forward, backward, clipping and AdamW in plain PyTorch; over several ranks with FSDP2."""
    torch.manual_seed(1)
    model = PlainLlama(size, device, dtype=dtype, recomputes=settings.recomputes)
    is_split = dist.is_initialized() and dist.get_world_size() > 1
    if is_split:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
    loss_of = torch.compile(model) if settings.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    shape = settings.samples // settings.microbatch, settings.microbatch, size.sequence + 1
    ids = torch.randint(size.vocabulary, shape, device=device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=device)
        for number, batch in enumerate(ids):
            if is_split:
                model.set_requires_gradient_sync(number == len(ids) - 1)  # type: ignore[operator]
            loss: Tensor = loss_of(batch[:, :-1], batch[:, 1:]) / len(ids)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(total)

    return step


def plain_steps(
    size: Size, settings: PlainSettings, number: int, unmeasured: int, backend: str | None, precision: str
) -> Taken:
    """Time steps of PlainLlama, in bf16 or fp32."""
    launch = launch_environment()
    device = choose_device(backend, launch)
    without_tf32()
    if launch.world_size > 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    taken = take_steps(plain_step(size, settings, device, dtype), number, device, unmeasured=unmeasured)
    if dist.is_initialized():
        dist.destroy_process_group()
    return taken


@dataclass(frozen=True)
class Way:
    """Settings of ours, in words for the table, and their estimate of a rank's memory in bytes."""

    about: str
    flags: list[str]
    estimated: int


def ways(size: Size, *, ranks: int, samples: int, precision: Sequence[str]) -> list[Way]:
    """What to try for a size, best first: without recomputation, layers split over few ranks, large microbatches.

    ``samples``: of a step, for each rank.
    """
    found = []
    splits = [tp for tp in (1, 2, 4, 8) if ranks % tp == 0 and size.groups % tp == 0]
    for way, tp, microbatch in itertools.product(RECOMPUTE, splits, (4, 2, 1)):
        if samples * tp % microbatch or (way and microbatch > 1):
            continue
        split = ["--tensor-model-parallel-size", str(tp), "--sequence-parallel"] if tp > 1 else []
        batch = ["--micro-batch-size", str(microbatch), "--global-batch-size", str(samples * ranks)]
        flags = [*size.flags, *batch, *split, *(ZERO.split() if ranks > 1 else []), *RECOMPUTE[way].split(), *precision]
        about = f"microbatch {microbatch}{f', TP {tp} with SP' * (tp > 1)}{', ZeRO 1' * (ranks > tp)}{way}"
        found.append(Way(about, flags, memory_estimate(run_of(flags, ranks), SPEC).total))
    return found


@dataclass(frozen=True)
class Scale:
    """Parameters of a model size, and its model FLOPs for a sample, forward and backward."""

    parameters: int
    flops: float


def scale_of(size: Size) -> Scale:
    """Parameters and model FLOPs of ``size``, used for both programs."""
    run = run_of([*size.flags, "--micro-batch-size", "1", "--global-batch-size", "1"], 1)
    return Scale(model_parameters(run, SPEC), flops_per_sample(run, SPEC))


def described(backend: str | None) -> dict[str, object]:
    """The device of this process: its name, memory in bytes, and its peak in bf16 and fp32 with where it is from."""
    from megatron.core.device import capability, describe
    from megatron.training.reporting.memory import total_memory

    device = choose_device(backend, launch_environment())
    peaks = {"bf16": device_peak(device, torch.bfloat16), "fp32": device_peak(device, torch.float32)}
    return {
        "device": describe(device),
        "capability": capability(device),
        "memory": total_memory(device),
        "peak": {name: None if peak is None else dataclasses.asdict(peak) for name, peak in peaks.items()},
    }
