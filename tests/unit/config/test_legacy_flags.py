"""Flags of Megatron-LM that are no settings here: none is unknown, none is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.command import CommandConfig
from megatron.config.flags import flags_of
from megatron.config.legacy_flags import HARMLESS, LEGACY_FLAGS, legacy_flag
from megatron.config.run import CORE_GROUPS
from megatron.errors import ConfigError
from tests.unit.config.command_lines import parse

# Every flag of Megatron-LM 2.6 and 0.12, and the most used of its main branch.
KNOWN = (Path(__file__).parents[2] / "golden" / "megatron_flags.txt").read_text().split()
OURS = {
    spelling for group in (*CORE_GROUPS, CommandConfig) for spec in flags_of(group) for spelling in spec.spellings()
}


def test_every_flag_is_known() -> None:
    """A launch script never meets 'there is no flag' for something that Megatron-LM has."""
    assert len(KNOWN) > 450
    assert [spelling for spelling in KNOWN if spelling not in OURS and spelling not in LEGACY_FLAGS] == []


@pytest.mark.parametrize("verdict", ["ignored", "refused"])
def test_every_legacy_flag_says_something(verdict: str) -> None:
    """Ignored with a note, or refused with advice; those that are renamed have a test of their own below."""
    for spelling, legacy in LEGACY_FLAGS.items():
        if legacy.verdict != verdict:
            continue
        assert legacy.word
        assert not legacy.word.endswith(".")
        if verdict == "ignored":
            assert parse(f"{spelling} value").notes == (f"{spelling} value has no effect: {legacy.word}",)
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
            "--apply-query-key-layer-scaling: taken as --attention-softmax-in-fp32; scores divided by the layer number "
            "and multiplied back in the softmax are the same scores",
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
    assert parse("--use-flash-attn --attention-backend reference").model.attention_backend == "reference"


def test_old_and_new_name_together() -> None:
    """When both are given and differ, which one counts is said."""
    run = parse("--batch-size 4")
    assert run.training.micro_batch_size == 4
    assert run.notes[-1] == "--micro-batch-size is given twice, 2 and 4: the last one counts"


@pytest.mark.parametrize(
    ("name", "taken"), [("flash", "auto"), ("fused", "auto"), ("unfused", "reference"), ("local", "reference")]
)
def test_attention_backends(name: str, taken: str) -> None:
    """Megatron-LM's names of attention kernels mean ours."""
    run = parse(f"--attention-backend {name}")
    assert run.model.attention_backend == taken
    (note,) = run.notes
    assert note.startswith(f"--attention-backend {name}: taken as {taken}; ")


@pytest.mark.parametrize(("spelling", "values"), sorted(HARMLESS.items()))
def test_values_that_ask_for_what_happens_anyway(spelling: str, values: tuple[str, ...]) -> None:
    """A script that spells out the default of a feature we lack still runs, without a word."""
    for value in values:
        assert parse(f"{spelling} {value}").notes == ()
        assert parse(f"{spelling}={value}") == parse()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("--num-experts 8", "mixture of experts is not available yet; leave it out for a dense model"),
        ("--moe-unheard-of 8", "mixture of experts is not available yet; leave it out for a dense model"),
        (
            "--multi-latent-attention",
            "multi-latent attention is not available yet; --group-query-attention also makes keys and values small",
        ),
        ("--fp8-format hybrid", "fp8 is not available yet; train with --bf16"),
        ("--warmup 100", "say --lr-warmup-fraction 0.01 (of the decay) or --lr-warmup-iters 100"),
        (
            "--checkpoint-activations",
            "say what to recompute: --recompute-granularity selective (the attention core), or --recompute-granularity "
            "full --recompute-method uniform --recompute-num-layers 1 (whole layers)",
        ),
        ("--retro-add-retriever", "RETRO is not available: retrieval models are outside this project"),
        ("--img-h 224", "a vision model is not available: only language models are trained here"),
        ("--grpo-group-size 4", "reinforcement learning is not available: this project pretrains; leave it out"),
        (
            "--log-straggler",
            "straggler detection is not available yet; --timing-log-level 1 --timing-log-option all shows every rank's "
            "times",
        ),
    ],
)
def test_refused_by_name(changes: str, message: str) -> None:
    """What is missing is named, with what to do instead."""
    with pytest.raises(ConfigError) as caught:
        parse(changes)
    assert str(caught.value) == f"{changes}: {message}"


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
