"""Flags of Megatron-LM that are no settings here: none is unknown, none is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.command import CommandConfig
from megatron.config.flags import flags_of
from megatron.config.legacy_flags import LEGACY_FLAGS, legacy_flag
from megatron.config.run import CORE_GROUPS
from megatron.config.typed_spellings import as_typed, errors_as_typed
from megatron.core.models.gpt.config import GROUPS
from megatron.core.models.registry import owner_of
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse

# Every flag of Megatron-LM 2.6 and 0.12, and those that its main branch added until 2026.
KNOWN = (Path(__file__).parents[2] / "golden" / "megatron_flags.txt").read_text().split()
OURS = {
    spelling
    for group in (*CORE_GROUPS, *GROUPS, CommandConfig)
    for spec in flags_of(group)
    for spelling in spec.spellings()
}


def test_every_flag_is_known() -> None:
    """A launch script never meets 'there is no flag' for something that Megatron-LM has."""
    assert len(KNOWN) > 600
    assert [
        spelling for spelling in KNOWN if spelling not in OURS and not (legacy_flag(spelling) or owner_of(spelling))
    ] == []


@pytest.mark.parametrize("verdict", ["ignored", "refused"])
def test_every_legacy_flag_says_something(verdict: str) -> None:
    """Ignored with a note, or refused with advice; those that are renamed have a test of their own below."""
    for spelling, legacy in LEGACY_FLAGS.items():
        if legacy.verdict != verdict:
            continue
        assert legacy.word
        assert not legacy.word.endswith(".")
        words = spelling if spelling == "--deepspeed" else f"{spelling} value"  # which takes a file, too
        if verdict == "ignored":
            assert parse(words).notes == (f"{words} has no effect: {legacy.word}",)
        else:
            with pytest.raises(ConfigError) as caught:
                parse(f"{spelling} value")
            assert str(caught.value) == f"{spelling} value: {legacy.word}"


@pytest.mark.parametrize(
    ("changes", "without", "field", "value", "note"),
    [
        (
            "--batch-size 4",
            "--micro-batch-size",
            "micro_batch_size",
            4,
            "--batch-size 4: taken as --micro-batch-size 4",
        ),
        (
            "--model-parallel-size 2",
            "",
            "tensor_model_parallel_size",
            2,
            "--model-parallel-size 2: taken as --tensor-model-parallel-size 2",
        ),
        (
            "--layernorm-epsilon 1e-6",
            "",
            "norm_epsilon",
            1e-6,
            "--layernorm-epsilon 1e-6: taken as --norm-epsilon 1e-6",
        ),
        ("--encoder-num-layers 3", "--num-layers", "num_layers", 3, "--encoder-num-layers 3: taken as --num-layers 3"),
        (
            "--encoder-seq-length 16",
            "--seq-length",
            "seq_length",
            16,
            "--encoder-seq-length 16: taken as --seq-length 16",
        ),
        (
            "--override-lr-scheduler",
            "",
            "override_opt_param_scheduler",
            True,
            "--override-lr-scheduler: taken as --override-opt_param-scheduler",
        ),
        (
            "--use-rotary-position-embeddings",
            "",
            "position_embedding_type",
            "rope",
            "--use-rotary-position-embeddings: taken as --position-embedding-type rope",
        ),
        (
            "--no-position-embedding",
            "",
            "position_embedding_type",
            "none",
            "--no-position-embedding: taken as --position-embedding-type none",
        ),
        (
            "--apply-query-key-layer-scaling",
            "",
            "attention_softmax_in_fp32",
            True,
            "--apply-query-key-layer-scaling: taken as --attention-softmax-in-fp32; dividing scores by the layer "
            "number and multiplying them back in the softmax cancels out",
        ),
        ("--use-flash-attn", "", "attention_backend", "auto", "--use-flash-attn: taken as --attention-backend auto"),
    ],
)
def test_renamed(changes: str, without: str, field: str, value: object, note: str) -> None:
    """An old spelling sets the field it means, and says so."""
    run = parse(changes, without=without, ranks=2)
    assert {spec.field: run.value(spec) for spec in run.flags()}[field] == value
    assert run.notes == (note,)
    assert run.provenance[field] == changes.split()[0]


def test_renamed_flags_that_yield() -> None:
    """Llama scripts give both: rotary positions, and none of the learned ones."""
    both = parse("--no-position-embedding --use-rotary-position-embeddings")
    assert both.model.position_embedding_type == "rope"
    assert both.notes == ("--use-rotary-position-embeddings: taken as --position-embedding-type rope",)
    assert parse("--no-position-embedding --position-embedding-type rope").notes == ()
    assert parse("--use-flash-attn --attention-backend eager").model.attention_backend == "eager"


def test_notes_with_one_reason_are_one_line() -> None:
    """A GPT-3 script of Megatron-LM was answered with eleven lines, five of which ended in the same words."""
    notes = parse("--no-rope-fusion --use-mcore-models --no-bias-swiglu-fusion --use-legacy-models").notes
    assert notes == (
        "--no-rope-fusion, --no-bias-swiglu-fusion have no effect: the fastest kernels are always used, and fusion "
        "never changes results",
        "--use-mcore-models, --use-legacy-models have no effect: there is one model implementation",
    )
    together = parse("--wandb-name a --wandb-entity b").notes
    assert together == ("--wandb-entity, --wandb-name: no effect without --wandb-project",)
    assert parse("--wandb-name a --wandb-project b").notes == ("--wandb-name a: taken as --wandb-exp-name a",)


def test_old_and_new_name_together() -> None:
    """When both are given and differ, which one counts is said."""
    run = parse("--batch-size 4")
    assert run.training.micro_batch_size == 4
    assert run.notes[-1] == "--micro-batch-size is given twice, 2 and 4: the last one is used"


@pytest.mark.parametrize(
    ("name", "taken"), [("flash", "auto"), ("fused", "auto"), ("unfused", "eager"), ("local", "eager")]
)
def test_attention_backends(name: str, taken: str) -> None:
    """Megatron-LM's names of attention kernels mean ours."""
    run = parse(f"--attention-backend {name}")
    assert run.model.attention_backend == taken
    (note,) = run.notes
    assert note.startswith(f"--attention-backend {name}: taken as {taken}; ")


