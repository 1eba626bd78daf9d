"""Teachers of tests: checkpoints of random weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.conversion.native import write_native
from megatron.core.conversion.portable import LazyTensor, PortableModel, parameters_of
from tests.harness.runs import GPT


def random_model(run: RunConfig, *, scale: float = 0.2) -> PortableModel:
    """A model with the settings of ``run``, whose values are functions of names."""
    shapes = {name: sharding.shape for name, sharding in parameters_of(run.model, run.extra).items()}

    def make(name: str, shape: Sequence[int]) -> Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
        return drawn + 1 if name.endswith("norm.weight") else drawn

    return PortableModel(
        model=run.model,
        groups=run.extra,
        tensors={name: LazyTensor(shape, torch.float32, partial(make, name, shape)) for name, shape in shapes.items()},
        tokenizer=run.tokenizer,
        seq_length=run.data.seq_length,
    )


def write_teacher(place: Path, flags: str) -> Path:
    """A checkpoint with the model of a GPT's command line; returns ``place``."""
    run = parse_run(f"{flags} --train-iters 1 --lr 1e-3 --dry-run".split(), extra_groups=GPT.groups)
    write_native(random_model(run), place, final=place)
    return place
