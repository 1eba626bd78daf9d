"""Perplexity must count every token once, with as much context as promised, whatever the batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.inference.scoring import TextScore, Window, score_texts, windows
from megatron.core.models.gpt import GPTModel
from megatron.core.parallel.context import ParallelContext

CPU = torch.device("cpu")


def test_every_prediction_is_scored_once_with_the_promised_context() -> None:
    """All small sizes: a gap or an overlap would silently change every published number."""
    for total, length in itertools.product(range(40), range(1, 12)):
        for stride in range(1, length + 1):
            scored: list[int] = []
            for window in windows(total, length=length, stride=stride):
                assert 0 <= window.start <= window.first_scored < window.stop <= total
                assert window.stop - window.start <= length
                if window.start > 0:
                    assert window.first_scored - window.start >= length - stride
                scored += range(window.first_scored, window.stop)
            assert scored == list(range(total))


def test_windows_by_hand() -> None:
    assert list(windows(10, length=4, stride=3)) == [Window(0, 4, 0), Window(3, 7, 4), Window(6, 10, 7)]
    assert list(windows(3, length=4, stride=4)) == [Window(0, 3, 0)]


def test_a_stride_beyond_the_window_would_skip_tokens() -> None:
    with pytest.raises(ValueError, match="stride of 5"):
        list(windows(10, length=4, stride=5))


def total(scores: list[TextScore]) -> TextScore:
    return TextScore(sum(score.nats for score in scores), sum(score.tokens for score in scores))


def by_label(tokens: Tensor, labels: Tensor) -> Tensor:
    """A model that is as surprised as the label is large; it is asked nothing about padding that counts."""
    return labels.float()


def test_sums_are_those_of_all_tokens_but_the_first() -> None:
    texts = [[9, 1, 2, 3], [9], [9, 4, 5], list(range(30))]
    for batch_size, stride in itertools.product((1, 2, 7), (1, 3, 5)):
        score = total(list(score_texts(by_label, texts, length=5, stride=stride, batch_size=batch_size, device=CPU)))
        assert score == TextScore(float(sum(sum(text[1:]) for text in texts)), 3 + 0 + 2 + 29)


def test_a_models_score_is_its_log_likelihood_and_no_batch_changes_it() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=16,
        vocab_size=50,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.5,
    )
    model = GPTModel(config, ParallelContext.single(dtype=torch.float64), seed=3).eval()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(50, (size,), generator=generator).tolist() for size in (2, 9, 17, 5)]

    def token_losses(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = model(tokens).token_losses(labels)
        return losses

    expected = 0.0
    for text in texts:
        logits = model(torch.tensor([text[:-1]])).logits()[0].double()
        expected -= logits.log_softmax(-1)[torch.arange(len(text) - 1), text[1:]].sum().item()
    for batch_size in (1, 4):
        parts = list(score_texts(token_losses, texts, length=16, stride=8, batch_size=batch_size, device=CPU))
        assert total(parts).nats == pytest.approx(expected, rel=1e-9)
    shorter = list(score_texts(token_losses, texts, length=4, stride=2, batch_size=3, device=CPU))
    assert total(shorter).tokens == 1 + 8 + 16 + 4


def test_figures_by_hand() -> None:
    score = TextScore(nats=10 * math.log(2), tokens=5)
    assert score.loss == pytest.approx(2 * math.log(2))
    assert score.perplexity == pytest.approx(4.0)
    assert score.bits_per_byte(20) == pytest.approx(0.5)
