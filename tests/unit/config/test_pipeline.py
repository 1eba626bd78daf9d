"""Layers over pipeline stages: by balance, by flags, by a layout string; none is lost, none is held twice."""

from __future__ import annotations

import pytest

from megatron.config.pipeline import balanced_sizes, chunks_per_rank, parse_layout, schedule_name, stage_sizes
from megatron.config.run import RunConfig
from tests.harness.closed_forms import model_parameters, rank_parameters
from tests.unit.config.command_lines import parse


def run_with(flags: str, *, ranks: int, layers: int) -> RunConfig:
    """A run of that many pipeline ranks and layers."""
    return parse(f"--num-layers {layers} --pipeline-model-parallel-size {ranks} {flags}", ranks=ranks)


@pytest.mark.parametrize(
    ("flags", "ranks", "layers", "sizes"),
    [
        ("", 4, 8, [2, 2, 2, 2]),
        ("", 4, 10, [2, 3, 3, 2]),
        ("", 3, 7, [2, 3, 2]),
        ("--num-virtual-stages-per-pipeline-rank 2", 2, 9, [2, 3, 2, 2]),
        ("--num-layers-per-virtual-pipeline-stage 2", 2, 8, [2, 2, 2, 2]),
        ("--pipeline-schedule zb-v", 2, 6, [1, 2, 2, 1]),
        ("--account-for-embedding-in-pipeline-split", 2, 7, [3, 4]),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", 4, 10, [2, 3, 3, 2]),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", 4, 2, [0, 1, 1, 0]),
        ("--decoder-first-pipeline-num-layers 1", 3, 7, [1, 3, 3]),
        ("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2", 4, 9, [1, 3, 3, 2]),
        ("--decoder-last-pipeline-num-layers 2 --num-virtual-stages-per-pipeline-rank 2", 2, 6, [2, 1, 2, 1]),
        ("--pipeline-model-parallel-layout E|t*3|t|tL", 2, 5, [0, 3, 1, 1]),
        ("--pipeline-model-parallel-layout Ett|(t|)*2L", 4, 4, [2, 1, 1, 0]),
    ],
)
def test_layers_fall_into_stages(flags: str, ranks: int, layers: int, sizes: list[int]) -> None:
    """A division that isn't the one asked for puts memory where nobody expects it."""
    run = run_with(flags, ranks=ranks, layers=layers)
    assert stage_sizes(run) == sizes
    assert sum(sizes) == layers and len(sizes) == ranks * chunks_per_rank(run)


@pytest.mark.parametrize("ranks", range(2, 6))
def test_any_number_of_layers_works(ranks: int) -> None:
    """Megatron-LM's way of losing layers is a division that rounds down."""
    for layers in range(2 * ranks, 30):
        for flags in ("", "--num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule zb-v"):
            run = run_with(flags, ranks=ranks, layers=layers)
            assert sum(stage_sizes(run)) == layers and min(stage_sizes(run)) > 0


def test_schedules_follow_the_stages() -> None:
    """Virtual stages mean interleaving, as with Megatron-LM's flags."""
    assert schedule_name(run_with("", ranks=2, layers=4)) == "1f1b"
    assert schedule_name(run_with("--num-virtual-stages-per-pipeline-rank 2", ranks=2, layers=4)) == "interleaved"
    assert schedule_name(run_with("--num-virtual-stages-per-pipeline-rank 1", ranks=2, layers=4)) == "1f1b"
    assert schedule_name(run_with("--pipeline-schedule zb-h1", ranks=2, layers=4)) == "zb-h1"
    assert schedule_name(parse()) == "1f1b"


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EtL", ["EtL"]),
        ("Et*3|(tt|)*2,tL", ["Ettt", "tt", "tt", "tL"]),
        ("E|(t|(tt)*2|)*2L", ["E", "t", "tttt", "t", "tttt", "L"]),
        ("E t, t | t L", ["Ett", "tL"]),
    ],
)
def test_layout_strings(text: str, stages: list[str]) -> None:
    """Strings that people have work as they do elsewhere."""
    assert parse_layout(text) == stages


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("flags", "ranks"), [("", 3), ("--pipeline-schedule zb-v", 2)])
def test_parameters_of_all_ranks_are_the_model(flags: str, ranks: int, tied: bool) -> None:
    """The estimate of a rank counts what it holds: a tied matrix on the first and the last, once where they are one."""
    flags += "" if tied else " --untie-embeddings-and-output-weights"
    run = run_with(f"{flags} --make-vocab-size-divisible-by 1", ranks=ranks, layers=7)
    held = sum(rank_parameters(run, pipeline_rank=rank) for rank in range(ranks))
    copies = 1 if tied and run.parallel.pipeline_schedule is None else 0
    assert held == model_parameters(run) + copies * run.padded_vocab_size * run.model.hidden_size


def test_sizes_differ_by_one_at_most() -> None:
    """A pipeline is as slow as its largest stage."""
    for layers in range(1, 40):
        for stages in range(1, 9):
            sizes = balanced_sizes(layers, stages)
            assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1
