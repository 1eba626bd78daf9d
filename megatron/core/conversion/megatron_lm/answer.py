"""The answer of a Megatron-LM checkpoint to a question, from its files alone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from megatron.core.conversion.megatron_lm.files import open_checkpoint
from megatron.core.conversion.megatron_lm.forward import MegatronLMModel
from megatron.core.conversion.questions import Answer, Question


@torch.no_grad()
def megatron_lm_answer(
    root: Path, question: Question, *, step: int | None = None, ignored: Collection[str] = ()
) -> Answer:
    """Logits in fp32, those of words over the padded vocabulary.

    ``ignored``: saved arguments that are read as if they weren't there.
    """
    return question.ask_megatron_lm(MegatronLMModel(open_checkpoint(root, step=step, ignored=ignored)))
