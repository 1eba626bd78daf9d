"""Text encoded in shares by several machines: the bytes and the report of bad lines are those of one machine."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError
from megatron.preprocessing import pieces
from megatron.preprocessing.piece_files import PieceWriter
from tests.harness.sentences import check_line, expect_error
from tools import preprocess_data

NULL = "--tokenizer-type NullTokenizer --vocab-size 9 --workers 1 --json-keys text other --on-bad-line skip"
SMALL = ("--piece-megabytes", "0.004")
KEYS = ("text", "other")


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a large file, one with a mark at its start and no last line end, and a packed one; and a file."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)

    def lines(count: int, bad_every: int) -> str:
        good = [json.dumps({"text": "3 " * draw.randrange(60), "other": "1 2"}) for _ in range(count)]
        return "".join(f"{'oops' if number % bad_every == 0 else each}\n" for number, each in enumerate(good))

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(lines(300, 50))
    (tmp_path / "in" / "b.jsonl").write_text("\ufeff" + lines(20, 100)[5:-1], encoding="utf-8")
    (tmp_path / "in" / "c.jsonl.gz").write_bytes(gzip.compress(lines(60, 5).encode()))
    (tmp_path / "d.jsonl").write_text(lines(200, 90))
    return tmp_path


def preprocess(prefix: str, *flags: str) -> None:
    preprocess_data.main(["--input", "in", "d.jsonl", "--output-prefix", prefix, *NULL.split(), *SMALL, *flags])


def files(prefix: str) -> dict[str, bytes]:
    endings = [f"{key}_document{ending}" for key in KEYS for ending in (".bin", ".idx", ".meta.json")]
    return {ending: Path(f"{prefix}_{ending}").read_bytes() for ending in endings}


def skipped(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(("skipped", "further bad"))]


def test_shares_give_the_bytes_of_one_machine(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lost share is named with the command that makes it; joined, nothing tells that there were several machines."""
    preprocess("one")
    of_one = skipped(capsys.readouterr().err)
    assert len(of_one) == 21, "more than are named"
    preprocess("all", "--shard", "1/3")
    preprocess("all", "--shard", "3/3")
    with expect_error(DataError, "--shard 2/3"):
        preprocess("all", "--merge-shards")
    assert not list(corpus.glob("all*.bin"))
    made = {path.name: path.stat().st_ino for path in Path("all_pieces").glob("*.piece")}
    for share in ("2/3", "1/3"):
        preprocess("all", "--shard", share)
    assert made.items() <= {path.name: path.stat().st_ino for path in Path("all_pieces").glob("*.piece")}.items()
    assert len(list(Path("all_pieces").glob("*.piece"))) > 8
    capsys.readouterr()
    preprocess("all", "--merge-shards")
    assert files("all") == files("one")
    assert skipped(capsys.readouterr().err) == of_one
    summaries = [json.loads(Path(f"{name}_summary.json").read_text()) for name in ("one", "all")]
    for each in summaries:
        each.pop("seconds")
        each["outputs"] = list(each["outputs"].values())
    assert summaries[0] == summaries[1]
    sources = summaries[0]["sources"]
    assert sources.keys() == {"in", "d.jsonl"}
    assert sum(each["documents"] for each in sources.values()) == summaries[0]["documents"]
    assert not Path("all_pieces").exists()


