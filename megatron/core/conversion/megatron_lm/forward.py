"""Logits straight from the files of a Megatron-LM checkpoint, computed rank by rank as Megatron-LM's ranks would.

This is the proof's independent side: it merges no shards, knows no mapping table and builds none of our layers. Each
tensor-parallel rank multiplies with its own shard as it lies on disk, and sums stand where they have an all-reduce. One
layer is in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.conversion.megatron_lm.arguments import has_residual_behind_norm, is_exact_gelu
from megatron.core.conversion.megatron_lm.files import DistFiles, ShardFiles
from megatron.core.conversion.megatron_lm.format import family_among, format_of
from megatron.core.conversion.megatron_lm.names import is_legacy, is_weight
from megatron.core.ops.rotary import Rotary, apply_rotary
from megatron.core.ops.rotary_scaling import Linear, Llama3, Scaling, Yarn
from megatron.errors import CheckpointError

Shard = Mapping[str, Tensor]
_IN_STACK = re.compile(r"(?:language_model\.)?(\w+)\.layers\.(?:(\d+)\.)?")


def future(length: int) -> Tensor:
    """Causal bias of scores ``[b, heads, queries, keys]``: minus infinity for keys that come later."""
    return torch.full((1, 1, length, length), -torch.inf).triu(1)


def padding(real: Tensor) -> Tensor:
    """Padding bias of scores ``[b, heads, queries, keys]``: minus infinity for keys that aren't ``real`` ``[b, s]``."""
    return torch.zeros(real.shape).masked_fill(~real, -torch.inf)[:, None, None, :]


@dataclass(frozen=True)
class Layer:
    """Tensors by the names after the layer's number. ``ranks``: of each tensor-parallel rank. ``experts``: of each
    expert-parallel rank and, in it, of each of those that split its experts.
    """

    ranks: list[Shard]
    experts: list[list[Shard]]


def _layers(files: ShardFiles | DistFiles, stack: str) -> Iterator[Layer]:
    """Layer after layer."""
    if isinstance(files, ShardFiles):
        for stage in files.stages:
            places = [place for name in stage.ranks[0] if (place := _IN_STACK.match(name)) and place[1] == stack]
            for number in sorted({int(place[2]) for place in places}):
                within = partial(_within, before=f"{stack}.layers.{number}.")
                yield Layer(
                    [within(shard) for shard in stage.ranks],
                    [[within(each) for each in rank] for rank in stage.experts],
                )
        return
    found = {key: place for key in files.names() if (place := _IN_STACK.match(key)) and place[1] == stack}
    numbers = sorted({int(place[2]) for place in found.values() if place[2]})
    depth = files.stored.entries[next(iter(found))].shape[0]
    for number in numbers or range(depth):
        keys = [key for key, place in found.items() if place[2] in (None, str(number))]
        at = None if numbers else number
        whole = {key.removeprefix(found[key][0]): files.stored.read(key, at=at) for key in keys}
        for name in [name for name in whole if name.endswith(("weight_w", "bias_w"))]:
            matrix = name.removesuffix("_w")  # newer folders keep gates (w) and values (v) apart
            whole[matrix] = torch.cat((whole.pop(name), whole.pop(f"{matrix}_v")))
        yield Layer([whole], [[whole]])


def _within(shard: Shard, *, before: str) -> Shard:
    """The tensors of a layer by the names after ``before``."""
    return {name.split(before, 1)[1]: tensor for name, tensor in shard.items() if before in name}


def _ends(files: ShardFiles | DistFiles) -> list[Shard]:
    """Each rank's tensors outside the layers; the last stage's where several have one."""
    if isinstance(files, ShardFiles):
        shards: list[dict[str, Tensor]] = [{} for _ in files.stages[0].ranks]
        for stage in files.stages:
            for known, shard in zip(shards, stage.ranks):
                known.update({name: tensor for name, tensor in shard.items() if "layers." not in name})
        return list(shards)
    roots = format_of(family_among(files.names())).names.roots  # others are optimizer and random states
    names = (key for key in files.stored.entries if key.split(".")[0] in roots and not _IN_STACK.match(key))
    return [{key: files.stored.read(key) for key in filter(is_weight, names)}]


