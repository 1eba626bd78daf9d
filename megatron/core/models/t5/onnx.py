"""T5 as ONNX graphs, with the files and names that optimum knows: an encoder, a decoder, and one that goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.conversion.onnx.graph import Graph, Named, Run
from megatron.core.conversion.onnx.texts import Kept, Texts
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.questions import Answer, Question
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.model import T5Model
from megatron.core.models.t5.questions import DecoderQuestion
from megatron.core.transformer.output_layer import VocabularyOutput

ENCODER, DECODER, LATER = "encoder_model", "decoder_model", "decoder_with_past_model"
_BATCH, _LENGTH, _OF_ENCODER, _PAST = "batch_size", "sequence_length", "encoder_sequence_length", "past_sequence_length"
_MASK, _HIDDEN = "encoder_attention_mask", "encoder_hidden_states"


class EncoderDecoderGraphs:
    """The graphs of a T5. The second decoder takes keys and values of the encoder's output from the first one."""

    def refuse(self, model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
        """Why a model has no graph."""
        kind = model.position_embedding_type
        if kind in ("dynamic_ntk", "longrope"):
            return [f"--position-embedding-type {kind} has frequencies that depend on the length of the text"]
        return []

    def graphs(self, stage: nn.Module, portable: PortableModel) -> Sequence[Graph]:
        """The three graphs."""
        assert isinstance(stage, T5Model)
        model = portable.model
        first, count = model.num_layers, T5Config.among(portable.groups).decoder_num_layers
        layers, longest = range(first, first + count), model.max_position_embeddings or 1

        def encode(inputs: Named) -> Named:
            texts = Texts(inputs["attention_mask"], {}, model.max_position_embeddings or 1)
            hidden = stage.encode(inputs["input_ids"], cache=texts)
            return {"last_hidden_state": hidden.transpose(0, 1)}

        def decode(inputs: Named) -> Named:
            tokens, places = inputs["input_ids"], {layer: number for number, layer in enumerate(layers)}
            of_encoder = {layer: found for layer in layers if (found := _kept(places[layer], "encoder", inputs))}
            empty = torch.zeros(tokens.shape[0], model.num_query_groups, 0, model.kv_channels)
            kept = {layer: _kept(places[layer], "decoder", inputs) or (empty, empty) for layer in layers}
            past = kept[first][0].shape[2]
            texts = Texts(
                torch.ones(tokens.shape[0], past + tokens.shape[1], dtype=torch.int64),
                kept,
                longest,
                encoder=inputs[_HIDDEN].transpose(0, 1) if _HIDDEN in inputs else None,
                encoder_mask=inputs[_MASK],
                of_encoder=dict(of_encoder),
            )
            positions = (torch.arange(tokens.shape[1]) + past).unsqueeze(0).expand_as(tokens)
            output = stage.continue_texts(tokens, positions, cache=texts)
            assert isinstance(output, VocabularyOutput)
            present = {"decoder": texts.after} if of_encoder else {"decoder": texts.after, "encoder": texts.of_encoder}
            return {"logits": output.logits(), **_named("present", present, places)}

        tokens, hidden = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 7, model.hidden_size)
        mask = torch.ones(2, 7, dtype=torch.int64)
        heads = {side: torch.zeros(2, model.num_query_groups, size, model.kv_channels) for side, size in _SIZES.items()}
        kept = {side: dict.fromkeys(layers, (heads[side],) * 2) for side in heads}
        past = _named("past_key_values", kept, {layer: number for number, layer in enumerate(layers)})
        free = {"input_ids": {0: _BATCH, 1: _LENGTH}, "attention_mask": {0: _BATCH, 1: _LENGTH}}
        free |= {_MASK: {0: _BATCH, 1: _OF_ENCODER}, _HIDDEN: {0: _BATCH, 1: _OF_ENCODER}}
        free |= {name: {0: _BATCH, 2: _OF_ENCODER if ".encoder." in name else _PAST} for name in past}
        return [
            Graph(ENCODER, encode, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, free),
            Graph(DECODER, decode, {"input_ids": tokens, _MASK: mask, _HIDDEN: hidden}, free),
            Graph(LATER, decode, {"input_ids": tokens, _MASK: mask, **past}, free),
        ]

    def answers(self, run: Run, question: Question, right: Answer) -> Sequence[tuple[Answer, Answer]]:
        """All texts at once; then each alone, its encoder's without padding and its decoder's in three parts."""
        assert isinstance(question, DecoderQuestion)
        alone = []
        for row, real in enumerate(question.real.sum(1).tolist()):
            tokens, wanted = question.tokens[row : row + 1, :real], question.decoder_tokens[row : row + 1]
            alone.append(_asked(run, tokens, torch.ones_like(tokens), wanted, parts=3))
        whole = _asked(run, question.tokens, question.real.long(), question.decoder_tokens, parts=1)
        return [(right, {"words": whole}), (right, {"words": torch.cat(alone)})]


_SIZES = {"decoder": 3, "encoder": 7}


def _asked(run: Run, tokens: Tensor, mask: Tensor, wanted: Tensor, *, parts: int) -> Tensor:
    """Logits of every position of ``wanted``, which the decoder gets in ``parts``."""
    hidden = run(ENCODER, {"input_ids": tokens, "attention_mask": mask})["last_hidden_state"]
    cuts = [wanted.shape[1] * part // parts for part in range(parts + 1)]
    kept, found = dict[str, Tensor](), []
    for one, other in pairwise(cuts):
        name, given = (LATER, kept) if kept else (DECODER, {_HIDDEN: hidden})
        outputs = dict(run(name, {"input_ids": wanted[:, one:other], _MASK: mask, **given}))
        found.append(outputs.pop("logits"))
        kept |= {name.replace("present", "past_key_values"): tensor for name, tensor in outputs.items()}
    return torch.cat(found, 1)


def _kept(number: int, side: str, inputs: Named) -> Kept:
    found = [inputs.get(f"past_key_values.{number}.{side}.{name}") for name in ("key", "value")]
    return tuple(each for each in found if each is not None)


def _named(prefix: str, sides: Mapping[str, Mapping[int, Kept]], places: Mapping[int, int]) -> dict[str, Tensor]:
    return {
        f"{prefix}.{places[layer]}.{side}.{name}": tensor
        for side, kept in sides.items()
        for layer, each in sorted(kept.items())
        for name, tensor in zip(("key", "value"), each)
    }


FORMAT = EncoderDecoderGraphs()
