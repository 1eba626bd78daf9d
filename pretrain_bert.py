"""Pretrain a BERT: ``torchrun --nproc_per_node=N pretrain_bert.py …``, or ``python pretrain_bert.py …`` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.config.bert import BertConfig
from megatron.training.pretrain import main

if TYPE_CHECKING:
    from megatron.training.recipe import Recipe


def recipe() -> Recipe:
    """Imported when training starts, so that ``--help`` and flag errors don't wait for torch."""
    from megatron.training.recipes.bert import BertRecipe

    return BertRecipe()


if __name__ == "__main__":
    main(recipe, BertConfig)
