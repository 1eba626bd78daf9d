"""Logits straight from the files of a Megatron-LM checkpoint, computed rank by rank as Megatron-LM's ranks would.

This is the proof's independent side: it merges no shards, knows no mapping table and builds none of our layers. Each
tensor-parallel rank multiplies with its own shard as it lies on disk, and sums stand where they have an all-reduce. One
layer is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.conversion.megatron_lm.arguments import Arguments, is_exact_gelu
from megatron.core.conversion.megatron_lm.files import DistFiles, ShardFiles, open_checkpoint
from megatron.core.ops.rotary import apply_rotary, rotary_frequencies, rotary_table
from megatron.errors import CheckpointError

Shard = Mapping[str, Tensor]


@torch.no_grad()
def megatron_lm_logits(root: Path, tokens: Tensor, *, step: int | None = None) -> Tensor:
    """Logits ``[b, s, padded vocabulary]`` of ``tokens`` ``[b, s]``, in fp32."""
    files = open_checkpoint(root, step=step)
    return _Forward(files.args, files.version).logits(_ends(files), _layers(files), tokens)


def _layers(files: ShardFiles | DistFiles) -> Iterator[list[Shard]]:
    """Layer after layer, each rank's tensors by the name after the layer's number."""
    if isinstance(files, ShardFiles):
        for stage in files.stages:
            local = {int(name.split("layers.")[1].split(".")[0]) for name in stage[0] if "layers." in name}
            for number in sorted(local):
                yield [_after(shard, f"layers.{number}.") for shard in stage]
        return
    numbered = "decoder.layers.0." in " ".join(files.stored.entries)
    for number in range(files.args("num_layers")):
        prefix = f"decoder.layers.{number}." if numbered else "decoder.layers."
        keys = [key for key in files.stored.entries if key.startswith(prefix)]
        at = None if numbered else number
        yield [{key.removeprefix(prefix): files.stored.read(key, at=at) for key in keys}]


def _ends(files: ShardFiles | DistFiles) -> list[Shard]:
    """Each rank's tensors outside the layers."""
    if isinstance(files, ShardFiles):
        shards: list[dict[str, Tensor]] = [{} for _ in files.stages[0]]
        for stage in files.stages:
            for known, shard in zip(shards, stage):
                known.update({name: tensor for name, tensor in shard.items() if "layers." not in name})
        return list(shards)
    ends = [key for key in files.stored.entries if key.startswith(("embedding.", "decoder.final", "output_layer."))]
    return [{key: files.stored.read(key) for key in ends}]


def _after(shard: Shard, part: str) -> dict[str, Tensor]:
    return {name.split(part, 1)[1]: tensor for name, tensor in shard.items() if f".{part}" in name}


def _pick(shard: Shard, *endings: str) -> Tensor | None:
    """The tensor whose name is, or ends with, one of ``endings``, in fp32."""
    for ending in endings:
        for name, tensor in shard.items():
            if name == ending or name.endswith(f".{ending}"):
                return tensor.float()
    return None


def _need(shard: Shard, *endings: str) -> Tensor:
    found = _pick(shard, *endings)
    if found is None:
        raise CheckpointError(f"the checkpoint has no {' or '.join(endings)}")
    return found


