"""Pretrain the model in ``recurrent/``: ``torchrun --nproc_per_node=N pretrain_own.py …``, or ``python …`` alone."""

from __future__ import annotations

from recurrent import FAMILY

from megatron.training.pretrain import main

if __name__ == "__main__":
    main(FAMILY)
