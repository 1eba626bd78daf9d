"""Pretrain a GPT: ``torchrun --nproc_per_node=N pretrain_gpt.py …``, or ``python pretrain_gpt.py …`` for one rank."""

from __future__ import annotations

from megatron.core.models.registry import FAMILIES
from megatron.training.pretrain import main

if __name__ == "__main__":
    main(FAMILIES["gpt"])
