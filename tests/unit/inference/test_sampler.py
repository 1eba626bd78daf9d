"""Each option must do what transformers' processor of its name does, and tokens must have the odds that are left."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.inference.request import Request, StopRules
from megatron.core.inference.sampler import (
    NOT_FINITE,
    NOTHING_LEFT,
    SampleRow,
    SamplerState,
    edited,
    filtered,
    picked,
    sample,
    token_logprobs,
    uniform,
)
from megatron.core.inference.sampling import ForbiddenAfter, Sampling
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error

VOCABULARY = 1000
PROMPT = (7, 3, 7, 500, 12)
NONE = float("-inf")


def state(sampling: Sampling, *, answer: tuple[int, ...] = (), **settings: Any) -> SamplerState:
    found = SamplerState(Request(id="r", prompt=PROMPT, max_tokens=100, sampling=sampling, **settings))
    for token in answer:
        found.append(token)
    return found


def row(sampling: Sampling, **settings: Any) -> SampleRow:
    return SampleRow(state(sampling, **settings))


def random_logits(rows: int = 1, *, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def after_edits(logits: Tensor, sampling: Sampling, **settings: Any) -> Tensor:
    return edited(logits, [row(sampling, **settings)] * len(logits))


def after_filters(logits: Tensor, sampling: Sampling) -> Tensor:
    """Scores of what the filters keep, as transformers' warpers return them."""
    kept = filtered(logits, [sampling] * len(logits), [0] * len(logits))[:, : logits.shape[-1]] > 0
    return (logits / sampling.temperature).masked_fill(~kept, NONE)


def test_each_stage_equals_transformers_processor() -> None:
    """Exactly, in fp32: a user moves settings over and expects the same distribution."""
    processors = pytest.importorskip("transformers").generation.logits_process
    answer = (3, 9, 9)
    text = torch.tensor([[*PROMPT, *answer]])
    biases = {(4,): 1.5, (7,): -3.25}
    words = [[5], [9, 11], [9, 9, 12], [500, 13]]
    edits: list[tuple[Any, dict[str, Any]]] = [
        (processors.RepetitionPenaltyLogitsProcessor(1.3), {"repetition_penalty": 1.3}),
        (processors.RepetitionPenaltyLogitsProcessor(0.7), {"repetition_penalty": 0.7}),
        (processors.SequenceBiasLogitsProcessor(biases), {"logit_bias": ((4, 1.5), (7, -3.25))}),
        (processors.NoBadWordsLogitsProcessor(words, eos_token_id=0), {"bad_words": tuple(map(tuple, words))}),
        (processors.MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [0, 8]), {"min_tokens": 4}),
        (processors.MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [0, 8]), {"min_tokens": 3}),
    ]
    stop = StopRules(token_ids=frozenset({0, 8}))
    for number, (processor, settings) in enumerate(edits):
        logits = random_logits(seed=number)
        found = after_edits(logits, Sampling(**settings), answer=answer, stop=stop)
        assert torch.equal(found, processor(text, logits.clone())), settings
    filters: list[tuple[Any, dict[str, Any]]] = [
        (processors.TemperatureLogitsWarper(0.7), {"temperature": 0.7}),
        *((processors.TopKLogitsWarper(k), {"top_k": k}) for k in (2, 50, 999)),
        *((processors.TopPLogitsWarper(p), {"top_p": p}) for p in (0.01, 0.3, 0.9, 0.999)),
        *((processors.MinPLogitsWarper(p), {"min_p": p}) for p in (0.01, 0.3, 1.0)),
    ]
    for processor, settings in filters:
        logits = random_logits(20, seed=1)
        assert torch.equal(after_filters(logits, Sampling(**settings)), processor(text, logits.clone())), settings


def test_penalties_count_the_answer_alone() -> None:
    """OpenAI's formula: logit - count·frequency - (count > 0)·presence; the prompt doesn't count."""
    logits = random_logits()
    expected = logits.clone()
    expected[0, 9] -= 2 * 0.5 + 1.25
    expected[0, 3] -= 0.5 + 1.25
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=1.25)
    assert torch.equal(after_edits(logits, sampling, answer=(3, 9, 9)), expected)
    drafted = edited(logits, [SampleRow(state(sampling, answer=(3,)), drafts=(9, 9))])
    assert torch.equal(drafted, expected)


