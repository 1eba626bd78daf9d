"""Input files as users have them: several, packed, damaged, with lines that hold no document."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron.core.tokenizers.input_files import find_inputs, is_plain_text, total_size
from megatron.core.tokenizers.line_batches import LineBatch
from megatron.core.tokenizers.text_files import read_batches, read_documents, read_plain_lines
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import check_sentence, expect_error

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.compress,
}


def lines_of(path: Path, *, batch_bytes: int) -> list[bytes]:
    return [batch.data for batch in read_batches([str(path)], batch_bytes=batch_bytes)]


def parse(*lines: bytes, keys: tuple[str, ...] = ("text",)) -> tuple[list[str], list[str]]:
    """Texts under the first key, and what is said about the other lines."""
    documents = read_documents(LineBatch("in.jsonl", 1, b"\n".join(lines) + b"\n", 0), keys)
    return documents.texts[keys[0]], [str(bad) for bad in documents.bad]


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("batch_bytes", [1, 7, 64, 1 << 20])
def test_batches_are_whole_lines(tmp_path: Path, ending: str, batch_bytes: int) -> None:
    """Wherever batches are cut, and whatever the file is packed with, no line is lost, doubled or split."""
    content = b"".join(b"line %d\n" % n * (n % 3) for n in range(40)) + b"last without end"
    path = tmp_path / f"in.jsonl{ending}"
    path.write_bytes(PACKERS[ending](content))
    batches = list(read_batches([str(path)], batch_bytes=batch_bytes))
    assert b"".join(batch.data for batch in batches) == content
    assert all(batch.data.endswith(b"\n") for batch in batches[:-1])
    for batch in batches:
        assert batch.first_line == 1 + content[: content.index(batch.data)].count(b"\n") or batch.first_line > 1
    assert batches[-1].first_line + batches[-1].data.count(b"\n") == content.count(b"\n") + 1


def test_packed_members_are_all_read(tmp_path: Path) -> None:
    """``cat a.gz b.gz`` is a valid file; stopping after the first part would silently drop documents."""
    for ending, pack in PACKERS.items():
        path = tmp_path / f"in.jsonl{ending}"
        path.write_bytes(pack(b"one\n") + pack(b"two\n"))
        assert b"".join(lines_of(path, batch_bytes=100)) == b"one\ntwo\n"


def test_lines_are_numbered_across_batches(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\nb\nc\nd\n")
    assert [batch.first_line for batch in read_batches([str(path)], batch_bytes=3)] == [1, 3]


def test_position_covers_all_files(tmp_path: Path) -> None:
    """Progress counts bytes on disk, over all files."""
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        Path(path).write_bytes(b"x" * 9 + b"\n")
    assert [batch.bytes_read for batch in read_batches(paths)] == [10, 20]
    assert total_size(paths) == 20
    assert total_size(["-"]) is None


def test_byte_order_mark_is_left_out(tmp_path: Path) -> None:
    """Editors on Windows put it at the start of a file; it is not part of the first line."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    (batch,) = read_batches([str(path)])
    documents = read_documents(batch, ["text"])
    assert (documents.texts, documents.bad) == ({"text": ["a", "b"]}, [])


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".zst"])
def test_damaged_files_are_named(tmp_path: Path, ending: str) -> None:
    """Not the half that could be read, and not a traceback of the library."""
    rows = b"".join(json.dumps({"text": os.urandom(30).hex()}).encode() + b"\n" for _ in range(300))
    path = tmp_path / f"in.jsonl{ending}"
    path.write_bytes(b"this is no archive")
    with expect_error(DataError, f"--input {path}", "0"):
        lines_of(path, batch_bytes=100)
    path.write_bytes(PACKERS[ending](rows)[:-40])
    with expect_error(DataError):
        lines_of(path, batch_bytes=1000)


def test_packed_files_are_known_without_their_ending(tmp_path: Path) -> None:
    """A .jsonl that was gzip's ended in "not UTF-8", with the advice to skip such lines; a plain .gz was "damaged"."""
    rows = b'{"text": "a"}\n' * 300
    for ending, pack in PACKERS.items():
        for name in ("in.jsonl", "in.jsonl.other", *({"in.jsonl.gz"} if ending == ".bz2" else ())):
            path = tmp_path / name
            path.write_bytes(pack(rows))
            if not ending:
                assert b"".join(batch.data for batch in read_batches([str(path)])) == rows
                continue
            with pytest.raises(DataError) as caught:
                lines_of(path, batch_bytes=100)
            check_sentence(str(caught.value), f"--input {path}", ending, ending)
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(rows)
    with expect_error(DataError):
        lines_of(path, batch_bytes=100)


