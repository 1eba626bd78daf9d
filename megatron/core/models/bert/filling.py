"""The likeliest tokens at the masks of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.models.bert.model import BertModel, BertOutput


@dataclass(frozen=True)
class Candidate:
    """A token that may stand in a place, and how likely the model finds it there."""

    token: int
    probability: float


@torch.no_grad()
def likeliest(
    model: BertModel, tokens: Sequence[int], places: Sequence[int], *, count: int, device: torch.device
) -> list[list[Candidate]]:
    """For each of ``places`` in one text the ``count`` likeliest tokens, the best first. A collective of the model's
    tensor-parallel ranks.
    """
    output = model(torch.tensor([tokens], device=device))
    assert isinstance(output, BertOutput), "a model with all its stages"
    probabilities = output.words.logits()[0, list(places)].float().softmax(-1)
    best = probabilities.topk(min(count, probabilities.shape[-1]))
    return [
        [Candidate(token, probability) for token, probability in zip(*place)]
        for place in zip(best.indices.tolist(), best.values.tolist())
    ]
