"""Patterns of hybrids: letters, ratios, what follows from them, and what is wrong with them."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import allocated, read_pattern
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import chunks_per_rank, model_stages, stage_sizes
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError
from megatron.planning.shrinking import SMALL_VOCABULARY, shrunk, without_files
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse as parse_plain

FREE = "--num-layers"
"""A flag that the pattern sets."""


def parse(changes: str, *, without: str = FREE, ranks: int = 1, **options: object) -> RunConfig:
    """The run of a hybrid's command line."""
    given = "" if FREE in changes else without
    return parse_plain(changes, without=given, ranks=ranks, extra_groups=FAMILIES["gpt"].groups, **options)


@pytest.mark.parametrize(
    ("layers", "attention", "mlp", "pattern"),
    [
        (10, 0.2, 0, "MMM*MM*MMM"),
        (10, 0.2, 0.2, "MMM*-M*MM-"),
        (10, 0.3, 0.3, "M-*MM*-*M-"),
        (12, 0.25, 0.25, "MM*-MM*-M*M-"),
        (48, 0.08, 0.5, "M-M-M--M-*M-M-M-M--*M-M-M-M-*M--M-M-M-*M-M--M-M-"),
        (56, 0.08, 0.5, "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"),
    ],
)
def test_ratios_make_megatron_lms_pattern(layers: int, attention: float, mlp: float, pattern: str) -> None:
    """A model of another order is another model; Megatron-LM's checkpoints of the same ratios would not fit."""
    assert allocated(layers, attention=attention, mlp=mlp) == pattern


def test_ratios_give_as_many_layers_as_they_say() -> None:
    """Rounding while layers are spread must not lose one."""
    for layers in range(1, 60, 3):
        for tenths in ((a, m) for a in range(11) for m in range(11 - a)):
            attention, mlp = (each / 10 for each in tenths)
            asked = round(layers * attention), round(layers * mlp)
            if sum(asked) <= layers:
                found = allocated(layers, attention=attention, mlp=mlp)
                assert (len(found), found.count("*"), found.count("-")) == (layers, *asked)


def test_a_letter_that_is_none_is_the_only_problem() -> None:
    """One wrong letter was followed by a complaint that settings of Mamba-2 or gated delta nets had no effect."""
    flags = "--mamba-num-groups 4 --linear-num-key-heads 4"
    recomputed = "--recompute-granularity selective --recompute-modules mamba"
    with expect_error(ConfigError, "'X' at place 2") as caught:
        parse(f"--hybrid-layer-pattern MXG {flags} {recomputed}")
    assert "problems" not in str(caught.value)
    with expect_error(ConfigError, "--hybrid-mlp-ratio 0.6") as caught:
        parse(f"--num-layers 3 --hybrid-attention-ratio 0.6 --hybrid-mlp-ratio 0.6 {flags}")
    assert "no effect" not in str(caught.value)


def test_a_pattern_that_starts_with_a_dash_is_said_how_to_write() -> None:
    """It looks like a flag of its own, and nobody guesses the equals sign."""
    with expect_error(ConfigError, "--hybrid-layer-pattern=-…", "there is no flag -M-M"):
        parse("--hybrid-layer-pattern -M-M --num-layers 4")
    assert parse("--hybrid-layer-pattern=-*-*").part(HybridConfig).letters == "-*-*"


def test_the_pattern_sets_what_follows_from_it() -> None:
    """Megatron-LM's lines give --hybrid-layer-pattern alone; --num-layers was then missing."""
    flags = "--num-experts 4 --position-embedding-type rope --pipeline-model-parallel-size 2"
    run = parse(f"--hybrid-override-pattern *-*E|*-/*-/*- {flags}", ranks=2)
    assert (run.model.num_layers, run.model.mtp_num_layers) == (6, 2)
    assert run.part(MoEConfig).expert_layers(6) == (False, False, False, True, False, False)
    hybrid = run.part(HybridConfig)
    assert (hybrid.hybrid_layer_pattern, hybrid.segments, hybrid.depth_letters) == ("*-*E*-/*-/*-", (4, 2), "*-")


def test_spellings_of_one_pattern_are_equal() -> None:
    """A checkpoint of one spelling must load where another is given, and at another pipeline size."""
    ratios = parse("--num-layers 4 --hybrid-attention-ratio 0.5 --hybrid-mlp-ratio 0.5")
    assert ratios.part(HybridConfig).hybrid_layer_pattern == "-**-"
    written = parse("--hybrid-layer-pattern -**- --hybrid-attention-ratio 0.5 --hybrid-mlp-ratio 0.5 --is-hybrid-model")
    assert written.part(HybridConfig) == ratios.part(HybridConfig)
    one = parse("--hybrid-layer-pattern *-*-/*- --mtp-num-layers 2 --position-embedding-type rope")
    assert one.part(HybridConfig).hybrid_layer_pattern == "*-*-/*-/*-"


