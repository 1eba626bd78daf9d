"""Every layout of the equivalence table, and every example, on a pretended accelerator.

Of examples and of the layouts of benchmarks/estimate.py the estimated memory is compared with what was counted.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from benchmarks import estimate
from megatron.config.family import FamilyConfig
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES
from megatron.core.models.t5.config import T5Config
from megatron.planning.estimate import rank_peak
from megatron.rehearsal.accelerator import unavailable
from megatron.rehearsal.rank import Rehearsed
from megatron.rehearsal.ranks import rehearse_tasks
from megatron.rehearsal.report import problems
from megatron.rehearsal.task import Task
from tests.equivalence import test_context, test_experts, test_fp8, test_freezing, test_pipeline, test_t5
from tests.equivalence import test_equivalence as table
from tests.equivalence.families import LENGTH, T5_SETTINGS, VOCABULARY
from tests.equivalence.training import Layout
from tests.harness.runs import tiny_config

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

Case = tuple[Mapping[str, Any], Layout]
LLAMA: dict[str, Any] = table.VARIANTS["llama"]
FOUR: dict[str, Any] = LLAMA | {"num_layers": 4}
DEEP: dict[str, Any] = LLAMA | {"num_layers": 9}
EXPERTS: dict[str, Any] = next(iter(test_experts.VARIANTS.values()))
LATER: dict[str, Any] = table.VARIANTS["future tokens, documents"]
BERT: dict[str, Any] = table.VARIANTS["bert"]
T5: dict[str, Any] = test_t5.VARIANTS["original"]
TP2 = Layout(tp=2, sequence_parallel=True)
STAGES = test_pipeline.STAGES | test_pipeline.COMBINED | test_pipeline.EIGHT_RANKS | test_pipeline.MANY_STAGES
SLICED = ("cp2 gather", "cp2 tp2 sp", "cp2 dp2, fully masked ranks")
STAGED = ("pp4", "pp2 vpp2", "pp2 zb-v", "pp2 zb-h1 tp2 sp, recompute full", "pp2 cp2", "pp2 zb-v dp2 zero overlapped")


def named(prefix: str, settings: dict[str, Any], layouts: Mapping[str, Layout]) -> dict[str, Case]:
    """A model at several layouts; where each layer has its own way of context parallelism, with as many layers."""
    ways = {name: len(layout.cp_comm_types) for name, layout in layouts.items()}
    return {
        f"{prefix}{name}": (settings | ({"num_layers": ways[name]} if ways[name] > 1 else {}), layout)
        for name, layout in layouts.items()
    }


def some(layouts: Mapping[str, Layout], names: Iterable[str]) -> dict[str, Layout]:
    """Those of ``layouts`` with these names."""
    return {name: layouts[name] for name in names}


def gathered(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With weights that are gathered in FP8."""
    return {**settings, "fp8": settings["fp8"] | {"fp8_param_gather": True}}


CASES: dict[str, Case] = {
    **{name: (FOUR if len(layout.cp_comm_types) > 1 else LLAMA, layout) for name, layout in table.LAYOUTS.items()},
    **named("", DEEP, STAGES | test_context.SLICED_STAGES),
    **named("few groups, ", table.FEW_GROUPS["two groups, qk norm, documents"], table.FEW_GROUPS_LAYOUTS),
    **named("few groups, ", table.FEW_GROUPS["one group"] | {"num_layers": 5}, test_context.SHARED_HEADS),
    **named("frozen, ", test_freezing.VARIANTS["first half"], test_freezing.LAYOUTS),
    **named("twelve heads, ", table.TWELVE_HEADS, table.THREES_LAYOUTS),
    **named("experts, ", EXPERTS, test_experts.LAYOUTS),
    **named("latents, ", table.LATENT | {"num_layers": 4}, table.LATENT_LAYOUTS),
    **{
        f"fp8, {name}": (
            test_fp8.VARIANTS["experts, tensorwise" if layout.ep > 1 else "tensorwise"] | test_fp8.FOUR_LAYERS,
            layout,
        )
        for name, layout in test_fp8.LAYOUTS.items()
    },
    **named("future tokens, ", LATER | {"num_layers": 9}, some(STAGES, STAGED)),
    **named("bert, ", BERT, some(table.LAYOUTS, ("tp2 sp", "dp2 zero", *SLICED))),
    **named("bert, ", BERT | {"num_layers": 9}, some(STAGES, STAGED)),
    **named("t5, ", T5, some(table.LAYOUTS, ("tp4 sp", "dp2 zero", *SLICED))),
    **named("t5, ", T5, some(STAGES, STAGED) | test_t5.CUTS),
    **{name: (settings, TP2) for name, settings in table.VARIANTS.items()},
    **{f"t5: {name}": (settings, TP2) for name, settings in (test_t5.VARIANTS | test_t5.OTHERS).items()},
    **{f"experts: {name}": (settings, TP2) for name, settings in test_experts.VARIANTS.items()},
    **{
        f"gathered in fp8: {name}": (gathered(test_fp8.VARIANTS[variant]), layout)
        for name, (variant, layout) in test_fp8.GATHERED.items()
    },
    **{f"fp8: {name}": (settings, TP2) for name, settings in test_fp8.VARIANTS.items()},
}
FIRST_ESTIMATED = ("gpt2_124m",)
ESTIMATED = [*estimate.LAYOUTS, *estimate.EXAMPLES]
FIRST = ("experts, tp2 sp ep2 etp1",)
TOGETHER = 5
WAITS = {
    "on_host": "loss and gradient norm of a step",
    "plan_route": "rows that experts' ranks send each other: shapes depend on them",
    "plan_local_route": "rows that are left where choices are dropped: shapes depend on them",
    "multiply": "rows of each expert in FP8: each has a product of its own",
    "expert_scales": "rounds of Sinkhorn routing: they end when scales no longer change",
    "parts": "rows of each expert: shapes depend on them",
    "cross_entropy_where_weighted": "words that count, of BERT: shapes depend on them",
    "with_gradient_scales": "of fp16, words that count: gradients are scaled by a number of the host",
    "train_step": "how often experts were chosen, for the log",
    "document_lengths": "where documents begin: which keys are read depends on them",
}
"""Functions in which a host may wait for its device, and why it must."""


