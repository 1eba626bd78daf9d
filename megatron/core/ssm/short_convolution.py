"""The short causal convolution before a layer's recurrence, in generation and where states are passed on.

Each channel is convolved by itself, over its last few tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.ops.causal_conv import causal_conv
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import Sharding, StackedPart
from megatron.core.ssm import sequences
from megatron.core.tensor_parallel.initialize import Uniform
from megatron.core.tensor_parallel.layers import make_parameter


class ShortConvolution(nn.Module):
    """Weight ``[channels, 1, taps]`` of the convolution."""

    def __init__(self, parts: tuple[StackedPart, ...], taps: int, context: ModelContext) -> None:
        super().__init__()
        self.weight = _parameter(parts, taps, context, shape=(1, taps))


class BiasedShortConvolution(ShortConvolution):
    """The weight, and a bias ``[channels]``."""

    def __init__(self, parts: tuple[StackedPart, ...], taps: int, context: ModelContext) -> None:
        super().__init__(parts, taps, context)
        self.bias = _parameter(parts, taps, context)


def _parameter(
    parts: tuple[StackedPart, ...], taps: int, context: ModelContext, *, shape: tuple[int, ...] = ()
) -> nn.Parameter:
    """Numbers of ``shape`` for each channel, drawn as torch draws those of its convolutions."""
    channels, limit = sum(part.rows for part in parts), 1.0 / math.sqrt(taps)
    sharding = Sharding((channels, *shape), {0: "tp"}, parts=parts, kind="table")
    return make_parameter(sharding, Uniform(-limit, limit), context)


def last_rows(before: Tensor, rows: Tensor) -> Tensor:
    """What the convolution of the next tokens needs of ``rows`` [n, t, c] and those ``before`` them: [n, k - 1, c]."""
    return torch.cat((before, rows), dim=1)[:, rows.shape[1] :]


@dataclass(frozen=True, eq=False)
class ConvolvedRuns:
    """A context-parallel rank's two runs of tokens behind the convolution (see ``sequences``).

    ``rows`` [2·b, l, c]; ``document_ids`` [2·b, l], and ``previous`` [2·b], the document of the token before each run:
    None where sequences are one document each.
    """

    rows: Tensor
    document_ids: Tensor | None
    previous: Tensor | None

    @property
    def continues(self) -> Tensor | None:
        """Whether the first token of each run is of the same document as the token before it, [2·b]."""
        if self.document_ids is None or self.previous is None:
            return None
        return self.document_ids[:, 0] == self.previous


def convolve_runs(
    rows: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None, mesh: Mesh
) -> ConvolvedRuns:
    """Convolve a rank's runs of tokens [2·b, l, c], which begin with the last rows of the runs before them.

    ``document_ids`` [b, S]: of the whole sequences.
    """
    earlier_rows = weight.shape[2] - 1
    own = earlier = previous = None
    if document_ids is not None:
        own, earlier = sequences.documents_of_runs(document_ids, max(earlier_rows, 1), mesh)
        previous = earlier[:, -1]
        earlier = earlier[:, earlier.shape[1] - earlier_rows :]
    initial = sequences.rows_before(rows, earlier_rows, mesh)
    convolved = causal_conv(rows, weight, bias, initial=initial, document_ids=own, initial_ids=earlier)
    return ConvolvedRuns(convolved, own, previous)
