"""A request's answer must depend on itself alone: not on neighbours, memory, chunks, or what was asked before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from typing_extensions import override

from megatron.core.inference.drafts import DraftModel, PromptLookup
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import Finish, Request, StopRules
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError, ParallelError
from tests.harness.sentences import check_sentence, expect_error
from tests.harness.table_model import table

GREEDY = Sampling(temperature=0.0)


class Letters(Tokenizer):
    """A letter for each token."""

    name, vocab_size, eod, pad, bos, eos = "Letters", 30, 0, None, None, None
    special_ids: frozenset[int] = frozenset()

    @override
    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in ids)

    @override
    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(letter) - ord("A") for letter in text] for text in texts]

    @property
    @override
    def fingerprint(self) -> str:
        return "letters"


def test_answers_a_request() -> None:
    request = Request(id="a", prompt=(1, 2, 3), max_tokens=5, sampling=GREEDY, logprobs=2, prompt_logprobs=1)
    [result] = Engine(table()).generate([request])
    text = [1, 2, 3]
    for _ in range(5):
        text.append(int(table().logits_after(text).argmax()))
    assert result.ids == text[3:]
    assert result.finish.reason == "length"
    assert [len(token.logprobs.top) for token in result.tokens if token.logprobs] == [2] * 5
    scores = [*result.prompt_logprobs, *(token.logprobs for token in result.tokens)]
    assert len(scores) == len(text) and scores[0] is None
    for end, score in enumerate(scores[1:], start=1):
        values = table().logits_after(text[:end]).log_softmax(-1)
        assert score is not None and score.logprob == pytest.approx(values[text[end]].item(), abs=1e-6)
        likeliest, logprob = score.top[0]
        assert likeliest == int(values.argmax()) and logprob == pytest.approx(values.max().item(), abs=1e-6)


def test_the_same_alone_and_crowded() -> None:
    requests = [
        Request(id=str(n), prompt=tuple(range(1, 3 + 2 * n)), max_tokens=12, seed=n % 3, choice=n % 2) for n in range(9)
    ]
    alone = [Engine(table()).generate([request])[0].ids for request in requests]
    for blocks, tokens, depth in ((64, 2048, 1), (10, 5, 1), (12, 7, 3)):
        engine = Engine(table(num_blocks=blocks, depth=depth), options=SchedulerOptions(max_tokens=tokens))
        together = engine.generate(requests)
        assert [result.ids for result in together] == alone
        assert engine.statistics.cache_usage == 0
    assert engine.statistics.preemptions == 2


def test_refuses_what_can_never_be_answered() -> None:
    engine = Engine(table(num_blocks=4))
    with expect_error(DataError):
        engine.submit(Request(id="a", prompt=(), max_tokens=5))
    with expect_error(DataError, "200"):
        engine.submit(Request(id="a", prompt=(1,), max_tokens=200))
    with expect_error(DataError, "12"):
        engine.submit(Request(id="a", prompt=(1,), max_tokens=12))
    with expect_error(DataError, "30"):
        engine.submit(Request(id="a", prompt=(30,), max_tokens=2))
    assert not engine.has_work
    assert engine.limits.max_length == 12  # what servers and chats give as the longest text


def test_a_stop_string_may_begin_before_min_tokens() -> None:
    """The text went on past a stop string of which min_tokens let only the beginning pass."""
    engine = Engine(table(), tokenizer=Letters())
    request = Request(id="a", prompt=(1, 2), max_tokens=8, sampling=GREEDY)
    whole = engine.generate([request])[0]
    assert [token.text for token in whole.tokens] == list(whole.text)
    stop = StopRules(strings=(whole.text[2:5],))
    for least in range(6):
        sampling = replace(GREEDY, min_tokens=least)
        [result] = engine.generate([replace(request, sampling=sampling, stop=stop)])
        assert result.text == (whole.text[:2] if least < 5 else whole.text)


def test_a_broken_row_ends_its_request_only() -> None:
    """One NaN would end every client's text; and its blocks must not be found by the next request."""
    engine = Engine(table(broken=frozenset({7})))
    bad = Request(id="bad", prompt=(1, 2, 3, 4, 5, 7), max_tokens=3)
    good = Request(id="good", prompt=(1, 2), max_tokens=3, seed=2)
    [alone] = Engine(table()).generate([good])
    first, second = engine.generate([bad, good])
    assert first.finish.reason == "error"
    check_sentence(str(first.finish.error))
    assert second.ids == alone.ids
    assert engine.statistics.cache_usage == 0
    assert engine.generate([bad])[0].cached_tokens == 0


def test_stops_at_ids_strings_and_limits() -> None:
    tokenizer = Letters()
    [free] = Engine(table(), tokenizer=tokenizer).generate([Request(id="a", prompt=(1, 2), max_tokens=9)])
    assert free.text == "".join(tokenizer.detokenize([token]) for token in free.ids)
    ends_with = free.text[4:6]
    cases = {
        StopRules(token_ids=frozenset({free.ids[5]})): (free.text[: free.ids.index(free.ids[5])], free.ids[5]),
        StopRules(strings=(ends_with,)): (free.text[: free.text.index(ends_with)], ends_with),
        StopRules(strings=(ends_with,), include_string=True): (
            free.text[: free.text.index(ends_with) + 2],
            ends_with,
        ),
        StopRules(strings=("nowhere",)): (free.text, None),
    }
    for drafts, drafter in ((0, None), (3, None), (3, DraftModel(table(is_draft=True)))):
        for stop, (text, reason) in cases.items():
            options = SchedulerOptions(num_drafts=drafts)
            [result] = Engine(table(), tokenizer=tokenizer, options=options, drafter=drafter).generate(
                [Request(id="a", prompt=(1, 2), max_tokens=9, stop=stop)]
            )
            assert (result.text, result.finish.stop) == (text, reason)
            assert result.finish.reason == ("length" if reason is None else "stop")


