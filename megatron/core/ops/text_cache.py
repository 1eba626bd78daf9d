"""What layers keep of texts in generation, and the cache that keeps it as one step sees it.

A layer that mixes positions says what it needs of a text so far by a property ``text_state``:

* :class:`Paged`: a key and a value of each token, as attention does. Memory grows with the text.
* :class:`Slotted`: tensors of a fixed size, as a recurrence does.
* None: nothing. The layer computes each token by itself, as an MLP does.
* :class:`WholeText`, or no such property: as far as we know, all of the text. Such a model reads whole texts at each
  token, which is right and slow, and a remark says so.

A layer with a state of fixed size computes its tokens through ``LayerInputs.cache``. As an example a moving average,
``h[t] = decay * h[t-1] + x[t]``::

    @property
    def text_state(self) -> Slotted:
        return Slotted({"mean": (self.width,)}, {"mean": torch.float32})

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:  # [s, b, h]
        if inputs.cache is None:  # training and whole texts: b texts from their beginnings
            zeros = {"mean": x.new_zeros(x.shape[1], self.width, dtype=torch.float32)}
            return self._advance(zeros, x)[0]
        return inputs.cache.advance(self.number, self._advance, x)  # x is [tokens of all texts, 1, h]

    def _advance(self, states: States, x: Tensor) -> tuple[Tensor, States]:
        mean, outputs = states["mean"], []
        for now in x:  # [t, n, h]: t tokens of each of n texts, whose states are [n, width]
            mean = self.decay * mean + now
            outputs.append(mean)
        return torch.stack(outputs).to(x.dtype), {"mean": mean}

``self.number`` is ``BranchPlace.number``. A function that gets ``t == 1`` for many texts, in the steps that generate,
can use a recurrence there, and a scan that begins with the given states for prompts and their parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from megatron.core.ops.attention.request import AttentionOptions


@dataclass(frozen=True)
class Paged:
    """A layer's state that grows with the text: of each token this rank's key and value heads, of these widths.

    ``values_in_keys``: a value is the first channels of its key, as in latent attention, and is not stored again.
    """

    groups: int
    key_width: int
    value_width: int
    values_in_keys: bool = False

    @property
    def numbers_per_token(self) -> int:
        """How many numbers are stored for each token."""
        return self.groups * (self.key_width + (0 if self.values_in_keys else self.value_width))


@dataclass(frozen=True)
class Slotted:
    """A layer's state of a fixed size: this rank's named tensors for one text, which are zero when a text begins."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]

    @property
    def bytes_per_text(self) -> int:
        """Memory of one text's state."""
        return sum(math.prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())


@dataclass(frozen=True)
class WholeText:
    """The declaration of a layer that needs the whole text at each token; one that declares nothing counts as such."""


TextState: TypeAlias = Paged | Slotted | WholeText | None
"""What a layer needs of a text so far."""

States: TypeAlias = Mapping[str, Tensor]
"""A layer's slotted tensors for n texts, by name: ``[n, *shape]``."""

Advance: TypeAlias = Callable[..., tuple[Tensor, States]]
"""``advance(states, *inputs)``: inputs ``[t, n, …]``, t tokens of each of n texts, to outputs ``[t, n, …]`` and the
states behind them. It may change the given states in place and return them.
"""


@dataclass(frozen=True)
class LayerStates:
    """What the layers of a model, or of a stage, need of a text, by the number of the layer. ``unknown``: class names
    of the branches that need the whole text.
    """

    paged: Mapping[int, Paged] = field(default_factory=dict)
    slotted: Mapping[int, Slotted] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @property
    def bytes_per_text(self) -> int:
        """Memory of one text's states of fixed size."""
        return sum(each.bytes_per_text for each in self.slotted.values())

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Memory of one token's keys and values, which are stored in ``dtype``."""
        return sum(each.numbers_per_token for each in self.paged.values()) * dtype.itemsize


class TextCache(Protocol):
    """The cache as one step of generation sees it. All tokens of the step are one sequence of a batch of one."""

    @property
    def max_length(self) -> int:
        """How long a text can get."""
        ...

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Keep the keys and values of the step's tokens for ``layer``, and attend from each token to its text so far.

        Shapes as in ``attention``, for a batch of one: ``q`` [t, 1, n, d], ``k`` and ``v`` [t, 1, g, d] -> [t, 1, n·d].
        """
        ...

    def advance(self, layer: int, advance: Advance, *inputs: Tensor) -> Tensor:
        """Compute the step's tokens by ``advance``, beginning with each text's state of ``layer``, and keep the states
        behind them. ``inputs`` and the result are ``[tokens, 1, …]``.

        ``advance`` is called with all texts that have one token together, and with texts that have as many tokens as
        each other, or with each text's tokens one by one where bits may not depend on the batch. A text that begins
        has a state of zeros.
        """
        ...

    def attend_encoder(
        self, layer: int, q: Tensor, project: Callable[[Tensor], tuple[Tensor, Tensor]], options: AttentionOptions
    ) -> Tensor:
        """Attend from each token, ``q`` [t, 1, n, d], to all of its text's encoder prompt -> [t, 1, n·d].

        ``project``: keys and values [T, 1, g, d] of the encoder's output [T, 1, h], for a prompt that is new here.
        """
        ...

    def with_bias(self, bias: Callable[[Tensor, Tensor], Tensor]) -> TextCache:
        """A view of the cache whose ``attend`` adds ``bias(query_positions, key_positions)`` [n, queries, keys] to the
        scores of each text.
        """
        ...


def text_state_of(module: nn.Module) -> TextState:
    """What a branch declares; :class:`WholeText` for one that declares nothing."""
    if not (hasattr(type(module), "text_state") or "text_state" in vars(module)):
        return WholeText()
    found: TextState = module.text_state  # type: ignore[assignment]
    return found
