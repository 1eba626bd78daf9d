"""Flags of forks that mean values of other flags."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError
from tests.harness.sentences import check_sentence, expect_error
from tests.unit.config.command_lines import parse

EXPERTS: dict[str, Any] = {"extra_groups": FAMILIES["gpt"].groups}  # the line has 4 layers of 64, and sequences of 32


def message_of(typed: str) -> str:
    """The error of the line with ``typed`` flags."""
    with pytest.raises(ConfigError) as caught:
        parse(typed)
    return str(caught.value)


def value(run: RunConfig, field: str) -> Any:
    """The value of any field of the run."""
    return next(run.value(spec) for spec in run.flags() if spec.field == field)


@pytest.mark.parametrize(
    ("typed", "fields"),
    [
        ("--sliding-window 16", {"window_size": (15, 0)}),
        ("--interleave-sliding-window 16", {"window_size": (15, 0), "window_attn_skip_freq": "2"}),
        ("--query-pre-attn-scalar 256", {"softmax_scale": 1 / 16}),
        ("--input-embeds-norm", {"embedding_multiplier": 8.0}),
        ("--scale-depth 1.4", {"residual_multiplier": 0.7}),
        ("--scale-emb 12 --dim-model-base 16", {"embedding_multiplier": 12.0, "logits_multiplier": 0.25}),
        ("--post-mlp-layernorm --post-self-attn-layernorm", {"norm_placement": "both"}),
        ("--post-norm", {"norm_placement": "both"}),
        ("--RMSNorm", {"normalization": "RMSNorm"}),
        ("--apply-wd-to-qk-layernorm", {"no_weight_decay_cond_type": "apply_wd_to_qk_layernorm"}),
        ("--layernorm-zero-centered-gamma", {"apply_layernorm_1p": True}),
        (
            "--position-embedding-type rope --rope-factor 8 --rope-low-freq-factor 1 --rope-high-freq-factor 4 "
            "--rope-original-max-positional-embeddings 4096",
            {"use_rope_scaling": True, "rope_scaling_factor": 8.0, "original_max_position_embeddings": 4096},
        ),
        (
            "--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-max-position-embeddings 8",
            {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "rope_scaling_factor": 8.0},
        ),
        (
            "--position-embedding-type rope --rope-scaling-type linear --rope-scaling-factor 4",
            {"rotary_seq_len_interpolation_factor": 4.0, "rope_scaling_factor": 8.0},
        ),
        ("--num-experts 4 --first-k-dense-replace 1", {"moe_layer_freq": "[0,1,1,1]"}),
        ("--num-experts 4 --moe-layer-freq 1 --first-k-dense-replace 0", {"moe_layer_freq": "1"}),
        ("--lr-decay-tokens 640 --lr-warmup-tokens 64", {"lr_decay_samples": 20, "lr_warmup_samples": 2}),
        ("--lr-decay-iters 5 --lr-decay-tokens 640", {"lr_decay_samples": 20, "lr_decay_iters": None}),
        ("--global-batch-size 2 --train-tokens 64000", {"train_iters": 10, "train_samples": None}),
        ("--global-batch-size 2 --train-tokens 320", {"train_iters": None, "train_samples": 10}),
        ("--enable-zb-runtime --spec local", {"pipeline_schedule": None}),
    ],
)
def test_what_is_meant(typed: str, fields: dict[str, Any]) -> None:
    """Lines of forks were refused for words about what is there."""
    run = parse(typed, **EXPERTS)
    assert {field: value(run, field) for field in fields} == fields
    check_sentence("\n".join(run.notes))


def test_tokens_end_a_run_in_samples() -> None:
    """DeepSpeed's scripts give twice as many samples as a second, later end."""
    for samples, expected in ((100, 20), (10, 10)):
        run = parse(f"--train-samples {samples} --train-tokens 640", without="--train-iters")
        assert run.train_samples == expected
    assert parse("--train-tokens 640", without="--train-iters").train_samples == 20


