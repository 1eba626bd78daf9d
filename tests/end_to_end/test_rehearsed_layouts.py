"""Every layout of the equivalence table, and every example, on a pretended accelerator.

Of examples and of the layouts of benchmarks/estimate.py the estimated memory is compared with what was counted.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from benchmarks import estimate
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.planning.estimate import rank_peak
from megatron.rehearsal.accelerator import unavailable
from megatron.rehearsal.rank import Rehearsed
from megatron.rehearsal.ranks import rehearse_tasks
from megatron.rehearsal.report import problems
from megatron.rehearsal.task import Task
from tests.equivalence import (
    flags,
    test_context,
    test_experts,
    test_fp8,
    test_freezing,
    test_pipeline,
    test_t5,
    test_two_levels,
)
from tests.equivalence import test_equivalence as table
from tests.equivalence.training import run_of as table_run

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

Case = tuple[str, str]
LLAMA = table.VARIANTS["llama"]
FOUR, DEEP = f"{LLAMA} --num-layers 4", f"{LLAMA} --num-layers 9"
EXPERTS = next(iter(test_experts.VARIANTS.values()))
LATER = f"{table.VARIANTS['future tokens, documents']} --num-layers 9"
BERT, T5 = table.VARIANTS["bert"], test_t5.VARIANTS["original"]
TP2 = f"--world-size 2 {flags.TP2} {flags.SP}"
STAGES = test_pipeline.STAGES | test_pipeline.COMBINED | test_pipeline.EIGHT_RANKS | test_pipeline.MANY_STAGES
SLICED = ("cp2 gather", "cp2 tp2 sp", "cp2 dp2, fully masked ranks")
STAGED = ("pp4", "pp2 vpp2", "pp2 zb-v", "pp2 zb-h1 tp2 sp, recompute full", "pp2 cp2", "pp2 zb-v dp2 zero overlapped")


def named(prefix: str, row: str, layouts: Mapping[str, str]) -> dict[str, Case]:
    """A model at several layouts; where each layer has its own way of context parallelism, with as many layers."""
    found = {}
    for name, layout in layouts.items():
        ways = re.search(r"--cp-comm-type ((?:[a-z]\S+ ?)+)", layout)
        count = len(ways[1].split()) if ways else 1
        found[f"{prefix}{name}"] = (f"{row} --num-layers {count}" if count > 1 else row, layout)
    return found


def some(layouts: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Those of ``layouts`` with these names."""
    return {name: layouts[name] for name in names}


CASES: dict[str, Case] = {
    **named("", LLAMA, table.LAYOUTS),
    **named("", DEEP, STAGES | test_context.SLICED_STAGES),
    **named("few groups, ", table.FEW_GROUPS["two groups, qk norm, documents"], table.FEW_GROUPS_LAYOUTS),
    **named("few groups, ", f"{table.FEW_GROUPS['one group']} --num-layers 5", test_context.SHARED_HEADS),
    **named("frozen, ", test_freezing.VARIANTS["first half"], test_freezing.LAYOUTS),
    **named("twelve heads, ", table.THREES["twelve heads"], table.THREES_LAYOUTS),
    **named("experts, ", EXPERTS, test_experts.LAYOUTS),
    **named("latents, ", f"{flags.LATENT} --num-layers 4", table.LATENT_LAYOUTS),
    **{
        f"fp8, {name}": (
            test_fp8.VARIANTS["experts, tensorwise" if flags.EP2 in layout else "tensorwise"] + " --num-layers 4",
            layout,
        )
        for name, layout in test_fp8.LAYOUTS.items()
    },
    **named("future tokens, ", LATER, some(STAGES, STAGED)),
    **named("bert, ", BERT, some(table.LAYOUTS, ("tp2 sp", "dp2 zero", *SLICED))),
    **named("bert, ", f"{BERT} --num-layers 9", some(STAGES, STAGED)),
    **named("t5, ", T5, some(table.LAYOUTS, ("tp4 sp", "dp2 zero", *SLICED))),
    **named("t5, ", T5, some(STAGES, STAGED) | test_t5.CUTS),
    **{name: (row, TP2) for name, row in table.VARIANTS.items()},
    **{f"t5: {name}": (row, TP2) for name, row in (test_t5.VARIANTS | test_t5.OTHERS).items()},
    **{f"experts: {name}": (row, TP2) for name, row in test_experts.VARIANTS.items()},
    **{
        f"gathered in fp8: {name}": (test_fp8.VARIANTS[variant], layout)
        for name, (variant, layout) in test_fp8.GATHERED.items()
    },
    **named("experts, copies, ", test_two_levels.VARIANTS["llama tied, experts"], test_two_levels.LAYOUTS),
    **{f"fp8: {name}": (row, TP2) for name, row in test_fp8.VARIANTS.items()},
}
TABLES = ("STAGES", "COMBINED", "EIGHT_RANKS", "MANY_STAGES", "SLICED_STAGES", "SHARED_HEADS", "CUTS", "GATHERED")
ESTIMATED = [*estimate.LAYOUTS, *estimate.EXAMPLES]
FIRST = ("experts, tp2 sp ep2 etp1",)
TOGETHER = 5
WAITS = {
    "on_host": "loss and gradient norm of a step",
    "plan_dispatch": "rows that experts' ranks send each other: shapes depend on them",
    "plan_local_dispatch": "rows that are left where choices are dropped: shapes depend on them",
    "multiply": "rows of each expert in FP8: each has a product of its own",
    "expert_scales": "rounds of Sinkhorn routing: they end when scales no longer change",
    "parts": "rows of each expert: shapes depend on them",
    "cross_entropy_where_weighted": "words that count, of BERT: shapes depend on them",
    "with_gradient_scales": "of fp16, words that count: gradients are scaled by a number of the host",
    "update_weights": "how often experts were chosen, for the log",
    "document_lengths": "where documents begin: which keys are read depends on them",
    "to_host": "gradients of a step that the CPU takes",
    "to_device": "weights of a step that the CPU takes",
}
"""Functions in which a host may wait for its device, and why it must."""


