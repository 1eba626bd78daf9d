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
    "activation": "swiglu",
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
    known = {key: value for key, value in settings.items() if key not in ("vocab_size", "activation")}
    if settings.get("activation") in ("swiglu", "squared_relu"):
        known[settings["activation"]] = True
    defaults = {"tokenizer_type": "NullTokenizer", "vocab_size": settings["vocab_size"] - 1, "seq_length": 32}
    return argparse.Namespace(**{**defaults, "padded_vocab_size": PADDED, **known, **more})


def shards_of(
    name: str, value: Tensor, tp: int, settings: Mapping[str, Any], version: float, *, padded: int = PADDED
) -> list[Tensor]:
    """What each tensor-parallel rank stores of one of our tensors."""
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "output_layer.bias")):
        padding = torch.full((padded - value.shape[0], *value.shape[1:]), 7.0, dtype=value.dtype)
        return list(torch.cat([value, padding]).chunk(tp))
    for matrix, kinds in {".linear_qkv.": 3, ".linear_kv.": 2}.items():
        if matrix in name:
            return [fused(part, kinds, settings["num_attention_heads"] // tp, version) for part in value.chunk(tp)]
    if ".linear_fc1." in name and settings.get("activation") == "swiglu":
        gate, up = value.chunk(2)
        return [torch.cat(pair) for pair in zip(gate.chunk(tp), up.chunk(tp))]
    if ".linear_fc1." in name or ".linear_q." in name or name.endswith(".sinks"):
        return list(value.chunk(tp))
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return list(value.chunk(tp, dim=1))
    return [value] * tp


def fused(rows: Tensor, kinds: int, heads: int, version: float) -> Tensor:
    """Query, key and value of a rank in the order of the checkpoint's version; ours is that of version 2."""
    if version >= 2:
        return rows
    by_head = rows.view(heads, kinds, -1, *rows.shape[1:])
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
CROSS = {
    "pre_cross_attn_layernorm": "post_attention_norm",
    "cross_attention.linear_q": "inter_attention.query",
    "cross_attention.linear_kv": "inter_attention.key_value",
    "cross_attention.linear_proj": "inter_attention.dense",
    "pre_mlp_layernorm": "post_inter_attention_norm",
}


def legacy_stage(tensors: Mapping[str, Tensor], *, first: bool, t5: bool = False) -> dict[str, Any]:
    """The nested state of one stage before core, as of today or (``first``) as of the first releases."""
    names, stack = FIRST_LEGACY if first else LEGACY, "transformer" if first and not t5 else "encoder"
    crossed = {
        **names,
        **{ours: name.replace("_norm", "_layernorm" if first else "_norm") for ours, name in CROSS.items()},
    }
    found: dict[str, Any] = {}
    heads: dict[str, Any] = {}
    for name, tensor in tensors.items():
        root, *parts, kind = name.split(".")
        if name == "output_layer.bias":
            heads["lm_head.bias"] = tensor
        elif root in ("lm_head", "binary_head"):
            heads[name.replace("layer_norm", "layernorm" if first else "norm")] = tensor
        elif root in ("embedding", "pooler", "output_layer"):
            found.setdefault(root, {})[".".join([*parts, kind])] = tensor
        else:
            in_decoder = t5 and root == "decoder"
            layers = found.setdefault("decoder" if in_decoder else stack, {})
            if parts[0] == "layers":
                own = ({**names, **crossed} if in_decoder else names)[".".join(parts[2:])]
                layers[f"layers.{parts[1]}.{own}.{kind}"] = tensor
            else:
                layers[f"final_{'layernorm' if first else 'norm'}.{kind}"] = tensor
    return {"language_model": found, **heads}


def core_stage(tensors: Mapping[str, Tensor], *, fused_norms: bool, t5: bool = False) -> dict[str, Any]:
    """The flat state of one stage of a core model, with norms by themselves or inside the matrix behind them."""
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if fused_norms and ".layers." in name:
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        name = name.replace("attention.sinks", "attention.core_attention.softmax_offset")
        for stack in ("encoder", "decoder"):
            name = name.replace(f"{stack}_positions.", f"{stack}_relative_pos_emb.relative_attention_bias.")
        state[name] = tensor
        if name.endswith("linear_qkv.weight"):
            state[name.replace("weight", "_extra_state")] = None
        if t5 and name.startswith("output_layer."):
            state[f"lm_head.{name}"] = tensor
        if t5 and name.startswith("embedding.position_embeddings."):
            state[name.removeprefix("embedding.")] = tensor
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
                state = state_of(mine, settings, style=style, place=chunk * pp + stage, places=pp * vpp)
                content[f"model{chunk}" if vpp > 1 else "model"] = state
            folder = root / name / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else ""))
            folder.mkdir()
            torch.save(content, folder / "model_optim_rng.pt")
    return root


def state_of(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], *, style: str, place: int, places: int
) -> dict[str, Any]:
    """What a rank saves of one of ``places`` consecutive parts: its own tensors, and what it holds of others'."""
    part = stage_of(tensors, settings, place=place, places=places)
    t5, is_core = any(".cross_attention." in key for key in tensors), style in ("core", "te")
    has_copy = places > 1 and place == places - 1 and "output_layer.weight" not in tensors
    copy = tensors["embedding.word_embeddings.weight"]
    if is_core:
        if t5 and places > 1 and place == places // 2 - 1:  # the encoder's end has a head, too, which nothing trains
            part |= {key: torch.zeros_like(tensors[key]) for key in tensors if key.startswith("output_layer.")}
        part |= {"output_layer.weight": copy} if has_copy else {}
        return core_stage(part, fused_norms=style == "te", t5=t5)
    state = legacy_stage(part, first=style == "first", t5=t5)
    return {**state, "word_embeddings_for_head": {"weight": copy}} if has_copy else state


def stage_of(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], *, place: int, places: int
) -> dict[str, Tensor]:
    """The tensors of one of ``places`` consecutive parts, layers numbered from 0 within it. A T5's encoder has the
    first half of them and its decoder the other, which begins with the embedding as well.
    """
    found, halves = {}, places > 1 and any(".cross_attention." in name for name in tensors)
    places = places // 2 if halves else places
    per = settings["num_layers"] // places
    for name, tensor in tensors.items():
        parts = name.split(".")
        first = 0 if not halves or name.startswith("encoder") else places
        if parts[0] == "embedding":
            if place in (0, first):
                found[name] = tensor
        elif parts[1] != "layers":
            if place == first + places - 1:
                found[name] = tensor
        elif first + int(parts[2]) // per == place:
            found[".".join([*parts[:2], str(int(parts[2]) % per), *parts[3:]])] = tensor
    return found
