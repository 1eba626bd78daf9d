"""Whatever arrives, whenever it leaves, and however little room there is: no block is lost and no text changes."""

from __future__ import annotations

import gc
import random
import resource
import threading
from dataclasses import dataclass, replace
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from megatron.core.inference.drafts import DraftModel
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request, StopRules
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduled_text import ScheduledText
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import StepPlan
from megatron.errors import DataError
from tests.harness.table_model import Table, table
from tests.tiers import many

VOCABULARY = 12  # few tokens, so that texts share beginnings and repeat themselves


@dataclass(frozen=True)
class Setting:
    """A memory, and how it is used."""

    num_blocks: int
    block_size: int
    max_requests: int
    depth: int
    options: SchedulerOptions
    has_draft_model: bool
    num_snapshots: int | None = None  # None: a model without states


settings_of_engines = st.builds(
    Setting,
    num_blocks=st.integers(26, 60),
    block_size=st.sampled_from([1, 2, 3, 5]),
    max_requests=st.integers(1, 5),
    depth=st.integers(1, 3),
    options=st.builds(
        SchedulerOptions,
        max_tokens=st.integers(5, 30),
        max_logits=st.integers(1, 9),
        chunked_prefill=st.booleans(),
        prefix_caching=st.booleans(),
        num_drafts=st.integers(0, 4),
    ),
    has_draft_model=st.booleans(),
    num_snapshots=st.sampled_from([None, 0, 1, 3]),
)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
requests = st.lists(
    st.builds(
        Request,
        id=st.just(""),
        prompt=prompts,
        max_tokens=st.integers(0, 9),
        sampling=st.sampled_from([Sampling(temperature=0.0), Sampling()]),
        seed=st.integers(0, 2),
        stop=st.sampled_from([StopRules(), StopRules(token_ids=frozenset({1}))]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        beams=st.sampled_from([None, None, BeamSearch(width=2), BeamSearch(width=3, length_penalty=0.5)]),
    ),
    min_size=1,
    max_size=9,
)


def new_engine(setting: Setting) -> tuple[Engine, Table]:
    def runner(*, depth: int = 1, is_draft: bool = False) -> Table:
        return table(
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            max_requests=setting.max_requests,
            depth=depth,
            vocabulary=VOCABULARY,
            is_draft=is_draft,
            has_states=setting.num_snapshots is not None,
            num_snapshots=setting.num_snapshots or 0,
        )

    model = runner(depth=setting.depth)
    drafter = DraftModel(runner(is_draft=True)) if setting.has_draft_model else None
    return Engine(model, options=setting.options, drafter=drafter), model


@cache
def expected(request: Request) -> tuple[list[int], int]:
    """What a request is answered alone, with room for everything."""
    result = Engine(table(vocabulary=VOCABULARY)).generate([request])[0]
    return [token.id for token in result.tokens], len(result.prompt_logprobs)


def can_answer(engine: Engine, request: Request) -> bool:
    """Whether there is room for all beams of a search."""
    try:
        engine.check(request)
    except DataError:
        return False
    return True


def check_blocks(engine: Engine) -> None:
    pool = engine._scheduler.pool
    texts = engine._scheduler.running
    held = {block for text in texts for block in text.blocks}
    assert pool.num_held == len(held)
    assert pool.num_available + pool.num_held == pool.num_blocks
    assert sum(pool._holders.values()) == sum(len(text.blocks) for text in texts)
    assert len({text.slot for text in texts}) == len(texts) <= engine.limits.max_requests
    searches = engine._scheduler._searches
    slots = [text.slot for text in texts if text.slot is not None] + [slot for each in searches for slot in each.slots]
    assert sorted([*slots, *engine._scheduler._slots]) == list(range(engine.limits.max_requests))
    assert all(each.num_missing >= 0 for each in searches)
    assert sum(each.num_missing for each in searches) <= pool.num_available


def test_a_text_that_waits_for_blocks_leaves_its_turn_to_a_search() -> None:
    """With several steps in flight it took the only turn of each step, got no block, and all requests stood still."""
    options = SchedulerOptions(max_tokens=5, max_logits=1, chunked_prefill=False, prefix_caching=False, num_drafts=0)
    setting = Setting(num_blocks=36, block_size=1, max_requests=3, depth=3, options=options, has_draft_model=False)
    greedy = Sampling(temperature=0.0)
    asked = [
        Request(id="0", prompt=(0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0), max_tokens=3, sampling=greedy),
        Request(id="1", prompt=(0, 0, 0, 0, 0, 2), max_tokens=5, sampling=greedy, beams=BeamSearch(width=2)),
    ]
    engine, _ = new_engine(setting)
    for request in asked:
        engine.submit(request)
    ends = [update.request_id for _ in range(30) for update in engine.step() if update.finish is not None]
    assert sorted(ends) == ["0", "1"]
    assert not engine.has_work


@given(settings_of_engines, requests, st.lists(st.integers(0, 8), max_size=9), st.sets(st.integers(0, 8), max_size=2))
def test_texts_depend_on_their_request_alone(
    setting: Setting, asked: list[Request], arrivals: list[int], left: set[int]
) -> None:
    """Any arrivals, chunks, forced preemption, prefix cache on and off, drafts, many steps in flight, aborts."""
    engine, runner = new_engine(setting)
    asked = [replace(request, id=str(number)) for number, request in enumerate(asked) if can_answer(engine, request)]
    ids: dict[str, list[int]] = {request.id: [] for request in asked}
    scores = dict.fromkeys(ids, 0)
    ends: dict[str, str] = {}
    waiting = [(arrivals[number] if number < len(arrivals) else 0, request) for number, request in enumerate(asked)]
    for step in range(10_000):
        for when, request in waiting:
            if when == step:
                engine.submit(request)
        if step == 5:
            for number in left:
                engine.abort(str(number))
        for update in engine.step():
            assert update.request_id not in ends
            ids[update.request_id] += [token.id for token in update.tokens]
            scores[update.request_id] += len(update.prompt_logprobs)
            if update.finish is not None:
                ends[update.request_id] = update.finish.reason
        check_blocks(engine)
        if not engine.has_work and step > max((when for when, _ in waiting), default=0):
            break
    assert engine.statistics.cache_usage == 0
    for request in asked:
        tokens, num_scores = expected(replace(request, id=""))
        if ends[request.id] == "abort":
            assert ids[request.id] == tokens[: len(ids[request.id])]
        else:
            assert (ids[request.id], scores[request.id]) == (tokens, num_scores)
    check_budget(runner.plans, setting)


def check_budget(plans: list[StepPlan], setting: Setting) -> None:
    for plan in plans:
        assert plan.rows
        assert plan.num_tokens <= setting.options.max_tokens or len(plan.rows) == 1


def test_nothing_is_lost_in_thousands_of_requests() -> None:
    """A server that leaks a block a request is full after a day."""
    count = many(10_000)
    runner = table(num_blocks=40, max_requests=8, vocabulary=VOCABULARY)
    engine = Engine(runner, options=SchedulerOptions(max_tokens=24))
    chance = random.Random(1)
    gc.collect()
    threads = threading.active_count()
    before = 0
    asked = ended = 0
    while asked < count or engine.has_work:
        while asked < count and engine.statistics.waiting < 8:
            prompt = tuple(chance.choices(range(3), k=chance.randrange(1, 12)))
            engine.submit(Request(id=str(asked), prompt=prompt, max_tokens=chance.randrange(4)))
            asked += 1
            if chance.random() < 0.2:
                engine.abort(str(chance.randrange(max(0, asked - 16), asked)))
        ended += sum(update.finish is not None for update in engine.step())
        runner.plans.clear()
        check_blocks(engine)
        if asked >= count // 2 and not before:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert ended == count
    assert engine.statistics.cache_usage == 0
    assert threading.active_count() == threads
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5_000


def test_answers_to_other_questions_share_no_block() -> None:
    """Every answer of an encoder-decoder begins with the same token: its keys and values depend on the question."""
    texts = [
        ScheduledText(Request(id="", prompt=(1,) * 6, encoder_prompt=(each,), max_tokens=1), 0) for each in (5, 6, 5)
    ]
    for text in texts:
        text.extend_keys(2)
    one, other, same = (text.keys for text in texts)
    assert len(one) == 3 and one == same
    assert {*one}.isdisjoint(other)
