"""Buffers of models in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.saving import Saver
from megatron.training.checkpoints.trained_model import load_model
from megatron.training.run.run import build_run
from tests.harness.runs import tiny_config


class CountingSpec(GPTSpec):
    """A GPT with a statistic that is no parameter."""

    @override
    def build_model(self, *args: Any, **part: Any) -> nn.Module:
        model = super().build_model(*args, **part)
        model.register_buffer("seen", torch.zeros(3))
        return model


def test_trained_model_has_the_buffers_of_its_checkpoint(tmp_path: Path) -> None:
    """Tasks and generation evaluated a user's model with the statistics of an untrained one, without a word."""
    config = tiny_config(f"--mock-data --save {tmp_path} --load {tmp_path}")
    run = build_run(config, CountingSpec(), ParallelContext.single())
    run.models[0].get_buffer("seen").fill_(7.0)
    Saver(run).save()
    (model,) = load_model(config, CountingSpec(), ParallelContext.single()).models
    assert model.get_buffer("seen").tolist() == [7.0] * 3
