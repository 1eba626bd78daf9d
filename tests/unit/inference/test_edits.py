"""No request may hold up its neighbours. What its settings cost is counted in work: times depend on the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from megatron.core.inference import beams, edits
from megatron.core.inference.block_pool import BlockPool
from megatron.core.inference.edits import Edits
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request, StopRules
from megatron.core.inference.sampler import SampleRow, SamplerState, sample
from megatron.core.inference.sampling import ForbiddenAfter, Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.stop_strings import StopStrings
from tests.harness.table_model import table

SIZE = 3000
ALL = range(SIZE)
STOP = StopRules(token_ids=frozenset(ALL))
HEAVY: dict[str, Sampling] = {
    "logit_bias": Sampling(logit_bias=tuple((token, token / SIZE) for token in ALL)),
    "allowed_ids": Sampling(allowed_ids=frozenset(range(1, SIZE))),
    "min_tokens": Sampling(min_tokens=5, allowed_ids=None),
    "forbidden_after": Sampling(forbidden_after=(ForbiddenAfter(previous=frozenset(ALL), tokens=frozenset(ALL[1:])),)),
    "bad_words": Sampling(bad_words=tuple((token,) for token in ALL[1:])),
}


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch is asked to compute."""

    count = 0

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def num_operations(state: SamplerState) -> int:
    operations = Operations()  # type: ignore[no-untyped-call]
    with operations:
        sample(torch.zeros(1, SIZE), [SampleRow(state)])
    return operations.count


@pytest.mark.parametrize("name", HEAVY)
def test_a_token_costs_a_few_operations_however_many_ids_a_request_names(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias for each token of the vocabulary was added in a Python loop, for each of 128 choices and each token of
    them: nobody else got an answer for four minutes.
    """
    made = Counter[str]()
    plain = edits._Tensors.of

    def counted(*args: Any) -> Any:
        made["tensors"] += 1
        return plain(*args)

    monkeypatch.setattr(edits._Tensors, "of", counted)
    prompt, sampling = (1, 2), HEAVY[name]
    stop = STOP if name == "min_tokens" else StopRules()
    latest, states = None, list[SamplerState]()
    for choice in range(20):
        request = Request(id=str(choice), prompt=prompt, max_tokens=9, sampling=sampling, stop=stop, choice=choice)
        latest = Edits.of(request, latest)
        states.append(SamplerState(request, latest))
    num_operations(states[0])
    neutral = SamplerState(Request(id="r", prompt=prompt, max_tokens=9))
    assert max(map(num_operations, states)) <= num_operations(neutral) + 8
    assert made == {"tensors": 1}, "each choice has made its own"


def test_the_engine_shares_the_tensors_of_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Sampling]()
    plain = edits._Tensors.of

    def counted(sampling: Sampling, *rest: Any) -> Any:
        made.append(sampling)
        return plain(sampling, *rest)

    monkeypatch.setattr(edits._Tensors, "of", counted)
    model = table(max_requests=9)
    heavy = Sampling(logit_bias=tuple((token, 0.5) for token in range(model.limits.vocabulary)))
    stop = StopRules()
    requests = [
        Request(id=str(n), prompt=(1, 2), max_tokens=7, sampling=heavy, stop=stop, choice=n, seed=3) for n in range(9)
    ]
    found = Engine(model).generate(requests)
    plain_ids = Engine(table(max_requests=9)).generate([replace(each, sampling=Sampling()) for each in requests])
    assert [each.ids for each in found] == [each.ids for each in plain_ids]  # the same bias for all changes nothing
    assert made == [heavy]


def backwards(tokens: Sequence[int], read: list[int]) -> Iterator[int]:
    for token in reversed(tokens):
        read.append(token)
        yield token


def test_bad_words_read_no_more_of_a_text_than_it_shares_with_one() -> None:
    """Each of 256 words was compared with the end of the text, for each token."""
    words = edits._Words([(*[1] * length, 9) for length in range(1, 50)] + [(2, 3, 7), (4, 3, 8), (3, 5)])
    read = list[int]()
    assert words.completing(backwards([1] * 1000, read)) == {9} and len(read) == 50
    for text, expected in (([2, 3], {7, 5}), ([4, 3], {8, 5}), ([3], {5}), ([2, 3, 6], set()), ([], set())):
        assert words.completing(reversed(text)) == expected


class Compared(str):
    """A text that counts how often it is compared."""

    __slots__ = ()
    times = 0

    @override
    def startswith(self, *args: Any) -> bool:
        Compared.times += 1
        return super().startswith(*args)


def test_stop_strings_compare_one_of_them_for_each_character() -> None:
    strings = [Compared("=" * length + "x" * 900) for length in range(1, 65)]
    stops = StopStrings(strings)
    shown = "".join(stops.add("y" * 128) for _ in range(10))
    assert Compared.times <= 1280
    assert shown == "y" * 1280 and stops.add("=" * 64 + "xx") == "" and stops.add("z") == "=" * 64 + "xxz"


def test_a_search_looks_at_as_many_tokens_as_it_has_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sorted width times as many as tokens end a text, which may be all, and read each beam's text anew."""
    counts, appended, plain = list[int](), list[int](), beams._best

    def counted(sums: Tensor, count: int) -> Any:
        counts.append(count)
        return plain(sums, count)

    append = SamplerState.append

    def counted_append(state: SamplerState, token: int) -> None:
        appended.append(token)
        append(state, token)

    monkeypatch.setattr(beams, "_best", counted)
    monkeypatch.setattr(SamplerState, "append", counted_append)
    model = table(max_requests=4, num_blocks=200)
    ends = frozenset(range(2, model.limits.vocabulary))
    search = Request(
        id="a",
        prompt=(1, 2, 3),
        max_tokens=12,
        stop=StopRules(token_ids=ends),
        sampling=Sampling(repetition_penalty=1.2, min_tokens=12),
        beams=BeamSearch(width=3),
    )
    Engine(model).generate([search])
    assert set(counts) == {3} and len(appended) <= 3 * 12


def test_choices_that_wait_for_their_prompt_look_for_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 127 looked up every block of a long prompt at each step in which the first one read a part of it."""
    looked = list[int]()
    find = BlockPool.find

    def counted(pool: BlockPool, keys: Sequence[bytes]) -> list[int]:
        looked.append(len(keys))
        return find(pool, keys)

    monkeypatch.setattr(BlockPool, "find", counted)
    model = table(block_size=4, num_blocks=400, max_requests=8)
    prompt = tuple(range(1, 25)) * 2
    requests = [Request(id=str(n), prompt=prompt, max_tokens=2, choice=n) for n in range(8)]
    Engine(model, options=SchedulerOptions(max_tokens=8)).generate(requests)
    assert len(looked) <= 2 * len(requests)
