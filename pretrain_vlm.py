"""Pretrain a vision-language model: ``torchrun --nproc_per_node=N pretrain_vlm.py …``, or ``python …`` alone."""

from __future__ import annotations

from megatron.core.models.registry import FAMILIES
from megatron.training.pretrain import main

if __name__ == "__main__":
    main(FAMILIES["vlm"])
