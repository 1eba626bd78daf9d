"""Forms of fine-tuning data, and files of one JSON list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.core.tokenizers.json_records import read_records
from megatron.core.tokenizers.records import FIELDS, Conversation, Pair, read_sample
from megatron.errors import DataError
from tests.harness.sentences import expect_error

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "short"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("record", "form", "messages"),
    [
        ({"messages": [USER, ANSWER], "conversations": None}, "messages", [USER, ANSWER]),
        (
            {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
            "lists of messages as prompt and completion",
            [SYSTEM, USER, ANSWER],
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "short"},
            "ShareGPT's conversations",
            [SYSTEM, USER, ANSWER],
        ),
        ({"conversations": [USER, ANSWER]}, "ShareGPT's conversations", [USER, ANSWER]),
        (
            {
                "conversations": [
                    {"from": "user", "value": "hi"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "7"},
                    {"from": "gpt", "value": "yo"},
                ]
            },
            "ShareGPT's conversations",
            [USER, CALL, {"role": "tool", "content": "7"}, ANSWER],
        ),
        (
            {"instruction": "hi", "input": "", "output": "yo", "system": "short"},
            "Alpaca's instruction and output",
            [SYSTEM, USER, ANSWER],
        ),
        (
            {"instruction": "hi", "input": "you", "output": "yo", "history": [["hi", "yo"]]},
            "Alpaca's instruction and output",
            [USER, ANSWER, {"role": "user", "content": "hi\nyou"}, ANSWER],
        ),
    ],
)
def test_forms(record: dict[str, Any], form: str, messages: list[dict[str, Any]]) -> None:
    """Each but the first was refused."""
    found = read_sample(record)
    assert isinstance(found, Conversation)
    assert (found.form, list(found.messages)) == (form, messages)
    read = 2 if "prompt" in record else 0
    assert [found.has_loss(number) for number in range(len(messages))] == [n >= read for n in range(len(messages))]


def test_a_pair_of_texts() -> None:
    assert read_sample({"prompt": "a", "completion": "b"}) == Pair("a", "b")


@pytest.mark.parametrize(
    "beside", [{"tools": TOOLS}, {"tools": json.dumps(TOOLS)}, {"functions": [{"name": "f"}]}, {"tools": []}]
)
def test_tools(beside: dict[str, Any]) -> None:
    """As a list, as JSON text in files whose columns have one type, and in the deprecated form."""
    found = read_sample({"messages": [USER, ANSWER], **beside})
    assert isinstance(found, Conversation)
    assert found.tools == (TOOLS if beside != {"tools": []} else None)


@pytest.mark.parametrize(
    "record",
    [
        {"text": "x"},
        {},
        {"messages": [USER, ANSWER | {"weight": 0.5}]},
        {"messages": [USER, ANSWER | {"weight": True}]},
        {"messages": [USER, ANSWER | {"weight": []}, {"role": "assistant"}]},
        {"prompt": [USER], "completion": "yo"},
        {"prompt": [USER], "completion": []},
        {"prompt": [USER], "completion": [ANSWER, {"role": "assistant"}]},
        {"prompt": [{}], "completion": [ANSWER]},
        {"conversations": "x"},
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": None}], "system": "x"},
        {"conversations": [USER, ANSWER | {"weight": 2}], "system": "x"},
        {"conversations": [{"from": 1}]},
        {"conversations": [{"from": "function_call", "value": "f()"}]},
        {"instruction": 1, "output": "x"},
        {"instruction": "x", "input": 1, "output": "x"},
        {"instruction": "x", "output": 1},
        {"instruction": "x", "output": "x", "history": [["x", 1]]},
        {"instruction": "x", "output": "x", "history": [1]},
    ],
)
def test_what_is_refused(record: dict[str, Any]) -> None:
    """Each error names the place as the record does; those of other forms spoke of messages, counted otherwise."""
    with expect_error(DataError):
        read_sample(record)


@pytest.mark.parametrize("spread", [None, 1])
def test_a_file_of_one_list(tmp_path: Path, spread: int | None) -> None:
    """Alpaca's and ShareGPT's own files are one list; line 1 was "not JSON", or "a list"."""
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"a": 1}, {"b": "]"}, 5, {}], indent=spread) + "\n\n")
    found = list(read_records([str(path)], columns=FIELDS))
    assert [each.value for each in found if isinstance(each.value, dict)] == [{"a": 1}, {"b": "]"}, {}]
    assert [each.line for each in found] == ([2, 5, 8, 9] if spread else [1] * 4)
    assert str(found[2].value) == "5 instead of a JSON object"
    path.write_text("[ ]")
    assert list(read_records([str(path)], columns=FIELDS)) == []
    for damaged in ('[{"a": 1}', '[{"a": 1} {"b": 1}]', "[1, x]", '[{"a": 1}]\n[]', "[1,"):
        path.write_text(damaged)
        with expect_error(DataError):
            list(read_records([str(path)], columns=FIELDS))
    path.write_text('[{"a": 1},\n{"a":\n x}]')
    with expect_error(DataError, "alpaca.json:3", "JSON"):
        list(read_records([str(path)], columns=FIELDS))
    for hostile in ("[" * 100_000, f"[{'9' * 6000}]"):
        path.write_text(hostile)
        with expect_error(DataError, "json:1"):
            list(read_records([str(path)], columns=FIELDS))
    path.write_bytes(b'["\xff"]')
    with expect_error(DataError, "UTF-8", "0xff", "3"):
        list(read_records([str(path)], columns=FIELDS))


def test_rows_of_parquet(tmp_path: Path) -> None:
    """Where a column has one type, every field that any message has is there, as null; the rows were empty objects."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs it")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = str(tmp_path / "a.parquet")
    messages = [{**USER, "tool_calls": None}, {**ANSWER, "tool_calls": None}]
    parquet.write_table(pyarrow.table({"messages": [messages], "score": [b"x"]}), path)
    [record] = read_records([path], columns=FIELDS)
    assert isinstance(record.value, dict)
    found = read_sample(record.value)
    assert isinstance(found, Conversation)
    assert found.messages == [USER, ANSWER]
    parquet.write_table(pyarrow.table({"text": ["x"]}), path)
    with expect_error(DataError):
        list(read_records([path], columns=FIELDS))
    Path(path).write_bytes(b"PAR1")
    with expect_error(DataError, "a.parquet"):
        list(read_records([path], columns=FIELDS))
