"""Pretrain an XLNet: ``torchrun --nproc_per_node=N pretrain_xlnet.py …``, or ``python …`` alone."""

from __future__ import annotations

from xlnet import FAMILY

from megatron.training.pretrain import main

if __name__ == "__main__":
    main(FAMILY)
