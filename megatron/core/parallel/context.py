"""Everything a layer may ask about the rank it runs on, passed by argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams


@dataclass(frozen=True)
class ParallelContext:
    """A rank: its place, random streams, device and parameter type, and whether sequence parallelism is on."""

    mesh: Mesh
    rng: RngStreams
    device: torch.device
    dtype: torch.dtype
    sequence_parallel: bool = False

    @property
    def hidden_generator(self) -> torch.Generator:
        """The stream for dropout on hidden states, which sequence parallelism splits over tensor-parallel ranks."""
        return self.rng.split if self.sequence_parallel else self.rng.replicated

    @classmethod
    def single(cls, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1234) -> ParallelContext:
        """A world of one rank, for tests, tools and notebooks."""
        mesh = Mesh.single()
        return cls(
            mesh=mesh, rng=RngStreams(seed, mesh, torch.device(device)), device=torch.device(device), dtype=dtype
        )
