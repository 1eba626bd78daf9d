"""The interface between an attention layer and a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron.core.ops.attention.request import AttentionOptions


@dataclass(frozen=True)
class CachedHeads:
    """What a layer keeps of each token: this rank's key and value heads, and their widths.

    ``values_in_keys``: a value is the first channels of its key, as in latent attention, and is not stored again.
    """

    groups: int
    key_width: int
    value_width: int
    values_in_keys: bool = False


class AttentionCache(Protocol):
    """The cache as one step of generation sees it."""

    @property
    def max_length(self) -> int:
        """How long a text can get."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Keep the keys and values of the step's tokens for ``layer``, and attend from each token to its text so far.

        Shapes as in ``attention``, for a batch of one: ``q`` [t, 1, n, d], ``k`` and ``v`` [t, 1, g, d] -> [t, 1, n·d].
        """
        ...

    def attend_encoder(
        self, layer: int, q: Tensor, project: Callable[[Tensor], tuple[Tensor, Tensor]], options: AttentionOptions
    ) -> Tensor:
        """Attend from each token, ``q`` [t, 1, n, d], to all of its text's encoder prompt -> [t, 1, n·d].

        ``project``: keys and values [T, 1, g, d] of the encoder's output [T, 1, h], for a prompt that is new here.
        """
        ...

    def with_bias(self, bias: Callable[[Tensor, Tensor], Tensor]) -> AttentionCache:
        """A view of the cache whose ``attend`` adds ``bias(query_positions, key_positions)`` [n, queries, keys] to the
        scores of each text.
        """
        ...
