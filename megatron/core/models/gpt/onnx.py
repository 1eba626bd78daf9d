"""Decoders as ONNX graphs, with the names that optimum and onnxruntime's programs know for generation of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from megatron.config.hybrid import HybridConfig
from megatron.config.hybrid_pattern import DELTA_NET, MAMBA
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.onnx.graph import Graph, Named, Run
from megatron.core.conversion.onnx.texts import Kept, Texts
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.questions import Answer, Question
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.gpt.questions import CausalQuestion
from megatron.core.ops.text_cache import Paged
from megatron.core.transformer.output_layer import VocabularyOutput

_BATCH, _LENGTH, _PAST, _TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"


class DecoderGraphs:
    """The graphs of decoders: one, ``model.onnx``, which begins texts and goes on with them."""

    def refuse(self, model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
        """Why a model has no graph."""
        reasons = []
        kind, pattern = model.position_embedding_type, HybridConfig.among(groups).hybrid_layer_pattern or ""
        if kind in ("dynamic_ntk", "longrope"):
            reasons.append(f"--position-embedding-type {kind} has frequencies that depend on the length of the text")
        if MAMBA in pattern:
            reasons.append("Mamba-2 layers need a loop over the tokens, which the graph can't have")
        if DELTA_NET in pattern or GatedDeltaNetConfig.among(groups).has_delta_nets:
            reasons.append("gated delta nets need a loop over the tokens, which the graph can't have")
        return reasons

    def graphs(self, stage: nn.Module, portable: PortableModel) -> Sequence[Graph]:
        """The graph of a whole model."""
        assert isinstance(stage, GPTModel)
        paged = stage.layer_states().paged
        longest = portable.model.max_position_embeddings

        def compute(inputs: Named) -> Named:
            kept = {layer: _kept(number, inputs) for number, layer in enumerate(paged)}
            texts = Texts(inputs["attention_mask"], kept, longest)
            output = stage(inputs["input_ids"], inputs["position_ids"], cache=texts)
            assert isinstance(output, VocabularyOutput)
            after = [texts.after[layer] for layer in paged]
            return {"logits": output.logits()[..., : portable.model.vocab_size], **_named("present", after)}

        free = {
            "input_ids": {0: _BATCH, 1: _LENGTH},
            "attention_mask": {0: _BATCH, 1: _TOTAL},
            "position_ids": {0: _BATCH, 1: _LENGTH},
        }
        kept = _named("past_key_values", [_zeros(each, 2, 3) for each in paged.values()])
        inputs = inputs_of(torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))
        free |= {name: {0: _BATCH, 2: _PAST} for name in kept}
        return [Graph("model", compute, {**inputs, **kept}, free, sums=(_TOTAL,))]

    def answers(self, run: Run, question: Question, right: Answer) -> Sequence[tuple[Answer, Answer]]:
        """All texts at once; then the first alone, in three parts; then both, of which one is shorter and padded on the
        left.
        """
        assert isinstance(question, CausalQuestion)
        tokens, words = question.tokens, right["words"]
        length = tokens.shape[1]
        cuts = [0, length // 3, length // 3 + 1, length]
        short = length - length // 4
        padded = torch.stack((tokens[0], tokens[1].roll(length - short)))
        mask = torch.ones_like(padded)
        mask[1, : length - short] = 0
        text = _Text(run)
        in_parts = torch.cat([text.go_on(tokens[:1, one:other]) for one, other in pairwise(cuts)], 1)
        beside = _Text(run).go_on(padded, mask)
        return [
            (right, {"words": _Text(run).go_on(tokens)}),
            ({"words": words[:1]}, {"words": in_parts}),
            ({"words": words[0]}, {"words": beside[0]}),
            ({"words": words[1, :short]}, {"words": beside[1, length - short :]}),
        ]


class _Text:
    """Texts that a graph goes on with, from their beginnings."""

    def __init__(self, run: Run) -> None:
        self._run, self._kept, self._masks = run, dict[str, Tensor](), list[Tensor]()

    def go_on(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits [b, s, vocabulary] of the next tokens [b, s]. ``mask``: 0 for those that are padding."""
        self._masks.append(torch.ones_like(tokens) if mask is None else mask)
        outputs = dict(self._run("model", {**inputs_of(tokens, torch.cat(self._masks, 1)), **self._kept}))
        logits = outputs.pop("logits")
        self._kept = {name.replace("present", "past_key_values"): tensor for name, tensor in outputs.items()}
        return logits


def inputs_of(tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Inputs of a graph for the last tokens [b, s] of texts whose ``mask`` is [b, p + s]."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def _zeros(state: Paged, rows: int, length: int) -> Kept:
    keys = torch.zeros(rows, state.groups, length, state.key_width)
    return (keys,) if state.values_in_keys else (keys, torch.zeros(*keys.shape[:3], state.value_width))


def _kept(number: int, inputs: Named) -> Kept:
    found = [inputs.get(f"past_key_values.{number}.{name}") for name in ("key", "value")]
    return tuple(each for each in found if each is not None)


def _named(prefix: str, kept: Sequence[Kept]) -> dict[str, Tensor]:
    return {
        f"{prefix}.{number}.{name}": tensor
        for number, each in enumerate(kept)
        for name, tensor in zip(("key", "value"), each)
    }


FORMAT = DecoderGraphs()
