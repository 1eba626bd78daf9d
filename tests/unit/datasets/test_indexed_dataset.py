"""Files that we write are Megatron-LM's to the byte, and appear complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.errors import ConfigError, DataError
from tests.harness.sentences import expect_error

SEQUENCES = [[1, 2], [3, 4, 5], [], [6], list(range(7, 40))]


def write(prefix: Path, sequences: list[list[int]] = SEQUENCES, dtype: Any = np.uint16) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for sequence in sequences:
            writer.add_document(sequence)
    return IndexedDataset(prefix)


def test_bytes_equal_recorded_ones(tmp_path: Path, golden: dict[str, Any]) -> None:
    """Documents of several sequences, of one, and an empty one, against Megatron-LM's own files."""
    recorded = golden["tiny_uint16"]
    with IndexedDatasetWriter(tmp_path / "tiny", np.uint16) as writer:
        for document in recorded["docs"]:
            writer.add_document(*document)
    assert (tmp_path / "tiny.bin").read_bytes().hex() == recorded["bin_hex"]
    assert (tmp_path / "tiny.idx").read_bytes().hex() == recorded["idx_hex"]


def test_multimodal_bytes_equal_recorded_ones(tmp_path: Path, golden: dict[str, Any]) -> None:
    """A mode per sequence follows the tables, and is read back."""
    recorded = golden["tiny_multimodal_int32"]
    with IndexedDatasetWriter(tmp_path / "tiny", np.int32, multimodal=True) as writer:
        writer.add_document([1, 2], [3], modes=[0, 1])
        writer.add_document([70000], modes=1)
    assert (tmp_path / "tiny.bin").read_bytes().hex() == recorded["bin_hex"]
    assert (tmp_path / "tiny.idx").read_bytes().hex() == recorded["idx_hex"]
    dataset = IndexedDataset(tmp_path / "tiny", multimodal=True)
    assert dataset.modes is not None
    assert dataset.modes.tolist() == [0, 1, 1]


def test_type_codes_equal_recorded_ones(tmp_path: Path, golden: dict[str, Any]) -> None:
    """Each type has Megatron-LM's code, and its values survive."""
    for name, code in golden["dtype_codes"].items():
        dataset = write(tmp_path / name, [[1, 2], [3]], dtype=name)
        assert (tmp_path / f"{name}.idx").read_bytes()[17] == code
        assert dataset.dtype == name
        assert [sequence.tolist() for sequence in dataset[:]] == [[1, 2], [3]]


@pytest.mark.parametrize("mmap", [True, False])
def test_reads_sequences_slices_and_parts(tmp_path: Path, mmap: bool) -> None:
    """Mapped files and plain reads give the same tokens, whole or in part, by number from either end."""
    write(tmp_path / "x")
    dataset = IndexedDataset(tmp_path / "x", mmap=mmap)
    assert len(dataset) == dataset.num_documents == len(SEQUENCES)
    assert dataset.num_tokens == sum(map(len, SEQUENCES))
    assert [dataset[i].tolist() for i in range(len(dataset))] == SEQUENCES
    assert [sequence.tolist() for sequence in dataset[1:4]] == SEQUENCES[1:4]
    assert dataset[-1].tolist() == SEQUENCES[-1]
    for offset in range(34):
        for length in (0, 1, 33 - offset):
            if 0 <= length <= 33 - offset:
                assert dataset.get(4, offset, length).tolist() == SEQUENCES[4][offset : offset + length]
    assert dataset.get(4, 30).tolist() == SEQUENCES[4][30:]
    assert np.concatenate(list(dataset.blocks())).tolist() == list(itertools.chain(*SEQUENCES))


def test_reading_outside_a_sequence_is_an_error(tmp_path: Path) -> None:
    """Tokens of the neighbour must not slip in."""
    dataset = write(tmp_path / "x")
    for arguments in [(0, 0, 3), (0, 3), (0, -1, 1), (9,)]:
        with pytest.raises(IndexError):
            dataset.get(*arguments)
    with pytest.raises(ValueError, match="step of 2"):
        dataset[::2]