def test_a_ring_of_groups_that_exchange_heads() -> None:
    """MindSpeed gives the inner of two levels."""
    flags = "--context-parallel-size 4 --ulysses-degree-in-cp 2 --context-parallel-algo hybrid_cp_algo"
    sizes = parse(flags, ranks=4).parallel
    assert (sizes.cp_comm_type, sizes.hierarchical_context_parallel_sizes) == (("a2a+p2p",), (2, 2))
    assert parse("--allgather-cp --context-parallel-size 2", ranks=2).parallel.cp_comm_type == ("all_gather",)


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("--enable-zbh1-pipeline", "zb-h1"),
        ("--enable-zero-bubble", "zb-h1"),
        ("--enable-zero-bubble --zero-bubble-v-schedule", "zb-v"),
    ],
)
def test_schedules_of_zero_bubble(schedule: str, name: str) -> None:
    """Its V-shaped schedule is asked for beside the switch of all of them."""
    assert parse(f"{schedule} --pipeline-model-parallel-size 2", ranks=2).parallel.pipeline_schedule == name


def test_a_tokenizer_beside_the_checkpoint() -> None:
    """Pai-Megatron-Patch reads the tokenizer in the folder of --load, unless it is given."""
    flags, no_size = "--patch-tokenizer-type LLamaTokenizer --load models/llama", "--vocab-size"
    for more, folder in (("", "models/llama"), (" --tokenizer-model t", "t")):
        tokenizer = parse(flags + more, without=no_size).tokenizer
        assert (tokenizer.tokenizer_type, tokenizer.tokenizer_model) == ("HuggingFaceTokenizer", folder)


def test_sizes_of_the_vocabulary() -> None:
    """Rows after padding, and rows besides those of the tokenizer; --vocab-size is that of NullTokenizer here."""
    run = parse("--padded-vocab-size 512 --tensor-model-parallel-size 2", ranks=2)
    assert run.with_vocab_size(101).padded_vocab_size == 512
    assert parse("--pad-vocab-size-to 512").with_vocab_size(101).padded_vocab_size == 512
    files = "--extra-vocab-size 20 --vocab-file v --merge-file m"
    run = parse(files, without="--vocab-size --tokenizer-type").with_vocab_size(300)
    assert (run.model.vocab_size, run.with_vocab_size(300).model.vocab_size) == (320, 320)
    small = "--padded-vocab-size 256 --vocab-file v --merge-file m"
    with expect_error(ConfigError, "--padded-vocab-size 256", "300"):
        parse(small, without="--vocab-size --tokenizer-type").with_vocab_size(300)


def test_a_schedule_of_batch_sizes_with_or_without_quotes() -> None:
    """Six unquoted pairs were "takes 1 value, not 6"."""
    pairs = "0:2 320:4 640:6 1280:8 2560:10 5120:12"
    free = parse(f"--step-batch-size-schedule {pairs}")
    assert free.batch_steps == ((0, 2), (10, 4), (20, 6), (40, 8), (80, 10), (160, 12))
    assert free.batch_steps == parse(f"--step-batch-size-schedule {pairs.replace(' ', ',')}").batch_steps


@pytest.mark.parametrize(
    "typed",
    [
        "--sliding-window wide",
        "--sliding-window",
        "--sliding-window 0",
        "--sliding-window 16.5",
        "--train-tokens nan",
        "--post-norm --post-mlp-layernorm",
        "--context-parallel-size 1 --ulysses-degree-in-cp 2",
        "--train-tokens 64 --rampup-batch-size 2 2 8 --global-batch-size 4",
        "--train-tokens 64",
        "--spec my.layers stack",
        "--rope-scaling-type dynamic",
    ],
)
def test_refusals(typed: str) -> None:
    """A wrong value, or a meaning that is not there, is one sentence about the flag that was typed."""
    with expect_error(ConfigError):
        parse(typed)


@pytest.mark.parametrize("flag", ["--input-embeds-norm", "--dim-model-base 16"])
def test_nothing_is_computed_from_a_number_out_of_bounds(flag: str) -> None:
    """The root of a number of 400 digits is an OverflowError; and such a flag was given, so it is not asked for."""
    said = message_of(f"--hidden-size {'9' * 400} {flag}")
    assert said.startswith("--hidden-size is 999") and said.endswith("it must be at most 2147483647"), said
    assert len(message_of(f"--sliding-window {'9' * 400}")) < 200
