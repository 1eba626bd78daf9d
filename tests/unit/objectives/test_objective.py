"""An objective replaces what it says of its family's train spec, and is chosen by settings in one place."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from typing_extensions import override

from megatron.config.flags import flag
from megatron.config.objective import ObjectiveConfig, chosen, without_objectives
from megatron.config.run import RunConfig
from megatron.core.models.registry import FAMILIES
from megatron.core.models.train_spec import TrainSpec
from megatron.core.objectives.base import Objective
from megatron.core.objectives.choice import objective_of
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch
from megatron.training.run.run import build_run
from megatron.training.step import train_step
from tests.harness.runs import tiny_config

GPT = FAMILIES["gpt"].train_spec


class HalvedConfig(ObjectiveConfig):
    """Settings of ``Halved``."""

    module: ClassVar[str] = "tests.unit.objectives.halved"

    halved: int | None = flag("Divide the loss.", default=None)

    @property
    @override
    def is_chosen(self) -> bool:
        return self.halved is not None


class OtherConfig(HalvedConfig):
    """Settings of a second objective."""


class Halved(Objective):
    """Half of the family's loss."""

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        found = super().loss(output, microbatch)
        return dataclasses.replace(
            found, sum=found.sum / 2, parts={"lm loss": found.parts["lm loss"] * torch.tensor([0.5, 1.0])}
        )


def with_groups(run: RunConfig, *groups: object) -> RunConfig:
    """The run with further settings."""
    return dataclasses.replace(run, extra=(*run.extra, *groups))


def test_an_objective_asks_its_family_for_all_it_does_not_replace() -> None:
    """A method of TrainSpec with a default of its own (workload, derived fields) would not be the family's."""
    methods = {name for name, each in vars(TrainSpec).items() if inspect.isfunction(each)}
    assert methods - set(vars(Objective)) == set()
    for name in methods:
        family = Mock(spec=TrainSpec, starts_from={"a": ()}, batch_fields={"tokens": 1}, continues_texts=True)
        family.name = "own"
        asked, objective = Mock(), Objective(family)
        given = [asked] * sum(
            each.kind == each.POSITIONAL_OR_KEYWORD
            for each in inspect.signature(getattr(objective, name)).parameters.values()
        )
        found = getattr(objective, name)(*given)
        assert found is getattr(family, name).return_value, name
        assert getattr(family, name).call_args.args == tuple(given)
    assert (objective.name, objective.batch_fields, objective.starts_from) == ("own", {"tokens": 1}, {"a": ()})
    assert objective.continues_texts


def test_a_run_trains_for_the_objective_that_its_settings_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose objective is forgotten trains for the family's loss, and says nothing."""
    module: Any = ModuleType(HalvedConfig.module)
    module.build = lambda family, run: Halved(family)
    monkeypatch.setitem(sys.modules, HalvedConfig.module, module)
    plain = tiny_config("--mock-data")
    asked = with_groups(plain, HalvedConfig(halved=2))
    assert objective_of(with_groups(plain, HalvedConfig()), GPT) is GPT
    objective = objective_of(asked, GPT)
    assert isinstance(objective, Halved) and objective_of(asked, objective) is objective
    losses = []
    for config in (plain, asked):
        run = build_run(config, GPT, ParallelContext.single(), started=0.0)
        losses.append(train_step(run, next(run.data.training_batches(0))).losses["lm loss"])
        assert run.train_spec.name == "gpt"
    assert losses[1] == pytest.approx(losses[0] / 2)


def test_a_run_has_one_objective() -> None:
    """Of two objectives one would be left out without a word."""
    run = with_groups(tiny_config("--mock-data"), HalvedConfig(halved=2), OtherConfig(halved=3))
    found = [text for group in chosen(run.extra) for rule in group.rules() if (text := rule(run))]
    assert found == ["OtherConfig and HalvedConfig both say what is trained for: leave one of them out"]
    assert chosen(without_objectives(run.extra)) == ()
