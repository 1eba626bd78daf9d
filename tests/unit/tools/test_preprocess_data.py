"""tools/preprocess_data.py as a user meets it: right files, or one sentence and no files."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.tokenizers.huggingface import load
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.preprocessing.reporting import BAD_LINES_SHOWN
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.unit.tools.conftest import TEXTS, command, environment, run, write_lines
from tools import preprocess_data

ENDINGS = (".bin", ".idx", ".meta.json")


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> RustTokenizer:
    return load(str(tokenizer_folder), extra_ids=0)


@pytest.fixture(scope="session")
def flags(tokenizer_folder: Path) -> tuple[str, ...]:
    """The tokenizer's flags."""
    return ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_folder))


def preprocess(source: Path | str, prefix: Path, flags: tuple[str, ...], *more: str) -> None:
    preprocess_data.main(["--input", str(source), "--output-prefix", str(prefix), "--workers", "1", *flags, *more])


def files(prefix: Path, key: str = "text") -> dict[str, bytes]:
    return {ending: Path(f"{prefix}_{key}_document{ending}").read_bytes() for ending in ENDINGS}


def documents(prefix: Path, key: str = "text") -> list[list[int]]:
    """Ids of each document; an empty one has no sequence."""
    data = IndexedDataset(f"{prefix}_{key}_document")
    bounds = data.boundaries.tolist()
    return [[int(each) for row in data[start:stop] for each in row] for start, stop in pairwise(bounds)]


def assert_nothing_left(folder: Path) -> None:
    """Neither results nor parts of them."""
    left = [path.name for path in folder.rglob("*") if "_document" in path.name]
    assert left == []


# What it writes


def test_documents_are_the_tokenized_lines(
    tmp_path: Path, corpus: Path, flags: tuple[str, ...], tokenizer: RustTokenizer
) -> None:
    preprocess(corpus, tmp_path / "out", flags, "--append-eod")
    assert documents(tmp_path / "out") == [[*tokenizer.tokenize(text), tokenizer.eod] for text in TEXTS]


def test_without_append_eod(tmp_path: Path, corpus: Path, flags: tuple[str, ...], tokenizer: RustTokenizer) -> None:
    preprocess(corpus, tmp_path / "out", flags)
    assert documents(tmp_path / "out") == tokenizer.tokenize_batch(TEXTS)


def test_the_engine_is_as_asked(
    tmp_path: Path, corpus: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever distrusts the faster library goes without it; whoever counts on it hears why it can't be had."""
    preprocess(corpus, tmp_path / "out", flags, "--tokenizer-engine", "own")
    check_line(capsys.readouterr().out, "--tokenizer-engine", hide=[r"[\d.]+ (docs|MB|tokens)/s"])
    numbers = write_lines(tmp_path / "numbers.jsonl", [{"text": "1 2 3"}])
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--tokenizer-engine", "gigatoken")
    with expect_error(ConfigError, "--tokenizer-engine gigatoken", "NullTokenizer"):
        preprocess(numbers, tmp_path / "numbers", null)
    assert_nothing_left(tmp_path / "numbers")


def test_every_key_gets_complete_files(
    tmp_path: Path, corpus: Path, flags: tuple[str, ...], tokenizer: RustTokenizer
) -> None:
    """With several keys Megatron-LM once finished only the last one's index."""
    preprocess(corpus, tmp_path / "out", flags, "--json-keys", "title", "text")
    assert documents(tmp_path / "out", "title") == tokenizer.tokenize_batch([text[:12] for text in TEXTS])
    assert documents(tmp_path / "out", "text") == tokenizer.tokenize_batch(TEXTS)


def test_empty_texts_are_documents_without_sequences(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """As Megatron-LM writes them: documents keep their numbers, and no sample is an end of document alone."""
    texts = ["", "the", "", "", "fox", ""]
    source = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    preprocess(source, tmp_path / "out", flags, "--append-eod")
    assert [bool(each) for each in documents(tmp_path / "out")] == [bool(text) for text in texts]
    data = IndexedDataset(f"{tmp_path / 'out'}_text_document")
    assert data.boundaries.tolist() == [0, 0, 1, 1, 1, 2, 2]


def test_metadata_names_the_tokenizer(
    tmp_path: Path, corpus: Path, flags: tuple[str, ...], tokenizer: RustTokenizer
) -> None:
    """A run with another tokenizer must be able to refuse the data."""
    preprocess(corpus, tmp_path / "out", flags, "--append-eod")
    metadata = DatasetMetadata.read(f"{tmp_path / 'out'}_text_document")
    assert metadata is not None
    assert metadata.tokenizer is not None
    assert (metadata.tokenizer.type, metadata.tokenizer.vocab_size) == ("HuggingFaceTokenizer", 300)
    assert (metadata.tokenizer.eod, metadata.tokenizer.fingerprint) == (tokenizer.eod, tokenizer.fingerprint)
    ids = [each for document in documents(tmp_path / "out") for each in document]
    assert (metadata.num_documents, metadata.num_tokens, metadata.max_token_id) == (len(TEXTS), len(ids), max(ids))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_498, np.uint16), (65_499, np.int32)])
