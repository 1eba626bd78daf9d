"""What transforms do beside moving numbers; that they move them rightly is shown by the round trips of every type."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.formats import formats
from megatron.core.conversion.transforms import GROUPED, TRANSPOSED_THIRDS, halves, neighbours

ROWS = (4 + 2 * 2) * 8  # of a fused query, key and value with the sizes below


def model(*, interleaved: bool, rotated: float = 1.0) -> ModelConfig:
    """Four heads of eight channels in two groups; ``rotated``: the part of each head that is."""
    return ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        position_embedding_type="rope",
        rotary_interleaved=interleaved,
        rotary_percent=rotated,
    )


NESTED = {"llava", "llava_next", "internvl", "paligemma", "gemma3"}  # rows of a language model, and of an encoder


@pytest.mark.parametrize("interleaved", [False, True])
def test_shapes_need_no_compiler(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the shapes of GPT-2's, Phi-3's and GPT-NeoX's tensors imported torch._dynamo, as torch.cat does for
    tensors without numbers: half of the time that converting 300 MB took.
    """
    concatenate = torch.cat

    def with_numbers(tensors: Any, *args: Any, **options: Any) -> torch.Tensor:
        assert not any(tensor.is_meta for tensor in tensors), "torch.cat of tensors without numbers"
        return concatenate(tensors, *args, **options)

    monkeypatch.setattr(torch, "cat", with_numbers)
    settings = model(interleaved=interleaved)
    for _, published in formats():
        for model_type in {*published.types} - NESTED:
            for row in published.table(model_type, settings):
                if model_type == "olmo_hybrid" and len(row.theirs) > 1:
                    continue  # these number the rows of one size
                for shape in ((ROWS,), (ROWS, 32)):
                    parts = row.transform.split(torch.empty(shape, device="meta"), settings)
                    assert sum(part.numel() for part in parts) == torch.Size(shape).numel(), row


def test_rows_that_stay_are_not_copied() -> None:
    """Copies of a tensor that changes nothing cost GPT-NeoX, BLOOM and Falcon time and memory."""
    tensor = torch.arange(ROWS * 32.0).view(ROWS, 32)
    assert GROUPED.split(tensor, model(interleaved=False))[0] is tensor
    turned = GROUPED.split(tensor, model(interleaved=True))[0]
    assert turned[:8, 0].tolist() == tensor[[0, 2, 4, 6, 1, 3, 5, 7], 0].tolist()
    there = TRANSPOSED_THIRDS.split(tensor, model(interleaved=False))
    assert torch.equal(TRANSPOSED_THIRDS.join(there, model(interleaved=False)), tensor)


def test_channels_that_are_not_rotated_stay() -> None:
    """With --rotary-percent 0.5 and neighbouring pairs, four of eight channels of each head move, and back again."""
    rows = torch.arange(16)
    turned = halves(rows, model(interleaved=True, rotated=0.5))
    assert turned.tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]
    assert torch.equal(neighbours(turned, model(interleaved=False, rotated=0.5)), rows)
