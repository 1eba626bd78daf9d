"""Pretrain a T5: ``torchrun --nproc_per_node=N pretrain_t5.py …``, or ``python pretrain_t5.py …`` alone."""

from __future__ import annotations

from megatron.core.models.registry import FAMILIES
from megatron.training.pretrain import main

if __name__ == "__main__":
    main(FAMILIES["t5"])