def pick(shard: Shard, *endings: str) -> Tensor | None:
    """The tensor whose name is, or ends with, one of ``endings``, in fp32."""
    for ending in endings:
        for name, tensor in shard.items():
            if name == ending or name.endswith(f".{ending}"):
                return tensor.float()
    return None


def need(shard: Shard, *endings: str) -> Tensor:
    """The tensor whose name is, or ends with, one of ``endings``, in fp32; CheckpointError where there is none."""
    found = pick(shard, *endings)
    if found is None:
        raise CheckpointError(f"the checkpoint has no {' or '.join(endings)}")
    return found


def _linear(x: Tensor, shard: Shard, *names: str, bias: bool = True) -> Tensor:
    """The product with the matrix that has, or ends with, one of ``names``, and its bias if it has one."""
    added = pick(shard, *(f"{name}.bias" for name in names)) if bias else None
    return F.linear(x, need(shard, *(f"{name}.weight" for name in names)), added)


def _sum(parts: Iterable[Tensor], bias: Tensor | None) -> Tensor:
    """What an all-reduce makes of the ranks' parts, and the bias that is added once."""
    summed = torch.stack(list(parts)).sum(0)
    return summed if bias is None else summed + bias


def _marks(pattern: int | list[int], number: int) -> bool:
    """Whether an argument marks layer ``number``, counted from 0: by a list, or every N-th layer."""
    if isinstance(pattern, list):
        return bool(pattern[number])
    return bool(pattern) and (number + 1) % pattern == 0


_INPUT_NORM = ("input_norm.", "input_layernorm.", "linear_qkv.layer_norm_", "norm.", "in_proj.layer_norm_")
_PROJECTION = ("self_attention.linear_proj", "self_attention.dense", "attention.dense")
_CROSS_PROJECTION = ("cross_attention.linear_proj", "inter_attention.dense")
_CROSS_NORM = ("post_attention_norm.", "post_attention_layernorm.", "pre_cross_attn_layernorm.")
_MLP_NORM = ("post_inter_attention_norm.", "post_inter_attention_layernorm.") + (
    *("post_attention_norm.", "post_attention_layernorm."),  # where nothing is between them
    *("pre_mlp_layernorm.", "linear_fc1.layer_norm_"),
)


