"""Checkpoints of models with experts as Megatron-LM's ranks write them, with no code of the converter."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from tests.unit.conversion.megatron_checkpoints import (
    MODERN,
    arguments,
    core_stage,
    random_tensors,
    shards_of,
    stage_of,
)

MOE: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
"""Every layer has experts; what follows are additions."""
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 16}
BIASED: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_dtype": "fp32",
}
LATENT: dict[str, Any] = {
    "num_layers": 2,
    "group_query_attention": False,
    "num_query_groups": 4,
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
}

_BY_HEAD = (".linear_q_proj.", ".linear_q_up_proj.", ".linear_kv_up_proj.")
_LATENTS = (".linear_q_down_proj.", ".linear_kv_down_proj.")


def model_and_experts(settings: Mapping[str, Any], moe: Mapping[str, Any]) -> tuple[ModelConfig, MoEConfig]:
    """Our settings of a model that has these arguments there."""
    ours = dict(moe)
    if "moe_layer_freq" in ours:
        ours["moe_layer_freq"] = str(ours["moe_layer_freq"]).replace(" ", "")
    if settings.get("multi_latent_attention"):
        settings = {**settings, "rotary_interleaved": True}
        settings = {name: value for name, value in settings.items() if name != "kv_channels"}
    return ModelConfig(**settings), MoEConfig(**ours)


def values_of(settings: Mapping[str, Any], moe: Mapping[str, Any]) -> dict[str, Tensor]:
    """A value for every parameter, by our names."""
    model, experts = model_and_experts(settings, moe)
    return random_tensors(model, (experts,))


def saved(settings: Mapping[str, Any], moe: Mapping[str, Any], **more: Any) -> Namespace:
    """The saved arguments."""
    return arguments(settings, **{"iteration": 500, "consumed_train_samples": 4000, **moe, **more})


def write_expert_shards(
    root: Path,
    moe: Mapping[str, Any],
    values: Mapping[str, Tensor],
    *,
    settings: Mapping[str, Any] = MODERN,
    kind: str = "sequential",
    fused_norms: bool = False,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    whole_latents: bool = False,
    later: str = "transformer_layer",
    **flags: Any,
) -> Path:
    """A folder of one checkpoint in the torch format, iteration 500.

    ``kind``: of the modules of experts: sequential, grouped (Transformer Engine) or legacy (a matrix for all of them).
    ``whole_latents``: ranks don't split the matrices of latents. ``later``: what the layer of a depth of multi-token
    prediction is called.
    """
    etp = etp or tp
    (root / "iter_0000500").mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("500\n")
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    args = saved(settings, moe, **{**sizes, "expert_tensor_parallel_size": etp, **flags})
    dense = {
        name: _dense_shards(name, value, tp, settings, whole_latents=whole_latents)
        for name, value in values.items()
        if ".experts." not in name
    }
    for rank in range(etp * ep):
        for stage in range(pp):
            mine = {name: shards[rank % tp] for name, shards in dense.items()}
            mine |= {name: _of_rank(value, name, rank, etp, ep) for name, value in values.items() if name not in dense}
            later_ones = {name: mine.pop(name) for name in [*mine] if name.startswith("mtp.")}
            part = stage_of(mine, settings, place=stage, places=pp)
            part |= later_ones if stage == pp - 1 else {}
            state = _state(part, kind=kind, fused_norms=fused_norms, later=later)
            names = [f"mp_rank_{rank % tp:02d}"] + ([f"{stage:03d}"] if pp > 1 else [])
            folder = root / "iter_0000500" / "_".join([*names, *([f"{rank // etp:03d}"] if ep > 1 else [])])
            folder.mkdir()
            content = {"args": args, "iteration": 500, "checkpoint_version": 3.0, "model": state}
            torch.save(content, folder / "model_optim_rng.pt")
    return root


def _dense_shards(
    name: str, value: Tensor, tp: int, settings: Mapping[str, Any], *, whole_latents: bool
) -> list[Tensor]:
    if any(part in name for part in _BY_HEAD) or ".eh_proj." in name:
        return list(value.chunk(tp))
    if any(part in name for part in _LATENTS):
        return [value] * tp if whole_latents else list(value.chunk(tp))
    return shards_of(name, value, tp, settings, 3.0)


def _of_rank(value: Tensor, name: str, rank: int, etp: int, ep: int) -> Tensor:
    """A rank's experts, ``[experts, rows, columns]``: its part of each one's matrices."""
    experts = value.chunk(ep)[rank // etp]
    if ".linear_fc1." in name:
        return experts.chunk(etp, dim=2)[rank % etp].flatten(1, 2)
    return experts.chunk(etp, dim=2)[rank % etp] if name.endswith("weight") else experts


def _state(part: Mapping[str, Tensor], *, kind: str, fused_norms: bool, later: str) -> dict[str, Any]:
    """The names of a core model."""
    routed = {name.removesuffix("mlp.router.weight") for name in part if name.endswith("mlp.router.weight")}
    found: dict[str, Any] = {}
    for name, value in core_stage(part, fused_norms=fused_norms).items():
        layer = name.split("mlp.")[0]
        if layer in routed:
            name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        if ".kv_down_proj." in name or f"{layer}self_attention.linear_kv_down_proj.weight" in part:
            name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        if fused_norms:
            name = name.replace("_attention.q_layernorm.weight", "_attention.linear_q_up_proj.layer_norm_weight")
            name = name.replace("_attention.kv_layernorm.weight", "_attention.linear_kv_up_proj.layer_norm_weight")
        name = name.replace("shared_experts.gate.weight", "shared_experts.gate_weight")
        name = name.replace("transformer_layer", later)
        before, is_of_experts, module = name.partition("mlp.experts.")
        if not is_of_experts:
            found[name] = value
        elif kind == "legacy":
            turned = value.transpose(1, 2).contiguous()  # [e, in, out]
            first = "linear_fc1" in module
            hidden = turned.shape[1] if first else turned.shape[2]
            stored = turned.reshape(hidden, -1) if first else turned.reshape(-1, hidden)
            found[f"{before}mlp.experts.weight{1 if first else 2}"] = stored
        else:
            for number, each in enumerate(value):
                spelled = f"local_experts.{number}.{module}" if kind == "sequential" else f"{module}{number}"
                found[f"{before}mlp.experts.{spelled}"] = each.clone()
    return found