def test_data_set_without_documents(tmp_path: Path) -> None:
    """No text at all still gives files that can be read."""
    dataset = write(tmp_path / "x", [])
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)
    assert len(IndexedDataset(tmp_path / "x", mmap=False)) == 0


def test_worker_processes_can_receive_it(tmp_path: Path) -> None:
    """Spawned loaders get the data set by pickle: the files are opened anew, not copied."""
    write(tmp_path / "x")
    for mmap in (True, False):
        data = pickle.dumps(IndexedDataset(tmp_path / "x", mmap=mmap))
        assert len(data) < 1000
        assert pickle.loads(data)[1].tolist() == SEQUENCES[1]


def test_documents_in_bulk_equal_one_by_one(tmp_path: Path) -> None:
    """The fast way of preprocessing writes the same bytes."""
    write(tmp_path / "single")
    with IndexedDatasetWriter(tmp_path / "bulk", np.uint16) as writer:
        for part in (SEQUENCES[:2], SEQUENCES[2:]):
            writer.add_documents(np.array(list(itertools.chain(*part)), np.int64), [len(sequence) for sequence in part])
    for ending in (".bin", ".idx", ".meta.json"):
        assert (tmp_path / f"single{ending}").read_bytes() == (tmp_path / f"bulk{ending}").read_bytes()


def test_appended_data_sets_equal_one_written_at_once(tmp_path: Path) -> None:
    """Merging keeps documents of several sequences and empty documents as they were."""
    for name in ("a", "b"):
        with IndexedDatasetWriter(tmp_path / name, np.int32) as writer:
            _two_documents(writer)
    with IndexedDatasetWriter(tmp_path / "merged", np.int32) as writer:
        for name in ("a", "b"):
            writer.add_dataset(IndexedDataset(tmp_path / name))
    with IndexedDatasetWriter(tmp_path / "direct", np.int32) as writer:
        _two_documents(writer)
        _two_documents(writer)
    for ending in (".bin", ".idx", ".meta.json"):
        assert (tmp_path / f"merged{ending}").read_bytes() == (tmp_path / f"direct{ending}").read_bytes()


def _two_documents(writer: IndexedDatasetWriter) -> None:
    writer.add_document([1, 70000], [3])
    writer.add_document()


def test_metadata_counts_what_was_written(tmp_path: Path) -> None:
    """The largest id lets a run check its vocabulary without reading the data."""
    write(tmp_path / "x", [[5, 9], [], [7]])
    metadata = DatasetMetadata.read(str(tmp_path / "x"))
    assert metadata is not None
    assert (metadata.num_tokens, metadata.num_sequences, metadata.num_documents, metadata.max_token_id) == (3, 3, 3, 9)


@pytest.mark.parametrize(("dtype", "token"), [(np.uint16, 65536), (np.uint16, -1), (np.int32, 2**31)])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, dtype: Any, token: int) -> None:
    """They would wrap around to other ids without a word."""
    writer = IndexedDatasetWriter(tmp_path / "x", dtype)
    writer.add_document([1, 2])
    with expect_error(DataError, token, np.dtype(dtype), "x.bin"):
        writer.add_document([3, token])
    assert list(tmp_path.iterdir()) == []


def test_nothing_appears_before_the_end_nor_after_a_failure(tmp_path: Path) -> None:
    """A run that looks for the files finds whole ones or none; an older version stays until the new one is complete."""
    write(tmp_path / "x")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    writer = IndexedDatasetWriter(tmp_path / "x", np.uint16)
    writer.add_document([9, 9])
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    with pytest.raises(KeyboardInterrupt), writer:
        raise KeyboardInterrupt
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_old_index_never_describes_new_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure between the last two renames leaves tokens without an index, which every reader refuses."""
    write(tmp_path / "x")
    rename = Path.replace

    def fail_for_the_index(path: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", fail_for_the_index)
    with expect_error(DataError, exit_code=1):
        write(tmp_path / "x", [[9] * count for count in range(8)])
    with expect_error(DataError, "x.idx", "x.bin"):
        IndexedDataset(tmp_path / "x")


def test_two_writers_of_one_data_set(tmp_path: Path) -> None:
    """A command started twice would mix its tokens with the other's; the second one stops, and takes nothing away."""
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([1, 2, 3])
        with expect_error(DataError, exit_code=1):
            IndexedDatasetWriter(tmp_path / "data", np.uint16)
        writer.add_document([4])
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "data")[:]] == [[1, 2, 3], [4]]
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_document([5])
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "data")[:]] == [[5]]


