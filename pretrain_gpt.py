"""Pretrain a GPT: ``torchrun --nproc_per_node=N pretrain_gpt.py …``, or ``python pretrain_gpt.py …`` for one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.training.pretrain import main

if TYPE_CHECKING:
    from megatron.training.recipe import Recipe


def recipe() -> Recipe:
    """Imported when training starts, so that ``--help`` and flag errors don't wait for torch."""
    from megatron.training.recipes.gpt import GPTRecipe

    return GPTRecipe()


if __name__ == "__main__":
    main(recipe)