def test_order_of_edits() -> None:
    """Biases come before penalties, and nothing brings back a token that isn't allowed."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]])
    sampling = Sampling(allowed_ids=frozenset({3, 7}), logit_bias=((7, -10.0), (5, 100.0)), repetition_penalty=2.0)
    assert edited(
        logits, [SampleRow(SamplerState(Request(id="r", prompt=(7,), max_tokens=1, sampling=sampling)))]
    ).tolist() == [[NONE, NONE, NONE, 4.0, NONE, NONE, NONE, -4.0]]


def test_no_newline_after_a_colon() -> None:
    rule = ForbiddenAfter(previous=frozenset({12, 13}), tokens=frozenset({1, 2}))
    logits = random_logits()
    found = after_edits(logits, Sampling(forbidden_after=(rule,)))
    assert (found[0] == NONE).nonzero()[:, 0].tolist() == [1, 2]
    assert torch.equal(after_edits(logits, Sampling(forbidden_after=(rule,)), answer=(4,)), logits)


def test_top_p_decays_down_to_its_bound() -> None:
    sampling = Sampling(top_p=0.8, top_p_decay=0.5, top_p_bound=0.15)
    assert [round(sampling.top_p_at(index), 6) for index in range(4)] == [0.8, 0.4, 0.2, 0.15]
    assert Sampling(top_p=0.8, top_p_decay=0.5).top_p_at(10**6) > 0  # 0 would keep all tokens
    assert [Sampling(top_p=p).top_p_at(5) for p in (0.0, 1.0, 0.5)] == [1.0, 1.0, 0.5]
    logits = random_logits()
    narrow = filtered(logits, [sampling], [3]).count_nonzero()
    assert narrow == filtered(logits, [Sampling(top_p=0.15)], [0]).count_nonzero()


def test_top_p_finds_its_place_in_vocabularies_of_any_size() -> None:
    """Sums are those of blocks: where a block begins must not show."""
    for vocabulary, scale in ((100, 1.0), (2048, 0.1), (5000, 0.1), (5000, 5.0), (20001, 0.0001)):
        logits = random_logits(vocabulary=vocabulary).double() * scale
        for share in (0.01, 0.5, 0.99, 0.999999):
            ordered = logits[0].softmax(0).sort(descending=True)
            before = ordered.values.cumsum(0) - ordered.values
            kept = filtered(logits, [Sampling(top_p=share)], [0])[0].nonzero()[:, 0]
            assert sorted(ordered.indices[before <= share].tolist()) == kept.tolist(), (vocabulary, scale, share)


ALL = [
    Sampling(),
    Sampling(temperature=0.6, top_k=40),
    Sampling(top_p=0.7, repetition_penalty=1.2),
    Sampling(min_p=0.05, temperature=1.5),
    Sampling(top_k=30, top_p=0.5, min_p=0.01),
    Sampling(logit_bias=((5, 4.0),), bad_words=((1, 2), (3,))),
    Sampling(temperature=0.0, presence_penalty=1.0),
    Sampling(allowed_ids=frozenset(range(0, 1000, 3))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    """Nor on its place, or on whether an earlier token came as a draft."""
    logits = random_logits(len(ALL)).to(dtype)
    before = logits.clone()
    rows = [row(sampling, seed=number, choice=number % 3, logprobs=2) for number, sampling in enumerate(ALL)]
    together = sample(logits, rows)
    assert torch.equal(logits, before)
    assert [sample(logits[number : number + 1], [each])[0] for number, each in enumerate(rows)] == together
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]
    for number, sampling in enumerate(ALL):
        drafted = SampleRow(state(sampling, seed=3, answer=(8,)), drafts=(4, 8))
        accepted = row(sampling, seed=3, answer=(8, 4, 8))
        assert sample(logits[number : number + 1], [drafted]) == sample(logits[number : number + 1], [accepted])


def test_neutral_settings_are_off_and_greedy_is_greedy() -> None:
    logits = random_logits(4)
    likeliest = logits.argmax(-1).tolist()
    neutral = [
        Sampling(top_k=VOCABULARY),
        Sampling(top_k=VOCABULARY + 1),
        Sampling(top_p=1.0),
        Sampling(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_p=0.0),
        Sampling(min_tokens=3),
        Sampling(allowed_ids=frozenset(range(VOCABULARY))),
    ]
    for seed in range(5):
        plain = sample(logits, [row(Sampling(), seed=seed)] * 4)
        for sampling in neutral:
            assert sample(logits, [row(sampling, seed=seed)] * 4) == plain, sampling
        for sampling in (Sampling(top_k=1), Sampling(temperature=0.0), Sampling(temperature=1e-9), Sampling(min_p=1.0)):
            assert [each.token for each in sample(logits, [row(sampling, seed=seed)] * 4)] == likeliest


def test_draws_have_the_odds_that_are_left() -> None:
    """Chi-square of 10⁵ sampled tokens, each with a number of its own, against fp64 probabilities."""
    logits = random_logits(vocabulary=40, seed=4)
    logits[0, 3] = NONE
    uniforms = torch.tensor([uniform(seed, 0, seed % 7) for seed in range(100_000)], dtype=torch.float64)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.5},
        {"top_k": 9, "temperature": 2.0},
        {"top_p": 0.8},
        {"min_p": 0.1, "top_p": 0.9},
    )
    for settings in kinds:
        sampling = Sampling(**settings)
        weights = filtered(logits, [sampling], [0])
        odds = after_filters(logits, sampling).double().softmax(-1)[0]
        expected = odds * 100_000
        counts = torch.bincount(picked(weights.expand(100_000, -1).contiguous(), uniforms), minlength=40)
        assert counts[odds == 0].sum() == 0
        common = expected >= 5
        wanted = torch.cat([expected[common], expected[~common].sum()[None] + 1e-9])
        observed = torch.cat([counts[common], counts[~common].sum()[None]])
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        assert torch.special.gammaincc(common.sum() / 2, statistic / 2) > 1e-4, settings


def test_uniforms_are_spread_and_never_shift() -> None:
    values = torch.tensor(
        [uniform(seed, choice, token) for seed in range(20) for choice in range(5) for token in range(100)]
    )
    assert values.min() >= 0 and values.max() < 1 and len(set(values.tolist())) > 9990
    assert values.mean().item() == pytest.approx(0.5, abs=0.01)
    assert uniform(1, 0, 5) == uniform(1, 0, 5) != uniform(1, 1, 5) != uniform(1, 0, 6)


def test_choices_of_a_request_draw_numbers_of_their_own() -> None:
    """A request for n choices must not get the same text n times."""
    drawn = sample(torch.zeros(64, VOCABULARY), [row(Sampling(), seed=3, choice=choice) for choice in range(64)])
    assert len({each.token for each in drawn}) > 50


def test_a_token_of_minus_infinity_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest uniforms once fell behind the last token."""
    for vocabulary in (3, 128, 300):
        logits = torch.full((2, vocabulary), NONE)
        logits[:, 1] = 0.0
        logits[1, 2] = -80.0
        for extreme in (0.0, 2.0**-53, 1 - 2.0**-53):
            monkeypatch.setattr("megatron.core.inference.sampler.uniform", lambda *key, value=extreme: value)
            assert {each.token for each in sample(logits, [row(Sampling())] * 2)} <= {1, 2}
            assert sample(logits, [row(Sampling())])[0].token == 1


