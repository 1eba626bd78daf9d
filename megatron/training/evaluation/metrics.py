"""Metrics: numbers for each sample, computed from a model's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.core.transformer.output_layer import VocabularyOutput


class Metric(Protocol):
    """Computes a row of numbers for each sample."""

    def width(self, config: RunConfig) -> int:
        """Length of a row."""
        ...

    def __call__(self, output: VocabularyOutput, labels: Tensor, wanted: Tensor, rows: Tensor) -> None:
        """Add this rank's contribution to ``rows`` ``[b, width]``.

        ``labels`` ``[b, s]``: the token after each position. ``wanted`` ``[b, s]``: the positions that are scored.
        """
        ...


@dataclass(frozen=True)
class Likelihoods:
    """Likelihoods over the scored labels: negative log-likelihood in nats, number of wrong greedy predictions, number
    of labels.

    ``compare``: whether wrong predictions are counted; otherwise they are 0.
    """

    compare: bool

    def width(self, config: RunConfig) -> int:
        """Numbers of a sample: three."""
        return 3

    def __call__(self, output: VocabularyOutput, labels: Tensor, wanted: Tensor, rows: Tensor) -> None:
        """Add the likelihoods of this rank's scored labels to ``rows`` ``[b, 3]``."""
        here, targets, owners = output.where(wanted), labels[wanted], wanted.nonzero()[:, 0]
        columns = [here.token_losses(targets[None])[0].double(), torch.zeros_like(targets), torch.ones_like(targets)]
        if self.compare:
            columns[1] = here.most_likely()[0] != targets
        rows.index_add_(0, owners, torch.stack([column.double() for column in columns], dim=1))


@dataclass(frozen=True)
class Logits:
    """The logits at the one scored position of each sample."""

    def width(self, config: RunConfig) -> int:
        """The size of the vocabulary."""
        assert config.model.vocab_size is not None
        return config.model.vocab_size

    def __call__(self, output: VocabularyOutput, labels: Tensor, wanted: Tensor, rows: Tensor) -> None:
        """Add the logits of this rank's scored positions to ``rows`` ``[b, vocabulary]``."""
        rows.index_add_(0, wanted.nonzero()[:, 0], output.where(wanted).logits()[0].double())
