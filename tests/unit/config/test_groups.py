"""What each group fills in by itself."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import DataConfig, ModelConfig, OptimizerConfig, PrecisionConfig, TrainingConfig


def model(**changes: Any) -> ModelConfig:
    return ModelConfig(**{"num_layers": 2, "hidden_size": 96, "num_attention_heads": 8, **changes})


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 384),
        ({"activation": "swiglu"}, 256),
        ({"activation": "geglu_tanh"}, 256),
        ({"activation": "swiglu", "hidden_size": 4096}, 10880),
        ({"activation": "swiglu", "hidden_size": 8}, 64),
        ({"activation": "swiglu", "ffn_hidden_size": 100}, 100),
    ],
)
def test_ffn_width(changes: dict[str, Any], width: int) -> None:
    """Four times the width, or, gated, two thirds of that in multiples of 64, as Megatron-LM has it; never 0."""
    assert model(**changes).ffn_hidden_size == width


@pytest.mark.parametrize(
    ("changes", "groups"),
    [({}, 8), ({"group_query_attention": True}, 1), ({"group_query_attention": True, "num_query_groups": 4}, 4)],
)
def test_query_groups(changes: dict[str, Any], groups: int) -> None:
    """Without grouped attention every query head has its own key and value."""
    assert model(**changes).num_query_groups == groups


def test_head_width() -> None:
    """Heads share the hidden size unless told otherwise."""
    assert model().kv_channels == 12
    assert model(kv_channels=32).kv_channels == 32


def test_biases() -> None:
    """Biases of all linear layers include that of query, key and value."""
    assert model().add_qkv_bias
    assert not model(add_bias_linear=False).add_qkv_bias
    assert model(add_bias_linear=False, add_qkv_bias=True).add_qkv_bias


@pytest.mark.parametrize(
    ("changes", "activation", "gated"),
    [
        ({}, "gelu_tanh", False),
        ({"activation": "gelu"}, "gelu", False),
        ({"activation": "squared_relu"}, "squared_relu", False),
        ({"activation": "swiglu"}, "silu", True),
        ({"activation": "geglu_tanh"}, "gelu_tanh", True),
        ({"activation": "geglu"}, "gelu", True),
    ],
)
def test_activation(changes: dict[str, Any], activation: str, gated: bool) -> None:
    """An activation is a non-linearity with or without a gate."""
    assert (model(**changes).nonlinearity, model(**changes).gated) == (activation, gated)


@pytest.mark.parametrize(
    ("vocabulary", "unit", "ranks", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (50304, 128, 1, 50304), (100, 1, 3, 102), (1, 128, 2, 256)],
)
def test_padded_vocabulary(vocabulary: int, unit: int, ranks: int, padded: int) -> None:
    """Every tensor-parallel rank gets equally many rows, in multiples of what was asked."""
    config = model(vocab_size=vocabulary, make_vocab_size_divisible_by=unit)
    assert config.padded_vocab_size(ranks) == padded


@pytest.mark.parametrize(
    ("changes", "dtype", "wide"),
    [
        ({}, "fp32", False),
        ({"accumulate_allreduce_grads_in_fp32": True}, "fp32", True),
        ({"bf16": True}, "bf16", True),
        ({"fp16": True}, "fp16", True),
        ({"bf16": True, "grad_reduce_in_bf16": True}, "bf16", False),
        ({"bf16": True, "main_grads_dtype": "bf16"}, "bf16", False),
    ],
)
def test_precision(changes: dict[str, Any], dtype: str, wide: bool) -> None:
    """Gradients of half-precision weights are accumulated in fp32 unless asked otherwise."""
    config = PrecisionConfig(**changes)
    assert (config.params_dtype, config.accumulate_allreduce_grads_in_fp32) == (dtype, wide)


def test_weight_decay() -> None:
    """First and last weight decay are the constant one unless given."""
    config = OptimizerConfig(weight_decay=0.3, end_weight_decay=0.5)
    assert (config.start_weight_decay, config.end_weight_decay) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (None, None, None)),
        ({"recompute_activations": True}, ("selective", None, None)),
        ({"recompute_granularity": "full"}, ("full", "uniform", 1)),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            ("full", "block", 3),
        ),
    ],
)
def test_recomputation(changes: dict[str, Any], expected: tuple[object, ...]) -> None:
    """The short flag means selective; full means every layer by itself unless told otherwise."""
    config = TrainingConfig(micro_batch_size=1, **changes)
    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == expected


def test_split() -> None:
    """Megatron-LM's shares when none are given."""
    assert DataConfig(seq_length=1).split == "969, 30, 1"
