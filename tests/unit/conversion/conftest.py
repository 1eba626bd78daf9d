"""Random models of every family, as folders that transformers wrote."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="conversion is proven with the dev extra's transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GPT2: dict[str, Any] = {
    "vocab_size": 101,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied, exact gelu": ("gpt2", {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt2 narrow mlp": ("gpt2", {**GPT2, "n_inner": 72}),
    "llama": ("llama", SIZES),
    "llama multi-head, tied": ("llama", {**SIZES, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama one group, wide heads": ("llama", {**SIZES, "num_key_value_heads": 1, "head_dim": 20}),
    "llama with biases": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {**SIZES, "rope_parameters": LLAMA3}),
    "llama stretched": (
        "llama",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral": ("mistral", {**SIZES, "sliding_window": None}),
    "mistral, window as long as sequences": ("mistral", {**SIZES, "sliding_window": 64, "head_dim": 16}),
    "qwen2": ("qwen2", SIZES),
    "qwen2 tied": (
        "qwen2",
        {**SIZES, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 16}),
    "qwen3 tied": ("qwen3", {**SIZES, "head_dim": 16, "tie_word_embeddings": True}),
}


BERT: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "hidden_act": "gelu",
}
BERTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "bert": ("bert", BERT, True),
    "bert, masked tokens only": ("bert", BERT, False),
    "bert, tanh gelu": ("bert", {**BERT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}, True),
    "bert of one layer": ("bert", {**BERT, "num_hidden_layers": 1}, True),
    "megatron-bert": ("megatron-bert", BERT, True),
    "megatron-bert, masked tokens only": ("megatron-bert", BERT, False),
}
"""Family, settings, and whether there is a head for the order of two texts."""


T5: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 48,
    "d_kv": 10,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
V1_1: dict[str, Any] = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
T5S: dict[str, tuple[dict[str, Any], bool]] = {
    "t5": (T5, False),
    "t5 of as many layers, far positions": (
        {
            **T5,
            "num_decoder_layers": None,
            "relative_attention_num_buckets": 32,
            "relative_attention_max_distance": 128,
        },
        False,
    ),
    "t5 v1.1": (V1_1, True),
    "t5 v1.1 that transformers ties": (V1_1, False),
    "t5 gated by silu": ({**V1_1, "feed_forward_proj": "gated-silu"}, True),
    "t5 gated by exact gelu": ({**V1_1, "dense_act_fn": "gelu"}, True),
    "t5, exact gelu": ({**T5, "feed_forward_proj": "gelu"}, False),
    "t5, tanh gelu, one layer": (
        {**T5, "feed_forward_proj": "gelu_new", "num_layers": 1, "num_decoder_layers": 1},
        False,
    ),
}
"""Settings, and whether the output has weights of its own."""


def random_t5(settings: dict[str, Any], untied: bool, *, seed: int = 0) -> Any:
    """A T5 whose weights are large enough that a mistake shows, and no two equal."""
    import transformers

    def build(config: Any) -> Any:
        build_from: Any = transformers.AutoModelForSeq2SeqLM.from_config
        model = build_from(config)
        if untied:  # as real files of v1.1 are; in a new model transformers 5 ties, whatever the settings say
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    return randomized(build, "t5", settings, seed=seed)


def random_bert(family: str, settings: dict[str, Any], both_heads: bool, *, seed: int = 0) -> Any:
    """A BERT whose weights are large enough that a mistake shows, and no two equal."""
    import transformers

    build: Any = transformers.AutoModelForPreTraining if both_heads else transformers.AutoModelForMaskedLM
    return randomized(build.from_config, family, settings, seed=seed)


def random_model(family: str, settings: dict[str, Any], *, seed: int = 0) -> Any:
    """A model with weights large enough that a mistake shows, and no two equal."""
    import transformers

    build: Any = transformers.AutoModelForCausalLM.from_config
    return randomized(build, family, settings, seed=seed)


def randomized(build: Callable[[Any], Any], family: str, settings: dict[str, Any], *, seed: int) -> Any:
    """The model that ``build`` makes of the family's settings, with other weights."""
    import transformers

    torch.manual_seed(seed)
    model = build(transformers.AutoConfig.for_model(family, **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.15 if parameter.dim() > 1 else 0.3
            is_scale = name.endswith("weight") and ("norm" in name.lower() or name.split(".")[-2] == "ln")
            parameter.normal_(1.0 if is_scale else 0.0, std)
    return model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of ``MODELS``, written once."""
    base = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        path = base / name.replace(" ", "-").replace(",", "")
        if not path.exists():
            if name in T5S:
                model = random_t5(*T5S[name])
            else:
                model = random_bert(*BERTS[name]) if name in BERTS else random_model(*MODELS[name])
            model.save_pretrained(path)
        return path

    return folder


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
