"""What state-space layers keep of a sequence that ranks divide, as the dry run counts it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from megatron.core.parallel.costs import Workload, costs_of
from megatron.core.parallel.model_context import ModelContext
from tests.harness import run_ranks
from tests.harness.kept import bytes_kept
from tests.unit.ssm.test_mamba import SMALL, VOCABULARY, hybrid

BATCH, LENGTH = 2, 256


def of_two_layers(context: ModelContext, comm_type: Literal["a2a", "states"], groups: int) -> tuple[int, int]:
    """Bytes that two layers more keep on this rank, and what is counted for them."""
    sizes = replace(SMALL, mamba_state_dim=16, mamba_chunk_size=16, mamba_num_groups=groups)
    sizes = replace(sizes, mamba_cp_comm_type=comm_type)
    models = [hybrid(letters, sizes, context=context).train() for letters in ("MM", "MMMM")]
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH // context.mesh.size("cp")))
    workload = Workload(context=context, batch=BATCH, length=LENGTH, stream_itemsize=context.dtype.itemsize)
    kept = [bytes_kept(model, tokens) for model in models]
    counted = [costs_of(model, workload).kept for model in models]
    return kept[1] - kept[0], counted[1] - counted[0]


@pytest.mark.parametrize("comm_type", ["a2a", "states"])
def test_memory_is_what_torch_keeps(comm_type: Literal["a2a", "states"]) -> None:
    """The dry run would promise a long sequence that doesn't fit."""
    for groups, tp in ((2, 1), (1, 2)):
        for kept, counted in run_ranks(of_two_layers, comm_type, groups, dtype=torch.float32, tp=tp, cp=2):
            assert counted == pytest.approx(kept, rel=0.02), (groups, tp)