class _Forward:
    """A GPT's forward pass by the saved settings."""

    def __init__(self, args: Arguments, version: float) -> None:
        self._args, self._version = args, version
        self._heads: int = args("num_attention_heads")
        self._width: int = args("kv_channels", args("hidden_size") // self._heads)
        grouped = args("group_query_attention", False)
        self._groups: int = args("num_query_groups", self._heads) if grouped else self._heads
        self._eps: float = args("norm_epsilon", args("layernorm_epsilon", 1e-5))

    def logits(self, ends: list[Shard], layers: Iterator[list[Shard]], tokens: Tensor) -> Tensor:
        """All of it: embedding, layers, final norm, output."""
        words = [_need(shard, "embedding.word_embeddings.weight") for shard in ends]
        x = F.embedding(tokens, torch.cat(words))
        positions = _pick(ends[0], "embedding.position_embeddings.weight")
        if positions is not None:
            x = x + positions[: tokens.shape[1]]
        for ranks in layers:
            x = x + self._attention(self._norm(x, ranks[0], "input"), ranks)
            x = x + self._mlp(self._norm(x, ranks[0], "post_attention"), ranks)
        x = self._norm(x, ends[0], "final")
        untied = self._args("untie_embeddings_and_output_weights", False)
        output = [_need(shard, "output_layer.weight") for shard in ends] if untied else words
        return torch.cat([F.linear(x, rows) for rows in output], dim=-1)

    def _norm(self, x: Tensor, shard: Shard, which: str) -> Tensor:
        inside = {"input": "linear_qkv", "post_attention": "linear_fc1", "final": ""}[which]
        names = [f"{which}_norm", f"{which}_layernorm"] + (["pre_mlp_layernorm"] if which == "post_attention" else [])

        def find(kind: str) -> list[str]:
            return [f"{name}.{kind}" for name in names] + ([f"{inside}.layer_norm_{kind}"] if inside else [])

        return self._normed(x, _need(shard, *find("weight")), _pick(shard, *find("bias")))

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._args("apply_layernorm_1p", False):
            weight = weight + 1
        if self._args("normalization", "LayerNorm") == "RMSNorm":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight
        return F.layer_norm(x, weight.shape, weight, bias, self._eps)

    def _attention(self, x: Tensor, ranks: list[Shard]) -> Tensor:
        """Every rank's heads, and the sum of their outputs."""
        summed: Tensor | None = None
        for shard in ranks:
            weight = _need(shard, "linear_qkv.weight", "query_key_value.weight")
            bias = _pick(shard, "linear_qkv.bias", "query_key_value.bias")
            query, key, value = self._heads_of(F.linear(x, weight, bias), len(ranks))
            if (norm := _pick(shard, "q_layernorm.weight")) is not None:
                query = self._normed(query, norm, _pick(shard, "q_layernorm.bias"))
                key = self._normed(key, _need(shard, "k_layernorm.weight"), _pick(shard, "k_layernorm.bias"))
            mixed = self._mix(self._rotated(query), self._rotated(key), value)
            part = F.linear(
                mixed.flatten(2),
                _need(shard, "linear_proj.weight", "self_attention.dense.weight", "attention.dense.weight"),
            )
            summed = part if summed is None else summed + part
        assert summed is not None
        bias = _pick(ranks[0], "linear_proj.bias", "self_attention.dense.bias", "attention.dense.bias")
        return summed if bias is None else summed + bias

    def _heads_of(self, fused: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value ``[b, s, heads, d]`` of one rank's fused projection, by the checkpoint's version."""
        heads, groups, width = self._heads // ranks, self._groups // ranks, self._width
        shape = fused.shape[:2]
        if self._version < 1:
            query, key, value = fused.view(*shape, 3, heads, width).unbind(2)
        elif self._version < 2:
            query, key, value = fused.view(*shape, heads, width, 3).unbind(-1)
        else:
            grouped = fused.view(*shape, groups, heads // groups + 2, width)
            query = grouped[..., :-2, :].reshape(*shape, heads, width)
            key, value = grouped[..., -2, :], grouped[..., -1, :]
        return query, key, value

    def _rotated(self, x: Tensor) -> Tensor:
        args = self._args
        if args("position_embedding_type", "") != "rope" and not args("use_rotary_position_embeddings", False):
            return x
        frequencies = rotary_frequencies(
            self._width,
            percent=args("rotary_percent", 1.0),
            base=args("rotary_base", 10000),
            interpolation_factor=args("rotary_seq_len_interpolation_factor", None),
            llama3_factor=args("rope_scaling_factor", 8.0) if args("use_rope_scaling", False) else None,
        )
        table = rotary_table(frequencies, torch.arange(x.shape[1]))
        return apply_rotary(x.transpose(0, 1), table, interleaved=args("rotary_interleaved", False)).transpose(0, 1)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal softmax attention, ``[b, s, heads, d]``."""
        repeats = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(self._width)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)

    def _mlp(self, x: Tensor, ranks: list[Shard]) -> Tensor:
        """Every rank's part of the inner width, and the sum of their outputs."""
        summed: Tensor | None = None
        for shard in ranks:
            bias = _pick(shard, "linear_fc1.bias", "dense_h_to_4h.bias")
            inner = F.linear(x, _need(shard, "linear_fc1.weight", "dense_h_to_4h.weight"), bias)
            part = F.linear(self._activated(inner), _need(shard, "linear_fc2.weight", "dense_4h_to_h.weight"))
            summed = part if summed is None else summed + part
        assert summed is not None
        bias = _pick(ranks[0], "linear_fc2.bias", "dense_4h_to_h.bias")
        return summed if bias is None else summed + bias

    def _activated(self, inner: Tensor) -> Tensor:
        if self._args("swiglu", False):
            gate, up = inner.chunk(2, dim=-1)
            return F.silu(gate) * up
        if self._args("squared_relu", False):
            return F.relu(inner).square()
        return F.gelu(inner, approximate="none" if is_exact_gelu(self._args) else "tanh")