def run_of(row: str, layout: str) -> RunConfig:
    """The run of a row of the table in bf16, on data of its family's own."""
    _, run = table_run(row, f"{layout} --bf16 --eval-iters 1")
    return dataclasses.replace(run, precision=PrecisionConfig(bf16=True))


def check(tasks: Mapping[str, Sequence[Task]]) -> dict[str, float]:
    """Rehearse ranks of runs, and assert that nothing is wrong with any; each one's peak over its estimate, of the rank
    where they differ most.
    """
    flat = [(name, task) for name, each in tasks.items() for task in each]
    outcomes = rehearse_tasks([task for _, task in flat], multiprocessing.get_context("forkserver"))
    wrong, found = list[str](), defaultdict[str, dict[int, Rehearsed]](dict)
    shares: dict[str, float] = {}
    for (name, task), outcome in zip(flat, outcomes):
        if isinstance(outcome, str):
            wrong.append(f"{name}: {outcome}")
            continue
        found[name][task.rank] = outcome
        share = outcome.highest / rank_peak(task.config, task.train_spec, outcome.pipeline_rank).total
        shares[name] = max(share, shares.get(name, share), key=lambda each: abs(each - 1))
    for name, ranks in found.items():
        wrong += [f"{name}: {each}" for each in problems(ranks)]
        for rank, each in ranks.items():
            by_function = Counter[str]()
            for place, times in each.waits.items():
                by_function[place.split(" in ")[1]] += times
            wrong += [f"{name}: the host waits in {function}" for function in by_function.keys() - WAITS.keys()]
            if by_function["on_host"] != 1:
                wrong.append(f"{name}: rank {rank} reads {by_function['on_host']} times what it reports, not once")
    assert not wrong, "\n".join(wrong)
    return shares


def in_groups(names: Iterable[str], first: Sequence[str]) -> list[Any]:
    """Some cases at a time, since a first use of torch takes seconds in each process; those of ``first`` in the
    default tier, all others in the whole one: together they take minutes.
    """
    others = [name for name in names if name not in first]
    groups = [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)]
    return [
        *([pytest.param(first, id="representative")] if first else []),
        *(pytest.param(group, id=group[0], marks=pytest.mark.slow) for group in groups),
    ]


@pytest.mark.parametrize("names", in_groups(CASES, FIRST))
def test_layouts_of_the_equivalence_table_fit_together(names: Sequence[str]) -> None:
    """Devices, waits, what ranks ask of each other, whether it ends, and a checkpoint of all of them."""
    runs = {name: run_of(*CASES[name]) for name in names}
    check({name: estimate.tasks_of(run, range(run.world_size)) for name, run in runs.items()})


@pytest.mark.parametrize("names", in_groups(ESTIMATED, ()))
def test_estimated_memory_is_what_is_counted(names: Sequence[str]) -> None:
    """The first and the last rank, at full size: up to 671 B parameters. The rehearsals of examples have no fault."""
    shares = check({name: estimate.tasks_of(estimate.run_of(name)) for name in names})
    assert shares == pytest.approx(dict.fromkeys(names, 1.0), abs=0.02)


def test_no_layout_is_left_out() -> None:
    """A layout that is added to the table is rehearsed; those of layers that no run's flags describe are alike."""
    rehearsed = [layout for _, layout in CASES.values()]
    modules = (table, test_context, test_experts, test_fp8, test_freezing, test_pipeline, test_t5, test_two_levels)
    tables = [each for module in modules for name, each in vars(module).items() if "LAYOUTS" in name or name in TABLES]
    layouts = [each for found in tables if isinstance(found, dict) for each in found.values()]
    assert len(layouts) > 100
    assert not [each for each in layouts if (each if isinstance(each, str) else each[-1]) not in rehearsed]
