"""Routers in generation."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.config.moe import MoEConfig
from megatron.core.models.registry import FAMILIES
from megatron.core.models.t5.model import T5Model
from megatron.core.moe.balancing import RouterLosses
from megatron.core.parallel.context import ParallelContext
from tests.harness.runs import tiny_run


def test_encoder_of_a_served_model_computes_no_balancing_loss() -> None:
    """The encoder's routers added up choices over data-parallel replicas, which serve different texts and would wait
    for each other.
    """
    experts = "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"
    run = tiny_run(ParallelContext.single(), f"--mock-data --decoder-seq-length 8 {experts}", family=FAMILIES["t5"])
    model = run.models[0].eval()
    assert isinstance(model, T5Model) and run.config.part(MoEConfig).balancing_losses
    text = torch.tensor([[7, 30, 8]])
    with (
        mock.patch.object(RouterLosses, "attach", side_effect=RuntimeError("a collective of replicas")),
        torch.no_grad(),
    ):
        with run.context.products.by(torch.nn.functional.linear):
            encoded = model.encode(text)
        with pytest.raises(RuntimeError, match="replicas"):
            model.encode(text)
    assert encoded.shape == (3, 1, run.config.model.hidden_size)
