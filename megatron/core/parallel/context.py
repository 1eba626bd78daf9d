"""Facts about the rank that code runs on, passed by argument."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import Self

from megatron.config.parallel import CpCommType, ParallelConfig
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams


@dataclass(frozen=True)
class ParallelContext:
    """A rank: its coordinates, random streams, device and parameter type, and how ranks split sequences.

    ``sequence_parallel``: tensor-parallel ranks split the sequence between their matmuls. ``cp_comm_types``: how
    context-parallel ranks exchange keys, for all layers or one for each; ``cp_sizes``: the two levels of "a2a+p2p".
    ``fills_weights_later``: weights get memory and values where they are divided over ranks, not when they are made.
    """

    mesh: Mesh
    rng: RngStreams
    device: torch.device
    dtype: torch.dtype
    sequence_parallel: bool = False
    cp_comm_types: tuple[CpCommType, ...] = ("p2p",)
    cp_sizes: tuple[int, ...] = ()
    fills_weights_later: bool = False

    @property
    def splits_sequence(self) -> bool:
        """Whether hidden states outside the regions are this rank's part of the sequence."""
        return self.sequence_parallel

    @property
    def sequence_parts(self) -> int:
        """Parts of the sequence that tensor-parallel ranks hold outside the regions: 1 without sequence parallelism."""
        return self.mesh.size("tp") if self.splits_sequence else 1

    @property
    def hidden_generator(self) -> torch.Generator:
        """The stream for dropout on hidden states, which sequence parallelism splits over tensor-parallel ranks."""
        return self.rng.split if self.splits_sequence else self.rng.replicated

    def cp_comm_type(self, layer: int) -> CpCommType:
        """The one of ``cp_comm_types`` for layer number ``layer``; layers beyond them are like the last."""
        return self.cp_comm_types[min(layer, len(self.cp_comm_types) - 1)]

    @classmethod
    def of(
        cls, parallel: ParallelConfig, *, mesh: Mesh, rng: RngStreams, device: torch.device, dtype: torch.dtype
    ) -> Self:
        """A rank of ``mesh`` as the settings describe it."""
        return cls(
            mesh=mesh,
            rng=rng,
            device=device,
            dtype=dtype,
            sequence_parallel=parallel.sequence_parallel,
            cp_comm_types=parallel.cp_comm_type,
            cp_sizes=parallel.hierarchical_context_parallel_sizes or (),
        )

    @classmethod
    def single(cls, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1234) -> Self:
        """A world of one rank, for tests, tools and notebooks."""
        mesh, on = Mesh.single(), torch.device(device)
        return cls(mesh=mesh, rng=RngStreams(seed, mesh, on), device=on, dtype=dtype)
