"""Generation must depend on the prompt, the seed and the settings, and on nothing else: not on the batch around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.inference.engine import Engine, GenerationLimits, WholeText
from megatron.core.inference.sampling import Sampling
from megatron.core.models.gpt.model import GPTModel
from megatron.core.parallel.context import ParallelContext
from megatron.errors import DataError

VOCABULARY = 40
GREEDY = Sampling(temperature=0.0)


def counting(tokens: Tensor, lengths: Tensor) -> Tensor:
    """A model that says "one more than the last token", and would be misled by reading padding."""
    last = tokens[torch.arange(len(lengths)), lengths - 1]
    return torch.nn.functional.one_hot((last + 1) % VOCABULARY, VOCABULARY).float() * 10


def engine(next_logits: object = counting, *, eod: int | None = None, max_length: int = 32) -> Engine:
    return Engine(next_logits, GenerationLimits(eod, max_length))  # type: ignore[arg-type]


def test_continues_each_prompt_from_its_own_end() -> None:
    results = engine().generate([[5], [1, 2, 3, 20]], tokens_to_generate=3, sampling=GREEDY, seeds=[0, 1])
    assert [result.tokens for result in results] == [[5, 6, 7, 8], [1, 2, 3, 20, 21, 22, 23]]
    assert [result.generated for result in results] == [[6, 7, 8], [21, 22, 23]]
    assert {result.finish_reason for result in results} == {"length"}


def test_stops_at_the_end_of_document_while_others_go_on() -> None:
    results = engine(eod=8).generate([[6], [20]], tokens_to_generate=4, sampling=GREEDY, seeds=[0, 1])
    assert (results[0].generated, results[0].finish_reason) == ([7], "end of document")
    assert (results[1].generated, results[1].finish_reason) == ([21, 22, 23, 24], "length")


def test_stops_where_the_caller_says_while_others_go_on() -> None:
    """Stop strings end one text of a batch; its last token stays, since only part of it may belong to the string."""
    results = engine().generate(
        [[6], [20]], tokens_to_generate=4, sampling=GREEDY, seeds=[0, 1], stop=lambda generated: 8 in generated
    )
    assert (results[0].generated, results[0].finish_reason) == ([7, 8], "stop")
    assert (results[1].generated, results[1].finish_reason) == ([21, 22, 23, 24], "length")


def test_a_finished_batch_asks_the_model_no_more() -> None:
    calls = []

    def next_logits(tokens: Tensor, lengths: Tensor) -> Tensor:
        calls.append(tokens.shape[0])
        return counting(tokens, lengths)

    engine(next_logits, eod=8).generate([[7], [6]], tokens_to_generate=20, sampling=GREEDY, seeds=[0, 0])
    assert calls == [2, 1]


def test_tokens_arrive_as_they_are_drawn() -> None:
    seen: list[tuple[int, int]] = []
    engine().generate(
        [[5], [7]],
        tokens_to_generate=2,
        sampling=GREEDY,
        seeds=[0, 1],
        on_token=lambda row, token: seen.append((row, token)),
    )
    assert seen == [(0, 6), (1, 8), (0, 7), (1, 9)]


def test_nothing_asked_is_nothing_generated() -> None:
    (result,) = engine().generate([[5, 6]], tokens_to_generate=0, sampling=GREEDY, seeds=[0])
    assert result.tokens == [5, 6]


def test_prompt_and_text_beyond_what_the_model_sees_is_one_sentence_with_the_numbers() -> None:
    with pytest.raises(DataError, match=r"prompt 2 has 30 tokens; with 3 .* makes 33, .* at most 32: .* at most 2"):
        engine().generate([[1], [1] * 30], tokens_to_generate=3, sampling=GREEDY, seeds=[0, 1])
    engine().generate([[1] * 30], tokens_to_generate=2, sampling=GREEDY, seeds=[0])


def test_empty_prompt_is_one_sentence() -> None:
    with pytest.raises(DataError, match="prompt 1 has no tokens"):
        engine().generate([[]], tokens_to_generate=3, sampling=GREEDY, seeds=[0])


@pytest.fixture(params=["learned_absolute", "rope"])
def gpt(request: pytest.FixtureRequest) -> GPTModel:
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=32,
        position_embedding_type=request.param,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
    )
    return GPTModel(config, ParallelContext.single(dtype=torch.float64), seed=5).eval()


def whole_text(model: GPTModel) -> Engine:
    return engine(WholeText(model))


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], [3, 2, 3, 8]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.7, top_k=10), Sampling(top_p=0.9)])
def test_a_prompt_gets_the_same_text_alone_and_in_any_batch(gpt: GPTModel, sampling: Sampling) -> None:
    """Right padding, positions and random numbers must all belong to the row, or answers depend on other users."""
    seeds = [11, 12, 13, 14]
    together = whole_text(gpt).generate(PROMPTS, tokens_to_generate=12, sampling=sampling, seeds=seeds)
    for prompt, seed, expected in zip(PROMPTS, seeds, together):
        (alone,) = whole_text(gpt).generate([prompt], tokens_to_generate=12, sampling=sampling, seeds=[seed])
        assert alone == expected


def test_greedy_text_is_the_argmax_of_the_full_forward_pass(gpt: GPTModel) -> None:
    """Every generated token is checked against logits of the finished text, where nothing is padded."""
    for result in whole_text(gpt).generate(PROMPTS, tokens_to_generate=12, sampling=GREEDY, seeds=[0] * 4):
        likeliest = gpt(torch.tensor([result.tokens])).logits()[0].argmax(-1).tolist()
        assert result.generated == likeliest[result.prompt_length - 1 : -1]


def test_seed_decides(gpt: GPTModel) -> None:
    def texts(seed: int) -> list[int]:
        return whole_text(gpt).generate([[1, 2]], tokens_to_generate=12, sampling=Sampling(), seeds=[seed])[0].tokens

    assert texts(1) == texts(1) != texts(2)


def test_vocabulary_padding_is_never_generated(gpt: GPTModel) -> None:
    hot = Sampling(temperature=100.0)
    results = whole_text(gpt).generate([[1]] * 8, tokens_to_generate=30, sampling=hot, seeds=list(range(8)))
    assert max(max(result.tokens) for result in results) < VOCABULARY
