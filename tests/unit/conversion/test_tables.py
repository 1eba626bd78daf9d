"""Rows of mapping tables for the parameters of a model."""

from __future__ import annotations

from unittest import mock

from megatron.config.model import ModelConfig
from megatron.core.conversion import tables
from megatron.core.conversion.tables import Row, matches
from megatron.core.parallel.sharding import Sharding
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error


def test_a_parameter_of_the_model_itself_has_a_row() -> None:
    """A family whose model holds a parameter outside every module could not be converted: no row named it."""
    model = ModelConfig(num_layers=2, hidden_size=4, num_attention_heads=2)
    held = {"mask": Sharding((4,)), "stack.layers.1.scale": Sharding((4,)), "norm.weight": Sharding((4,))}
    table = (
        Row("mask", "theirs.mask", is_parameter=True),
        Row("stack.layers.{n}.scale", "theirs.{n}.s", is_parameter=True),
        Row("norm", "theirs.norm"),
    )
    with mock.patch.object(tables, "parameters_of", return_value=held):
        found = matches(table, model, where="x")
    assert [each.theirs for each in found] == [("theirs.mask",), ("theirs.1.s",), ("theirs.norm.weight",)]


def test_a_parameter_that_a_format_does_not_name_is_said() -> None:
    """A family of one's own with experts was to be downloaded again, though it had just been trained here."""
    model = ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=2)
    held = {"norm.weight": Sharding((4,)), "stack.layers.0.router.weight": Sharding((4,))}
    with (
        mock.patch.object(tables, "parameters_of", return_value=held),
        expect_error(CheckpointError, "an own model", "stack.layers.0.router.weight"),
    ):
        matches((Row("norm", "theirs.norm"),), model, where="an own model")
