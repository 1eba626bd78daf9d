"""--model-type: every family is in the one list, and a tool takes its flags and no others'."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.models.bert.config import BertConfig
from megatron.core.models.registry import FAMILIES, Family, family_named, family_of
from megatron.errors import CheckpointError, ConfigError
from megatron.training.pretrain import ModelTypeConfig, parse_any_family
from tests.harness.data import REPOSITORY
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import words


@pytest.mark.parametrize("known", FAMILIES.values(), ids=FAMILIES)
def test_every_family_has_a_train_spec_and_a_command(known: Family) -> None:
    """A line in the list without the rest would fail at the first user of a tool."""
    assert known.train_spec.name == known.name
    assert (REPOSITORY / f"pretrain_{known.name}.py").exists()
    assert family_of(group() for group in known.groups) is known
    needed = {"vlm": "--vision-model-type clip --img-h 28 --img-w 28"}.get(known.name, "")
    config = parse_any_family(words(f"--model-type {known.title} {needed}"), prog="tool")
    assert config.group(ModelTypeConfig).model_type == known.title
    assert family_of(config.extra) is known


def test_flags_are_those_of_the_family(tmp_path: Path) -> None:
    """Also where a file names it; GPT where nobody does."""
    assert parse_any_family(words("--model-type BERT --mask-prob 0.3"), prog="x").group(BertConfig).mask_prob == 0.3
    (tmp_path / "run.yaml").write_text("model_type: BERT\nmask_prob: 0.2\n")
    assert parse_any_family(words(f"--config {tmp_path}/run.yaml"), prog="x").group(BertConfig).mask_prob == 0.2
    assert family_of(parse_any_family(words(""), prog="x").extra).name == "gpt"
    with expect_error(ConfigError, "--mask-prob", "pretrain_bert.py"):
        parse_any_family(words("--mask-prob 0.3"), prog="x")
    with expect_error(ConfigError, "--model-type", "'Bert'"):
        parse_any_family(words("--model-type Bert"), prog="x")


def test_a_family_that_is_not_known() -> None:
    """A checkpoint of a version to come, or of somebody else's family: its owner must learn what to install."""
    with expect_error(CheckpointError, "'mamba'"):
        family_named("mamba", where="here")
