"""Input and output of preprocessing in object storage: the bytes of a disk, or one sentence and no files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from megatron.core.files import range_reader, remote_path
from megatron.core.files.range_reader import RangeReader
from megatron.core.files.remote_path import RemotePath
from megatron.errors import DataError
from tests.harness.bucket import empty_memory
from tests.harness.s3 import S3Server, credentials, s3_server
from tests.harness.sentences import expect_error
from tools import preprocess_data

NULL = "--tokenizer-type NullTokenizer --vocab-size 9 --workers 1 --on-bad-line skip --piece-megabytes 0.05"
LINES = [json.dumps({"text": "1 2 3 " * (number % 90)}) if number % 300 else "oops" for number in range(1000)]
FILES = {
    "in/a.jsonl": "\n".join(LINES[:700]).encode(),
    "in/deep/b.jsonl.gz": gzip.compress("\n".join(LINES[700:]).encode()),
}
ENDINGS = (".bin", ".idx", ".meta.json")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(range_reader, "BLOCK", 7000)
    yield
    empty_memory()


def preprocess(source: str, prefix: str, *flags: str) -> None:
    preprocess_data.main(["--input", *source.split(), "--output-prefix", prefix, *NULL.split(), *flags])


def on_disk(folder: Path) -> dict[str, bytes]:
    """The files that a disk's text gives; the text is at ``folder``/in."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    preprocess(str(folder / "in"), str(folder / "out"))
    return {ending: (folder / f"out_text_document{ending}").read_bytes() for ending in ENDINGS}


def put(root: str) -> None:
    for name, content in FILES.items():
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(content)


def at_url(prefix: str) -> dict[str, bytes]:
    return {ending: RemotePath(f"{prefix}_text_document{ending}").read_bytes() for ending in ENDINGS}


def skipped(printed: str) -> list[str]:
    return [line.rpartition("/")[2] for line in printed.splitlines() if line.startswith("skipped")]


