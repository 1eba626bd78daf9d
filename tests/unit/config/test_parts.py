"""Parts of models: groups of settings that several families may have, several of them at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from typing_extensions import override

from megatron.config.family import FamilyConfig, PartConfig, Rule
from megatron.config.flags import architecture_flag
from megatron.config.layer_patterns import every_or_listed, shortest_pattern
from megatron.config.moe import MoEConfig
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig
from megatron.core.models.bert.config import BertConfig
from megatron.core.models.t5.config import T5Config
from megatron.errors import ConfigError
from megatron.planning.shrinking import SMALL_VOCABULARY, shrunk, without_files
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse

if TYPE_CHECKING:
    from typing_extensions import Self


class StateSpaceConfig(PartConfig):
    """A part of a user's own, beside experts."""

    state_width: int | None = architecture_flag("Width of a state.", default=None, at_least=1)

    @override
    def rules(self) -> Sequence[Rule]:
        """A rule about the part."""
        return (
            rule(
                "--state-width {run.model.hidden_size} is the --hidden-size; give less",
                lambda run: run.part(StateSpaceConfig).state_width == run.model.hidden_size,
            ),
        )

    @override
    def remarks(self) -> Sequence[Rule]:
        """A remark about the part."""
        return (lambda run: "--state-width 3: an odd width" if self.state_width == 3 else None,)

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """Words for a report."""
        return (f"states of {self.state_width} in {run.num_layers} layers",) if self.state_width else ()

    @override
    def shrunk(self, stacks: Sequence[int], small: Sequence[int]) -> Self:
        """A narrow part."""
        return dataclasses.replace(self, state_width=2)


class OwnConfig(FamilyConfig):
    """A user's family that may have both parts."""

    name: ClassVar[str] = "own"


BOTH: dict[str, Any] = {"extra_groups": (OwnConfig, StateSpaceConfig, MoEConfig)}


def test_a_run_has_several_parts() -> None:
    """Two groups of parts in one family were refused: each was taken for a family."""
    run = parse("--state-width 16 --num-experts 4 --moe-layer-freq 2", **BOTH)
    assert (run.family.name, run.part(StateSpaceConfig).state_width, run.part(MoEConfig).num_experts) == ("own", 16, 4)
    assert [words for part in run.parts for words in part.described(run)] == [
        "states of 16 in 4 layers",
        "4 experts of 256 in 2 layers, 2 for each token",
    ]


def test_rules_and_remarks_of_all_parts() -> None:
    """A rule of the second part, or of the family, must not be lost."""
    with expect_error(ConfigError, "--state-width 64", "--hidden-size", "--moe-router-topk 5", "--num-experts 4"):
        parse("--state-width 64 --num-experts 4 --moe-router-topk 5", **BOTH)
    notes = parse("--state-width 3 --num-experts 4", **BOTH).notes
    assert any("an odd width" in note for note in notes) and any("nothing balances" in note for note in notes)


def test_a_small_copy_keeps_every_part() -> None:
    """The parity check of a run with two parts compared models without experts."""
    run = parse("--num-layers 12 --state-width 16 --num-experts 4 --moe-layer-freq [0]*11+[1]", **BOTH)
    little = shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3))
    assert little.part(StateSpaceConfig).state_width == 2
    assert little.part(MoEConfig).expert_layers(*little.stacks) == (False, True)


def test_a_family_without_the_part_has_a_model_without_it() -> None:
    """Whoever asks for a part need not know which families may have it."""
    run = parse(extra_groups=(OwnConfig,))
    assert run.part(MoEConfig) == MoEConfig() and not run.divides_over_expert_ranks
    with expect_error(ConfigError):
        parse("--expert-model-parallel-size 2", ranks=2, extra_groups=(OwnConfig,))


def test_layers_of_two_stacks() -> None:
    """A number counts in each stack of a T5, and a list names the layers of both, the encoder's first."""
    assert every_or_listed("2", 3, 2, flag="--x") == (True, False, True, True, False)
    assert every_or_listed("[0]*3+[1]*2", 3, 2, flag="--x") == (False, False, False, True, True)
    assert shortest_pattern((True, False, True, True, False), 3, 2) == "2"
    assert shortest_pattern((True, False, True, False, True), 3, 2) == "[1,0,1,0,1]"
    with expect_error(ConfigError, "3", "4", "2"):
        parse(
            "--decoder-num-layers 2 --num-experts 4 --moe-layer-freq [1]*3",
            extra_groups=(T5Config, MoEConfig),
        )


def test_dense_layers_at_the_start_of_each_stack() -> None:
    """--first-k-dense-replace speaks of the stack that a token passes."""
    run = parse(
        "--decoder-num-layers 2 --num-experts 4 --first-k-dense-replace 1",
        extra_groups=(T5Config, MoEConfig),
    )
    assert run.part(MoEConfig).expert_layers(*run.stacks) == (False, True, True, True, False, True)
    with expect_error(ConfigError, "--num-layers 4", "--decoder-num-layers 6", "10"):
        parse(
            "--decoder-num-layers 6 --num-experts 4 --first-k-dense-replace 6",
            extra_groups=(T5Config, MoEConfig),
        )


@pytest.mark.parametrize("kind", [T5Config, BertConfig])
def test_a_small_copy_of_a_sentence_family_keeps_experts(kind: type[FamilyConfig]) -> None:
    """Each stack keeps the kinds of its first and its last layers, and never loses its experts."""
    run = parse("--num-layers 12 --num-experts 4 --moe-layer-freq 5", extra_groups=(kind, MoEConfig))
    little = shrunk(without_files(run, vocab_size=SMALL_VOCABULARY, steps=3))
    assert run.part(MoEConfig).expert_layers(12)[-1] is False
    wanted = {(2,): (True, False), (1, 1): (True, True)}
    assert little.part(MoEConfig).expert_layers(*little.stacks) == wanted[little.stacks]
