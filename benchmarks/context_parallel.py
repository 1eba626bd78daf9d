"""What context parallelism costs and saves: bytes that ranks send, against textbook figures, and memory.

    python -m benchmarks.context_parallel --ranks 2
    torchrun --standalone --nproc_per_node 2 -m benchmarks.context_parallel
    torchrun --standalone --nproc_per_node 4 -m benchmarks.context_parallel --no-memory

Bytes are counted at the calls of torch.distributed, for attention alone, forward and backward. Memory is the growth of
a rank's peak resident size over a training step; the same ranks run the same model with a sample each (cp 1) and with
all of them on one sample (cp N).
"""

from __future__ import annotations

import os
import sys

from typing_extensions import override

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import ctypes
import dataclasses
import gc
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.communication import counting
from megatron.config.model import ModelConfig
from megatron.config.parallel import CpCommType, ParallelConfig
from megatron.core.context_parallel.attention import attention
from megatron.core.models.gpt.model import GPTModel
from megatron.core.ops.attention import AttentionOptions
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.environment import LaunchEnvironment, launch_environment
from megatron.core.parallel.launch import mesh_of, parallel_context
from megatron.core.parallel.model_context import ModelContext


@dataclass(frozen=True)
class Shape:
    """An attention call over the whole sequence, in fp32."""

    length: int = 1024
    batch: int = 2
    heads: int = 16
    groups: int = 4
    width: int = 32


@dataclass(frozen=True)
class Way:
    """How ranks exchange keys or heads; ``levels``: of the two-level exchange."""

    kind: CpCommType
    levels: tuple[int, int] = (1, 1)

    @override
    def __str__(self) -> str:
        return self.kind if self.kind != "a2a+p2p" else f"a2a+p2p {self.levels[0]} x {self.levels[1]}"


def textbook(shape: Shape, way: Way, ranks: int) -> int:
    """Bytes that a rank sends, forward and backward.

    A ring moves every key and value past all others: forward once, backward once and their gradients once. Gathering is
    the same in one message. Exchanging heads sends all but its own part of q, k, v and of the result, each way.
    """
    row = shape.length // ranks * shape.batch * shape.width * 4
    exchanging = {"a2a": ranks, "a2a+p2p": way.levels[0]}.get(way.kind, 1)
    ringing = ranks // exchanging
    keys = 2 * row * max(shape.groups, exchanging)
    both = 2 * row * shape.heads + keys
    return 3 * (ringing - 1) * keys + 2 * both * (exchanging - 1) // exchanging


def bytes_sent(context: ModelContext, shape: Shape, way: Way) -> Counter[str]:
    """Counted over one call and its gradient."""
    context = dataclasses.replace(context, cp_comm_types=(way.kind,), cp_sizes=way.levels)
    held = shape.length // context.mesh.size("cp")
    sizes = (shape.heads, shape.groups, shape.groups)
    q, k, v = (torch.randn(held, shape.batch, heads, shape.width, requires_grad=True) for heads in sizes)
    options = AttentionOptions(causal=True, scale=shape.width**-0.5)
    with counting(context.mesh) as sent:
        out = attention(q, k, v, options, context=context, comm_type=way.kind)
        out.sum().backward()  # type: ignore[no-untyped-call]
    return sent


def compare_bytes(context: ModelContext, say: Callable[[str], None]) -> dict[str, float]:
    """A table of counted against textbook bytes; their ratios."""
    shape, ranks = Shape(), context.mesh.size("cp")
    ratios = {}
    ways = [Way("p2p"), Way("all_gather"), Way("a2a")]
    ways += [Way("a2a+p2p", (size, ranks // size)) for size in range(2, ranks) if ranks % size == 0]
    say(f"{shape}, {ranks} ranks; KiB sent by a rank, forward and backward")
    say(f"{'way':<16} {'counted':>9} {'textbook':>9}  by call")
    for way in ways:
        everyone = gather_objects(bytes_sent(context, shape, way), context.mesh)
        totals = {sum(sent.values()) for sent in everyone}
        assert len(totals) == 1, f"ranks send {totals}"
        (total,) = totals
        parts = ", ".join(f"{name} {size / 1024:.0f}" for name, size in everyone[0].items())
        say(f"{way!s:<16} {total / 1024:>9.0f} {textbook(shape, way, ranks) / 1024:>9.0f}  {parts}")
        ratios[f"{way}, {ranks} ranks"] = total / textbook(shape, way, ranks)
    return ratios


def peak_growth(step: Callable[[], None]) -> int:
    """Bytes by which the peak resident size exceeds that before ``step``."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier steps freed would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system doesn't report {field}")


def step_memory(context: ModelContext, length: int) -> int:
    """Growth of a rank's memory over forward and backward of one sample."""
    config = ModelConfig(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        max_position_embeddings=length,
        vocab_size=1024,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        position_embedding_type="rope",
    )
    model = GPTModel(config, context, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.main_grad = parameter.grad  # type: ignore[attr-defined]
    held = length // context.mesh.size("cp")
    tokens = torch.randint(1024, (1, held))

    def step() -> None:
        output = model(tokens)
        output.cross_entropy(tokens, torch.ones(1, held)).backward()

    return peak_growth(step)


def compare_memory(
    launch: LaunchEnvironment, sliced: ModelContext, lengths: Sequence[int], say: Callable[[str], None]
) -> dict[str, float]:
    """A table of memory by length, for a rank alone with its sample and for all ranks on one; their ratios."""
    ratios = {}
    ranks = launch.world_size
    apart = dataclasses.replace(sliced, mesh=mesh_of(ParallelConfig(), world_size=ranks, rank=launch.rank))
    say(f"\n{'length':>8} {'cp 1, MiB':>11} {f'cp {ranks}, MiB':>11} {'ratio':>6}")
    for length in lengths:
        alone, together = step_memory(apart, length), step_memory(sliced, length)
        highest = [max(both) / 2**20 for both in zip(*gather_objects((alone, together), sliced.mesh))]
        say(f"{length:>8} {highest[0]:>11.0f} {highest[1]:>11.0f} {highest[1] / highest[0]:>6.2f}")
        ratios[f"memory of {length} tokens"] = highest[1] / highest[0]
    return ratios


def main() -> None:
    """Print both tables on the first rank."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--no-memory", action="store_true", help="count bytes only")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="of samples in memory"
    )
    parser.add_argument("--ranks", type=int, default=2, help="started where torchrun doesn't (default 2)")
    options = results.parse(parser, lengths=[256])
    launch = launch_environment()
    if launch.world_size == 1:
        on_ranks(options.ranks)
        return
    torch.set_num_threads(1)
    parallel = ParallelConfig(context_parallel_size=launch.world_size, distributed_backend="gloo")

    def say(text: str) -> None:
        if launch.rank == 0:
            print(text, flush=True)

    with parallel_context(parallel, launch, params_dtype="fp32", seed=1) as rank:
        context = ModelContext.plain(rank)
        ratios = compare_bytes(context, say)
        memory = {} if options.no_memory else compare_memory(launch, context, options.lengths, say)
    if launch.rank == 0:
        results.save(options, ratios | memory, watched=memory.keys())


def on_ranks(number: int) -> None:
    """Run this command again on as many ranks; ends the program where they fail."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
    root = Path(__file__).resolve().parents[1]
    command = [*launcher, "-m", "benchmarks.context_parallel", *sys.argv[1:]]
    if code := subprocess.run(command, cwd=root, check=False).returncode:
        sys.exit(code)


if __name__ == "__main__":
    main()