def test_a_hybrid_without_ratios_is_all_mamba() -> None:
    """Megatron-LM's ``pretrain_mamba.py`` without a pattern trains Mamba layers, and a GPT must not come out."""
    assert (
        parse("--mamba-num-groups 1 --num-layers 3 --is-hybrid-model").part(HybridConfig).hybrid_layer_pattern == "MMM"
    )
    script = parse("--mamba-num-groups 1 --num-layers 3", defaults={"is_hybrid_model": True})
    assert script.part(HybridConfig).letters == "MMM"
    spec = parse(
        "--mamba-num-groups 1 --num-layers 3 --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    )
    assert spec.part(HybridConfig).letters == "MMM" and any("--is-hybrid-model" in note for note in spec.notes)
    assert not parse("--num-layers 3").part(HybridConfig).is_hybrid


def test_a_checkpoint_gives_its_pattern() -> None:
    """``--use-checkpoint-args``, and so every tool, builds the saved hybrid; a pattern in flags goes before it."""
    saved = parse("--hybrid-layer-pattern *-|*-*- --pipeline-model-parallel-size 2", ranks=2).to_json()
    asked = "--use-checkpoint-args --load somewhere"
    run = parse(asked, checkpoint_config=lambda load, step: saved)
    assert (run.part(HybridConfig).hybrid_layer_pattern, run.model.num_layers, run.segments) == ("*-*-*-", 6, ())
    run = parse(f"{asked} --hybrid-layer-pattern *-", checkpoint_config=lambda load, step: saved)
    assert run.model.num_layers == 2
    restored = RunConfig.from_json(saved, groups=FAMILIES["gpt"].groups)
    assert restored.segments == (2, 4) and restored.to_json() == saved


@pytest.mark.parametrize(
    ("pattern", "ranks", "chunks"), [("*-|*-*-", 2, 1), ("*|-|*-|*", 2, 2), ("*|-*|*|-", 4, 1), ("*-|*|-|*-*", 2, 2)]
)
def test_stages_end_at_borders(pattern: str, ranks: int, chunks: int) -> None:
    """A stage holds the layers between two borders, and a multiple of the pipeline size makes virtual stages."""
    run = parse(f"--hybrid-layer-pattern {pattern} --pipeline-model-parallel-size {ranks}", ranks=ranks)
    assert stage_sizes(run) == [len(each) for each in pattern.split("|")]
    assert chunks_per_rank(run) == chunks and [stage.rank for stage in model_stages(run)] == [*range(ranks)] * chunks


def test_a_small_copy_keeps_each_kind_of_layer() -> None:
    """The parity check of a hybrid must run all of its modules, in its stages."""
    run = parse("--hybrid-layer-pattern=---*-*--E-/*E --num-experts 4 --position-embedding-type rope")
    little = shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3))
    assert little.part(HybridConfig).hybrid_layer_pattern == "-*E/*E" and little.model.num_layers == 3
    assert little.part(MoEConfig).expert_layers(3) == (False, False, True)
    run = parse("--hybrid-layer-pattern=---*|-*-- --pipeline-model-parallel-size 2", ranks=2)
    little = shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3))
    assert little.part(HybridConfig).letters == "---*-*--" and stage_sizes(little) == [4, 4]


def test_a_report_counts_layers_of_each_kind() -> None:
    """The line about the model says what a hybrid consists of."""
    letters = allocated(56, attention=0.08, mlp=0.5)
    run = parse(f"--hybrid-layer-pattern {letters} --mamba-num-groups 1")
    assert [*run.part(HybridConfig).described(run)] == ["24 Mamba-2", "4 attention", "28 MLP layers"]
    assert not HybridConfig().described(run)


def test_experts_are_where_the_letter_is() -> None:
    """A --moe-layer-freq beside a pattern has no effect, and says so."""
    run = parse("--hybrid-layer-pattern *E*- --num-experts 4 --moe-layer-freq 2")
    assert run.part(MoEConfig).moe_layer_freq == "[0,1,0,0]"
    assert any("--moe-layer-freq: no effect" in note for note in run.notes)


def test_patterns_are_read_once() -> None:
    """The pattern without borders is the same model."""
    assert read_pattern("*-|*E").layers == read_pattern("*-*E").layers == "*-*E"
    assert dataclasses.asdict(read_pattern("*-/E")) == {"layers": "*-", "segments": (2,), "depths": ("E",)}
