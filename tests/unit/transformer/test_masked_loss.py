"""The loss of the tokens that a mask keeps: what is left out of the product has no loss and no gradient."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.transformer import output_layer
from megatron.core.transformer.output_layer import VocabularyOutput
from tests.harness.ranks import run_ranks

LENGTH, BATCH, WIDTH, VOCABULARY = 12, 3, 4, 10


def drawn(kept: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weights, labels and a mask."""
    random = torch.Generator().manual_seed(3)
    hidden, weight = (
        torch.randn(*shape, generator=random, dtype=torch.float64)
        for shape in ((LENGTH, BATCH, WIDTH), (VOCABULARY, WIDTH))
    )
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=random)
    return hidden, weight, labels, (torch.rand(BATCH, LENGTH, generator=random) < kept).double()


def losses_and_gradients(context: ParallelContext, kept: float) -> list[Tensor]:
    """Loss and gradients of all, by the masked loss and then by the whole one, and how often the former left tokens
    out.
    """
    hidden, weight, labels, wanted = drawn(kept)
    rank, size = context.mesh.rank("tp"), VOCABULARY // context.mesh.size("tp")
    found, chosen = [], 0
    for name in ("masked_cross_entropy", "cross_entropy"):
        states, part = hidden.clone().requires_grad_(), weight[rank * size : (rank + 1) * size].clone().requires_grad_()
        output = VocabularyOutput(states, part, VOCABULARY, ModelContext.plain(context), cap=5.0, z_loss=0.1)
        with mock.patch.object(output_layer, "linear_cross_entropy", wraps=cross_entropy.linear_cross_entropy) as asked:
            loss = getattr(output, name)(labels, wanted, backward_scale=2.0)
        (loss * 2.0).backward()
        assert states.grad is not None and part.grad is not None
        found += [loss.detach(), states.grad, part.grad]
        chosen += len(asked.call_args.args[0]) < LENGTH * BATCH
    return [*found, torch.tensor(chosen)]


@pytest.mark.parametrize(("kept", "chosen"), [(0.3, 1), (0.0, 1), (0.97, 0)])
def test_masked_loss_is_the_loss_of_all_with_a_mask(kept: float, chosen: int) -> None:
    """A row of the wrong token, or one left out that counts, would teach something else."""
    for ranks in (1, 2):
        for *found, times in run_ranks(losses_and_gradients, kept, tp=ranks):
            assert int(times) == chosen
            for one, other in zip(found[:3], found[3:], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
            assert kept > 0 or not found[0]
