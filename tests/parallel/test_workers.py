"""Ranks that compute another model than one rank would, or that wait for each other, are noticed by users only."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from megatron.config.model import ModelConfig
from megatron.config.pipeline import stages_of
from megatron.core.inference.drafts import DraftModel
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request
from megatron.core.inference.runner import CachedRunner
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.inference.workers import Leader, follow
from megatron.core.models.gpt.model import GPTModel
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.model import T5Model
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.messages import Messages
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import ParallelError
from tests.harness.ranks import fork_server, run_ranks
from tests.harness.sentences import check_sentence
from tests.tiers import tiers
from tests.unit.ssm.test_mamba import SMALL as SMALL_MAMBA
from tests.unit.ssm.test_mamba import hybrid

VOCABULARY = 40
LIMITS = RunnerLimits(num_blocks=24, block_size=4, max_requests=5, max_length=64, vocabulary=VOCABULARY)
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    position_embedding_type="rope",
    max_position_embeddings=64,
    vocab_size=VOCABULARY,
    make_vocab_size_divisible_by=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.3,
    untie_embeddings_and_output_weights=True,
)
REQUESTS = [
    Request(
        id=str(number),
        prompt=tuple(range(1, 3 + 3 * number)),
        max_tokens=6 + number,
        sampling=Sampling(temperature=0.0 if number % 2 else 1.0),
        seed=number,
        prompt_logprobs=0 if number == 2 else None,
    )
    for number in range(7)
]
SEARCH = Request(id="search", prompt=(1, 2, 3, 4), max_tokens=9, beams=BeamSearch(width=3))


def cached_runner(context: ModelContext) -> CachedRunner:
    stage = stages_of([MODEL.num_layers // context.mesh.size("pp")] * context.mesh.size("pp"))[context.mesh.rank("pp")]
    model = GPTModel(MODEL, context, stage=stage, seed=5).eval()
    return CachedRunner(model, MODEL, context, LIMITS)


def generates(context: ModelContext, num_drafts: int = 0) -> list[tuple[list[int], list[float]]] | str:
    """With drafts of the model itself, which are always right."""
    stages, messages = [cached_runner(context) for _ in range(2)], Messages(context.mesh)
    if context.mesh.world_rank:
        follow(stages, context.mesh, messages)
        return context.mesh.activity.collective
    runner, draft = [Leader(stage, context.mesh, messages, number=number) for number, stage in enumerate(stages)]
    options = SchedulerOptions(max_tokens=16, num_drafts=num_drafts)
    engine = Engine(runner, options=options, drafter=DraftModel(draft))
    *results, search = engine.generate([*REQUESTS, SEARCH])
    engine.close()
    found = [(each.ids, [score.logprob for score in each.prompt_logprobs if score is not None]) for each in results]
    return [*found, *(([token.id for token in beam.tokens], [beam.score]) for beam in search.beams)]


@pytest.mark.parametrize(
    ("tp", "pp"), [(2, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 2), (4, 1))), (2, 2)]
)
def test_texts_are_those_of_one_rank(tp: int, pp: int) -> None:
    """Of four tensor-parallel ranks, two share each key and value head."""
    expected = generates(ModelContext.single(dtype=torch.float64))
    for num_drafts in (0, 2):
        found, *others = run_ranks(generates, num_drafts, tp=tp, pp=pp, dtype=torch.float64)
        for (ids, scores), (expected_ids, expected_scores) in zip(found, expected, strict=True):
            assert ids == expected_ids
            assert scores == pytest.approx(expected_scores, rel=1e-9, abs=1e-9)
        assert others == [""] * len(others)


def goes_on(context: ModelContext) -> list[list[int]] | None:
    """Greedy texts of a hybrid with state-space layers, whose group of B and C two ranks share."""
    of = hybrid("M*-M", replace(SMALL_MAMBA, mamba_num_groups=1), context=context).eval().requires_grad_(False)
    runner, messages = CachedRunner(of, of._config, context, LIMITS), Messages(context.mesh)
    if context.mesh.world_rank:
        follow([runner], context.mesh, messages)
        return None
    engine = Engine(Leader(runner, context.mesh, messages, number=0), options=SchedulerOptions(max_tokens=16))
    *results, search = engine.generate([*REQUESTS, SEARCH])
    engine.close()
    return [*(each.ids for each in results), *([token.id for token in beam.tokens] for beam in search.beams)]


@pytest.mark.parametrize("tp", tiers([2, 4], first=[2]))
def test_states_of_a_rank_s_heads_give_the_texts_of_one_rank(tp: int) -> None:
    """Each rank keeps the states of its heads, and all of them the rows of shared groups."""
    found, *_ = run_ranks(goes_on, tp=tp, dtype=torch.float64)
    assert found == goes_on(ModelContext.single(dtype=torch.float64))


def answers(context: ModelContext, layers: Sequence[int], drafts: int = 0) -> list[list[int]] | None:
    """Of a T5 with two layers in its encoder and three in its decoder, in stages of so many ``layers``."""
    config = replace(MODEL, num_layers=2, position_embedding_type="relative", fp32_residual_connection=drafts > 0)
    limits, mesh = replace(LIMITS, max_encoder_length=24), context.mesh
    model = T5Model(
        config, T5Config(decoder_num_layers=3), context, stage=stages_of(layers)[mesh.rank("pp")], seed=5
    ).eval()
    stages = [CachedRunner(model, config, context, limits) for _ in range(2)]
    messages = Messages(mesh)
    if mesh.world_rank:
        follow(stages, mesh, messages)
        return None
    runner, draft = [Leader(stage, mesh, messages, number=number) for number, stage in enumerate(stages)]
    options = SchedulerOptions(max_tokens=16, num_drafts=drafts)
    engine = Engine(runner, options=options, drafter=DraftModel(draft) if drafts else None)
    requests = [
        replace(each, prompt=(1,), encoder_prompt=each.prompt[::-1], prompt_logprobs=None)
        for each in (*REQUESTS, SEARCH)
    ]
    *results, search = engine.generate(requests)
    engine.close()
    if drafts:
        assert engine.statistics.accepted_tokens == engine.statistics.drafted_tokens > 0
    return [*(each.ids for each in results), *([token.id for token in beam.tokens] for beam in search.beams)]


@pytest.mark.parametrize(
    ("layers", "tp", "drafts"), [((2, 3), 1, 0), ((1, 2, 2), 1, 2), ((3, 2), 2, 0)], ids=["pp", "pp3 drafts", "tp pp"]
)
def test_an_encoder_and_its_decoder_may_lie_on_several_ranks(layers: Sequence[int], tp: int, drafts: int) -> None:
    """The encoder's output must reach every stage of the decoder, while other texts are on their way.

    Drafts of the model itself are always right, if it has read the encoder's text.
    """
    expected = answers(ModelContext.single(dtype=torch.float64), (5,))
    assert expected is not None and len({tuple(ids) for ids in expected}) > 3
    found, *_ = run_ranks(answers, layers, drafts, tp=tp, pp=len(layers), dtype=torch.float64)
    assert found == expected


TOO_BUSY = "the ranks did not meet in a second"


def outlives(path: str, rank: int, dying: int, told: Connection) -> None:
    """Two ranks; one is killed while neither computes anything, the other tells how it found out."""
    store = dist.FileStore(path, 2)  # type: ignore[attr-defined]
    store.set(f"started {rank}", "")
    store.wait(["started 0", "started 1"], timedelta(seconds=60))  # gloo's time counts from its first rank on
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1))
    except RuntimeError:
        told.send(TOO_BUSY)
        return
    messages = Messages(Mesh.of(tp=2, rank=rank))
    if rank == dying:
        time.sleep(1.5)  # longer than a collective may take
        store.set("dies", "")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if rank:
            messages.receive()
        deadline = time.monotonic() + 60
        while messages.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        messages.send([1])
    except ParallelError as error:
        told.send(str(error) if store.check(["dies"]) else f"too early: {error}")


def told_by_the_other(dying: int) -> str:
    """What the rank says that outlives the other one."""
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        ranks = [context.Process(target=outlives, args=(f"{folder}/store", rank, dying, theirs)) for rank in (0, 1)]
        for process in ranks:
            process.start()
        try:
            assert ours.poll(120), "nobody noticed"
            said: str = ours.recv()
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return said


def test_a_killed_rank_is_noticed_without_requests() -> None:
    """An idle server with a dead rank would answer /health with 200, and the next request never."""
    for dying, facts in ((1, ["rank 1 of 2"]), (0, ["rank 0"])):
        while (said := told_by_the_other(dying)) == TOO_BUSY:
            pass
        check_sentence(said, *facts, hide=[r"(?<=\()[^()]*(?=\)$)"])  # gloo's words


def receives_long(context: ModelContext) -> list[list[int]]:
    messages, lengths = Messages(context.mesh), (1, 1024, 1025, 5000)
    if context.mesh.world_rank == 0:
        for length in lengths:
            messages.send(list(range(length)))
        messages.close()
        return []
    received = [messages.receive() for _ in lengths]
    messages.close()
    return received


def test_messages_of_any_length_arrive_in_order() -> None:
    """A plan with a long prompt is longer than what travels with its length."""
    _, *others = run_ranks(receives_long, tp=3)
    assert others == [[list(range(length)) for length in (1, 1024, 1025, 5000)]] * 2
