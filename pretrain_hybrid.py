"""Pretrain a hybrid, as ``pretrain_mamba.py`` does, under Megatron-LM's newer name."""

from __future__ import annotations

from megatron.config.hybrid_pattern import HYBRID
from megatron.core.models.registry import FAMILIES
from megatron.training.pretrain import main

if __name__ == "__main__":
    main(FAMILIES["gpt"], model=HYBRID, defaults={"is_hybrid_model": True})
