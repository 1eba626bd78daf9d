"""The input of a conversion's proof: two segments, the second with a memory, and the places to predict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.conversion.megatron_lm.forward import MegatronLMModel
from megatron.core.conversion.questions import Answer, tokens_for
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.errors import CheckpointError
from xlnet.config import XLNetConfig
from xlnet.data import Factorization

_PREDICTED = 5


@dataclass(frozen=True)
class PermutedQuestion:
    """A question for the logits of some places, given the tokens that come before them in a factorization order.

    ``places`` ``[b, segments, P]``: predicted places. ``tokens``, ``ranks`` (the order) and ``documents``
    ``[b, segments, S]``: the first segment is one document, which ends within the second.
    """

    tokens: Tensor
    ranks: Tensor
    places: Tensor
    documents: Tensor
    auto_class = "XLNetLMHeadModel"

    def ask_theirs(self, model: Any) -> Answer:
        """Logits of each segment's places, given what the model remembers of the one before."""
        memory, found = None, list[Tensor]()
        for tokens, ranks, places, documents in zip(*(each.unbind(1) for each in self._fields)):
            see = (ranks.unsqueeze(1) < 0) | (ranks.unsqueeze(1) < ranks.unsqueeze(2))
            output = model(
                tokens,
                perm_mask=(~see).float(),
                target_mapping=torch.nn.functional.one_hot(places, tokens.shape[1]).float(),
                token_type_ids=documents,
                mems=memory,
                use_mems=True,
            )
            memory = output.mems if model.config.mem_len else None
            found.append(output.logits)
        return {"words": torch.stack(found, dim=1).flatten(0, 1)}

    @property
    def _fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.ranks, self.places, self.documents

    def ask_megatron_lm(self, model: MegatronLMModel) -> Answer:
        """Raise CheckpointError: Megatron-LM has no XLNet."""
        raise CheckpointError("Megatron-LM has no XLNet: convert between this project and Hugging Face only")

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """Logits of all places from our model; before the last stage, its hidden states."""
        output: VocabularyOutput | Tensor = stage(
            self.tokens, ranks=self.ranks, places=self.places, documents=self.documents, **handed
        )
        return {"words": output.logits()} if isinstance(output, VocabularyOutput) else {"hidden": output}


def question_for(model: ModelConfig, groups: Sequence[object]) -> PermutedQuestion:
    """The question for this model: fixed tokens, and orders in which every predicted token sees others."""
    tokens = tokens_for(model)
    samples, length = tokens.shape[0], tokens.shape[1] // 2
    draw = Factorization(min(_PREDICTED, max(length - 1, 1)), XLNetConfig.max_gram)
    random, free = np.random.RandomState(0), np.ones(length, bool)
    drawn = [draw(free, random)[:2] for _ in range(2 * samples)]
    ranks, places = (torch.from_numpy(np.stack(each)).view(samples, 2, -1) for each in zip(*drawn))
    documents = torch.stack((torch.zeros(length), torch.arange(length) >= length // 2)).long()
    return PermutedQuestion(tokens.view(samples, 2, length), ranks, places, documents.expand(samples, 2, length))