def test_missing_zstandard_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = tmp_path / "in.jsonl.zst"
    path.touch()
    with expect_error(ConfigError):
        lines_of(path, batch_bytes=100)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "the line is empty"),
        (b"   ", "the line is empty"),
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
        (b"text", "not JSON: Expecting value at column 1"),
        (b'[{"text": "a"},', "not JSON: Expecting value at column 16; each line must be an object of its own"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes at column 2; each line must be an object"),
        (b'{"text": "tab\there"}', "not JSON: Invalid control character"),
        (b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9 at column 14"),
        (b"\xff\xfe{\x00", "not UTF-8: byte 0xff at column 1"),
        (b'["text"]', "a list instead of a JSON object"),
        (b"null", "null instead of a JSON object"),
        (b'{"txt": "a", "url": "b"}', 'no key "text" (its keys are txt, url)'),
        (b"{}", 'no key "text" (the object is empty)'),
        (b'{"text": 3}', 'a number under "text" instead of a string'),
        (b'{"text": null}', 'null under "text" instead of a string'),
        (b'{"text": ["a"]}', 'a list under "text" instead of a string'),
        (b"[" * 100_000, "not readable: the JSON is nested too deeply"),
        (b'{"text": "a", "b": %s}' % (b"[" * 100_000 + b"]" * 100_000), "not readable: the JSON is nested too deeply"),
        (b'{"text": "a", "n": %s}' % (b"9" * 4301), "not readable: a number has more than 4,300 digits"),
    ],
)
def test_bad_lines_say_where_and_why(line: bytes, reason: str) -> None:
    """Everything that a line can hold instead of a document, in the words a user can act on."""
    texts, bad = parse(b'{"text": "before"}', line, b'{"text": "after"}')
    assert texts == ["before", "after"]
    assert len(bad) == 1
    assert bad[0].startswith(f"in.jsonl:2: {reason}")


def test_empty_text_is_a_document() -> None:
    assert parse(b'{"text": ""}') == ([""], [])


def test_a_line_without_one_of_the_keys_is_bad_for_all() -> None:
    """Else the data of different keys would no longer be about the same documents."""
    line = LineBatch("in.jsonl", 1, b'{"a": "1", "b": "2"}\n{"a": "3"}\n', 0)
    documents = read_documents(line, ["a", "b"])
    assert documents.texts == {"a": ["1"], "b": ["2"]}
    assert [bad.line for bad in documents.bad] == [2]


def test_dropped_documents_keep_the_order_of_lines() -> None:
    """Lines found bad later are reported where they stand, so that the first error is the first in the file."""
    documents = read_documents(LineBatch("f", 10, b'{"text": "a"}\n\n{"text": "b"}\n{"text": "a"}\n', 0), ["text"])

    def refuse_a(text: str) -> None:
        if text == "a":
            raise DataError("it is an a")

    documents.drop_unless(refuse_a)
    assert (documents.texts, documents.lines) == ({"text": ["b"]}, [12])
    assert [(bad.line, bad.reason) for bad in documents.bad] == [
        (10, "it is an a"),
        (11, "the line is empty"),
        (13, "it is an a"),
    ]


def test_plain_text_keeps_its_lines() -> None:
    documents = read_plain_lines(LineBatch("f.txt", 1, b"a\r\n\nb\xff\nc", 0))
    assert documents.texts == {"text": ["a\r\n", "\n", "c"]}
    assert [bad.line for bad in documents.bad] == [3]
    assert [is_plain_text(name) for name in ("a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.zst", "-")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_inputs_are_found_in_a_fixed_order(tmp_path: Path) -> None:
    """Files, folders and globs; whatever order the file system lists, the documents come in the same one."""
    for name in ("b.jsonl", "a.jsonl.gz", "deep/c.json", "notes.txt", "x.jsonl.part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    inside = [str(tmp_path / name) for name in ("a.jsonl.gz", "b.jsonl", "deep/c.json")]
    assert find_inputs([str(tmp_path)]) == inside
    assert find_inputs([str(tmp_path / "*.json*")]) == [*inside[:2], str(tmp_path / "x.jsonl.part")]
    assert find_inputs([inside[1], "-", inside[0]]) == [inside[1], "-", inside[0]]


def test_a_file_with_glob_characters_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "part[1].jsonl"
    path.touch()
    assert find_inputs([str(path)]) == [str(path)]


@pytest.mark.parametrize(
    "pattern",
    [
        "none.jsonl",
        "*.jsonl",
        "empty",
    ],
)
def test_inputs_that_are_not_there(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "empty").mkdir()
    with expect_error(DataError):
        find_inputs([str(tmp_path / pattern)])


def test_inputs_at_a_url() -> None:
    with expect_error(DataError, "memory://bucket/a.jsonl"):
        find_inputs(["memory://bucket/a.jsonl"])


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    """Overlapping globs would train twice on some documents without a word."""
    (tmp_path / "a.jsonl").touch()
    with expect_error(DataError, "a.jsonl"):
        find_inputs([str(tmp_path), str(tmp_path / "a.jsonl")])