@pytest.mark.parametrize("source", ["{0}/in", "{0}/in/*.jsonl {0}/in/**/*.gz"])
def test_text_and_tokens_at_urls_are_those_of_a_disk(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder or globs; one file in several pieces; the pieces are gone at the end."""
    expected = on_disk(tmp_path)
    of_disk = skipped(capsys.readouterr().err)
    assert len(of_disk) == 4
    put("memory://bucket")
    preprocess(source.format("memory://bucket"), "memory://bucket/out/mine")
    assert at_url("memory://bucket/out/mine") == expected
    assert skipped(capsys.readouterr().err) == of_disk
    assert json.loads(RemotePath("memory://bucket/out/mine_summary.json").read_bytes())["documents"] == 996
    preprocess(source.format("memory://bucket"), str(tmp_path / "local"))
    assert (tmp_path / "local_text_document.bin").read_bytes() == expected[".bin"]
    assert [each for each in fsspec.filesystem("memory").find("/bucket") if "pieces" in each] == []


def test_ranges_are_a_file(tmp_path: Path) -> None:
    content = bytes(range(256)) * 100
    with fsspec.open("memory://bucket/file", "wb") as file:
        file.write(content)
    with RangeReader(RemotePath("memory://bucket/file"), len(content), stop=20_000) as reader:
        assert reader.readall() == content
        reader.seek(-5, 2)
        assert reader.read(9) == content[-5:]
        assert (reader.seek(6_990), reader.read(3), reader.tell()) == (6_990, content[6_990:6_993], 6_993)
    with pytest.raises(OSError, match="it is being replaced"):
        RangeReader(RemotePath("memory://bucket/file"), len(content) + 9).readall()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server() as running:
        for name, value in credentials(running).items():
            monkeypatch.setenv(name, value)
        kind = fsspec.get_filesystem_class("s3")
        kind.clear_instance_cache()
        fsspec.filesystem("s3").mkdir("bucket")
        yield running
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "tests")
        kind.clear_instance_cache()
        fsspec.filesystem("s3").rm("bucket", recursive=True)  # servers of one process share their buckets
        kind.clear_instance_cache()


@pytest.mark.slow  # a server; memory:// stands for it above
def test_s3_gives_the_bytes_of_a_disk(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by shares, and with tokens sent in several parts."""
    monkeypatch.setattr(remote_path, "_PART_BYTES", 5 << 20)
    lines = [json.dumps({"text": "1 2 3 " * 10_000}) for _ in range(110)]
    expected = on_disk(tmp_path)
    put("s3://bucket")
    preprocess("s3://bucket/in", "s3://bucket/out/mine")
    assert at_url("s3://bucket/out/mine") == expected
    for share in ("1/2", "2/2"):
        preprocess("s3://bucket/in/*.jsonl s3://bucket/in/deep", "s3://bucket/out/shares", "--shard", share)
    preprocess("s3://bucket/in/*.jsonl s3://bucket/in/deep", "s3://bucket/out/shares", "--merge-shards")
    assert at_url("s3://bucket/out/shares") == expected
    (tmp_path / "large.jsonl").write_text("\n".join(lines))
    preprocess(str(tmp_path / "large.jsonl"), str(tmp_path / "large"), "--piece-megabytes", "1")
    preprocess(str(tmp_path / "large.jsonl"), "s3://bucket/large", "--piece-megabytes", "1")
    assert (
        RemotePath("s3://bucket/large_text_document.bin").version()
        and at_url("s3://bucket/large")[".bin"] == (tmp_path / "large_text_document.bin").read_bytes()
    )
    assert any(request.startswith("POST /bucket/large_text_document.bin") for request in server.requests), "in parts"


@pytest.mark.slow  # a server
def test_an_interrupted_run_at_urls_goes_on(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has a final name before its end, finished pieces are not encoded again, on whatever machine."""
    expected = on_disk(tmp_path)
    put("s3://bucket")
    puts = 0

    def refuse_the_third_piece(method: str, path: str) -> str | None:
        nonlocal puts
        puts += method == "PUT" and path.endswith(".piece")
        return "denied" if puts > 2 else None

    with server.failing(refuse_the_third_piece), expect_error(DataError, "s3://bucket/out/mine_pieces/000002.piece"):
        preprocess("s3://bucket/in", "s3://bucket/out/mine")
    refusing = server.failing(lambda method, path: "denied" if path.endswith(".bin") and method != "GET" else None)
    with refusing, expect_error(DataError, "s3://bucket/out/mine_text_document.bin"):
        preprocess("s3://bucket/in", "s3://bucket/out/mine")
    assert [each for each in fsspec.filesystem("s3").find("bucket/out") if "_document" in each] == []
    made = [each for each in server.requests if each.startswith("PUT") and each.endswith("000000.piece")]
    preprocess("s3://bucket/in", "s3://bucket/out/mine")
    assert [each for each in server.requests if each.startswith("PUT") and each.endswith("000000.piece")] == made
    assert at_url("s3://bucket/out/mine") == expected
    assert [each for each in fsspec.filesystem("s3").find("bucket/out") if "piece" in each] == []


@pytest.mark.slow  # a server
def test_failures_of_the_service_are_sentences(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk(tmp_path)
    put("s3://bucket")
    with expect_error(DataError, "--input s3://nowhere/in"):
        preprocess("s3://nowhere/in", str(tmp_path / "x"))
    with expect_error(DataError, "--input s3://bucket/other"):
        preprocess("s3://bucket/other/*.jsonl", str(tmp_path / "x"))
    with expect_error(DataError, "s3://nowhere/out_pieces/plan.json"):
        preprocess(str(tmp_path / "in"), "s3://nowhere/out")
    with server.failing(lambda method, path: "denied"), expect_error(DataError, "--input s3://bucket/in"):
        preprocess("s3://bucket/in", str(tmp_path / "x"))
    read_only = server.failing(lambda method, path: "denied" if method == "PUT" else None)
    with read_only, expect_error(DataError, "s3://bucket/out_pieces/plan.json"):
        preprocess(str(tmp_path / "in"), "s3://bucket/out")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with expect_error(DataError, "--input s3://bucket/in"):
        preprocess("s3://bucket/in", str(tmp_path / "x"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert not list(tmp_path.glob("x*"))
