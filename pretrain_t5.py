"""Pretrain a T5: ``torchrun --nproc_per_node=N pretrain_t5.py …``, or ``python pretrain_t5.py …`` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.config.t5 import T5Config
from megatron.training.pretrain import main

if TYPE_CHECKING:
    from megatron.training.recipe import Recipe


def recipe() -> Recipe:
    """Imported when training starts, so that ``--help`` and flag errors don't wait for torch."""
    from megatron.training.recipes.t5 import T5Recipe

    return T5Recipe()


if __name__ == "__main__":
    main(recipe, T5Config)