def run_of(settings: Mapping[str, Any], layout: Layout) -> RunConfig:
    """The run that a row of the table describes."""
    given = dict(settings)
    family, documents = given.pop("family", "gpt").partition(",")[0], given.pop("document_ids", False)
    pads = [given.pop(name, False) for name in ("text_mask", "mtp_text_mask")]
    groups: tuple[FamilyConfig, ...] = given.pop("groups", ())
    fp8, freeze, recompute = Fp8Config(**given.pop("fp8", {})), given.pop("freeze", ()), layout.recompute
    if family == "t5":
        groups = (T5Config(**T5_SETTINGS),)
    flags = [
        "--mock-data --tokenizer-type NullTokenizer --bf16 --eval-iters 1",
        f"--tensor-model-parallel-size {layout.tp} --context-parallel-size {layout.cp}",
        f"--pipeline-model-parallel-size {layout.pp} --expert-model-parallel-size {layout.ep}",
        f"--micro-batch-size {layout.micro_batch_size} --cp-comm-type {' '.join(layout.cp_comm_types)}",
        "--hierarchical-context-parallel-sizes " + " ".join(map(str, layout.cp_sizes)) if layout.cp_sizes else "",
        "--num-experts 8" if any(isinstance(group, MoEConfig) for group in groups) else "",
        f"--decoder-num-layers {T5_SETTINGS['decoder_num_layers']}" if family == "t5" else "",
        f"--num-layers {given['num_layers']} --num-attention-heads {12 if layout.tp == 3 else 16} --hidden-size 96",
        f"--expert-tensor-parallel-size {layout.etp}" if layout.etp else "",
        "--sequence-parallel" if layout.sequence_parallel else "",
        "--use-distributed-optimizer" if layout.sharded else "",
        "--overlap-grad-reduce" if layout.overlap else "",
        "--overlap-param-gather" if layout.overlap and layout.sharded else "",
        f"--ddp-bucket-size {layout.bucket_size}" if layout.bucket_size else "",
        "" if layout.pp_before_dp else "--use-tp-pp-dp-mapping",
        "" if layout.pp == 1 else f"--pipeline-schedule {layout.schedule}",
        f"--num-virtual-stages-per-pipeline-rank {layout.chunks}" if layout.schedule == "interleaved" else "",
        "" if layout.overlap_p2p or layout.pp == 1 else "--no-overlap-p2p-communication",
        "--reset-position-ids --reset-attention-mask" if documents else "",
    ]
    ranks = layout.tp * layout.cp * layout.dp * layout.pp
    flags += ["--packing best-fit"] if any(pads) else []
    config = tiny_config(" ".join(flags), ranks=ranks, family=FAMILIES[family])
    model = ModelConfig(max_position_embeddings=LENGTH, vocab_size=VOCABULARY, **given)
    extra: tuple[Any, ...] = tuple(
        next((own.resolved(model, config.data) for own in groups if type(own) is type(group)), group)
        for group in config.extra
    )
    training = dataclasses.replace(
        config.training,
        recompute_granularity=recompute.granularity,
        recompute_method=recompute.method,
        recompute_num_layers=recompute.num_layers,
        recompute_modules=recompute.modules,
        cpu_offloading=recompute.offloaded > 0,
        min_offloaded_tensor_size=recompute.least_offloaded,
    )
    parallel = dataclasses.replace(
        config.parallel,
        stage_layers=layout.stage_sizes or None,
        gradient_accumulation_fusion=layout.fuses_accumulation,
    )
    optimizer = dataclasses.replace(config.optimizer, freeze=freeze)
    return dataclasses.replace(
        config, model=model, extra=extra, training=training, parallel=parallel, optimizer=optimizer, fp8=fp8
    )


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
        pytest.param(first, id="representative"),
        *(pytest.param(group, id=group[0], marks=pytest.mark.slow) for group in groups),
    ]


@pytest.mark.parametrize("names", in_groups(CASES, FIRST))
def test_layouts_of_the_equivalence_table_fit_together(names: Sequence[str]) -> None:
    """Devices, waits, what ranks ask of each other, whether it ends, and a checkpoint of all of them."""
    runs = {name: run_of(*CASES[name]) for name in names}
    check({name: estimate.tasks_of(run, range(run.world_size)) for name, run in runs.items()})


@pytest.mark.parametrize("names", in_groups(ESTIMATED, FIRST_ESTIMATED))
def test_estimated_memory_is_what_is_counted(names: Sequence[str]) -> None:
    """The first and the last rank, at full size: up to 671 B parameters. The rehearsals of examples have no fault."""
    shares = check({name: estimate.tasks_of(estimate.run_of(name)) for name in names})
    assert shares == pytest.approx(dict.fromkeys(names, 1.0), abs=0.03)


def test_no_layout_is_left_out() -> None:
    """A layout that is added to the table is rehearsed; those of layers that no run's flags describe are alike."""
    rehearsed = [layout for _, layout in CASES.values()]
    modules = (table, test_context, test_experts, test_fp8, test_freezing, test_pipeline, test_t5)
    tables = [each for module in modules for each in vars(module).values() if isinstance(each, dict)]
    layouts = [each for found in tables for each in found.values() if isinstance(each, Layout)]
    assert not [each for each in layouts if each not in rehearsed]
