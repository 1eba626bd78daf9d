"""What a layer needs to know about the rank it runs on, passed by argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from megatron.config.parallel import CpCommType, ParallelConfig
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.products import Products
from megatron.core.parallel.rng import RngStreams
from megatron.core.parallel.weight_gradients import WeightGradients


@dataclass(frozen=True)
class ParallelContext:
    """A rank: its coordinates, random streams, device and parameter type, and how ranks split sequences.

    ``sequence_parallel``: tensor-parallel ranks split the sequence between their matmuls. ``cp_comm_types``: how
    context-parallel ranks exchange keys, for all layers or one for each; ``cp_sizes``: the two levels of "a2a+p2p".
    ``weight_gradients``: whether layers compute them at once. ``products``: how they multiply in generation.
    ``low_precision``: which layers multiply in 8 bits. ``layer``: number of the layer that is being built, if any.
    """

    mesh: Mesh
    rng: RngStreams
    device: torch.device
    dtype: torch.dtype
    sequence_parallel: bool = False
    cp_comm_types: tuple[CpCommType, ...] = ("p2p",)
    cp_sizes: tuple[int, ...] = ()
    weight_gradients: WeightGradients = field(default_factory=WeightGradients, compare=False)
    products: Products = field(default_factory=Products, compare=False)
    low_precision: LowPrecision = field(default_factory=LowPrecision, compare=False)
    layer: int | None = field(default=None, compare=False)
    _of_layers: list[ParallelContext] = field(default_factory=list, compare=False, repr=False)

    def in_layer(self, number: int | None) -> ParallelContext:
        """The context for parts of layer ``number`` of the whole model; None: for parts that belong to no layer."""
        made = replace(self, layer=number)
        self._of_layers.append(made)
        return made

    @property
    def sequence_parts(self) -> int:
        """Parts of the sequence that tensor-parallel ranks hold outside the regions: 1 without sequence parallelism."""
        return self.mesh.size("tp") if self.sequence_parallel else 1

    @property
    def hidden_generator(self) -> torch.Generator:
        """The stream for dropout on hidden states, which sequence parallelism splits over tensor-parallel ranks."""
        return self.rng.split if self.sequence_parallel else self.rng.replicated

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Turn off sequence parallelism inside the block, as for steps of generation, whose few tokens can't be
        divided.

        The weights are the same with it and without. Forward passes only: gradients would need it off as well.
        """
        before, everywhere = self.sequence_parallel, (self, *self._of_layers)
        for context in everywhere:
            object.__setattr__(context, "sequence_parallel", False)
        try:
            yield
        finally:
            for context in everywhere:
                object.__setattr__(context, "sequence_parallel", before)

    @property
    def keeps_bytes(self) -> bool:
        """Whether linear layers that are built with this context keep copies of their inputs in 8 bits."""
        return self.low_precision.serves(self.layer) and self.low_precision.settings.fp8_wgrad

    def cp_comm_type(self, layer: int) -> CpCommType:
        """The one of ``cp_comm_types`` for layer number ``layer``; layers beyond them are like the last."""
        return self.cp_comm_types[min(layer, len(self.cp_comm_types) - 1)]

    @classmethod
    def of(
        cls, parallel: ParallelConfig, *, mesh: Mesh, rng: RngStreams, device: torch.device, dtype: torch.dtype
    ) -> ParallelContext:
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
    def single(cls, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 1234) -> ParallelContext:
        """A world of one rank, for tests, tools and notebooks."""
        mesh, on = Mesh.single(), torch.device(device)
        return cls(mesh=mesh, rng=RngStreams(seed, mesh, on), device=on, dtype=dtype)
