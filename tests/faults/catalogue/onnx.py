"""Faults in ONNX graphs: another model in sizes that were not traced, or beside padding."""

from __future__ import annotations

from tests.faults.fault import Fault

TESTS = ("unit/conversion/test_onnx.py",)

FAULTS = (
    Fault(
        "graphs_attend_beyond_windows",
        "megatron/core/conversion/onnx/texts.py",
        old="seen = seen & (ahead >= -before)",
        new="seen = seen & (ahead >= -10 * before)",
        suffers="A gpt-oss or Gemma exported to ONNX attends to tokens that its windows had left behind.",
        first=TESTS,
    ),
    Fault(
        "graphs_read_types_from_ids",
        "megatron/core/conversion/onnx/writing.py",
        old="name: each.clone() for name, each in graph.inputs.items()",
        new="name: each for name, each in graph.inputs.items()",
        suffers="A BERT exported to ONNX takes the ids of tokens for their types, since the tracer merges two inputs.",
        first=TESTS,
    ),
)
