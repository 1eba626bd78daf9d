"""Ranks compare what they are about to run, before any of them builds a model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

import megatron
from megatron.config.run import RunConfig
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ParallelError


def check_ranks_agree(config: RunConfig, context: ParallelContext) -> None:
    """Raise ParallelError when ranks run other settings, other code or another torch than rank 0. A collective."""
    mine = {"settings": config.digest, "code of megatron": code_digest(), "torch version": torch.__version__}
    everyone = gather_objects(mine, context.mesh)
    for what, expected in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[what] != expected]
        if others:
            named = ", ".join(map(str, others[:8])) + (" …" if len(others) > 8 else "")
            raise ParallelError(
                f"ranks disagree on the {what}: rank 0 has {expected[:12]}, rank {others[0]} has "
                f"{everyone[others[0]][what][:12]} (other than rank 0: {named}); start every rank with the same command "
                "and the same installation"
            )


def code_digest() -> str:
    """SHA-256 of the package's sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(megatron.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