class MegatronLMModel:
    """The forward pass of a model by its saved settings, whose parts a family's question puts together.

    ``args``: the settings. ``is_legacy``: from before core. ``stacks``: names of its stacks of layers.
    """

    def __init__(self, files: ShardFiles | DistFiles) -> None:
        self._files, self.args, self._version = files, files.args, files.version
        self.is_legacy = is_legacy(files.names())
        self._ends = _ends(files)
        self.stacks = {place[1] for name in files.names() if (place := _IN_STACK.match(name))}
        args = self.args
        self._heads: int = args("num_attention_heads")
        self._width: int = args("kv_channels", args("hidden_size") // self._heads)
        grouped = args("group_query_attention", False)
        self._groups: int = args("num_query_groups", self._heads) if grouped else self._heads
        self._eps: float = args("norm_epsilon", 1e-5)

    def embedded(self, tokens: Tensor, types: Tensor | None = None) -> Tensor:
        """Ids ``[b, s]`` to hidden states ``[b, s, h]``."""
        x = F.embedding(tokens, torch.cat(self._words()))
        positions = pick(self._ends[0], "embedding.position_embeddings.weight")
        kinds = pick(self._ends[0], "embedding.tokentype_embeddings.weight")
        if positions is not None:
            x = x + positions[: tokens.shape[1]]
        return x if kinds is None or types is None else x + kinds[types]

    def _words(self) -> list[Tensor]:
        return [need(shard, "embedding.word_embeddings.weight") for shard in self._ends]

    def run(
        self,
        stack: str,
        x: Tensor,
        bias: Tensor,
        *,
        encoder_hidden_states: Tensor | None = None,
        seen: Tensor | None = None,
        routed: Callable[[Tensor, Layer], Tensor] | None = None,
        mixers: Mapping[str, Callable[[Tensor, Layer], Tensor]] | None = None,
    ) -> Tensor:
        """All layers and the norm behind them; ``bias`` is added to attention scores ``[b, heads, queries, keys]``, and
        ``seen`` to those of the attention to what an encoder made. ``routed``: the network of layers with a router.
        ``mixers``: those with a state, by what the names of their tensors begin with.
        """
        branches: list[tuple[tuple[str, ...], Callable[[Tensor, Layer], Tensor]]]
        behind = has_residual_behind_norm(self.args, legacy=self.is_legacy)
        for number, layer in enumerate(_layers(self._files, stack)):
            scores, first = bias + self._out_of_window(number, x.shape[1]), layer.ranks[0]
            is_latent = pick(first, "self_attention.linear_kv_up_proj.weight") is not None
            kind = self._latent_attention if is_latent else partial(self._attention, number=number)
            attention = partial(kind, scores=scores)
            found = (each for start, each in (mixers or {}).items() if any(name.startswith(start) for name in first))
            has_router = routed is not None and "mlp.router.weight" in first
            branches = [
                (_INPUT_NORM, next(found, attention)),
                (_MLP_NORM, routed if routed and has_router else self._mlp),
            ]
            if encoder_hidden_states is not None and seen is not None:
                branches.insert(
                    1, (_CROSS_NORM, partial(self._crossing, encoder_hidden_states=encoder_hidden_states, scores=seen))
                )
            branches = [(names, branch) for names, branch in branches if self._is_there(first, *names)]
            outer = {name: tensor for name, tensor in first.items() if not name.startswith("mixer.norm.")}
            for names, branch in branches:
                normed = self._norm(x, outer, *names)
                x = (normed if behind else x) + branch(normed, layer)
        return self._norm(x, self._ends[0], f"{stack}.final_norm.", f"{stack}.final_layernorm.")

    def _is_there(self, shard: Shard, *names: str) -> bool:
        """Whether a layer has a norm of these names; layers of a hybrid have one mixer each."""
        return pick(shard, *(f"{name}weight" for name in names)) is not None

    def _out_of_window(self, number: int, length: int) -> Tensor:
        """Added to scores in layer ``number``, counted from 0: none of what is out of its window."""
        window, full = self.args("window_size", None), self.args("window_attn_skip_freq", 0)
        is_full = _marks(full, number) != isinstance(full, list)  # a list marks the layers with a window
        before, after = (length if side < 0 or is_full else side for side in window or (-1, -1))
        distance = torch.arange(length) - torch.arange(length)[:, None]
        return torch.zeros(length, length).masked_fill((distance < -before) | (distance > after), -torch.inf)

    def words(self, x: Tensor) -> Tensor:
        """Hidden states to the logits of all ranks' words."""
        untied = self.args("untie_embeddings_and_output_weights", False)
        rows = [need(shard, "output_layer.weight") for shard in self._ends] if untied else self._words()
        biases = [pick(shard, "output_layer.bias", "lm_head.bias") for shard in self._ends]
        return torch.cat([F.linear(x, weight, bias) for weight, bias in zip(rows, biases)], dim=-1)

    def tensor(self, name: str) -> Tensor | None:
        """The tensor outside the layers whose name is, or ends with, ``name``, in fp32."""
        return pick(self._ends[0], name)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The product with a matrix outside the layers, and its bias if it has one."""
        return _linear(x, self._ends[0], name)

    def norm(self, x: Tensor, *names: str) -> Tensor:
        """The norm outside the layers whose tensors' names end with one of ``names`` and then the kind."""
        return self._norm(x, self._ends[0], *names)

    def _norm(self, x: Tensor, shard: Shard, *names: str) -> Tensor:
        """The norm whose tensors' names are, or end with, one of ``names`` and then the kind."""
        weight = need(shard, *(f"{name}weight" for name in names))
        return self._normed(x, weight, pick(shard, *(f"{name}bias" for name in names)))

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.args("apply_layernorm_1p", False):
            weight = weight + 1
        if self.args("normalization", "LayerNorm") == "RMSNorm":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight
        return F.layer_norm(x, weight.shape, weight, bias, self._eps)

    def _attention(self, x: Tensor, layer: Layer, *, number: int, scores: Tensor) -> Tensor:
        """Every rank's heads in layer ``number``, counted from 0, and the sum of their outputs."""
        parts, ranks = [], layer.ranks
        heads, groups = self._heads // len(ranks), self._groups // len(ranks)
        is_rotated = not _marks(self.args("no_rope_freq", 0), number)
        is_gated = self.args("attention_output_gate", False)
        for rank, shard in enumerate(ranks):
            mine = scores if scores.shape[1] == 1 else scores.chunk(len(ranks), dim=1)[rank]
            fused = _linear(x, shard, "linear_qkv", "query_key_value")
            gate: Tensor | None = None
            if heads == groups and not is_gated:
                query, key, value = self._kinds_of(fused, 3, heads)
            else:
                grouped = fused.view(*fused.shape[:2], groups, -1, self._width)
                query, key, value = grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]
                query, gate = torch.split(query, heads // groups, dim=-2) if is_gated else (query, None)
                query = query.flatten(2, 3)
            if (norm := pick(shard, "q_layernorm.weight")) is not None:
                query = self._normed(query, norm, pick(shard, "q_layernorm.bias"))
                key = self._normed(key, need(shard, "k_layernorm.weight"), pick(shard, "k_layernorm.bias"))
            if self.args("qk_l2_norm", False):
                query, key = (each / (each.square().mean(-1, keepdim=True) + self._eps).sqrt() for each in (query, key))
            if is_rotated:
                query, key = self._rotated(query), self._rotated(key)
            offset = pick(shard, "self_attention.core_attention.softmax_offset")
            mixed = self._mix(query, key, value, mine, offset=offset)
            mixed = mixed if gate is None else mixed * torch.sigmoid(gate.flatten(2, 3))
            parts.append(_linear(mixed.flatten(2), shard, *_PROJECTION, bias=False))
        return _sum(parts, pick(ranks[0], *(f"{name}.bias" for name in _PROJECTION)))

    def _latent_attention(self, x: Tensor, layer: Layer, *, scores: Tensor) -> Tensor:
        """Every rank's heads, from latent vectors that all ranks have (arXiv:2405.04434, section 2.1)."""
        args, ranks = self.args, layer.ranks
        turned, plain, wide = args("qk_pos_emb_head_dim"), args("qk_head_dim"), args("v_head_dim")
        rotary = Rotary(turned, args("rotary_base", 10000), self._latent_scaling())
        table = rotary.table(torch.arange(x.shape[1]), length=x.shape[1])

        def turn(part: Tensor) -> Tensor:
            return apply_rotary(part.transpose(0, 1), table, interleaved=True).transpose(0, 1)

        both = self._latent(x, ranks, "linear_kv_down_proj", args("kv_lora_rank") + turned)
        latent, key = torch.split(both, [args("kv_lora_rank"), turned], dim=-1)
        latent = self._if_normed(latent, ranks[0], "kv_layernorm.", "linear_kv_up_proj.layer_norm_")
        key, parts = turn(key.unsqueeze(2)), []
        for rank, shard in enumerate(ranks):
            mine = scores if scores.shape[1] == 1 else scores.chunk(len(ranks), dim=1)[rank]
            if pick(shard, "linear_q_proj.weight") is not None:
                query = _linear(x, shard, "linear_q_proj")
            else:
                narrow = self._latent(x, ranks, "linear_q_down_proj", args("q_lora_rank"))
                narrow = self._if_normed(narrow, ranks[0], "q_layernorm.", "linear_q_up_proj.layer_norm_")
                query = _linear(narrow, shard, "linear_q_up_proj")
            query = torch.unflatten(query, -1, (-1, plain + turned))
            query = torch.cat((query[..., :plain], turn(query[..., plain:])), dim=-1)
            made = torch.unflatten(_linear(latent, shard, "linear_kv_up_proj"), -1, (-1, plain + wide))
            keys, values = torch.split(made, [plain, wide], dim=-1)
            keys = torch.cat((keys, key.expand(-1, -1, keys.shape[2], -1)), dim=-1)
            offset = pick(shard, "self_attention.core_attention.softmax_offset")
            scale = self._latent_temperature() / math.sqrt(plain + turned)
            mixed = self._mix(query, keys, values, mine, offset=offset, scale=scale)
            parts.append(_linear(mixed.flatten(2), shard, *_PROJECTION, bias=False))
        return _sum(parts, pick(ranks[0], *(f"{name}.bias" for name in _PROJECTION)))

    @staticmethod
    def _latent(x: Tensor, ranks: list[Shard], name: str, width: int) -> Tensor:
        """A latent of ``width``: of rows that ranks divide and gather, or that each has all of."""
        rows = [need(shard, f"{name}.weight") for shard in ranks]
        return F.linear(x, rows[0] if rows[0].shape[0] == width else torch.cat(rows))

    def _if_normed(self, x: Tensor, shard: Shard, *names: str) -> Tensor:
        weight = pick(shard, *(f"{name}weight" for name in names))
        return x if weight is None else self._normed(x, weight, pick(shard, *(f"{name}bias" for name in names)))

    def _latent_temperature(self) -> float:
        """What scores are multiplied by beside the usual scale."""
        factor = self.args("rotary_scaling_factor", 1.0)
        is_yarn = self.args("rope_type", "yarn") == "yarn"
        growth = 0.1 * self.args("mscale_all_dim", 1.0) * math.log(factor) if is_yarn and factor > 1 else 0.0
        return float((1.0 + growth) ** 2)

    def _latent_scaling(self) -> Scaling:
        args = self.args
        if args("rope_type", "yarn") != "yarn":
            return Linear(factor=1.0)
        return Yarn(
            factor=args("rotary_scaling_factor", 1.0),
            beta_fast=args("beta_fast", 32.0),
            beta_slow=args("beta_slow", 1.0),
            original_length=args("original_max_position_embeddings", args("max_position_embeddings")),
            round_to_int=True,
            attention_factor=1.0,
        )

    def _crossing(self, x: Tensor, layer: Layer, *, encoder_hidden_states: Tensor, scores: Tensor) -> Tensor:
        """Attention to the encoder's output: every rank's heads, and the sum of their outputs."""
        ranks = layer.ranks
        parts, heads = [], self._heads // len(ranks)
        for shard in ranks:
            (query,) = self._kinds_of(_linear(x, shard, "linear_q", "inter_attention.query"), 1, heads)
            key, value = self._kinds_of(
                _linear(encoder_hidden_states, shard, "linear_kv", "inter_attention.key_value"), 2, heads
            )
            offset = pick(shard, "cross_attention.core_attention.softmax_offset")
            mixed = self._mix(query, key, value, scores, offset=offset)
            parts.append(_linear(mixed.flatten(2), shard, *_CROSS_PROJECTION, bias=False))
        return _sum(parts, pick(ranks[0], *(f"{name}.bias" for name in _CROSS_PROJECTION)))

    def _kinds_of(self, fused: Tensor, kinds: int, heads: int) -> tuple[Tensor, ...]:
        """Each kind's heads ``[b, s, heads, d]``, in the order of the checkpoint's version."""
        shape = fused.shape[:2]
        if self._version < 1:
            return fused.view(*shape, kinds, heads, self._width).unbind(2)
        if self._version < 2:
            return fused.view(*shape, heads, self._width, kinds).unbind(-1)
        return fused.view(*shape, heads, kinds, self._width).unbind(3)

    def _rotated(self, x: Tensor) -> Tensor:
        args, positions = self.args, self.args("position_embedding_type", "")
        if positions not in ("rope", "yarn") and not args("use_rotary_position_embeddings", False):
            return x
        scaling: Scaling = Linear(factor=args("rotary_seq_len_interpolation_factor", 1.0))
        if args("use_rope_scaling", False):
            scaling = Llama3(factor=args("rope_scaling_factor", 8.0), low=1.0, high=4.0, original_length=8192)
        if positions == "yarn":
            scaling = self._yarn()
        rotary = Rotary(int(self._width * args("rotary_percent", 1.0)), args("rotary_base", 10000), scaling)
        table = rotary.table(torch.arange(x.shape[1]), length=x.shape[1])
        return apply_rotary(x.transpose(0, 1), table, interleaved=args("rotary_interleaved", False)).transpose(0, 1)

    def _yarn(self) -> Yarn:
        """YaRN's scaling, whose temperature is a ratio where both scales are saved."""
        args = self.args
        factor, mscale, mscale_all_dim = (
            args("yarn_rotary_scaling_factor"),
            args("yarn_mscale", None),
            args("yarn_mscale_all_dim", None),
        )
        growth = 0.1 * math.log(max(factor, 1.0))
        scales = (1.0, 0.0) if mscale is None or mscale_all_dim is None else (mscale, mscale_all_dim)
        return Yarn(
            factor=factor,
            beta_fast=args("yarn_beta_fast", 32.0),
            beta_slow=args("yarn_beta_slow", 1.0),
            original_length=args("yarn_original_max_position_embeddings"),
            round_to_int=args("yarn_correction_range_round_to_int", True),
            attention_factor=(scales[0] * growth + 1.0) / (scales[1] * growth + 1.0),
        )

    def _mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        *,
        offset: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Softmax attention, ``[b, s, heads, d]``, whose sum has one more term where each head has an ``offset``."""
        repeats = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        scale = scale or self.args("softmax_scale", 1 / math.sqrt(self._width))
        bias = bias.masked_fill(bias.isneginf().all(-1, keepdim=True), 0.0)  # padding that sees nothing: any number
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale + bias
        if self.args("softmax_type", "vanilla") == "off-by-one":
            offset = scores.new_zeros(scores.shape[1])
        if offset is not None:
            scores = torch.cat([scores, offset[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., : key.shape[1]], value)

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        """Every rank's part of the inner width, and the sum of their outputs."""
        return self.network(
            x, layer.ranks, ("mlp.linear_fc1", "mlp.dense_h_to_4h"), ("mlp.linear_fc2", "mlp.dense_4h_to_h")
        )

    def network(self, x: Tensor, ranks: list[Shard], first: tuple[str, ...], second: tuple[str, ...]) -> Tensor:
        """An MLP with matrices of other names, ``first`` and ``second``: every rank's part, and the sum of their
        outputs.
        """
        inner = [self._activated(_linear(x, shard, *first)) for shard in ranks]
        parts = [_linear(mine, shard, *second, bias=False) for mine, shard in zip(inner, ranks)]
        return _sum(parts, pick(ranks[0], *(f"{name}.bias" for name in second)))

    def _activated(self, inner: Tensor) -> Tensor:
        if self.args("quick_geglu", False):
            limit = self.args("activation_func_clamp_value", math.inf)
            gate, up = inner.chunk(2, dim=-1)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            gated: Tensor = gate * torch.sigmoid(1.702 * gate) * (up + self.args("glu_linear_offset", 0.0))
            return gated
        if self.args("swiglu", False):
            gate, up = inner.chunk(2, dim=-1)
            return F.silu(gate) * up
        if self.args("squared_relu", False):
            return F.relu(inner).square()
        return F.gelu(inner, approximate="none" if is_exact_gelu(self.args, legacy=self.is_legacy) else "tanh")
