"""The estimated memory of ranks beside what a rehearsal counts: ten layouts of a model, and every example.

    python -m benchmarks.estimate                 # all of them, some minutes
    python -m benchmarks.estimate cp2 llama3_70b  # some

A rehearsal runs the program on a pretended accelerator and counts the bytes of each tensor that it makes there. The
examples run on as many ranks as their scripts are for; of each, the first rank of every pipeline's first stage is
taken, and of layouts with stages the last one too.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import dataclasses
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks import results
from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES, family_of
from megatron.errors import ParallelError
from megatron.planning.estimate import rank_peak
from megatron.rehearsal.accelerator import unavailable
from megatron.rehearsal.ranks import rehearse_tasks
from megatron.rehearsal.settings import rehearsed
from megatron.rehearsal.task import Task
from tests.golden.regenerate_examples import FLAG_FILES, example

EXAMPLES = {path.stem: path for path in FLAG_FILES}
MODEL = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --num-layers 8 --hidden-size 2048 --swiglu "
    "--num-attention-heads 16 --group-query-attention --num-query-groups 4 --normalization RMSNorm --bf16 "
    "--position-embedding-type rope --disable-bias-linear --seq-length 4096 --micro-batch-size 1 --lr 1e-4 "
    "--attention-dropout 0 --hidden-dropout 0 --train-iters 10 --global-batch-size 32"
)
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "one rank": (1, ""),
    "one rank, recompute full": (1, "--recompute-granularity full --recompute-method uniform"),
    "one rank, recompute core_attn": (1, "--recompute-granularity selective --recompute-modules core_attn"),
    "one rank, recompute layernorm, mlp": (1, "--recompute-granularity selective --recompute-modules layernorm mlp"),
    "dp8 zero": (8, ZERO),
    "tp4": (4, "--tensor-model-parallel-size 4"),
    "tp4 sp dp2 zero": (8, f"--tensor-model-parallel-size 4 --sequence-parallel {ZERO}"),
    "cp2": (2, "--context-parallel-size 2"),
    "cp2 tp2 sp, heads": (4, "--context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 2 "
     "--sequence-parallel"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "pp2 vpp2 tp2 sp": (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
     "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2 zb-h1, recompute full": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --recompute-granularity full",
    ),
    "ep4 zero": (4, f"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 2048 --expert-model-parallel-size 4 "
     f"{ZERO}"),
    "tp2 sp, tensorwise fp8": (2, "--tensor-model-parallel-size 2 --sequence-parallel --fp8-format hybrid "
     "--fp8-recipe tensorwise"),
}  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """Bytes of one rank: what is held between steps, and the most in a step; counted and estimated."""

    rank: int
    states: int
    estimated_states: int
    highest: int
    estimated_highest: int

    @property
    def share(self) -> float:
        """The peak over its estimate."""
        return self.highest / self.estimated_highest


def run_of(name: str) -> RunConfig:
    """A layout or an example by its name."""
    if name in LAYOUTS:
        ranks, flags = LAYOUTS[name]
        return parse_run([*MODEL.split(), *flags.split()], world_size=ranks, extra_groups=FAMILIES["gpt"].groups)
    run = example(EXAMPLES[name])
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=run.model.vocab_size or 32000))


def tasks_of(run: RunConfig, ranks: Iterable[int] | None = None) -> list[Task]:
    """Ranks of a run to rehearse: by default the first one, and the last one where it is of another stage."""
    spec = family_of(run.extra).train_spec
    assert run.model.vocab_size
    small = rehearsed(run, spec, vocab_size=run.model.vocab_size, steps=1)
    last = [run.world_size - 1] if run.parallel.pipeline_model_parallel_size > 1 else []
    wanted = [0, *last] if ranks is None else ranks
    return [Task(config=small, train_spec=spec, rank=rank, steps=1, memory=80 * 10**9) for rank in wanted]


def compared(tasks: Mapping[str, Sequence[Task]]) -> dict[str, list[Compared]]:
    """Rehearse the tasks, and compare their memory with the estimate. Raises ParallelError where one fails."""
    flat = [(name, task) for name, each in tasks.items() for task in each]
    found: dict[str, list[Compared]] = {name: [] for name in tasks}
    outcomes = rehearse_tasks([task for _, task in flat], multiprocessing.get_context("forkserver"))
    for (name, task), outcome in zip(flat, outcomes):
        if isinstance(outcome, str):
            raise ParallelError(f"{name}: {outcome}")
        estimate = rank_peak(task.config, task.train_spec, outcome.pipeline_rank)
        found[name].append(Compared(task.rank, outcome.states, estimate.states, outcome.highest, estimate.total))
    return found


def main() -> None:
    """Print the table."""
    parser = results.parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a layout or an example; all without one")
    options = results.parse(parser, names=["cp2"])
    names, ratios = options.names or [*LAYOUTS, *EXAMPLES], {}
    if reason := unavailable():
        results.skip(options, reason)
        return
    if unknown := {*names} - {*LAYOUTS, *EXAMPLES}:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join([*LAYOUTS, *EXAMPLES])}")
    print("| run | rank | between steps, GB | estimated | at most, GB | estimated | counted/estimated |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in names:
        for each in compared({name: tasks_of(run_of(name))})[name]:
            sizes = (each.states, each.estimated_states, each.highest, each.estimated_highest)
            columns = " | ".join(f"{size / 1e9:.2f}" for size in sizes)
            print(f"| {name} | {each.rank:,} | {columns} | {each.share:.3f} |", flush=True)
            ratios[f"{name}, rank {each.rank}"] = max(each.share, 1 / each.share)
    results.save(options, ratios)


if __name__ == "__main__":
    main()
