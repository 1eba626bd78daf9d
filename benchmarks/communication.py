"""What ranks send in one training step, counted at the calls of torch.distributed, against the textbook's figure.

    python -m benchmarks.communication

Bytes are what a rank sends in an exchange without switches: of n ranks, 2·(n-1)/n of an all-reduced tensor, (n-1)/n of
one that is gathered or reduce-scattered, all of a message. The figures follow from sizes alone (arXiv:1909.08053,
2104.04473, 2205.05198, 1910.02054) and agree to the byte. Context parallelism has benchmarks/context_parallel.py.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.config.pipeline import chunks_per_rank, model_stages
from megatron.config.run import RunConfig
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel import collectives
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.mesh import Mesh
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.planning.estimate import rank_parameters
from megatron.training.run.run import build_run
from megatron.training.step import train_step
from tests.harness.ranks import run_ranks

MODEL = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --vocab-size 383 "
    "--global-batch-size 16 --attention-dropout 0 --hidden-dropout 0 --mock-data --lr 1e-3 --train-iters 3 "
    "--num-workers 0 --eval-iters 0"
)
"""Sizes are multiples of 64, so that buckets have no padding, whose bytes no textbook knows."""
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "TP 2": ({"tp": 2}, ""),
    "TP 2, SP": ({"tp": 2}, "--sequence-parallel"),
    "TP 4": ({"tp": 4}, ""),
    "TP 4, SP": ({"tp": 4}, "--sequence-parallel"),
    "DP 2": ({"dp": 2}, ""),
    "ZeRO 1, DP 2": ({"dp": 2}, "--use-distributed-optimizer"),
    "ZeRO 2, DP 2": ({"dp": 2}, "--data-parallel-sharding-strategy optim_grads"),
    "ZeRO 2, DP 2, overlapped": (
        {"dp": 2},
        "--data-parallel-sharding-strategy optim_grads --overlap-grad-reduce --overlap-param-gather",
    ),
    "ZeRO 3, DP 2": ({"dp": 2}, "--data-parallel-sharding-strategy optim_grads_params"),
    "ZeRO 3, DP 2, overlapped, recomputed": (
        {"dp": 2},
        "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather "
        "--recompute-granularity full",
    ),
    "DP 4": ({"dp": 4}, "--overlap-grad-reduce"),
    "ZeRO 1, DP 4, overlapped": (
        {"dp": 4},
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 100000",
    ),
    **{
        f"{name}, DP 4 in 2 copies": (
            {"dp": 4, "copies": 2},
            # Without biases, with which a layer is no multiple of 4 times 64.
            f"--data-parallel-sharding-strategy {flags} --num-distributed-optimizer-instances 2 --disable-bias-linear",
        )
        for name, flags in {
            "ZeRO 1": "optim --overlap-grad-reduce --overlap-param-gather",
            "ZeRO 2": "optim_grads",
            "ZeRO 3": "optim_grads_params",
            "ZeRO 3, state over both": "optim_grads_params --outer-dp-sharding-strategy optim --overlap-grad-reduce",
        }.items()
    },
    "ZeRO 2, PP 2, DP 2, ZB-H1": (
        {"pp": 2, "dp": 2},
        "--data-parallel-sharding-strategy optim_grads --pipeline-schedule zb-h1",
    ),
    "ZeRO 3, PP 2, DP 2": ({"pp": 2, "dp": 2}, "--data-parallel-sharding-strategy optim_grads_params"),
    "PP 4, GPipe": ({"pp": 4}, "--pipeline-schedule gpipe"),
    "PP 4, 1F1B": ({"pp": 4}, ""),
    "PP 4, 1F1B, untied": ({"pp": 4}, "--untie-embeddings-and-output-weights"),
    "PP 4, interleaved 2": ({"pp": 4}, "--num-virtual-stages-per-pipeline-rank 2"),
    "PP 4, ZB-H1": ({"pp": 4}, "--pipeline-schedule zb-h1"),
    "PP 4, ZB-V": ({"pp": 4}, "--pipeline-schedule zb-v"),
    # Without biases, whose shards differ from rank to rank.
    "TP 2, PP 2, DP 2, ZeRO 1": ({"tp": 2, "pp": 2, "dp": 2}, "--use-distributed-optimizer --disable-bias-linear"),
}
_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
}
_GROUPS: dict[str, tuple[Axis, ...]] = {
    "all": ("pp", "dp", "cp", "tp"),
    "pp, dp": ("pp", "dp", "cp"),
    "pp": ("pp",),
    "dp, in a copy": ("dp_in",),
    "dp, copies": ("dp_out",),
    "dp": ("dp",),
    "cp": ("cp",),
    "tp": ("tp",),
}
"""Axes that each group of ranks spans; of several names that mean the same ranks, the last one counts."""


def config_of(layout: str) -> RunConfig:
    """The run of a row of ``LAYOUTS``."""
    sizes, flags = LAYOUTS[layout]
    given = [word for axis, size in sizes.items() if axis in _FLAGS for word in (_FLAGS[axis], str(size))]
    return parse_run(
        [*MODEL.split(), *given, *flags.split()],
        world_size=math.prod(size for axis, size in sizes.items() if axis != "copies"),
        extra_groups=GPT_GROUPS,
    )


def all_reduced(size: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` sends to sum tensors of ``size`` bytes."""
    return 2 * size * (ranks - 1) // ranks


