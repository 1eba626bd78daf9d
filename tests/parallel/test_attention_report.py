"""The attention that the start-up report names is the one that layers call, however ranks exchange keys."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.ops.attention import partial, registry
from megatron.core.ops.attention.registry import Backend
from megatron.core.ops.backend_choice import Choice
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.run.attention import attention_choices, check_backend
from megatron.training.step import train_step
from tests.harness import run_ranks
from tests.harness.runs import tiny_config, tiny_run
from tests.harness.sentences import expect_error


def told_and_called(context: ParallelContext, flags: str, ways: dict[str, Any]) -> tuple[str, set[tuple[str, bool]]]:
    """What the report says, and the backends that a training step calls, with whether for parts of the keys."""
    context = replace(context, **ways)
    run, called = tiny_run(context, f"--mock-data {flags}"), set()

    def noted(q: Tensor, k: Tensor, *call: Any, partial: bool = False) -> Choice[Backend]:
        choice = registry.choice_for(q, k, *call, partial=partial)
        called.add((choice.name, partial))
        return choice

    with mock.patch.object(partial, "choice_for", noted), mock.patch("megatron.core.ops.attention.choice_for", noted):
        train_step(run, next(run.data.training_batches(0)))
    return attention_choices(run.config, run.train_spec, context), called


REFUSED = "sdpa refused: it draws dropout (0.1) from torch's global generator, which cannot be replayed"
STILL, SLICED = "--attention-dropout 0", "--context-parallel-size 2"


@pytest.mark.parametrize(
    ("flags", "ways", "told", "called"),
    [
        (f"{SLICED} {STILL}", {}, "p2p: sdpa", {("sdpa", True)}),
        (SLICED, {}, f"p2p: chunked ({REFUSED})", {("chunked", True)}),
        (f"{SLICED} {STILL} --reset-attention-mask", {}, "p2p: sdpa", {("sdpa", True)}),
        (
            f"{SLICED} --cp-comm-type a2a all_gather --attention-backend eager",
            {"cp_comm_types": ("a2a", "all_gather")},
            "a2a: eager; all_gather: eager",
            {("eager", False), ("eager", True)},
        ),
    ],
)
def test_report_names_what_is_called(
    flags: str, ways: dict[str, Any], told: str, called: set[tuple[str, bool]]
) -> None:
    """Somebody who looks for the reason of a slow run is led astray by any other name."""
    assert run_ranks(told_and_called, flags, ways, cp=2) == [(told, called)] * 2


def test_a_dry_run_refuses_a_backend_that_no_device_has() -> None:
    """A backend that couldn't compute ALiBi passed the dry run, and the job ended when it started."""
    run = tiny_config("--mock-data --position-embedding-type alibi --attention-dropout 0")
    backends: dict[Any, bool] = {"sdpa": False, "chunked": True}
    for backend, works in backends.items():
        asked = replace(run, model=replace(run.model, attention_backend=backend))
        with nullcontext() if works else expect_error(ConfigError, f"--attention-backend {backend}"):
            check_backend(asked, GPTSpec())