def test_a_broken_row_fails_alone() -> None:
    logits = random_logits(6)
    good = sample(logits, [row(Sampling(), seed=5)] * 6)
    logits[0, 17] = math.nan
    logits[2] = NONE
    logits[3, 0] = math.inf
    for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(top_k=4), Sampling(allowed_ids=frozenset({1}))):
        found = sample(logits, [row(sampling, seed=5, logprobs=3)] * 6)
        assert [each.error for each in found[:4]] == [NOT_FINITE, None, NOT_FINITE, NOT_FINITE]
        assert found[0].token == -1 and found[0].logprobs is None
    assert [each.token for each in sample(logits, [row(Sampling(), seed=5)] * 6)][4:] == [
        each.token for each in good[4:]
    ]
    logits[1, 8] = NONE
    rows = [row(Sampling(allowed_ids=frozenset({8})), seed=5), row(Sampling(), seed=5)]
    first, second = sample(logits[[1, 4]], rows)
    assert str(first.error).startswith(f"{NOTHING_LEFT} (allowed_token_ids)")
    assert first.token == -1 and first.is_refusal and second.token == good[4].token


def test_logprobs_are_the_models_own() -> None:
    """Before temperature, biases and filters, and the sampled token's is the very number of the list."""
    logits = random_logits(2)
    values = logits.log_softmax(-1)
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=5.0, logit_bias=((3, 50.0),), top_k=2)):
        for number, found in enumerate(sample(logits, [row(sampling, logprobs=4, seed=9), row(sampling, logprobs=0)])):
            assert found.logprobs is not None
            assert found.logprobs.logprob == values[number, found.token].item()
            assert len(found.logprobs.top) == (0 if number else 4)
            assert all(values[number, token].item() == value for token, value in found.logprobs.top)
    greedy = sample(logits, [row(Sampling(temperature=0.0), logprobs=1)] * 2)
    assert all(each.logprobs and each.logprobs.top == ((each.token, each.logprobs.logprob),) for each in greedy)
    assert sample(logits, [row(Sampling())] * 2)[0].logprobs is None
    double = token_logprobs(logits.double(), [3, 4], top=2000)
    assert double[1].logprob == pytest.approx(logits[1].double().log_softmax(-1)[4].item(), abs=1e-14)
    assert len(double[0].top) == VOCABULARY


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 1.5},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": math.nan},
        {"top_p": 0.5, "top_p_decay": 1.1},
        {"top_p_decay": 0.9},
        {"top_p": 0.5, "top_p_bound": 0.6},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": math.nan},
        {"logit_bias": ((3, 101.0),)},
        {"min_tokens": -1},
        {"allowed_ids": frozenset()},
        {"bad_words": ((),)},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with expect_error(ConfigError):
        Sampling(**settings)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    for settings in ({"logit_bias": ((50, 1.0),)}, {"allowed_ids": frozenset({50})}, {"bad_words": ((1, 50),)}):
        with expect_error(ConfigError, "50", "0", "49"):
            Sampling(**settings).check_vocabulary(50)
    Sampling(logit_bias=((49, 1.0),)).check_vocabulary(50)