def test_values_that_ask_for_what_happens_anyway() -> None:
    """A script that spells out the default of a feature we lack still runs, without a word."""
    plain = parse()
    tried = 0
    for spelling, legacy in LEGACY_FLAGS.items():
        for value in legacy.harmless:
            run = parse(f"{spelling}={value}")
            assert (run, run.notes) == (plain, ()), spelling
            tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("changes", "fields", "note"),
    [
        (
            "--checkpoint-activations",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            "--checkpoint-activations: taken as --recompute-granularity full",
        ),
        (
            "--fp8-hybrid --bf16",
            {"fp8_format": "hybrid"},
            "--fp8-hybrid: taken as --fp8-format hybrid",
        ),
        (
            "--activations-checkpoint-method block",
            {"recompute_granularity": "full", "recompute_method": "block"},
            "--activations-checkpoint-method block: taken as --recompute-granularity full --recompute-method block",
        ),
        (
            "--num-key-value-heads 2",
            {"group_query_attention": True, "num_query_groups": 2},
            "--num-key-value-heads 2: taken as --group-query-attention --num-query-groups 2",
        ),
        (
            "--attention-head-type multiquery",
            {"group_query_attention": True, "num_query_groups": 1},
            "--attention-head-type multiquery: taken as --group-query-attention --num-query-groups 1",
        ),
        (
            "--glu-activation swiglu",
            {"activation": "swiglu"},
            "--glu-activation swiglu: taken as --activation swiglu",
        ),
        (
            "--zero-stage 1",
            {"data_parallel_sharding_strategy": "optim"},
            "--zero-stage 1: taken as --data-parallel-sharding-strategy optim",
        ),
        (
            "--zero-stage 0",
            {"data_parallel_sharding_strategy": "no_shard"},
            "--zero-stage 0: taken as --data-parallel-sharding-strategy no_shard",
        ),
        (
            "--zero-stage 3",
            {"data_parallel_sharding_strategy": "optim_grads_params"},
            "--zero-stage 3: taken as --data-parallel-sharding-strategy optim_grads_params",
        ),
        (
            "--warmup .25",
            {"lr_warmup_fraction": 0.25},
            "--warmup .25: taken as --lr-warmup-fraction .25; it is a fraction of the decay",
        ),
        (
            "--ds-sequence-parallel-size 2",
            {"context_parallel_size": 2, "cp_comm_type": ("a2a",)},
            "--ds-sequence-parallel-size 2: taken as --context-parallel-size 2 --cp-comm-type a2a",
        ),
        ("--normalization rmsnorm", {"normalization": "RMSNorm"}, "--normalization rmsnorm: taken as RMSNorm"),
        ("--optimizer adamw", {"optimizer": "adam"}, "--optimizer adamw: taken as adam"),
        ("--eval-iters -1", {"eval_iters": 0}, "--eval-iters -1: taken as 0; there is no evaluation"),
        (
            "--weight_decay 0.1 --adam_eps 1e-6",
            {"weight_decay": 0.1, "adam_eps": 1e-6},
            "--weight_decay, --adam_eps: read with dashes instead of underscores",
        ),
    ],
)
def test_flags_of_old_versions_and_forks(changes: str, fields: dict[str, object], note: str) -> None:
    """Scripts of Megatron-DeepSpeed, BigCode and Megatron-LLM were refused over the name of something we have."""
    run = parse(f"{changes} --attention-dropout 0", ranks=2)
    values = {spec.field: run.value(spec) for spec in run.flags()}
    assert {name: values[name] for name in fields} == fields
    assert run.notes == (note,)


