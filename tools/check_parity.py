"""Show that a layout computes the model of one rank: equal losses, gradients and weights, in fp64, on this machine.

Takes the flags of a pretraining command, --world-size, and --model-type where it is not GPT. Both runs have made-up
data and no dropout, and each rank is a process on the CPU. With --shrink the model becomes small and keeps its layout
and kinds of layers; without it the machine must hold the model once for every replica, in fp64 with its optimizer
state.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import multiprocessing
import pickle
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from megatron.config.flags import Settings, flag
from megatron.config.run import RunConfig
from megatron.core.models.registry import family_of
from megatron.core.parallel.environment import errors_once_per_node, launched_world_size
from megatron.errors import ConfigError, ParallelError, run_command
from megatron.planning.shrinking import SMALL_VOCABULARY, on_one_rank, shrunk, without_files
from megatron.training.pretrain import parse_any_family

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.training.evaluation.parity import Observed


MOST_RANKS = 256


class ParityConfig(Settings):
    """What is compared."""

    shrink: bool = flag("Compare a small model of the same layout and kinds of layers.", default=False)
    steps: int = flag("Optimizer steps.", default=3, at_least=1)


def main(argv: Sequence[str]) -> int:
    """Compare and print a table; 1 when anything differs."""
    if "LOCAL_RANK" in os.environ and launched_world_size() > 1:
        with errors_once_per_node():
            raise ConfigError(
                "a launcher has started this command several times, and it starts its ranks itself: run it with "
                f"python tools/check_parity.py, and give --world-size {launched_world_size()}"
            )
    config = parse_any_family([*argv, "--dry-run"], ParityConfig, prog="check_parity.py", about=__doc__ or "")
    parity = config.group(ParityConfig)
    config = without_files(config, vocab_size=vocabulary(config, parity), steps=parity.steps)
    if parity.shrink:
        config = shrunk(config)
    if config.world_size > MOST_RANKS:
        raise ConfigError(
            f"every rank is a process of this machine, and {config.world_size} are too many: give at most --world-size "
            f"{MOST_RANKS}"
        )
    if config.parallel.diloco_workers is not None:
        raise ConfigError(
            f"--diloco-workers {config.parallel.diloco_workers}: workers train apart, so no single rank takes their "
            "steps; leave it out to compare the layout of a worker"
        )
    print(f"== {describe(config)} against one rank, {parity.steps} steps in fp64", flush=True)
    return report(config, parity.steps)


def vocabulary(config: RunConfig, parity: ParityConfig) -> int:
    """Words of the model that is compared."""
    if parity.shrink:
        return SMALL_VOCABULARY
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    from megatron.core.tokenizers.build import build_tokenizer

    return build_tokenizer(config.tokenizer).vocab_size


def describe(config: RunConfig) -> str:
    """Model and layout in a line."""
    from megatron.config.report import describe_model

    parallel = config.parallel
    axes = {
        "tensor": parallel.tensor_model_parallel_size,
        "pipeline": parallel.pipeline_model_parallel_size,
        "context": parallel.context_parallel_size,
        "data": config.data_parallel_size,
        "expert": parallel.expert_model_parallel_size,
    }
    layout = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1) or "1 rank"
    samples = f"{config.training.global_batch_size} samples of {config.data.seq_length} tokens"
    return f"{layout}: {describe_model(config)}, {samples}"


def report(config: RunConfig, steps: int) -> int:
    """Run both, print what was compared; 1 when anything differs."""
    from megatron.training.evaluation.parity import TOLERANCE, compare

    ranks = observe_on_ranks(config, steps)
    comparisons = compare(ranks, observe_on_ranks(on_one_rank(config), steps))
    width = max(len(each.kind) for each in comparisons)
    for each in comparisons:
        verdict = "equal" if each.where is None else f"DIFFERENT, first in {each.where}"
        print(f"   {each.kind:<{width}}  {each.count:4}  largest difference {each.largest:.1e}  {verdict}")
    if any(each.where for each in comparisons):
        print(f"== not equal (tolerance {TOLERANCE:g}; initial weights bit for bit)")
        return 1
    print(f"== equal (tolerance {TOLERANCE:g}; initial weights bit for bit)")
    return 0


def observe_on_ranks(config: RunConfig, steps: int) -> list[Observed]:
    """What each rank saw, every rank a process of its own."""
    if sys.platform == "linux":  # forked, ranks start with torch loaded, in which nothing has run yet
        multiprocessing.set_start_method("fork", force=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, connections = [], []
    for rank in range(config.world_size):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=run_rank, args=(config, steps, rank, port, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    found: list[Observed] = []
    for rank, connection in enumerate(connections):
        try:
            found.append(pickle.loads(connection.recv_bytes()))
        except EOFError:
            raise ParallelError(f"rank {rank} of {config.world_size} failed; its error is above") from None
    for process in processes:
        process.join()
    return found


def run_rank(config: RunConfig, steps: int, rank: int, port: int, connection: Connection) -> None:
    """One rank, from start to end."""
    run_command(lambda: _run_rank(config, steps, rank, port, connection))


def _run_rank(config: RunConfig, steps: int, rank: int, port: int, connection: Connection) -> int:
    import torch

    from megatron.core.parallel.environment import LaunchEnvironment
    from megatron.core.parallel.launch import parallel_context
    from megatron.training.evaluation.parity import observe
    from megatron.training.run.run import build_run

    torch.set_num_threads(1)
    size = config.world_size
    launch = LaunchEnvironment(rank, size, rank, size, "127.0.0.1" if size > 1 else None, port)
    with parallel_context(config.parallel, launch, params_dtype="fp64", seed=config.training.seed) as context:
        observed = observe(build_run(config, family_of(config.extra).train_spec, context), steps=steps)
    connection.send_bytes(pickle.dumps(observed))  # plainly: torch would share memory with a process that is ending
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