def test_type_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    """Megatron-LM's rule, end of document included: 65,500 ids and more need four bytes."""
    source = write_lines(tmp_path / "in.jsonl", [{"text": f"0 1 {vocab_size - 1}"}])
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size))
    preprocess(source, tmp_path / "out", null, "--append-eod")
    data = IndexedDataset(f"{tmp_path / 'out'}_text_document")
    assert data.dtype == dtype
    assert data[0].tolist() == [0, 1, vocab_size - 1, vocab_size]


def test_gpt2_is_the_default_tokenizer(tmp_path: Path, corpus: Path, tokenizer_folder: Path) -> None:
    """Megatron-LM's own default for GPT; same ids as from tokenizer.json of the same training."""
    pair = ("--vocab-file", f"{tokenizer_folder}/vocab.json", "--merge-file", f"{tokenizer_folder}/merges.txt")
    preprocess(corpus, tmp_path / "pair", pair)
    preprocess(corpus, tmp_path / "type", ("--tokenizer-type", "GPT2BPETokenizer", *pair))
    for ending in ("bin", "idx"):
        names = [tmp_path / f"{name}_text_document.{ending}" for name in ("pair", "type")]
        assert names[0].read_bytes() == names[1].read_bytes()


def test_several_files_in_the_order_given(tmp_path: Path, flags: tuple[str, ...], tokenizer: RustTokenizer) -> None:
    second = write_lines(tmp_path / "b.jsonl", [{"text": text} for text in TEXTS[:5]])
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"text": TEXTS[9]}).encode()))
    preprocess(second, tmp_path / "out", flags, "--input", str(second), str(packed))
    assert documents(tmp_path / "out") == tokenizer.tokenize_batch([*TEXTS[:5], TEXTS[9]])


def test_an_earlier_result_is_replaced(tmp_path: Path, corpus: Path, flags: tuple[str, ...]) -> None:
    preprocess(corpus, tmp_path / "out", flags)
    preprocess(write_lines(tmp_path / "in.jsonl", [{"text": "fox"}]), tmp_path / "out", flags)
    assert len(documents(tmp_path / "out")) == 1


