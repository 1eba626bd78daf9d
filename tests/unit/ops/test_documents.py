"""Packed documents as calls of their own."""

from __future__ import annotations

from itertools import groupby
from unittest import mock

import torch

from megatron.core.ops.attention import AttentionOptions, attention, masks


def within(document_ids: torch.Tensor) -> AttentionOptions:
    return AttentionOptions(causal=True, scale=0.5, document_ids=document_ids)


def test_documents_are_located_once_for_all_layers() -> None:
    """A GPU would be waited for in every layer, since the lengths of documents must be known on the host."""
    document_ids = torch.tensor([[0, 0, 1, 1, 1, 2]])
    q, k, v = (torch.randn(6, 1, 2, 4) for _ in range(3))
    with mock.patch.object(masks, "groupby", wraps=groupby) as read:
        layers = [attention(q, k, v, within(document_ids), backend="sdpa") for _ in range(3)]
    assert read.call_count == 1
    assert torch.equal(layers[0], layers[2])


def test_other_documents_in_a_tensor_at_the_same_place_are_located_anew() -> None:
    """The next microbatch's documents often lie where the last one's lay."""
    q, k, v = (torch.randn(6, 1, 2, 4) for _ in range(3))
    for numbers in ([0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]):
        document_ids = torch.tensor([numbers])
        expected = attention(q, k, v, within(document_ids), backend="eager")
        torch.testing.assert_close(attention(q, k, v, within(document_ids), backend="sdpa"), expected)
        del document_ids