@pytest.mark.parametrize(("number", "stops"), [(errno.ENOLCK, False), (errno.EIO, True)])
def test_only_a_file_system_without_locks_goes_without(
    number: int, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data could not be written to some network file systems; a disk that fails here would fail later, after hours."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with expect_error(DataError, exit_code=1) if stops else nullcontext():
        with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
            writer.add_document([1, 2])
        assert IndexedDataset(tmp_path / "data")[0].tolist() == [1, 2]


def test_data_sets_are_not_written_to_urls() -> None:
    """Taken as a path it would become a folder named s3:."""
    with expect_error(ConfigError):
        IndexedDatasetWriter("s3://bucket/data", np.uint16)


def test_killed_writer_leaves_no_data_set_behind(tmp_path: Path) -> None:
    """kill -9 in the middle: what is left doesn't look like a data set, and doesn't hinder the next attempt."""
    script = """
        import os, signal, sys
        from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
        writer = IndexedDatasetWriter(sys.argv[1], "uint16")
        writer.add_documents(list(range(60000)), [60000])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "x")], check=False)
    assert ended.returncode == -signal.SIGKILL
    with expect_error(DataError):
        IndexedDataset(tmp_path / "x")
    assert write(tmp_path / "x").num_documents == len(SEQUENCES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.meta.json"]


@pytest.fixture
def little_space() -> Iterator[None]:
    """Files may have 100,000 bytes: writing more fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("little_space")
def test_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """Whether the tokens or the index find no room, the message names the file, and half a data set never stays."""
    for documents, tokens in ((1, 60_000), (8_000, 1)):  # the .bin too large, then the .idx
        with (
            expect_error(DataError, "x.bin", exit_code=1),
            IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
        ):
            writer.add_documents(np.zeros(documents * tokens, np.uint16), [tokens] * documents)
        assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where the folder should be stands for any folder that refuses."""
    (tmp_path / "file").write_text("")
    with expect_error(DataError, "file/x.bin"):
        IndexedDatasetWriter(tmp_path / "file" / "x", np.uint16)


def test_missing_folders_are_made(tmp_path: Path) -> None:
    """--output-prefix may name a folder that doesn't exist yet."""
    assert len(write(tmp_path / "new" / "folder" / "x")) == len(SEQUENCES)


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """Lengths and documents go to disk as they come: two million documents stay within a few MB."""
    script = """
        import resource, sys
        import numpy as np
        from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with IndexedDatasetWriter(sys.argv[1], "uint16") as writer:
            tokens, lengths = np.ones(20_000, np.uint16), np.full(10_000, 2)
            writer.add_documents(tokens, lengths)
            before = peak()
            for _ in range(200):
                writer.add_documents(tokens, lengths)
        print(peak() - before)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "x")],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert int(ran.stdout) < 10_000  # KB; the tables alone would be 24,000
    assert IndexedDataset(tmp_path / "x").num_documents == 2_010_000


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_cut_short_under_a_run_is_an_error(tmp_path: Path, mmap: bool) -> None:
    """Reading a map beyond the end of its file killed the process with SIGBUS, and plain reads gave fewer tokens."""
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_documents(np.arange(5000), [2500, 2500])
    data = IndexedDataset(tmp_path / "x", mmap=mmap)
    os.truncate(tmp_path / "x.bin", 11_000)
    assert data[0].tolist() == list(range(2500))
    for read in (
        lambda: data[1],
        lambda: data.get(1, 2000, 100),
        lambda: data.get_range(0, 2),
        lambda: list(data.blocks()),
    ):
        with expect_error(DataError, "x.bin", "20000 bytes", "11000"):
            read()