def test_summary_says_what_was_done(
    tmp_path: Path, corpus: Path, flags: tuple[str, ...], tokenizer: RustTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess(corpus, tmp_path / "out", flags, "--log-interval", "25")
    written = capsys.readouterr()
    assert "documents    50\n" in written.out
    check_line(written.out, tokenizer.fingerprint)
    assert f"{tmp_path / 'out'}_text_document.{{bin,idx,meta.json}}:" in written.out
    assert written.err.startswith("Processed 50 documents (")


# Bad input: one sentence, and nothing written


BAD_LINES: list[tuple[bytes, str]] = [
    (b'{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
    (b"", "the line is empty"),
    (b'{"txt": "a"}', 'no key "text" (its keys are txt)'),
    (b'{"text": 5}', 'a number under "text" instead of a string'),
    (b'{"text": "caf\xe9"}', "not UTF-8: byte 0xe9 at column 14"),
    (rb'{"text": "\ud800"}', "the text holds \\ud800, an unpaired surrogate, which is not a character"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_bad_line_stops(tmp_path: Path, flags: tuple[str, ...], line: bytes, reason: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "fox"}\n' + line + b'\n{"text": "dog"}\n')
    with pytest.raises(DataError) as failure:
        preprocess(source, tmp_path / "out", flags)
    check_sentence(str(failure.value), f"{source}:2", reason, "--on-bad-line skip")
    assert_nothing_left(tmp_path)


def test_plain_text_is_explained(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """ "not JSON: Expecting value at column 1" doesn't tell a newcomer what the file should hold."""
    source = tmp_path / "book.txt"
    source.write_text("the fox\n")
    with expect_error(DataError, "JSON", "'{text: .}'", "book.jsonl"):
        preprocess(source, tmp_path / "out", flags)
    source.write_text('{"text": "fox"}\n')
    preprocess(source, tmp_path / "out", flags)
    for line in ('{"txt": "fox"}', '{"text": "fox"'):  # JSON after all
        source.write_text(f"{line}\n")
        with expect_error(DataError):
            preprocess(source, tmp_path / "again", flags)


def test_bad_lines_are_left_out_and_counted(
    tmp_path: Path, flags: tuple[str, ...], tokenizer: RustTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is reported with its place; the documents between them are all there."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(line + b'\n{"text": "fox"}' for line, _ in BAD_LINES) + b"\n")
    preprocess(source, tmp_path / "out", flags, "--on-bad-line", "skip")
    assert documents(tmp_path / "out") == [tokenizer.tokenize("fox")] * len(BAD_LINES)
    written = capsys.readouterr()
    for number, (_, reason) in enumerate(BAD_LINES):
        assert f"skipped {source}:{2 * number + 1}: {reason}\n" in written.err
    check_line(written.out, "bad lines", len(BAD_LINES))


def test_many_bad_lines_do_not_flood(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("oops\n" * 500 + '{"text": "fox"}\n')
    preprocess(source, tmp_path / "out", flags, "--on-bad-line", "skip")
    written = capsys.readouterr()
    assert written.err.count("skipped") == BAD_LINES_SHOWN
    check_line(written.err, "further")
    check_line(written.out, "lines", "500")


@pytest.mark.parametrize("content", ["", "oops\n"])
def test_no_document_at_all_is_an_error(tmp_path: Path, flags: tuple[str, ...], content: str) -> None:
    """An empty data set would only fail later, in training."""
    (tmp_path / "in.jsonl").write_text(content)
    with expect_error(DataError):
        preprocess(tmp_path / "in.jsonl", tmp_path / "out", flags, "--on-bad-line", "skip")
    assert_nothing_left(tmp_path)


def test_an_earlier_result_survives_a_failure(tmp_path: Path, corpus: Path, flags: tuple[str, ...]) -> None:
    preprocess(corpus, tmp_path / "out", flags)
    before = files(tmp_path / "out")
    (tmp_path / "bad.jsonl").write_text("oops\n")
    with pytest.raises(DataError):
        preprocess(tmp_path / "bad.jsonl", tmp_path / "out", flags)
    assert files(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("more", "kind", "fact"),
    [
        (("--keep-newlines",), ConfigError, "--split-sentences"),
        (("--lang", "german"), ConfigError, "--split-sentences"),
        (("--split-sentences", "--lang", "../x"), ConfigError, "--lang"),
        (("--json-keys", "text", "text"), ConfigError, "--json-keys"),
        (("--json-keys",), ConfigError, "--json-keys"),
        (("--workers", "0"), ConfigError, "--workers"),
        (("--workers", "1000000"), ConfigError, "--workers"),
        (("--apend-eod",), ConfigError, "--append-eod"),
        (("--on-bad-line", "ignore"), ConfigError, "--on-bad-line"),
        (("--tokenizer-model", "nowhere"), DataError, "--tokenizer-model"),
        (("--tokenizer-type", "BertWordPieceCase"), ConfigError, "--vocab-file"),
        (("--input", "nowhere.jsonl"), DataError, "nowhere.jsonl"),
    ],
)
def test_impossible_flags(
    tmp_path: Path,
    corpus: Path,
    flags: tuple[str, ...],
    more: tuple[str, ...],
    kind: type[MegatronError],
    fact: str,
) -> None:
    with expect_error(kind, fact):
        preprocess(corpus, tmp_path / "out", flags, *more)
    assert_nothing_left(tmp_path)


def test_flags_of_other_programs(
    tmp_path: Path, corpus: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Public command lines of Megatron-LM's earlier versions, Megatron-DeepSpeed, GPT-NeoX and NeMo."""
    preprocess(corpus, tmp_path / "plain", flags)
    capsys.readouterr()
    for number, (more, facts) in enumerate(
        (
            ("--dataset-impl mmap", ["--dataset-impl mmap"]),
            ("--chunk-size 25", ["--chunk-size 25"]),
            ("--vocab-size 50304", ["--vocab-size", "HuggingFaceTokenizer"]),
            ("--num-docs 100", ["--num-docs 100"]),
            ("--jsonl-keys text", ["--jsonl-keys text", "--json-keys text"]),
            ("--json_keys text", ["--json_keys"]),
            ("--make-vocab-size-divisible-by 128", ["--make-vocab-size-divisible-by"]),
            ("--tokenizer-library=megatron", ["--tokenizer-library megatron", "--tokenizer-type"]),
        )
    ):
        preprocess(corpus, tmp_path / f"out{number}", flags, *more.split())
        check_line(capsys.readouterr().err, *facts)
        assert documents(tmp_path / f"out{number}") == documents(tmp_path / "plain")
    for refused in ("--dataset-impl lazy", "--dataset-impl cached", "--ftfy", "--append-bos", "--dataset-impl"):
        with expect_error(ConfigError, refused):
            preprocess(corpus, tmp_path / "none", flags, *refused.split())


def test_old_name_of_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--vocab`` is what Megatron-LM called it until 2023, and what tutorials still have."""
    with expect_error(DataError, "--vocab-file nowhere"):
        preprocess_data.main(["--input", __file__, "--output-prefix", str(tmp_path / "x"), "--vocab", "nowhere"])
    check_line(capsys.readouterr().err, "--vocab nowhere", "--vocab-file nowhere")


def test_flags_of_megatron_without_effect(
    tmp_path: Path, corpus: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    preprocess(corpus, tmp_path / "out", flags, "--keep-sequential-samples", "--partitions", "4")
    check_line(capsys.readouterr().err, "--partitions 4")


def test_unwritable_folder(tmp_path: Path, corpus: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    with expect_error(DataError):
        preprocess(corpus, tmp_path / "file" / "out", flags)


# The real script


def test_same_bytes_for_any_number_of_workers(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Several batches, three processes that finish in any order, packed input: the bytes of one worker."""
    texts = [f"{number} " + text * (number % 90) for number, text in enumerate(TEXTS * 8)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    assert len(lines) > 2 * (1 << 19), "too little for several batches"
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1))
    preprocess(tmp_path / "in.jsonl.gz", tmp_path / "one", flags, "--append-eod")
    done = run(
        "preprocess_data.py",
        *("--input", tmp_path / "in.jsonl.gz", "--output-prefix", tmp_path / "three", "--append-eod"),
        *("--workers", "3", *flags),
    )
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "three") == files(tmp_path / "one")


def test_standard_input(tmp_path: Path, corpus: Path, flags: tuple[str, ...]) -> None:
    """What a pipe brings, which can be read only once and has no size, gives the bytes of the file."""
    preprocess(corpus, tmp_path / "file", flags)
    arguments = command("preprocess_data.py", "--input", "-", "--output-prefix", tmp_path / "pipe", *flags)
    done = subprocess.run(arguments, env=environment(), input=corpus.read_bytes(), capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for ending in ("bin", "idx"):
        names = [tmp_path / f"{name}_text_document.{ending}" for name in ("file", "pipe")]
        assert names[0].read_bytes() == names[1].read_bytes()


def test_script_reports_a_bad_line(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Across process borders still one sentence, no traceback."""
    source = write_lines(tmp_path / "in.jsonl", [{"text": "fox"}, {"txt": "dog"}])
    done = run("preprocess_data.py", "--input", source, "--output-prefix", tmp_path / "out", "--workers", "2", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f'error: {source}:2: no key "text"')
    assert done.stderr.count("\n") == 1
    assert_nothing_left(tmp_path)


def test_full_disk(tmp_path: Path, corpus: Path, flags: tuple[str, ...]) -> None:
    """A limit on the size of files fails writes as a full disk does."""
    arguments = command(
        "preprocess_data.py", "--input", corpus, "--output-prefix", tmp_path / "out", "--workers", "1", *flags
    )
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"error: cannot write {tmp_path / 'out'}_text_document.bin: File too large; free some"
    )
    assert done.stderr.count("\n") == 1
    assert_nothing_left(tmp_path)


LINE = json.dumps({"text": TEXTS[0] * 50}).encode() + b"\n"
MEGABYTE = LINE * ((1 << 20) // len(LINE) + 1)


@pytest.fixture
def waiting(tmp_path: Path, flags: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """A run with a thread and two processes at work that has had some input and waits for more."""
    arguments = command(
        "preprocess_data.py", "--input", "-", "--output-prefix", tmp_path / "out", "--workers", "3", *flags
    )
    pipe: Any = subprocess.PIPE
    process = subprocess.Popen(
        arguments,
        env=environment(),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        start_new_session=True,
        # Tests that a shell started in the background ignore Ctrl-C, and their children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin is not None
    process.stdin.write(MEGABYTE * 2)
    process.stdin.flush()
    wait_for(lambda: len(workers_of(process.pid)) == 2)
    workers = workers_of(process.pid)
    yield process
    for pid in (process.pid, *workers):  # a worker that survives would keep the pipes open
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def workers_of(pid: int) -> list[int]:
    """Worker processes; the one that tracks resources is none."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for each in children if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Ended, and not left as a zombie of ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the workers")


@needs_proc
def test_killed_worker(tmp_path: Path, waiting: subprocess.Popen[bytes]) -> None:
    """The system kills a worker when memory runs out: one sentence, nothing written, no process left."""
    workers = workers_of(waiting.pid)
    os.kill(workers[0], signal.SIGKILL)
    _, errors = waiting.communicate(MEGABYTE * 8, timeout=120)
    assert waiting.returncode == 1
    *before, last = errors.decode().splitlines()
    assert last.startswith("error: one of the 2 worker processes was killed")
    assert all(line.startswith("Processed ") for line in before), before
    assert_nothing_left(tmp_path)
    wait_for(lambda: all(map(is_gone, workers)))


@needs_proc
def test_killed_run_leaves_no_workers(waiting: subprocess.Popen[bytes]) -> None:
    """Nobody is left to tell the workers to stop."""
    workers = workers_of(waiting.pid)
    assert len(workers) == 2
    waiting.kill()
    waiting.wait()
    wait_for(lambda: all(map(is_gone, workers)))
    assert all(map(is_gone, workers))


@needs_proc
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_run_cleans_up(
    tmp_path: Path, waiting: subprocess.Popen[bytes], sent: signal.Signals, code: int
) -> None:
    """Ctrl-C and a batch system's stop: no half-written files, no workers, no traceback."""
    workers = workers_of(waiting.pid)
    os.killpg(waiting.pid, sent)  # as a terminal and a batch system do: run and workers alike
    _, errors = waiting.communicate(timeout=120)
    assert waiting.returncode == code
    assert errors in (b"", b"interrupted: nothing is kept, no shard was finished\n")
    assert_nothing_left(tmp_path)
    wait_for(lambda: all(map(is_gone, workers)))
