"""BERT as an ONNX graph: hidden states for embeddings, and both heads, with the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.conversion.onnx.graph import Graph, Named, Run
from megatron.core.conversion.onnx.texts import Texts
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.questions import Answer, Question
from megatron.core.models.bert.config import TokenTypesConfig
from megatron.core.models.bert.model import BertModel
from megatron.core.models.bert.questions import MaskedQuestion
from megatron.core.parallel.rng import StreamKey

_FREE = {0: "batch_size", 1: "sequence_length"}
_ORDER = "seq_relationship_logits"


class BertGraphs:
    """The graph of a BERT, ``model.onnx``."""

    def refuse(self, model: ModelConfig, groups: Sequence[object]) -> Sequence[str]:
        """Why a model has no graph."""
        kind = model.position_embedding_type
        if kind in ("dynamic_ntk", "longrope"):
            return [f"--position-embedding-type {kind} has frequencies that depend on the length of the text"]
        return []

    def graphs(self, stage: nn.Module, portable: PortableModel) -> Sequence[Graph]:
        """The graph of a whole model."""
        assert isinstance(stage, BertModel)
        has_types = TokenTypesConfig.among(portable.groups).num_tokentypes > 0

        def compute(inputs: Named) -> Named:
            texts = Texts(inputs["attention_mask"], {}, portable.model.max_position_embeddings)
            hidden = stage.hidden_states(
                inputs["input_ids"],
                inputs.get("token_type_ids"),
                attention_mask=None,
                rng_key=StreamKey(0),
                hidden=None,
                side_losses=None,
                text_mask=None,
                cache=texts,
            )
            output = stage.heads(hidden)
            order = {} if output.order is None else {_ORDER: output.order}
            return {"logits": output.words.logits(), **order, "last_hidden_state": hidden.transpose(0, 1)}

        tokens = torch.zeros(2, 5, dtype=torch.int64)
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if has_types:
            inputs["token_type_ids"] = tokens
        return [Graph("model", compute, inputs, dict.fromkeys(inputs, _FREE))]

    def answers(self, run: Run, question: Question, right: Answer) -> Sequence[tuple[Answer, Answer]]:
        """All texts at once, some with padding; then each alone, without."""
        assert isinstance(question, MaskedQuestion)
        alone: list[Answer] = []
        for row, real in enumerate(question.real.sum(1).tolist()):
            types = None if question.types is None else question.types[row : row + 1, :real]
            tokens = question.tokens[row : row + 1, :real]
            alone.append(_asked(run, tokens, types, torch.ones_like(tokens)))
        each = {name: torch.cat([answer[name] for answer in alone]) for name in right}
        return [(right, _asked(run, question.tokens, question.types, question.real.long())), (right, each)]


def _asked(run: Run, tokens: Tensor, types: Tensor | None, mask: Tensor) -> Answer:
    inputs = {"input_ids": tokens, "attention_mask": mask}
    outputs = run("model", inputs if types is None else {**inputs, "token_type_ids": types})
    words = {"words": outputs["logits"][mask.bool()]}
    return {**words, "order": outputs[_ORDER]} if _ORDER in outputs else words


FORMAT = BertGraphs()
