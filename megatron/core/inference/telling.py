"""What an encoder-decoder model tells of a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.models.t5 import T5Model
from megatron.core.transformer.heads import VocabularyOutput


@torch.no_grad()
def likeliest_answer(
    model: T5Model, tokens: Sequence[int], *, begin: int, end: int, most: int, device: torch.device
) -> list[int]:
    """What the decoder says of one text after ``begin``, each token the likeliest after those before it, up to ``end``
    (left out) or ``most`` tokens. A collective of the model's tensor-parallel ranks.

    The text is encoded anew for every token, which for texts as short as those of training costs little.
    """
    text, answer = torch.tensor([tokens], device=device), [begin]
    while len(answer) <= most:
        output = model(text, torch.tensor([answer], device=device))
        assert isinstance(output, VocabularyOutput), "a model with all its stages"
        token = int(output.most_likely()[0, -1])
        if token == end:
            break
        answer.append(token)
    return answer[1:]
