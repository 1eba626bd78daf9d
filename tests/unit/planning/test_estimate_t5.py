"""Parameters and memory of T5's two stacks by arithmetic, against models that are really built."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from megatron.config import ParallelConfig, PrecisionConfig, RunConfig
from megatron.config.pipeline import model_stages
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.model import T5Model
from megatron.core.models.t5.train_spec import T5Spec
from megatron.core.parallel.costs import costs_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import sharding_of
from megatron.core.transformer.block import RecomputePlan
from megatron.planning.model import planned_context
from tests.harness.kept import bytes_kept
from tests.unit.config.command_lines import run_of
from tests.unit.planning.test_estimate import (
    context,
    kept_activations,
    memory_estimate,
    model_parameters,
    rank_parameters,
)

QUIET: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
RELATIVE: dict[str, Any] = {"position_embedding_type": "relative", "normalization": "RMSNorm", "add_bias_linear": False}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "original": {**QUIET, **RELATIVE, "activation": "relu"},
    "v1.1": {**QUIET, **RELATIVE, "activation": "geglu_tanh", "untie_embeddings_and_output_weights": True},
    "megatron": QUIET,
    "dropout": {},
    "relative, dropout": RELATIVE,
    "scores": {"attention_backend": "eager"},
    "rotary, few groups, head norms": {
        **QUIET,
        "position_embedding_type": "rope",
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
    },
}


def t5_run(
    model: dict[str, Any], *, ranks: int = 1, training: dict[str, Any] | None = None, **parallel: Any
) -> RunConfig:
    """A T5 with more layers in the decoder and half of the tokens."""
    sizes = {"num_layers": 3, "hidden_size": 128, **model}
    run = run_of(ranks=ranks, length=128, model=sizes, training=training or {})
    t5 = T5Config(decoder_seq_length=64, decoder_num_layers=4)
    return dataclasses.replace(run, extra=(t5,), parallel=ParallelConfig(**parallel))


def build(run: RunConfig, mesh: Mesh | None = None) -> T5Model:
    dtype = torch.bfloat16 if run.precision.bf16 else torch.float32
    return T5Model(
        run.model, run.group(T5Config), context(dtype, mesh), recompute=RecomputePlan.of(run.training)
    ).train()


def measured(run: RunConfig) -> int:
    """Bytes that a forward pass over samples with padding leaves behind for the backward pass."""
    size = run.training.micro_batch_size
    tokens = (torch.zeros(size, length, dtype=torch.int64) for length in (128, 64))
    model = build(run)
    torch.nn.init.normal_(model.get_parameter("embedding.word_embeddings.weight"))
    return bytes_kept(model, *tokens, attention_mask=torch.arange(128).expand(size, 128) < 100)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters(name: str, ranks: int) -> None:
    """The closed form equals the model that is built, whole and cut into stages."""
    run = t5_run(ARCHITECTURES[name], ranks=ranks, tensor_model_parallel_size=ranks)
    model = build(run, Mesh.of(tp=ranks))
    assert rank_parameters(run) == sum(parameter.numel() for parameter in model.parameters())
    assert model_parameters(run) == sum(math.prod(sharding_of(each).shape) for each in model.parameters())


@pytest.mark.parametrize("layout", ["Et|tttttt|L", "Ettt|tttt|L", "Etttt|tt|tL", "Et|tt|ttttL"])
@pytest.mark.parametrize("name", ["original", "v1.1", "megatron"])
def test_parameters_of_stages(name: str, layout: str) -> None:
    """Copies of the embedding and of tables of positions are held where they are needed, and counted there."""
    run = t5_run(ARCHITECTURES[name], ranks=3, pipeline_model_parallel_size=3, pipeline_model_parallel_layout=layout)
    for rank, stage in enumerate(model_stages(run)):
        built = T5Model(run.model, run.group(T5Config), context(torch.float32), stage=stage)
        held = sum(parameter.numel() for parameter in built.parameters())
        assert rank_parameters(run, pipeline_rank=rank) == held


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "few groups" not in name])
def test_activations(name: str) -> None:
    """The estimate is within 3 % of what torch keeps."""
    run = t5_run(ARCHITECTURES[name])
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]


def test_activations_in_bf16() -> None:
    """Half of the bytes; with the kernel of an accelerator, whatever this machine would take."""
    run = t5_run({**QUIET, "attention_backend": "sdpa"})
    run = dataclasses.replace(run, precision=PrecisionConfig(bf16=True))
    assert kept_activations(run) == [pytest.approx(measured(run), rel=0.03)]


ENCODED = 128 * 2 * 128 * 4
TABLES = (128**2 + 64**2) * 8 * 4
"""Bytes of what recomputed layers share, which is therefore kept; the measurement doesn't see them."""


@pytest.mark.parametrize(
    ("name", "granularity", "shared"),
    [("original", "full", ENCODED + TABLES), ("original", "selective", TABLES), ("dropout", "full", ENCODED)],
)
def test_activations_with_recomputation(name: str, granularity: str, shared: int) -> None:
    """What is recomputed is not kept."""
    run = t5_run(ARCHITECTURES[name], training={"recompute_granularity": granularity})
    assert kept_activations(run) == [pytest.approx(measured(run) + shared, rel=0.03)]


def test_stages_keep_what_is_theirs() -> None:
    """Stages together keep what one keeps, and what the encoder made again on each further stage of the decoder."""
    model = ARCHITECTURES["megatron"]
    whole = kept_activations(t5_run(model))
    stages = kept_activations(
        t5_run(model, ranks=3, pipeline_model_parallel_size=3, pipeline_model_parallel_layout="Ett|tt|tttL")
    )
    assert sum(stages) - sum(whole) == ENCODED
    assert memory_estimate(t5_run(model)).kept == whole[0]


def test_gradients_of_keys_are_as_many_as_the_encoders_tokens() -> None:
    """A short decoder was said to work with gradients of as few keys as it has queries."""
    short = dataclasses.replace(t5_run(QUIET), extra=(T5Config(decoder_seq_length=8, decoder_num_layers=4),))
    model, encoded = T5Model(short.model, short.group(T5Config), context(torch.float32)), 2 * 128
    found = costs_of(
        model.get_submodule("decoder.layers.0.cross_attention"), T5Spec().workload(short, planned_context(short))
    )
    assert found.working > 2 * encoded * 2 * 128 * 4
