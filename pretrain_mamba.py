"""Pretrain a Mamba-2 model or a hybrid: ``torchrun --nproc_per_node=N pretrain_mamba.py …``.

It is a GPT whose layers are those of ``--hybrid-layer-pattern`` or of ratios, and all Mamba-2 without either.
"""

from __future__ import annotations

from megatron.config.hybrid_pattern import HYBRID
from megatron.core.models.registry import FAMILIES
from megatron.training.pretrain import main

if __name__ == "__main__":
    main(FAMILIES["gpt"], model=HYBRID, defaults={"is_hybrid_model": True})