def gathered(size: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` sends so that all have ``size`` bytes, or the sum of as many in equal parts."""
    return size * (ranks - 1) // ranks


@contextlib.contextmanager
def counting(mesh: Mesh) -> Iterator[Counter[str]]:
    """Bytes that this rank sends, by kind of call and axes of the group. Small all-reduces go the way of large ones."""
    sent: Counter[str] = Counter()
    names = {mesh.members(*axes): name for name, axes in _GROUPS.items()}

    def where(group: dist.ProcessGroup) -> str:
        return names.get(tuple(dist.get_process_group_ranks(group)), "neighbours")

    def reduce(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        sent[f"all-reduce {where(group)}"] += all_reduced(x.nbytes, group.size())
        return original_reduce(x, op, group=group, **options)

    def gather(out: Tensor, x: Tensor, **options: Any) -> Any:
        sent[f"all-gather {where(options['group'])}"] += out.nbytes - x.nbytes
        return original_gather(out, x, **options)

    def scatter(out: Tensor, x: Tensor, **options: Any) -> Any:
        sent[f"reduce-scatter {where(options['group'])}"] += x.nbytes - out.nbytes
        return original_scatter(out, x, **options)

    def exchange(out: Tensor, x: Tensor, *splits: Any, group: dist.ProcessGroup, **options: Any) -> Any:
        rows = splits[1] if splits else [1] * group.size()
        sent[f"all-to-all {where(group)}"] += x.nbytes * (sum(rows) - rows[group.rank()]) // max(sum(rows), 1)
        return original_exchange(out, x, *splits, group=group, **options)

    def send(x: Tensor, *peer: Any, **options: Any) -> Any:
        sent["messages"] += x.nbytes
        return original_send(x, *peer, **options)

    def operation(kind: Any, x: Tensor, *peer: Any) -> dist.P2POp:
        sent["messages"] += x.nbytes * (kind is send)
        return original_operation(original_send if kind is send else kind, x, *peer)

    original_reduce: Any = dist.all_reduce
    original_exchange: Any = dist.all_to_all_single
    original_send, original_operation = dist.isend, dist.P2POp
    original_gather, original_scatter = collectives._gather_tensor, collectives._scatter_tensor
    with (
        mock.patch.object(dist, "all_reduce", reduce),
        mock.patch.object(dist, "all_to_all_single", exchange),
        mock.patch.object(dist, "isend", send),
        mock.patch.object(dist, "P2POp", operation),
        mock.patch.object(collectives, "_gather_tensor", gather),
        mock.patch.object(collectives, "_scatter_tensor", scatter),
        mock.patch.object(collectives, "_SMALL_ON_CPU", 0),
    ):
        yield sent


def count_steps(context: ParallelContext, layouts: Sequence[str]) -> list[Counter[str]]:
    """What this rank sends at each layout in the second step; the first one learns which gradients come."""
    counted = []
    for layout in layouts:
        config = config_of(layout)
        sliced = dataclasses.replace(context, sequence_parallel=config.parallel.sequence_parallel)
        run = build_run(config, GPTSpec(), sliced, started=0.0)
        batches = run.data.training_batches(0)
        train_step(run, next(batches))
        run.optimizer.gather.finish()
        with counting(context.mesh) as sent:
            train_step(run, next(batches))
            run.optimizer.gather.finish()
        counted.append(sent)
    return counted


def worlds() -> list[list[str]]:
    """Layouts that the same ranks can take, one after the other."""
    return [list(names) for _, names in itertools.groupby(LAYOUTS, lambda name: LAYOUTS[name][0])]


def measured(layouts: Sequence[str]) -> dict[str, list[Counter[str]]]:
    """What every rank sends in a step, for layouts of the same sizes."""
    by_rank = run_ranks(count_steps, layouts, timeout=300.0, reuse=False, **LAYOUTS[layouts[0]][0])
    return {layout: list(counted) for layout, counted in zip(layouts, zip(*by_rank))}


def textbook(layout: str, rank: int) -> Counter[str]:
    """What a rank should send in a step, from sizes alone; fp32 throughout."""
    sizes, config = LAYOUTS[layout][0], config_of(layout)
    mesh = Mesh.of(tp=sizes.get("tp", 1), dp=sizes.get("dp", 1), pp=sizes.get("pp", 1), rank=rank)
    sent = _tensor_parallel(config, mesh) + _pipeline(config, mesh) + _data_parallel(config, mesh)
    # The norm of all gradients in fp64, and two numbers for each of two losses.
    several = [axis for axis in ("pp", "dp", "tp") if mesh.size(axis) > 1]
    sent[f"all-reduce {', '.join(several) if 'tp' not in several[1:] else 'all'}"] += all_reduced(8, mesh.world_size)
    holders = [axis for axis in several if axis != "tp"]
    sent[f"all-reduce {', '.join(holders)}"] += all_reduced(16, mesh.size("pp", "dp"))
    return +sent


def _tensor_parallel(config: RunConfig, mesh: Mesh) -> Counter[str]:
    """Two all-reduces a layer either way, or with sequence parallelism as many reduce-scatters and gathers, and two
    gathers more for the gradients of weights; one at the embedding, one at the output; three numbers a token.
    """
    ranks, model = mesh.size("tp"), config.model
    if ranks == 1:
        return Counter()
    stages = [stage for stage in model_stages(config) if stage.rank == mesh.rank("pp")]
    layers = sum(len(stage.layers) for stage in stages)
    ends = sum(stage.is_first + stage.is_last for stage in stages)
    tokens = config.data.seq_length * config.training.micro_batch_size
    hidden, microbatches = tokens * model.hidden_size * 4, config.num_microbatches()
    loss = 3 * all_reduced(4 * tokens, ranks) * any(stage.is_last for stage in stages)
    biases = all_reduced(4 * 2 * layers * model.hidden_size, ranks) * model.add_bias_linear  # added before the sums
    if not config.parallel.sequence_parallel:
        exchanges = (4 * layers + ends) * all_reduced(hidden, ranks)
        return Counter({"all-reduce tp": microbatches * (exchanges + loss) + biases})
    # Held whole and used on a part of the sequence: norms, of two numbers a channel, and positions.
    partial = model.hidden_size * (2 * 2 * layers + 2 + config.data.seq_length)
    return Counter(
        {
            "all-gather tp": microbatches * (6 * layers + ends) * gathered(hidden, ranks),
            "reduce-scatter tp": microbatches * (4 * layers + ends) * gathered(hidden, ranks),
            "all-reduce tp": microbatches * loss + biases + all_reduced(4 * partial, ranks),
        }
    )


def _pipeline(config: RunConfig, mesh: Mesh) -> Counter[str]:
    """One activation a boundary and microbatch, and its gradient back; the gradient of tied embeddings once a step."""
    if mesh.size("pp") == 1:
        return Counter()
    settings, rank, model = PipelineSettings.of(config), mesh.rank("pp"), config.model
    at = [location.rank for location in settings.placement.locations]
    assert len(at) == mesh.size("pp") * chunks_per_rank(config)
    ways = sum((one, other).count(rank) for one, other in itertools.pairwise(at) if one != other)
    activation = config.data.seq_length * config.training.micro_batch_size * model.hidden_size * 4
    sent = config.num_microbatches() * ways * activation
    if not model.untie_embeddings_and_output_weights and at[0] != at[-1] and rank in (at[0], at[-1]):
        owners = mesh.size("dp") if config.parallel.zero_stage else 1
        sent += config.padded_vocab_size // mesh.size("tp") * model.hidden_size * 4 // owners
    return Counter({"messages": sent})


def _data_parallel(config: RunConfig, mesh: Mesh) -> Counter[str]:
    """All gradients summed; with ZeRO 1 each rank gets the sums of its part, and all ranks get all weights. ZeRO 2 sums
    after each microbatch. ZeRO 3 gathers weights for each forward and each backward pass, or with pipelines once;
    embeddings and output weights for forward passes alone: gradients of rows don't depend on them, and the loss makes
    its gradients on the way. Tied words are gathered for both. With copies, between the ranks of one; then shards are
    summed over copies, or portions of shards, which are gathered.
    """
    ranks, parameters = mesh.size("dp"), rank_parameters(config, GPTSpec(), pipeline_rank=mesh.rank("pp"))
    size, ends = parameters.total * 4, parameters.ends * 4
    words = config.padded_vocab_size // mesh.size("tp") * config.model.hidden_size * 4
    if ranks == 1:
        return Counter()
    if config.parallel.zero_stage == 0:
        return Counter({"all-reduce dp": all_reduced(size, ranks)})
    microbatches = config.num_microbatches() if config.parallel.zero_stage > 1 else 1
    whole = size
    if config.parallel.zero_stage == 3 and mesh.size("pp") == 1:
        once = ends if config.model.untie_embeddings_and_output_weights else ends - words
        whole = microbatches * (2 * size - once)
    copies = config.parallel.num_distributed_optimizer_instances
    shards, within = ranks // copies, "dp" if copies == 1 else "dp, in a copy"
    part, portion = gathered(size, shards), gathered(size // shards, copies)
    sent = Counter({f"reduce-scatter {within}": microbatches * part, f"all-gather {within}": gathered(whole, shards)})
    if config.parallel.outer_dp_sharding_strategy == "optim":
        return sent + Counter({"reduce-scatter dp, copies": portion, "all-gather dp, copies": portion})
    return sent + Counter({"all-reduce dp, copies": all_reduced(size // shards, copies)})


def main() -> None:
    """Print a row a layout, of the rank that sends most, and say whether all ranks agree with the textbook."""
    options = results.parse(results.parser_of(__doc__))
    ratios = {}
    print("| layout | KiB | textbook | by call |")
    print("|---|--:|--:|---|")
    for layouts in worlds()[:1] if options.quick else worlds():
        for layout, counted in measured(layouts).items():
            expected = [textbook(layout, rank) for rank in range(len(counted))]
            most = max(range(len(counted)), key=lambda rank: counted[rank].total())
            parts = ", ".join(f"{name} {size / 1024:,.1f}" for name, size in sorted(counted[most].items()))
            verdict = "" if counted == expected else " DIFFERENT"
            sizes = f"{counted[most].total() / 1024:,.1f} | {expected[most].total() / 1024:,.1f}{verdict}"
            print(f"| {layout} | {sizes} | {parts} |", flush=True)
            ratios[layout] = max(sent.total() / wanted.total() for sent, wanted in zip(counted, expected))
    results.save(options, ratios)


if __name__ == "__main__":
    main()
