"""Logits straight from the files of a TensorRT-LLM checkpoint, computed rank by rank as its ranks would.

This is the proof's independent side: it reads config.json and the rank files, and knows neither our names nor how they
were cut. Each rank multiplies with its own part as it lies on disk, and sums stand where they have an all-reduce. What
is no field of config.json is what the code of the architecture does. One layer is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.conversion.huggingface.reading import safetensors_in
from megatron.core.conversion.portable import LazyTensor
from megatron.core.ops.rotary_scaling import UNSCALED, Linear, Llama3, Scaling
from megatron.errors import CheckpointError
from megatron.small_files import read_json

Shard = Mapping[str, Tensor]
_LONGEST = "max_position_embeddings"


class TensorRTModel:
    """The forward pass of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read config.json, and names of tensors. CheckpointError where files are missing."""
        self.config = read_json(folder / "config.json", dict[str, Any], error=CheckpointError)
        mapping = self.config["mapping"]
        self._ranks, self._stages = mapping["tp_size"], mapping["pp_size"]
        self._files: list[dict[str, LazyTensor]] = [
            dict(safetensors_in(folder / f"rank{rank}.safetensors")) for rank in range(mapping["world_size"])
        ]
        self._unread = [set(file) for file in self._files]
        name = self.config["architecture"]
        self._scales_words = name.startswith("Gemma")

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits ``[b, s, v]`` of ``tokens`` ``[b, s]`` over the vocabulary without padding, in fp32.

        CheckpointError for tensors that no part of the model uses.
        """
        x = self._embedded(tokens)
        per_stage = self.config["num_hidden_layers"] // self._stages
        for stage in range(self._stages):
            for number in range(per_stage):
                x = self._layer(x, self._shards(stage, f"transformer.layers.{number}."))
        (*_, last) = range(self._stages)
        ends = self._shards(last, "transformer.ln_f.")
        x = self._norm(x, ends[0], "")
        heads = [shard["weight"] for shard in self._shards(last, "lm_head.")]
        words = torch.cat([F.linear(x, each) for each in heads], -1)[..., : self.config["vocab_size"]]
        if left := sorted({name for file in self._unread for name in file if "kv_cache" not in name}):
            raise CheckpointError(f"the rank files hold tensors that no part of the model uses: {left[:5]}")
        cap = self.config.get("final_logit_softcapping")
        words = words * float(self.config.get("output_multiplier_scale", 1.0))
        return words if cap is None else torch.tanh(words / cap) * float(cap)

    def _shards(self, stage: int, prefix: str) -> list[Shard]:
        """Each rank's tensors whose names begin with ``prefix``, by the rest, as numbers in fp32."""
        return [dict(self._numbers(stage * self._ranks + rank, prefix)) for rank in range(self._ranks)]

    def _numbers(self, rank: int, prefix: str) -> Iterator[tuple[str, Tensor]]:
        file = self._files[rank]
        for name in [name for name in file if name.startswith(prefix)]:
            if "kv_cache" in name:
                continue
            self._unread[rank].discard(name)
            tensor = file[name].make()
            if tensor.dtype in (torch.int8, torch.float8_e4m3fn):
                tensor = self._widened(tensor, file[name.replace("weight", "weights_scaling_factor")].make())
            yield name.removeprefix(prefix), tensor.float()

    def _widened(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Numbers of codes: FP8 with a scale for a matrix, or two signed numbers of 4 bits in a byte with scales of
        groups.
        """
        if codes.dtype == torch.float8_e4m3fn:
            return codes.float() * scales.float().view(*scales.shape[:-1], *(1,) * (codes.dim() - scales.dim() + 1))
        numbers = torch.stack((codes << 4 >> 4, codes >> 4), dim=-2).flatten(-3, -2).float()
        group = numbers.shape[-1] // scales.shape[-1]
        return numbers * scales.float().repeat_interleave(group, -1)

    def _embedded(self, tokens: Tensor) -> Tensor:
        shards = self._shards(0, "transformer.vocab_embedding.")
        split = self.config["use_parallel_embedding"]
        x = F.embedding(tokens, torch.cat([each["weight"] for each in shards]) if split else shards[0]["weight"])
        if self._scales_words:
            return x * math.sqrt(self.config["hidden_size"])
        x = x * float(self.config.get("embedding_multiplier") or self.config.get("embedding_scale") or 1.0)
        if self.config["position_embedding_type"] == "learned_absolute":
            table, rows = self._shards(0, "transformer.position_embedding.")[0]["weight"], self.config[_LONGEST]
            if len(table) != rows:
                raise CheckpointError(f"the files hold {len(table)} positions, and config.json's {_LONGEST} is {rows}")
            x = x + table[: tokens.shape[1]]
        return x

    def _norm(self, x: Tensor, shard: Shard, name: str) -> Tensor:
        weight, bias = shard[f"{name}weight"], shard.get(f"{name}bias")
        eps = self.config["norm_epsilon"]
        if bias is not None:  # of the two kinds that it has, one has none
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def _layer(self, x: Tensor, shards: Sequence[Shard]) -> Tensor:
        first, factor = shards[0], float(self.config.get("residual_multiplier", 1.0))
        made = self._attention(self._norm(x, first, "input_layernorm."), shards)
        if "pre_feedforward_layernorm.weight" in first:  # norms also on what is added
            x = x + self._norm(made, first, "post_layernorm.")
            made = self._network(self._norm(x, first, "pre_feedforward_layernorm."), shards)
            return x + self._norm(made, first, "post_feedforward_layernorm.")
        x = x + made * factor
        return x + self._network(self._norm(x, first, "post_layernorm."), shards) * factor

    def _attention(self, x: Tensor, shards: Sequence[Shard]) -> Tensor:
        """Every rank's heads, and the sum of their outputs; the first rank's bias is added once."""
        config, width = self.config, self.config["head_size"]
        heads = config["num_attention_heads"] // self._ranks
        groups = -(-config["num_key_value_heads"] // self._ranks)
        scale = config.get("attention_multiplier", 1.0) / config.get("q_scaling", 1.0) / math.sqrt(width)
        if "query_pre_attn_scalar" in config:
            scale = config["query_pre_attn_scalar"] ** -0.5
        future = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        parts = []
        for shard in shards:
            fused = F.linear(x, shard["attention.qkv.weight"], shard.get("attention.qkv.bias"))
            fused = fused.view(*fused.shape[:2], -1, width).transpose(1, 2)
            query, key, value = torch.split(fused, [heads, groups, groups], dim=1)
            if "attention.q_layernorm.weight" in shard:
                query = self._norm(query, shard, "attention.q_layernorm.")
                key = self._norm(key, shard, "attention.k_layernorm.")
            query, key = self._turned(query), self._turned(key)
            key, value = (each.repeat_interleave(heads // groups, 1) for each in (key, value))
            scores = query @ key.transpose(-1, -2) * scale
            cap = config.get("attn_logit_softcapping")
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            mixed = torch.softmax(scores + future, -1) @ value
            parts.append(F.linear(mixed.transpose(1, 2).flatten(2), shard["attention.dense.weight"]))
        summed = torch.stack(parts).sum(0)
        bias = shards[0].get("attention.dense.bias")
        return summed if bias is None else summed + bias

    def _turned(self, x: Tensor) -> Tensor:
        """Heads ``[b, heads, s, width]`` turned by their positions."""
        kind = self.config["position_embedding_type"]
        if not kind.startswith("rope"):
            return x
        turned = int(x.shape[-1] * self.config.get("rotary_pct", 1.0))
        frequencies = self._scaling().frequencies(turned, self.config["rotary_base"], length=x.shape[2])
        angles = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        own, rest = x[..., :turned], x[..., turned:]
        if not kind.endswith("neox"):
            one, other = own[..., ::2], own[..., 1::2]
            pair = (one * cos - other * sin, other * cos + one * sin)
            return torch.cat((torch.stack(pair, -1).flatten(-2), rest), -1)
        one, other = own.chunk(2, -1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin, rest), -1)

    def _scaling(self) -> Scaling:
        found = self.config.get("rotary_scaling")
        if not found:
            return UNSCALED
        if found["type"] == "linear":
            return Linear(factor=found["factor"])
        length = found["original_max_position_embeddings"]
        low, high = found["low_freq_factor"], found["high_freq_factor"]
        return Llama3(factor=found["factor"], low=low, high=high, original_length=length)

    def _network(self, x: Tensor, shards: Sequence[Shard]) -> Tensor:
        """The MLP, or experts where there is a router, of every rank, and the sum of their outputs."""
        if "mlp.router.weight" in shards[0]:
            return self._experts(x, shards)
        parts = []
        for shard in shards:
            inner = self._activated(F.linear(x, shard["mlp.fc.weight"], shard.get("mlp.fc.bias")))
            if "mlp.gate.weight" in shard:
                inner = inner * F.linear(x, shard["mlp.gate.weight"], shard.get("mlp.gate.bias"))
            parts.append(F.linear(inner, shard["mlp.proj.weight"]))
        summed, bias = torch.stack(parts).sum(0), shards[0].get("mlp.proj.bias")
        return summed if bias is None else summed + bias

    def _activated(self, x: Tensor) -> Tensor:
        match self.config["hidden_act"]:
            case "silu" | "swiglu":
                return F.silu(x)
            case "relu":
                return F.relu(x)
            case "squared-relu":
                return F.relu(x).square()
            case _:
                return F.gelu(x, approximate="tanh")

    def _experts(self, x: Tensor, shards: Sequence[Shard]) -> Tensor:
        """What each token's experts make, weighted by a softmax over their scores alone."""
        top, chosen = F.linear(x, shards[0]["mlp.router.weight"]).topk(self.config["moe"]["top_k"], -1)
        weights = torch.softmax(top, -1)
        out = torch.zeros_like(x)
        for number in range(len(shards[0]["mlp.fc.weight"])):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            for shard in shards:
                linear, activated = F.linear(x, shard["mlp.fc.weight"][number]).chunk(2, -1)
                out += share * F.linear(F.silu(activated) * linear, shard["mlp.proj.weight"][number])
        return out
