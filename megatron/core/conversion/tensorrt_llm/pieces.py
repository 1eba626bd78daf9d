"""A portable model as the tensors of TensorRT-LLM's ranks: where each of ours lies, and what it becomes there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.tensorrt_llm import cuts
from megatron.core.conversion.tensorrt_llm.architecture import Architecture, fields_of
from megatron.core.conversion.tensorrt_llm.cuts import Cut, Layout
from megatron.core.conversion.tensorrt_llm.few_bits import (
    FewBits,
    check_parts,
    codes_and_scales,
    packed_outputs,
)
from megatron.errors import CheckpointError, ConfigError

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_ENDS = {
    "embedding.position_embeddings.weight": "transformer.position_embedding.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
}
_WORDS, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
Ranks = list[dict[str, Tensor]]
"""Tensors by name, for each tensor-parallel rank of a stage."""


@dataclass(frozen=True)
class Piece:
    """What one tensor of ours becomes in the files of a ``stage``. ``make``: of the tensor, made or without numbers."""

    stage: int
    source: LazyTensor
    make: Callable[[Tensor], Ranks]

    def shapes(self) -> Ranks:
        """The parts without numbers."""
        return self.make(torch.empty(self.source.shape, dtype=self.source.dtype, device="meta"))


@dataclass(frozen=True)
class Plan:
    """How a model is divided. ``few_bits``: what is quantized."""

    portable: PortableModel
    architecture: Architecture
    layout: Layout
    few_bits: FewBits | None = None

    @property
    def model(self) -> ModelConfig:
        """The model's settings."""
        return self.portable.model

    def check(self) -> None:
        """Raise ConfigError for ranks that can't divide the model."""
        model, layout = self.model, self.layout
        ranks, groups = layout.tensor, model.num_query_groups
        tensor = f"--target-tensor-parallel-size {ranks}"
        if model.num_attention_heads % ranks:
            raise ConfigError(f"{tensor} doesn't divide the {model.num_attention_heads} attention heads")
        if groups % ranks and ranks % groups:
            raise ConfigError(f"{tensor} neither divides the {groups} key/value heads nor is a multiple of them")
        width = fields_of(model, self.portable.groups, self.architecture)["intermediate_size"]
        if width % ranks:
            raise ConfigError(f"{tensor} doesn't divide the MLP's width {width}")
        if self.architecture.splits_words and (model.vocab_size or 0) % ranks:
            raise ConfigError(
                f"{tensor} doesn't divide the vocabulary of {model.vocab_size}, and TensorRT-LLM divides the word "
                f"embedding of {self.architecture.name} without padding"
            )
        if model.num_layers % layout.pipeline:
            raise ConfigError(
                f"--target-pipeline-parallel-size {layout.pipeline} doesn't divide the {model.num_layers} layers, and "
                "releases of TensorRT-LLM differ in how they then divide them"
            )

    def pieces(self) -> Iterator[Piece]:
        """What each tensor becomes, stage after stage; CheckpointError for one that has no place."""
        tensors = self.portable.tensors
        strange = [name for name in tensors if name not in (*_ENDS, _WORDS, _OUTPUT) and self._in_layer(name) is None]
        if strange:
            raise CheckpointError(
                f"TensorRT-LLM's {self.architecture.name} has no place for {listed(strange)}; --to hf has, if a "
                "published type does"
            )
        ranks, last = self.layout.tensor, self.layout.pipeline - 1
        split = cuts.words if self.architecture.splits_words else cuts.whole
        yield self._plain(0, tensors[_WORDS], split("transformer.vocab_embedding.weight", ranks))
        for name, tensor in tensors.items():
            if (stage := self._in_layer(name)) is not None:
                yield self._layer_piece(stage, name, tensor)
            elif name in _ENDS:
                stage = 0 if name.startswith("embedding") else last
                yield self._plain(stage, self.added(name, tensor), cuts.whole(_ENDS[name], ranks))
        yield from self._cache_scales()
        yield self._plain(last, tensors.get(_OUTPUT, tensors[_WORDS]), cuts.words("lm_head.weight", ranks))

    def _in_layer(self, name: str) -> int | None:
        """The stage of a layer's tensor; None for another tensor."""
        found = _LAYER.fullmatch(name)
        if found is None or self._cut(found[2], found[3]) is None:
            return None
        return int(found[1]) // (self.model.num_layers // self.layout.pipeline)

    def _local(self, number: int) -> str:
        return f"transformer.layers.{number % (self.model.num_layers // self.layout.pipeline)}"

    def added(self, name: str, tensor: LazyTensor) -> LazyTensor:
        """A norm's weight as the factor that it is, also where 1 is stored less."""
        if not (self.model.apply_layernorm_1p and "layernorm" in name and name.endswith("weight")):
            return tensor
        return dataclasses.replace(tensor, make=partial(_plus_one, tensor))

    def _cut(self, module: str, kind: str) -> Cut | None:
        """How a module's weight or bias is divided, with its name in a layer; None for one that has no place."""
        model, ranks = self.model, self.layout.tensor
        if module in self.architecture.norms:
            return cuts.whole(self.architecture.norms[module], ranks)
        rows = cuts.by_columns if kind == "weight" else cuts.whole
        plain = cuts.by_rows("mlp.fc", ranks)
        places: dict[str, Cut] = {
            "self_attention.linear_qkv": cuts.attention("attention.qkv", model, ranks),
            "self_attention.linear_proj": rows("attention.dense", ranks),
            "self_attention.q_layernorm": cuts.whole("attention.q_layernorm", ranks),
            "self_attention.k_layernorm": cuts.whole("attention.k_layernorm", ranks),
            "mlp.linear_fc1": cuts.gated("mlp.fc", "mlp.gate", ranks) if model.gated else plain,
            "mlp.linear_fc2": rows("mlp.proj", ranks),
            "mlp.router": cuts.whole("mlp.router", ranks),
            "mlp.experts.linear_fc1": cuts.experts_gated("mlp.fc", ranks),
            "mlp.experts.linear_fc2": cuts.by_columns("mlp.proj", ranks),
        }
        return None if "experts" in module and (kind == "bias" or not model.gated) else places.get(module)

    def _plain(self, stage: int, source: LazyTensor, cut: Cut, *, dtype: torch.dtype | None = None) -> Piece:
        """A piece whose names are whole names."""

        def make(tensor: Tensor) -> Ranks:
            found = cut(tensor.to(dtype or self.portable.dtype))
            return [{name: parts[rank] for name, parts in found.items()} for rank in range(self.layout.tensor)]

        return Piece(stage, source, make)

    def _layer_piece(self, stage: int, name: str, tensor: LazyTensor) -> Piece:
        found = _LAYER.fullmatch(name)
        assert found is not None, "it is a layer's"
        number, module, kind = int(found[1]), found[2], found[3]
        cut, prefix = self._cut(module, kind), self._local(number)
        assert cut is not None, "it has a place"

        def named(tensor: Tensor, ending: str = kind) -> dict[str, list[Tensor]]:
            return {f"{prefix}.{module}.{ending}": parts for module, parts in cut(tensor).items()}

        if self.few_bits is None or name not in self.few_bits.names or self.few_bits.algorithm == "W8A16":
            dtype = torch.float32 if module == "mlp.router" else None
            return self._plain(stage, self.added(name, tensor), named, dtype=dtype)
        return Piece(stage, tensor, partial(self._quantized, name, named))

    def _quantized(
        self, name: str, named: Callable[[Tensor, str], Mapping[str, list[Tensor]]], weight: Tensor
    ) -> Ranks:
        """Codes and scales of a weight, for each rank."""
        few_bits = self.few_bits
        assert few_bits is not None, "it is quantized"
        grid, held = few_bits.scheme.weights, few_bits.names[name]
        given = None if weight.is_meta else few_bits.given(name, tuple(weight.shape))
        codes, factors = codes_and_scales(weight, given, grid, grid.scales_dtype(self.portable.dtype))
        ranks: Ranks = [{} for _ in range(self.layout.tensor)]
        in_groups = few_bits.algorithm == "W4A16_AWQ"
        for each, parts in named(codes, "weight").items():
            check_parts(name, parts, few_bits.scheme)
            for rank, part in zip(ranks, parts):
                rank[each] = packed_outputs(part) if in_groups else part
        for each, parts in named(factors, "weights_scaling_factor").items():
            for rank, part in zip(ranks, parts):
                rank[each] = part.to(self.portable.dtype) if in_groups else part[..., :1, 0].float()
        if held is not None and held.inputs is not None:
            scale = torch.empty(1, device="meta") if weight.is_meta else held.inputs.make().float().view(-1)[:1]
            modules = [each.removesuffix("weight") for each in named(codes, "weight")]
            for rank in ranks:
                rank |= {f"{module}activation_scaling_factor": scale for module in modules}
        return ranks

    def _cache_scales(self) -> Iterator[Piece]:
        """One scale for the keys and values of each layer: the larger, as TensorRT-LLM takes it."""
        held = self.portable.quantization.cache if self.portable.quantization else {}
        for name, keys in held.items():
            if not name.endswith(".k_scale"):
                continue
            values = held[f"{name.removesuffix('k_scale')}v_scale"]
            number = int(name.split(".")[2])
            stage = number // (self.model.num_layers // self.layout.pipeline)
            both = LazyTensor((1,), torch.float32, partial(_larger, keys, values))
            place = f"{self._local(number)}.attention.kv_cache_scaling_factor"
            yield self._plain(stage, both, cuts.whole(place, self.layout.tensor), dtype=torch.float32)


def _plus_one(tensor: LazyTensor) -> Tensor:
    weight = tensor.make()
    return (weight.float() + 1).to(weight.dtype)


def _larger(one: LazyTensor, other: LazyTensor) -> Tensor:
    return torch.maximum(one.make().float(), other.make().float()).view(1)


def by_stage(pieces: Sequence[Piece], stages: int) -> list[list[Piece]]:
    """The pieces of each stage, in their order."""
    return [[piece for piece in pieces if piece.stage == stage] for stage in range(stages)]
