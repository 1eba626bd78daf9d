"""What every layer of a microbatch is given besides hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron.core.context_parallel.visible import Documents
from megatron.core.ops.rotary import RotaryTable
from megatron.core.parallel.rng import StreamKey


@dataclass(frozen=True)
class LayerInputs:
    """``key``: the microbatch's random streams. ``rotary``: cos and sin for the positions, or None. ``segments``:
    ``[b, S]`` document numbers; attention stays within a document. ``padding_mask``: ``[b, S]``, True where real.
    ``bias``: ``[n, s, S]``, added to the scores of self-attention.

    For cross-attention: ``encoded`` ``[t, b, h]``, what the encoder made, and its own ``encoded_padding_mask``
    ``[b, T]``.
    """

    key: StreamKey
    rotary: RotaryTable | None = None
    segments: Tensor | None = None
    padding_mask: Tensor | None = None
    bias: Tensor | None = None
    encoded: Tensor | None = None
    encoded_padding_mask: Tensor | None = None

    @cached_property
    def documents(self) -> Documents | None:
        """Where the documents of ``segments`` lie: found once for all layers, since a device must wait for it."""
        return None if self.segments is None else Documents(self.segments)
