"""Greedy decoding with an encoder-decoder model, and the likeliest beginnings of masked spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.models.t5.model import T5Model
from megatron.core.transformer.output_layer import VocabularyOutput


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


@dataclass(frozen=True)
class Beginnings:
    """How hidden spans begin: ``true`` [spans] tokens, and ``likeliest`` [spans, k], what the model takes for them, the
    best first.
    """

    true: Tensor
    likeliest: Tensor


@torch.no_grad()
def beginnings(
    model: T5Model,
    tokens: Tensor,
    decoder_tokens: Tensor,
    *,
    attention_mask: Tensor,
    names: Sequence[int],
    count: int,
) -> Beginnings:
    """The ``count`` likeliest first tokens of every span in a batch, each given the true words of the spans before it.

    ``tokens`` and ``attention_mask`` [b, S], ``decoder_tokens`` [b, D] as in training. A collective of the model's
    tensor-parallel ranks.
    """
    output = model(tokens, decoder_tokens, attention_mask=attention_mask)
    assert isinstance(output, VocabularyOutput), "a model with all its stages"
    named = torch.isin(decoder_tokens, torch.tensor(names, device=decoder_tokens.device))
    named[:, -1] = False  # a span has a token at least
    return Beginnings(decoder_tokens.roll(-1, dims=1)[named], output.where(named).logits()[0].topk(count).indices)
