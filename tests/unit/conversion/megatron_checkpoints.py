"""Checkpoints as Megatron-LM writes them, made from what is known of its formats, with no code of the converter."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.conversion.portable import LazyTensor, PortableModel, parameters_of

CLASSIC: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": 101,
}
MODERN: dict[str, Any] = {
    **CLASSIC,
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 12,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
PADDED = 128


def random_tensors(
    model: ModelConfig, groups: tuple[object, ...] = (), *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A value for every parameter of a model, by our names. ``groups``: settings of its family alone."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, sharding in parameters_of(model, groups).items():
        is_norm = "norm" in name and name.endswith("weight") and not model.apply_layernorm_1p
        noise = torch.randn(sharding.shape, generator=generator)
        values[name] = (noise * 0.2 + (1.0 if is_norm else 0.0)).to(dtype)
    return values


def portable(model: ModelConfig, values: Mapping[str, Tensor], groups: tuple[object, ...] = ()) -> PortableModel:
    """The model as conversions see it, with a tokenizer of numbers."""
    assert model.vocab_size is not None
    return PortableModel(
        model=model,
        groups=groups,
        tensors={name: LazyTensor(tuple(value.shape), value.dtype, value.clone) for name, value in values.items()},
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size - 1),
        seq_length=model.max_position_embeddings,
    )


def arguments(settings: Mapping[str, Any], **more: Any) -> argparse.Namespace:
    """The flags of a training run that are saved."""
    known = {key: value for key, value in settings.items() if key != "vocab_size"}
    defaults = {"tokenizer_type": "NullTokenizer", "vocab_size": settings["vocab_size"] - 1, "seq_length": 32}
    return argparse.Namespace(**{**defaults, "padded_vocab_size": PADDED, **known, **more})


def shards_of(
    name: str, value: Tensor, tp: int, settings: Mapping[str, Any], version: float, *, padded: int = PADDED
) -> list[Tensor]:
    """What each tensor-parallel rank stores of one of our tensors."""
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "output_layer.bias")):
        padding = torch.full((padded - value.shape[0], *value.shape[1:]), 7.0, dtype=value.dtype)
        return list(torch.cat([value, padding]).chunk(tp))
    if ".linear_qkv." in name:
        return [fused(part, settings["num_attention_heads"] // tp, version) for part in value.chunk(tp)]
    if ".linear_fc1." in name and settings.get("swiglu"):
        gate, up = value.chunk(2)
        return [torch.cat(pair) for pair in zip(gate.chunk(tp), up.chunk(tp))]
    if ".linear_fc1." in name:
        return list(value.chunk(tp))
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return list(value.chunk(tp, dim=1))
    return [value] * tp


def fused(rows: Tensor, heads: int, version: float) -> Tensor:
    """Query, key and value of a rank in the order of the checkpoint's version; ours is that of version 2."""
    if version >= 2:
        return rows
    by_head = rows.view(heads, 3, -1, *rows.shape[1:])
    order = by_head.transpose(1, 2) if version >= 1 else by_head.transpose(0, 1)
    return order.reshape(rows.shape)


LEGACY = {
    "input_layernorm": "input_norm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_norm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
FIRST_LEGACY = {**LEGACY, "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
FIRST_LEGACY |= {
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
}


def legacy_stage(tensors: Mapping[str, Tensor], *, first: bool) -> dict[str, Any]:
    """The nested state of one stage before core, as of today or (``first``) as of the first releases."""
    names, stack, final = (
        (FIRST_LEGACY, "transformer", "final_layernorm") if first else (LEGACY, "encoder", "final_norm")
    )
    embedding: dict[str, Any] = {}
    layers: dict[str, Tensor] = {}
    pooler: dict[str, Tensor] = {}
    heads: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "embedding":
            embedding[parts[1]] = {"weight": tensor}
        elif name == "output_layer.bias":
            heads["lm_head.bias"] = tensor
        elif parts[0] == "output_layer":
            model["output_layer"] = {"weight": tensor}
        elif parts[0] == "pooler":
            pooler[f"dense.{parts[2]}"] = tensor
        elif parts[0] in ("lm_head", "binary_head"):
            heads[name.replace("layer_norm", "layernorm" if first else "norm")] = tensor
        elif parts[1] == "final_layernorm":
            layers[f"{final}.{parts[2]}"] = tensor
        else:
            layers[f"layers.{parts[2]}.{names['.'.join(parts[3:-1])]}.{parts[-1]}"] = tensor
    if embedding:
        model["embedding"] = embedding
    if pooler:
        model["pooler"] = pooler
    return {"language_model": {**model, stack: layers}, **heads}


def core_stage(tensors: Mapping[str, Tensor], *, fused_norms: bool) -> dict[str, Any]:
    """The flat state of one stage of a core model, with norms by themselves or inside the matrix behind them."""
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if fused_norms and ".layers." in name:
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        state[name] = tensor
        if name.endswith("linear_qkv.weight"):
            state[name.replace("weight", "_extra_state")] = None
    return state


def write_torch(
    root: Path,
    settings: Mapping[str, Any],
    values: Mapping[str, Tensor],
    *,
    style: str,
    version: float | None = 3.0,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    release: bool = False,
    padded: int = PADDED,
    **flags: Any,
) -> Path:
    """A folder of one checkpoint in the torch format, iteration 500. ``style``: first, legacy, core or te."""
    name = "release" if release else "iter_0000500"
    (root / name).mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("release" if release else "500\n")
    sharded = {key: shards_of(key, value, tp, settings, version or 0, padded=padded) for key, value in values.items()}
    for rank in range(tp):
        for stage in range(pp):
            content: dict[str, Any] = {
                "args": arguments(settings, iteration=500, consumed_train_samples=4000, **flags),
                "iteration": 500,
                "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}},
                "rng_state": [
                    {"np_rng_state": np.random.RandomState(1).get_state(), "random_rng_state": random.getstate()}
                ],
            }
            if version is not None:
                content["checkpoint_version"] = version
            for chunk in range(vpp):
                mine = {key: parts[rank] for key, parts in sharded.items()}
                part = stage_of(mine, settings, place=chunk * pp + stage, places=pp * vpp)
                state: dict[str, Any] = (
                    core_stage(part, fused_norms=style == "te")
                    if style in ("core", "te")
                    else legacy_stage(part, first=style == "first")
                )
                if pp > 1 and stage == pp - 1 and chunk == vpp - 1 and "output_layer.weight" not in values:
                    copy = mine["embedding.word_embeddings.weight"]
                    is_core = style in ("core", "te")
                    state |= (
                        {"output_layer.weight": copy} if is_core else {"word_embeddings_for_head": {"weight": copy}}
                    )
                content[f"model{chunk}" if vpp > 1 else "model"] = state
            folder = root / name / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            folder.mkdir()
            torch.save(content, folder / "model_optim_rng.pt")
    return root


def stage_of(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], *, place: int, places: int
) -> dict[str, Tensor]:
    """The tensors of one of ``places`` consecutive parts, layers numbered from 0 within it."""
    per = settings["num_layers"] // places
    found = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "embedding":
            if place == 0:
                found[name] = tensor
        elif parts[1] != "layers":
            if place == places - 1:
                found[name] = tensor
        elif int(parts[2]) // per == place:
            found[".".join([*parts[:2], str(int(parts[2]) % per), *parts[3:]])] = tensor
    return found