def test_sources_are_counted(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess("one")
    check_line(capsys.readouterr().out, "source", "d.jsonl")
    counts = json.loads(Path("one_summary.json").read_text())["sources"]["d.jsonl"]
    good = [json.loads(line) for line in Path("d.jsonl").read_text().splitlines() if line != "oops"]
    tokens = {key: sum(len(each[key].split()) for each in good) for key in KEYS}
    size = Path("d.jsonl").stat().st_size
    assert counts == {"documents": len(good), "bad_lines": 3, "text_bytes": size, "tokens": tokens}


def test_a_bad_line_in_a_piece_has_its_number_in_the_file(corpus: Path) -> None:
    """A worker that begins in the middle of a file knows no line numbers, but a user edits by them."""
    lines = Path("d.jsonl").read_text().replace("oops\n", '{"text": "1", "other": "2"}\n').splitlines(keepends=True)
    lines[150] = "oops\n"
    shutil.rmtree("in")
    os.mkdir("in")
    Path("in/a.jsonl").write_text("".join(lines))
    Path("d.jsonl").write_text(lines[0])
    with expect_error(DataError, "in/a.jsonl:151"):
        preprocess("all", "--shard", "1/1", "--on-bad-line", "error")


@pytest.mark.parametrize("change", ["settings", "input", "tokenizer", "size"])
def test_shares_of_other_data_are_refused(corpus: Path, change: str) -> None:
    """Half of one corpus and half of another train without an error."""
    preprocess("all", "--shard", "1/2")
    flags: tuple[str, ...] = ("--shard", "2/2")
    match change:
        case "settings":
            flags = (*flags, "--append-eod")
        case "input":
            Path("in/a.jsonl").write_text(Path("in/a.jsonl").read_text() + "oops\n")
        case "tokenizer":
            flags = (*flags, "--vocab-size", "8")
        case _:
            flags = (*flags, "--piece-megabytes", "0.005")
    with expect_error(DataError, "all_pieces"):
        preprocess("all", *flags)


@pytest.mark.parametrize("harm", ["of another run", "another piece", "cut", "flipped", "flipped in its record"])
def test_a_piece_that_is_not_of_this_run_is_refused(corpus: Path, harm: str) -> None:
    """Copied by hand, or damaged on its way."""
    preprocess("all", "--shard", "1/1")
    piece = Path("all_pieces/000002.piece")
    if harm == "of another run":
        preprocess("other", "--shard", "1/1", "--append-eod")
        shutil.copy("other_pieces/000002.piece", piece)
    elif harm == "another piece":
        shutil.copy("all_pieces/000003.piece", piece)
    elif harm == "cut":
        os.truncate(piece, piece.stat().st_size - 1)
    else:
        content = bytearray(piece.read_bytes())
        content[20 if harm == "flipped" else content.index(b'"batches": [') + 12] ^= 1
        piece.write_bytes(content)
    with expect_error(DataError, "all_pieces/000002.piece"):
        preprocess("all", "--merge-shards")
    assert not list(Path().glob("all*.idx"))


def test_an_interrupted_share_keeps_what_is_finished(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C says how to go on; nothing half-written has the name of a piece."""
    preprocess("one")
    add, calls = PieceWriter.add, 0

    def add_some(self: PieceWriter, texts: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        add(self, texts)

    with monkeypatch.context() as patched:
        patched.setattr(PieceWriter, "add", add_some)
        with expect_error(KeyboardInterrupt):
            preprocess("all", "--shard", "1/1")
    assert 0 < len(list(Path("all_pieces").iterdir())) - 1 < 5
    assert all(not path.name.startswith(".") for path in Path("all_pieces").iterdir())
    preprocess("all", "--shard", "1/2")
    preprocess("all", "--shard", "2/2")
    preprocess("all", "--merge-shards")
    assert files("all") == files("one")


def slurm(task: int, *, first: int = 0, step: int = 1, count: int = 3) -> dict[str, str]:
    names = ("ID", "MIN", "STEP", "COUNT")
    return {f"SLURM_ARRAY_TASK_{name}": str(each) for name, each in zip(names, (task, first, step, count))}


def test_tasks_of_an_array_are_shares(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess("one")
    for task in (4, 6, 8):
        for name, value in slurm(task, first=4, step=2).items():
            monkeypatch.setenv(name, value)
        preprocess("all", "--shard", "slurm")
    preprocess("all", "--merge-shards")
    assert files("all") == files("one")


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ("--shard 4/3", {}),
        ("--shard 0/3", {}),
        ("--shard half", {}),
        ("--shard slurm", {}),
        ("--shard slurm", slurm(7, count=2)),
        ("--shard slurm", slurm(1, first=3)),
        ("--shard slurm", slurm(1, step=0)),
        ("--shard 1/2 --merge-shards", {}),
        ("--input - --shard 1/2", {}),
        ("--ray local", {}),
        ("--ray=", {}),
    ],
)
def test_mistakes_are_one_sentence(
    corpus: Path, flags: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it isn't installed
    with expect_error(ConfigError, flags.split()[0].removesuffix("=")):
        preprocess("all", *flags.split())
    assert not Path("all_pieces").exists()


def test_a_ray_cluster_that_is_away_is_named_at_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library waits for minutes."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with expect_error(ConfigError, "--ray 127.0.0.1:1"):
        preprocess("all", "--ray", "127.0.0.1:1")
    assert not Path("all_pieces").exists()


def test_a_merge_without_pieces_names_them(corpus: Path) -> None:
    with expect_error(DataError, "all_pieces"):
        preprocess("all", "--merge-shards")


@pytest.mark.slow  # files that appear whole are proven in tests/unit/files
def test_two_machines_with_one_piece_write_the_same(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is requeued while its first start is still writing."""
    preprocess("one")
    preprocess("all", "--shard", "1/1")
    monkeypatch.setattr(pieces.Plan, "missing", lambda self: list(range(self.division.count)))
    preprocess("all", "--shard", "2/3")
    monkeypatch.undo()
    monkeypatch.chdir(corpus)
    preprocess("all", "--merge-shards")
    assert files("all") == files("one")
