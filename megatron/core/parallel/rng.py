"""Random streams as functions of (seed, samples, layer), with no state to save or restore.

A stream is seeded again at every layer of every microbatch. So recomputation replays a layer, a resumed run continues
exactly, and dropout doesn't depend on how layers are divided into stages, or samples and experts over replicas. Only
ranks that hold parts of one activation, of its heads or its sequence, draw masks of their own.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.parallel.mesh import Mesh


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts, the same on every machine and Python."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_global_generators(*parts: object) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices, from any printable parts: for code of
    users, which knows no streams.
    """
    seed = derive_seed(*parts)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class StreamKey:
    """Identifies a microbatch: the number of its first sample, and the split (``train``, ``valid``, ``test``)."""

    sample: int
    split: str = "train"


class RngStreams:
    """Two generators for dropout: ``replicated`` draws the same on tensor-parallel ranks, ``split`` doesn't.

    Activations that every tensor-parallel rank holds whole use ``replicated``; those of which it holds a part (heads,
    or the sequence under sequence parallelism) use ``split``. Context-parallel ranks hold different tokens, so both
    differ between them. ``seed`` may be set: to that of the run that a checkpoint continues. ``key``: of the
    microbatch that a layer computes, for modules in it that aren't told.
    """

    def __init__(self, seed: int, mesh: Mesh, device: torch.device) -> None:
        self.seed, self.key = seed, StreamKey(0)
        self.replicated = torch.Generator(device)
        self.split = torch.Generator(device)
        self._context_rank, self._tensor_rank = mesh.rank("cp"), mesh.rank("tp")

    def enter(self, key: StreamKey, place: str) -> None:
        """Point both streams at ``place`` (a layer, the embedding) of a microbatch."""
        base = (self.seed, key.split, key.sample, place)
        self.replicated.manual_seed(derive_seed(*base, "replicated", self._context_rank))
        self.split.manual_seed(derive_seed(*base, "split", self._context_rank, self._tensor_rank))