def test_a_wrong_value_under_an_old_name_is_told_under_both_names() -> None:
    """A bound of a flag that the user never typed would be a riddle."""
    with expect_error(ConfigError, "--warmup 100", "--lr-warmup-fraction 100", "--lr-warmup-fraction"):
        parse("--warmup 100")


def test_an_error_names_the_flag_that_was_typed() -> None:
    """--rope-theta 5000 ended in an error about --rotary-base, which nobody had typed."""
    for changes, without in (
        ("--rope-theta 5000", ""),
        ("--num-key-value-heads 3", ""),
        ("--batch-size 3 --global-batch-size 8", "--micro-batch-size"),
    ):
        with expect_error(ConfigError, changes.split()[0]) as caught:
            parse(changes, without=without)
        assert str(caught.value).count("(here") <= 1


def test_errors_after_parsing_name_the_flag_that_was_typed() -> None:
    """--tokenizer-file /nowhere ended in an error about --tokenizer-model."""
    run = parse("--tokenizer-file /no/where --tokenizer-type HuggingFaceTokenizer", without="--vocab-size")
    with expect_error(DataError, "--tokenizer-file", "--tokenizer-model /no/where"), errors_as_typed(run):
        build_tokenizer(run.tokenizer)
    run = parse("--num-layers 4")
    assert as_typed(run, "--num-layers 4") == "--num-layers 4"


@pytest.mark.parametrize("typed", ["-num-layers", "–num-layers", "—num-layers"])
def test_other_dashes_are_meant_as_flags(typed: str) -> None:
    """One dash, or the long one that documents make of two, was a further value of the flag before."""
    with expect_error(ConfigError, typed, "--num-layers"):
        parse(f"--seed 3 {typed} 4")


@pytest.mark.parametrize(
    ("changes", "instead"),
    [
        ("--num-experts-teacher 8", []),
        ("--moe-unheard-of 8", []),
        ("--mtp-use-repeated-layer", []),
        ("--fp8-output-proj", []),
        ("--fp4-format e2m1", ["--fp8-format e4m3", "--fp8-recipe mxfp8"]),
        ("--fsdp2-config-path x", ["--data-parallel-sharding-strategy"]),
        ("--glu-activation reglu", ["--swiglu", "--geglu"]),
        ("--retro-add-retriever", []),
        ("--img-dim 224", []),
        ("--grpo-filter-groups-with-same-reward", ["--perform-rl-step"]),
        ("--qk-clip-alpha 0.5", ["--qk-layernorm"]),
    ],
)
def test_refused_by_name(changes: str, instead: list[str]) -> None:
    """What is missing is named, with what to do instead."""
    with expect_error(ConfigError, changes, *instead):
        parse(changes)


def test_advice_names_flags_that_exist() -> None:
    """Advice to use a flag that is unknown would be worse than none."""
    for legacy in LEGACY_FLAGS.values():
        for word in legacy.word.replace(",", " ").replace(";", " ").replace(":", " ").replace(")", " ").split():
            if word.startswith("--"):
                assert word in OURS, f"{word} in: {legacy.word}"


def test_a_flag_is_in_one_table() -> None:
    """A setting and a legacy flag of one spelling would shadow each other."""
    assert not OURS & set(LEGACY_FLAGS)
    assert legacy_flag("--hidden-size") is None
