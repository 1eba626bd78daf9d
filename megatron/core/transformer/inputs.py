"""Inputs of every layer of a microbatch besides hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from megatron.core.context_parallel.visible import Documents
from megatron.core.ops.rotary import RotaryTables
from megatron.core.ops.text_cache import TextCache
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.regions import sequence_slice


@dataclass(frozen=True)
class LayerInputs:
    """What all layers of a forward pass share. ``rng_key``: the microbatch's random streams. ``side_losses``: takes the
    losses of layers.

    ``rotary``: cos and sin for the positions, by how a layer turns its heads. ``document_ids``: ``[b, S]``; attention
    stays within a document. ``ahead``: ``[b, S]``, how many keys after its own position a query sees, where attention
    is causal. ``attention_mask``: ``[b, S]``, True where real. ``bias``: ``[n, s, S]``, added to the
    scores of self-attention.

    ``cache``: in generation, keys and values of the texts that the step goes on with; then all its tokens are one
    sequence of a batch of one, and attention finds each token's text.

    ``text_mask``: which of this rank's rows of hidden states ``[s·b]``, position by position, are text; the others
    are padding, which experts neither process nor count. None: all are text.

    ``kept``: what a layer's forward pass leaves for its recomputation, such as choices that must not change.

    For cross-attention: ``encoder_hidden_states`` ``[t, b, h]``, the encoder's output, and its
    ``encoder_attention_mask`` ``[b, T]``.
    """

    rng_key: StreamKey
    side_losses: SideLosses
    rotary: RotaryTables = field(default_factory=dict)
    document_ids: Tensor | None = None
    ahead: Tensor | None = None
    attention_mask: Tensor | None = None
    text_mask: Tensor | None = None
    bias: Tensor | None = None
    cache: TextCache | None = None
    encoder_hidden_states: Tensor | None = None
    encoder_attention_mask: Tensor | None = None
    kept: dict[nn.Module, Any] = field(default_factory=dict)

    @cached_property
    def documents(self) -> Documents | None:
        """Where the documents of ``document_ids`` lie: found once for all layers, since a device must wait for it."""
        return None if self.document_ids is None else Documents(self.document_ids)

    def with_text(self, text_mask: Tensor | None) -> LayerInputs:
        """The inputs of layers in which other rows are text."""
        other = replace(self, text_mask=text_mask)
        if "documents" in vars(self):
            vars(other)["documents"] = self.documents
        return other


def text_rows(mask: Tensor | None, context: ParallelContext) -> Tensor | None:
    """What ``mask`` ``[b, S]`` of a context-parallel rank's tokens says of its rows of hidden states ``[s·b]``."""
    return None if mask is None else sequence_slice(mask.t(), context).flatten()
