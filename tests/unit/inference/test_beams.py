"""Beams share blocks and compete: each must read its own text, and the best must win."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request, StopRules
from megatron.core.inference.sampling import ForbiddenAfter, Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.errors import DataError
from tests.harness.sentences import check_sentence, expect_error
from tests.harness.table_model import Table, table
from tests.unit.inference.test_engine import Letters

ENDS = frozenset({3, 17})
REQUEST = Request(
    id="a", prompt=(1, 2, 3), max_tokens=9, stop=StopRules(token_ids=ENDS), beams=BeamSearch(width=4), logprobs=0
)


def by_hand(model: Table, request: Request) -> list[tuple[list[int], float]]:
    """The rules on lists of tokens, with sums in fp64."""
    beams = request.beams
    assert beams is not None
    going_on, ended = [(tuple[int, ...](), 0.0)], list[tuple[tuple[int, ...], float]]()
    for length in range(1, request.max_tokens + 1):
        found = []
        for tokens, total in going_on:
            logits = model.logits_after([*request.prompt, *tokens], request.encoder_prompt)
            values = logits.log_softmax(-1).double().tolist()
            found += [((*tokens, token), total + value) for token, value in enumerate(values)]
        found = sorted(found, key=lambda each: -each[1])[: (1 + len(ENDS)) * beams.width]
        stops = [each[0][-1] in ENDS or length == request.max_tokens for each in found]
        ended += [
            (tokens, total / length**beams.length_penalty)
            for (tokens, total), is_end in list(zip(found, stops))[: beams.width]
            if is_end
        ]
        ended = sorted(ended, key=lambda each: -each[1])[: beams.width]
        going_on = [each for each, is_end in zip(found, stops) if not is_end][: beams.width]
        best = going_on[0][1] / length**beams.length_penalty if going_on else 0.0
        if not going_on or (len(ended) == beams.width and best <= ended[-1][1]):
            break
    return [(list(tokens), score) for tokens, score in ended]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_finds_what_the_rules_say(width: int, penalty: float, block_size: int) -> None:
    """In blocks that beams share up to any position, beside other texts and other searches."""
    for depth in (1, 3):
        model = table(block_size=block_size, num_blocks=200, max_requests=9, depth=depth)
        beams = BeamSearch(width=width, length_penalty=penalty)
        requests = [replace(REQUEST, id=str(n), prompt=(1, 2, 3, *range(n)), beams=beams) for n in range(7)]
        mixed = [each for n, each in enumerate(requests) for each in (each, replace(each, id=f"plain {n}", beams=None))]
        engine = Engine(model, options=SchedulerOptions(max_tokens=9, num_drafts=2))
        results = engine.generate(mixed)[::2]
        assert engine.statistics.cache_usage == 0
        for request, result in zip(requests, results, strict=True):
            expected = by_hand(model, request)
            assert [[token.id for token in beam.tokens] for beam in result.beams] == [tokens for tokens, _ in expected]
            assert [beam.score for beam in result.beams] == pytest.approx([score for _, score in expected], rel=1e-5)
            assert result.tokens == result.beams[0].tokens and result.finish == result.beams[0].finish
            for beam in result.beams:
                total = sum(token.logprobs.logprob for token in beam.tokens if token.logprobs)
                assert beam.score == pytest.approx(total / len(beam.tokens) ** penalty, rel=1e-5)


def test_one_beam_is_the_greedy_text() -> None:
    beams = replace(REQUEST, beams=BeamSearch(width=1), stop=StopRules())
    greedy = replace(REQUEST, id="b", beams=None, sampling=Sampling(temperature=0.0), stop=StopRules())
    found = Engine(table()).generate([beams, greedy])
    assert found[0].ids == found[1].ids and len(found[0].beams) == 1


def test_each_answer_has_its_text() -> None:
    """Without the token that ended it."""
    [result] = Engine(table(), tokenizer=Letters()).generate([REQUEST])
    assert len({beam.text for beam in result.beams}) == 4
    for beam in result.beams:
        ids = [token.id for token in beam.tokens]
        assert beam.text == Letters().detokenize([each for each in ids if each not in ENDS])
        assert beam.finish.stop == (ids[-1] if ids[-1] in ENDS else None)
    assert result.text == result.beams[0].text


def test_what_is_forbidden_is_in_no_beam() -> None:
    pair = ForbiddenAfter(previous=frozenset(range(15)), tokens=frozenset(range(15, 30)))
    for sampling in (Sampling(forbidden_after=(pair,)), Sampling(allowed_ids=frozenset(range(15)))):
        [result] = Engine(table()).generate([replace(REQUEST, sampling=sampling)])
        assert all(token.id < 15 for beam in result.beams for token in beam.tokens)
    nothing = Sampling(allowed_ids=frozenset({4}), bad_words=((4,),))
    [result] = Engine(table()).generate([replace(REQUEST, sampling=nothing)])
    assert result.finish.reason == "error"
    check_sentence(result.finish.error or "")


def test_prompts_are_scored_beside_a_search() -> None:
    request = replace(REQUEST, prompt=tuple(range(20)), prompt_logprobs=1)
    options = SchedulerOptions(max_logits=3, max_tokens=5)
    [result] = Engine(table(), options=options).generate([request])
    [plain] = Engine(table()).generate([replace(request, beams=None, max_tokens=0)])
    assert result.prompt_logprobs == plain.prompt_logprobs and len(result.beams) == 4


def test_a_search_ends_with_its_client_and_with_broken_logits() -> None:
    """No block or slot stays behind."""
    engine = Engine(table())
    engine.submit(REQUEST)
    for _ in range(3):
        assert not engine.step()
    engine.abort("a")
    assert [update.finish.reason for update in engine.step() if update.finish] == ["abort"]
    assert engine.statistics.cache_usage == engine.statistics.running == 0
    broken = Engine(table(broken=frozenset(range(10, 30))))
    assert broken.generate([REQUEST])[0].finish.reason == "error"
    assert broken.statistics.cache_usage == 0
    assert engine.generate([REQUEST])[0].beams == Engine(table()).generate([REQUEST])[0].beams


def test_an_encoder_reads_its_text_for_every_beam() -> None:
    model = table(max_encoder_length=20, max_requests=5)
    requests = [replace(REQUEST, id=str(n), prompt=(1,), encoder_prompt=tuple(range(5 + n))) for n in range(3)]
    for request, result in zip(requests, Engine(model).generate(requests)):
        assert [[token.id for token in beam.tokens] for beam in result.beams] == [
            tokens for tokens, _ in by_hand(model, request)
        ]
    assert sum(row.encoder for plan in model.plans for row in plan.rows) == 3 * 4


def test_refuses_what_has_no_room() -> None:
    engine = Engine(table(num_blocks=20, block_size=4))
    cases = [
        (replace(REQUEST, beams=BeamSearch(width=5)), "5"),
        (replace(REQUEST, beams=BeamSearch(width=0)), "0"),
        (replace(REQUEST, max_tokens=60), "19"),
        (replace(REQUEST, max_tokens=0), "max_tokens 0"),
    ]
    for request, fact in cases:
        with expect_error(DataError, fact):
            engine.check(request)


def test_copies_read_before_they_write() -> None:
    """A block may be copied to one that is itself being copied away, and keys may hold their values."""
    from megatron.core.inference.cache import KeyValueCache
    from megatron.core.ops.text_cache import Paged

    limits = replace(table().limits, num_blocks=6, block_size=2)
    layers = {0: Paged(2, 3, 3), 1: Paged(1, 4, 2, values_in_keys=True)}
    cache = KeyValueCache(layers, limits, dtype=torch.float64, device=torch.device("cpu"))
    for tensor in (*cache.keys.values(), cache.values[0]):
        tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype))
    before = {layer: (cache.keys[layer].clone(), cache.values[layer].clone()) for layer in layers}
    cache.copy([(2, 3), (1, 2)])
    for layer, (keys, values) in before.items():
        for after, old in ((cache.keys[layer], keys), (cache.values[layer], values)):
            assert torch.equal(after[:, 6:8], old[:, 4:6]) and torch.equal(after[:, 4:6], old[:, 2:4])
            assert torch.equal(after[:, :4], old[:, :4]) and torch.equal(after[:, 8:], old[:, 8:])
