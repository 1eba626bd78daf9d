"""Rotary positions of latent attention in the words of Megatron-LM's public launches."""

from __future__ import annotations

import math

import pytest

from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.conversion.huggingface.formats import model_from_config
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.transformer.positions import rotary_of, score_factor_of
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 4096"
LATENTS = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8"
LINE = f"{SIZES} {LATENTS} --v-head-dim 16 --position-embedding-type rope --rotary-base 10000 --rotary-interleaved"
REST = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data --vocab-size 256"
SCALED = "--rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0"
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def parse(flags: str) -> RunConfig:
    """The run of the line with ``flags``."""
    return parse_run(f"{LINE} {REST} {flags}".split(), extra_groups=GPT_GROUPS)


@pytest.mark.parametrize("more", ["", "--rope-type yarn", "--original-max-position-embeddings 4096"])
def test_a_factor_means_yarn(more: str) -> None:
    """All public DeepSeek launches were refused, and without the refused flags scores were 1.87 times too small."""
    run, published = parse(f"{SCALED} {more}"), model_from_config(DEEPSEEK, where="config.json")
    assert score_factor_of(run.model) == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert score_factor_of(run.model) == score_factor_of(published)
    assert rotary_of(run.model, 0) == rotary_of(published, 0)
    assert any(note.startswith("--position-embedding-type rope with --multi-latent") for note in run.notes)


def test_a_given_length_stays() -> None:
    """Megatron-LM has 4096 where nothing else is given."""
    assert parse(SCALED).model.original_max_position_embeddings == 4096
    assert parse(f"{SCALED} --original-max-position-embeddings 8192").model.original_max_position_embeddings == 8192


@pytest.mark.parametrize(
    "flags", ["--mscale-all-dim 1.0", "--mscale 0.7 --rope-type yarn", "--rotary-scaling-factor 1"]
)
def test_without_a_factor_positions_are_plain(flags: str) -> None:
    """YaRN with the factor 1 turns positions as they are; its other settings are remarked upon."""
    run = parse(flags)
    assert run.model.position_embedding_type == "rope" and score_factor_of(run.model) == 1
    assert rotary_of(run.model, 0) == rotary_of(parse("").model, 0)
    assert any("no effect without a --rotary-scaling-factor" in note for note in run.notes) == ("mscale" in flags)


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        (f"{SCALED} --rope-type rope", "--position-embedding-type"),
        ("--position-embedding-type longrope --rope-type yarn", "--rope-type"),
        ("--no-multi-latent-attention --rope-type yarn", "--multi-latent-attention"),
        (f"--no-multi-latent-attention {SCALED}", "--position-embedding-type"),
    ],
)
def test_contradictions_are_refused(flags: str, fact: str) -> None:
    """What Megatron-LM itself doesn't take, or ignores."""
    with expect_error(ConfigError, fact):
        parse(flags)
