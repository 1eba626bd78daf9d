"""Sampling decides what a user reads: every filter must keep exactly the tokens it promises, with the right odds."""

from __future__ import annotations

import pytest
import torch

from megatron.core.inference.sampler import filtered, picked
from megatron.core.inference.sampling import Sampling
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error

PROBABILITIES = torch.tensor([[0.05, 0.5, 0.15, 0.3]])
LOGITS = PROBABILITIES.log()


def kept(sampling: Sampling, logits: torch.Tensor = LOGITS) -> list[int]:
    return torch.nonzero(filtered(logits, [sampling], [0])[0])[:, 0].tolist()


def next_tokens(logits: torch.Tensor, sampling: Sampling, uniforms: torch.Tensor) -> torch.Tensor:
    """The token that each number in [0, 1) selects."""
    return picked(filtered(logits, [sampling] * len(logits), [0] * len(logits)), uniforms)


def odds(sampling: Sampling, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """Share of evenly spread uniforms that pick each token: the distribution that is really sampled from."""
    uniforms = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    sampled = next_tokens(logits.expand(100_000, -1), sampling, uniforms)
    return torch.bincount(sampled, minlength=logits.shape[-1]) / 100_000


def test_one_token_left_is_taken_whatever_the_random_number() -> None:
    uniforms = torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64)
    assert next_tokens(LOGITS.expand(3, -1), Sampling(top_k=1), uniforms).tolist() == [1, 1, 1]


def test_plain_sampling_draws_the_models_probabilities() -> None:
    torch.testing.assert_close(odds(Sampling()), PROBABILITIES[0], atol=2e-5, rtol=0)


def test_temperature_divides_the_logits() -> None:
    for temperature in (0.5, 2.0):
        expected = (LOGITS / temperature).softmax(-1)[0]
        torch.testing.assert_close(odds(Sampling(temperature=temperature)), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("top_k", "tokens"), [(0, [0, 1, 2, 3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])]
)
def test_top_k_keeps_the_k_likeliest(top_k: int, tokens: list[int]) -> None:
    assert kept(Sampling(top_k=top_k)) == tokens


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [
        (0.0, [0, 1, 2, 3]),  # off
        (0.1, [1]),  # the likeliest always stays
        (0.45, [1]),
        (0.55, [1, 3]),  # the token that crosses p stays: the mask is shifted by one
        (0.85, [1, 2, 3]),
        (0.97, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_tokens_until_p_is_exceeded(top_p: float, tokens: list[int]) -> None:
    assert kept(Sampling(top_p=top_p)) == tokens


def test_top_p_sees_what_temperature_and_top_k_have_left() -> None:
    assert kept(Sampling(top_k=3, top_p=0.6)) == [1, 3]  # renormalized 0.53, 0.32, 0.16
    assert kept(Sampling(temperature=100.0, top_p=0.55)) == [1, 2, 3]  # nearly uniform


def test_what_was_filtered_is_never_drawn_and_the_rest_is_renormalized() -> None:
    torch.testing.assert_close(odds(Sampling(top_k=2)), torch.tensor([0, 0.625, 0, 0.375]), atol=2e-5, rtol=0)


def test_extreme_random_numbers_stay_inside_the_vocabulary() -> None:
    logits = torch.tensor([[0.0, 0.0, float("-inf")]]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert next_tokens(logits, Sampling(), uniforms).tolist() == [0, 1]


def test_filters_agree_with_a_plain_account_of_them() -> None:
    """Random logits: sort by hand, and keep while the sum of the likelier ones doesn't exceed p."""
    generator = torch.Generator().manual_seed(0)
    for top_k, top_p in ((0, 0.7), (5, 0.0), (7, 0.4), (20, 0.9)):
        logits = torch.randn(1, 20, generator=generator) * 2
        order = sorted(range(20), key=lambda token: -logits[0, token].item())[: top_k or 20]
        shares = logits[0, order].double().softmax(0).tolist()
        expected, total = [], 0.0
        for token, share in zip(order, shares):
            if top_p and total > top_p:
                break
            expected.append(token)
            total += share
        assert kept(Sampling(top_k=top_k, top_p=top_p), logits) == sorted(expected)


@pytest.mark.parametrize("settings", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 1.1}, {"top_p": -0.1}])
def test_impossible_settings_are_one_sentence(settings: dict[str, float]) -> None:
    name, value = next(iter(settings.items()))
    with expect_error(ConfigError, f"{name.replace('_', '-')} is {value}"):
        Sampling(**settings)  # type: ignore[arg-type]
