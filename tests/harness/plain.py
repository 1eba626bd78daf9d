"""Modules and data sets as a user writes them, who knows nothing of this project."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from typing_extensions import override

FLAGS = "--micro-batch-size 4 --global-batch-size 16 --lr 0.05 --eval-iters 0 --log-interval 1 --train-iters "


class Points(Dataset[Any]):
    """Points of eight coordinates, and whether their sum is positive. ``noise``: random each time one is read."""

    def __init__(self, size: int = 40, *, noise: float = 0.0) -> None:
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __getitem__(self, number: int) -> dict[str, Any]:
        x = self.x[number]
        return {"x": x + self.noise * torch.randn(8), "y": int(x.sum() > 0)}


class Classifier(nn.Module):
    """Two layers, one weight used twice, a scale without dimensions, and what is asked for; it returns its loss."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def logits(self, x: Tensor) -> Tensor:
        """Scores ``[b, 2]``."""
        hidden = self.dropout(self.norm(self.second(self.first(x).relu()).relu()))
        scores: Tensor = self.last(hidden) * self.scale
        return scores

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return cross_entropy(self.logits(x), y)
