"""What a train spec that answers sums and counts, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config.expert_settings import LOSS_NAMES, Z_LOSS
from megatron.core.models.bert.train_spec import TEXT_MASK
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.pipeline_parallel.chunk import Microbatch
from tasks.fine_tuning.model import AnswerLogits
from tasks.fine_tuning.train_spec import ACCURACY, LOSS, ClassificationSpec, LabelledData

CONTEXT = ModelContext.single(dtype=torch.float64)
ROUTERS = (*LOSS_NAMES.values(), Z_LOSS)
TRAIN_SPEC = ClassificationSpec("MNLI", LabelledData())


@pytest.mark.parametrize(
    ("labels", "losses", "correct"),
    [
        ([0, 2], [math.log(1 + 2 * math.exp(-3)), math.log(2 + math.exp(1))], 1),
        ([-1, 1], [math.log(2 + math.exp(1)) - 1], 1),
        ([-1, -1], [], 0),
    ],
)
def test_loss_and_accuracy_are_of_the_samples_that_count(labels: list[int], losses: list[float], correct: int) -> None:
    """A sample that only fills a batch would be learned from, or raise or lower the score."""
    logits = AnswerLogits(torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64), CONTEXT)
    text = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    microbatch = Microbatch({"label": torch.tensor(labels), "attention_mask": text}, StreamKey(0))
    found = TRAIN_SPEC.loss(logits, microbatch)
    assert found.sum.item() == pytest.approx(sum(losses))
    assert found.count.item() == len(losses)
    assert found.parts[LOSS].tolist() == pytest.approx([sum(losses), len(losses)])
    assert found.parts[ACCURACY].tolist() == [correct, len(losses)]
    counts = TRAIN_SPEC.counts(microbatch, CONTEXT)
    answers = {LOSS: len(losses), ACCURACY: len(losses)}
    assert {name: int(count) for name, count in counts.items()} == {**answers, **dict.fromkeys(ROUTERS, 10)}
    without_padding = Microbatch({**microbatch.tensors, TEXT_MASK: text.bool()}, StreamKey(0))
    counts = TRAIN_SPEC.counts(without_padding, CONTEXT)
    assert {name: int(count) for name, count in counts.items()} == {**answers, **dict.fromkeys(ROUTERS, 7)}


def test_ranks_before_the_last_stage_count_nothing() -> None:
    """They hold no labels, and the reduction of counts must not ask for them."""
    assert TRAIN_SPEC.counts(Microbatch({"attention_mask": torch.ones(1)}, StreamKey(0)), CONTEXT) == {}