def test_choices_read_their_prompt_once() -> None:
    """Ten continuations of a long prompt would take ten times as long to begin."""
    engine = Engine(table(max_requests=10, num_blocks=200))
    prompt = tuple(range(1, 22))
    results = engine.generate([Request(id=str(n), prompt=prompt, max_tokens=4, choice=n) for n in range(10)])
    assert [result.cached_tokens for result in results] == [0] + [20] * 9
    assert engine.statistics.step_tokens == 21 + 9 * 1 + 10 * 3
    assert (engine.statistics.prefix_queries, engine.statistics.prefix_hits) == (210, 180)
    assert len({tuple(result.ids) for result in results}) > 1
    [whole] = engine.generate([Request(id="whole blocks", prompt=prompt[:20], max_tokens=4)])
    assert (
        whole.cached_tokens == 16
        and whole.ids == Engine(table()).generate([Request(id="a", prompt=prompt[:20], max_tokens=4)])[0].ids
    ), "the last token is read again for its logits"


def test_right_drafts_save_steps() -> None:
    """The smaller model is right two times in three; no draft is beyond the longest text."""
    request = Request(id="a", prompt=(1, 2, 3), max_tokens=60)
    model, draft = table(max_length=63), table(max_length=63, is_draft=True)
    plain = Engine(table())
    drafted = Engine(model, options=SchedulerOptions(num_drafts=4), drafter=DraftModel(draft))
    assert plain.generate([request])[0].ids == drafted.generate([request])[0].ids
    assert drafted.statistics.steps < plain.statistics.steps / 2
    numbers = drafted.statistics
    assert 0 < numbers.accepted_tokens < numbers.drafted_tokens
    assert numbers.step_tokens == 3 + (numbers.steps - 1) + numbers.drafted_tokens, "accepted tokens computed again"


def test_a_younger_text_gives_way_within_a_step() -> None:
    """Its token is planned before the older text, which is still being read, finds that it needs the last blocks."""
    old = Request(id="old", prompt=tuple(range(1, 21)), max_tokens=1, prompt_logprobs=0)
    young = Request(id="young", prompt=(1, 2), max_tokens=15)
    alone = [Engine(table()).generate([each])[0].ids for each in (old, young)]
    engine = Engine(table(num_blocks=24, block_size=1), options=SchedulerOptions(max_logits=1))
    assert [each.ids for each in engine.generate([old, young])] == alone
    assert engine.statistics.preemptions == 1


def test_the_oldest_text_never_waits_for_younger_ones() -> None:
    """When blocks run out, the youngest begins again; if the oldest did, a text could begin again for ever."""
    requests = [Request(id=str(number), prompt=(1, number), max_tokens=12) for number in range(3)]
    engine, steps = Engine(table(num_blocks=9)), list[set[str]]()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        steps.append({update.request_id for update in engine.step()})
    assert engine.statistics.preemptions == 1
    assert all("0" in step for step in steps[:12]), "a token of the oldest in each step"
    assert ["0" in step for step in steps].index(False) == 12


def test_prompt_lookup_finds_the_most_recent_repetition() -> None:
    lookup = PromptLookup()
    assert lookup.after([1, 2, 3, 9, 1, 2, 4, 5, 1, 2], 3) == (4, 5, 1)
    assert lookup.after([7, 7, 7], 4) == (7,)
    assert lookup.after([1, 2, 3], 4) == ()
    assert lookup.after([256, 1, 0, 256, 3, 1, 256], 4) == ()  # bytes that match between tokens


def test_aborts_end_requests_in_any_state() -> None:
    """A client that leaves must free its blocks at once, or a few of them fill the server."""
    for steps in range(6):
        engine = Engine(table(max_requests=2), options=SchedulerOptions(max_tokens=6))
        for number in range(4):
            engine.submit(Request(id=str(number), prompt=tuple(range(1, 12)), max_tokens=5, seed=number))
        for _ in range(steps):
            engine.step()
        for number in range(4):
            engine.abort(str(number))
        engine.abort("unknown")
        assert engine.statistics.cache_usage == 0
        assert {update.finish for update in engine.step() if update.finish} == {Finish("abort")}
        assert not engine.has_work


def test_encoder_prompts_are_read_before_the_text_and_shared_by_none() -> None:
    """The decoder's keys and values depend on what the encoder has read."""
    requests = [Request(id=str(n), prompt=(1, 2, 3, 4, 5, 6), encoder_prompt=(7, 8, n), max_tokens=5) for n in range(4)]
    alone = [Engine(table(max_encoder_length=9)).generate([each])[0].ids for each in requests]
    assert len({tuple(ids) for ids in alone}) == 4
    for tokens, blocks in ((100, 60), (4, 60), (5, 6)):
        engine = Engine(
            table(max_encoder_length=9, max_requests=3, num_blocks=blocks), options=SchedulerOptions(max_tokens=tokens)
        )
        assert [result.ids for result in engine.generate(requests)] == alone
        again = [replace(each, id="again" + each.id) for each in requests]
        assert [result.ids for result in engine.generate(again)] == alone


def test_a_lost_rank_ends_the_engine() -> None:
    runner = table()
    engine = Engine(runner)
    assert engine.error is None
    runner.failure = ParallelError("rank 1 is gone")
    assert engine.error is runner.failure
