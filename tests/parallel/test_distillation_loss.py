"""The distilled vocabulary loss split over ranks: the same numbers as on one, padding or not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import VocabularyPart
from megatron.core.tensor_parallel.distillation import Head, Mix, distilled_cross_entropy, top_of_distribution
from tests.harness.ranks import run_ranks

ROWS, WIDTH = 23, 6


@mock.patch.object(cross_entropy, "_CPU_CHUNK", 512)  # several chunks
def compute(mesh: Mesh, vocab: int, padded: int) -> dict[str, Tensor]:
    """Sums and gradients of a rank, against a whole teacher and against the top of its distributions."""
    generator = torch.Generator().manual_seed(5)
    draw: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    size = padded // mesh.size("tp")
    start = size * mesh.rank("tp")

    def matrix(width: int) -> Tensor:
        whole = torch.zeros(padded, width, dtype=torch.float64)
        whole[:vocab] = torch.randn(vocab, width, **draw)
        return whole[start : start + size].clone()

    hidden, weight = torch.randn(ROWS, WIDTH, **draw).requires_grad_(), matrix(WIDTH).requires_grad_()
    head = Head(hidden=torch.randn(ROWS, 9, **draw), weight=matrix(9), cap=2.0)
    labels, loss_weights = torch.randint(vocab, (ROWS,), generator=generator), torch.rand(ROWS, generator=generator)
    part = VocabularyPart(mesh=mesh, start=start, valid=max(0, min(size, vocab - start)))
    mix, found = Mix(cross_entropy=0.3, divergence=2.8, temperature=2.0), dict[str, Tensor]()
    top = top_of_distribution(head, 5, vocabulary=part, temperature=2.0)
    found |= {"ids": top.ids, "log_probs": top.log_probs, "rest": top.rest}
    for name, target in (("teacher", head), ("top", top)):
        sums = distilled_cross_entropy(hidden, weight, labels, loss_weights, target, mix=mix, vocabulary=part)
        of_hidden, of_weight = torch.autograd.grad(sums.total, (hidden, weight))
        found |= {f"{name} total": sums.total.detach(), f"{name} divergence": sums.divergence}
        found |= {f"{name} hidden": of_hidden, f"{name} weight": of_weight}
    return found


def compute_on_rank(context: ParallelContext, vocab: int, padded: int) -> dict[str, Tensor]:
    """One rank's numbers."""
    return compute(context.mesh, vocab, padded)


@pytest.mark.parametrize(("tp", "vocab", "padded"), [(2, 64, 64), (4, 17, 64)])
def test_split_vocabulary_equals_whole(tp: int, vocab: int, padded: int) -> None:
    """A teacher whose softmax was made of one rank's ids taught each rank something else. Also where whole ranks hold
    nothing but padding (17 of 64).
    """
    whole, ranks = compute(Mesh.single(), vocab, padded), run_ranks(compute_on_rank, vocab, padded, tp=tp)
    for name, expected in whole.items():
        each = [rank[name] for rank in ranks]
        if name.endswith("hidden"):
            each = [torch.stack(each).sum(0)]
        elif name.endswith("weight"):
            each = [torch.cat(each)]
        for found in each:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
