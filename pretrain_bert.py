"""Pretrain a BERT: ``torchrun --nproc_per_node=N pretrain_bert.py …``, or ``python pretrain_bert.py …`` alone."""

from __future__ import annotations

from megatron.core.models.registry import FAMILIES
from megatron.training.pretrain import main

if __name__ == "__main__":
    main(FAMILIES["bert"])
