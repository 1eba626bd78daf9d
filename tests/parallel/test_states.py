"""States of fixed size on several ranks: each rank keeps its channels, and each stage its layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.config.pipeline import stages_of
from megatron.core.inference.drafts import DraftModel
from megatron.core.inference.engine import Engine
from megatron.core.inference.request import BeamSearch, Request
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.workers import Leader, follow
from megatron.core.parallel.messages import Messages
from megatron.core.parallel.model_context import ModelContext
from tests.harness.ranks import run_ranks
from tests.unit.inference.test_states import GREEDY, LIMITS, PROMPTS, model, runner


def answers(context: ModelContext, layers: tuple[int, ...], num_drafts: int = 0) -> list[list[int]]:
    """Texts, choices of one prompt, and the beams of a search; the first stage has attention alone.

    Drafts are those of the model itself, which are right.
    """
    mesh = context.mesh
    limits = replace(LIMITS, max_requests=5, has_states=True, num_snapshots=2)
    stage = stages_of(layers)[mesh.rank("pp")]
    of, messages = model("*aa*", context, stage=stage), Messages(mesh)
    steps = [runner(of, limits) for _ in range(2)]
    if mesh.world_rank:
        follow(steps, mesh, messages)
        return []
    leader, draft = (Leader(each, mesh, messages, number=number) for number, each in enumerate(steps))
    options = SchedulerOptions(max_tokens=12, num_drafts=num_drafts)
    engine = Engine(leader, options=options, drafter=DraftModel(draft))
    prompts = [*PROMPTS, PROMPTS[6], PROMPTS[6]]
    asked = [Request(id=str(n), prompt=each, max_tokens=7, sampling=GREEDY) for n, each in enumerate(prompts)]
    search = Request(id="search", prompt=PROMPTS[4], max_tokens=6, beams=BeamSearch(width=3))
    *texts, found = engine.generate([*asked, search])
    assert engine.statistics.prefix_hits > 0
    assert engine.statistics.accepted_tokens == engine.statistics.drafted_tokens
    engine.close()
    return [*(each.ids for each in texts), *([token.id for token in beam.tokens] for beam in found.beams)]


def test_texts_are_those_of_one_rank() -> None:
    """A stage without states must carry copies of other stages' states, with several steps, and drafts, in flight."""
    expected = answers(ModelContext.single(dtype=torch.float64), (4,))
    found, *_ = run_ranks(answers, (1, 3), 2, tp=2, pp=2, dtype=torch.float64)
    assert found == expected
