"""A cache never changes what a run reads, nor stops one: shared, read-only, damaged and contended folders work."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.index_build import SampleIndex, build_epoch
from megatron.core.datasets.index_cache import IndexCache, digest_of
from megatron.core.datasets.packing import BestFitOrder
from megatron.core.datasets.sample_order import EpochOrder, MegatronOrder
from megatron.core.datasets.spans import MegatronSpanOrder, Sentences, SpanOrder, SpanRules
from tests.harness.sentences import check_line

LENGTHS = np.arange(1, 300, dtype=np.int32)


class Builder:
    """Builds an index and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> SampleIndex:
        self.calls += 1
        return build_epoch(LENGTHS, seed=1, epoch=0, seq_length=8)


def get(folder: Path | None, build: Builder, *, inputs: tuple[object, ...] = (1,), least_rows: int = 1) -> SampleIndex:
    return IndexCache(folder, least_rows=least_rows).get(build, rows=len(LENGTHS), inputs=inputs)


def assert_right(index: SampleIndex) -> None:
    built = Builder()()
    assert np.array_equal(index.documents, built.documents)
    assert np.array_equal(index.samples, built.samples)
    assert (index.documents.dtype, index.samples.dtype) == (built.documents.dtype, built.samples.dtype)


def test_built_once_then_read(tmp_path: Path) -> None:
    """The second run maps what the first one stored."""
    build = Builder()
    for _ in range(3):
        assert_right(get(tmp_path / "cache", build))
    assert build.calls == 1


def test_name_follows_inputs_only(tmp_path: Path) -> None:
    """Moved data find their cache; other inputs never do."""
    build = Builder()
    get(tmp_path / "here", build)
    shutil.move(tmp_path / "here", tmp_path / "there")
    get(tmp_path / "there", build)
    assert build.calls == 1
    get(tmp_path / "there", build, inputs=(2,))
    assert build.calls == 2


def test_small_indices_are_not_stored(tmp_path: Path) -> None:
    """Thousands of epochs of a small corpus must not become thousands of files."""
    assert_right(get(tmp_path / "cache", Builder(), least_rows=1000))
    assert not (tmp_path / "cache").exists()
    assert_right(get(None, Builder()))


def test_folder_that_cannot_be_written_says_so_once_and_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file in the folder's place refuses as a read-only disk does, for root too."""
    (tmp_path / "file").write_text("")
    cache, build = IndexCache(tmp_path / "file" / "cache", least_rows=1), Builder()
    with caplog.at_level(logging.WARNING):
        for epoch in range(2):
            assert_right(cache.get(build, rows=300, inputs=(epoch,)))
    assert [record.getMessage() for record in caplog.records] == [
        f"keeping indices in memory: the cache {cache.folder} cannot be written (Not a directory)"
    ]
    assert build.calls == 2


def test_full_disk_is_named_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason was given as "(None)": numpy's own writing of arrays loses the operating system's."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
        assert_right(get(tmp_path, Builder()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caplog.messages == [f"keeping indices in memory: the cache {tmp_path} cannot be written (File too large)"]
    assert not list(tmp_path.glob(".*.npy.*"))


def test_what_a_killed_builder_left_is_deleted(tmp_path: Path) -> None:
    """Its unfinished files, as large as an index, stayed in the cache for good."""
    get(tmp_path, Builder())
    left = tmp_path / f".{digest_of(0)}-samples.npy.4711-0123abcd"
    left.touch()
    get(tmp_path, Builder(), inputs=(2,))
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 5


def test_read_only_folder_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prepared once by somebody who may write, read by everybody else without a word."""
    get(tmp_path, Builder())
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()  # opening it for writing fails, also for root
    build = Builder()
    assert_right(get(tmp_path, build))
    assert build.calls == 0
    assert not caplog.records


def test_any_change_to_a_cache_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """63 of 600 mutations gave other samples without a word, and a damaged header ended every start in a traceback."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    get(tmp_path, Builder())
    random = np.random.default_rng(1)
    for path in sorted(tmp_path.glob("*.npy")):
        sound = path.read_bytes()
        flips = [*range(0, 128, 9), *random.integers(128, len(sound), 12).tolist()]
        damages = [sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :] for at in flips]
        damages += [sound[:size] for size in (0, 1, 4, 6, 100, len(sound) - 100, len(sound) - 1)]
        damages += [sound + b"\0", sound[:-4] + bytes(4), bytes(len(sound)), b"garbage" * 50]
        for damage in damages:
            path.write_bytes(damage)
            caplog.clear()
            build = Builder()
            assert_right(get(tmp_path, build))
            assert (build.calls, path.read_bytes()) == (1, sound)
            assert [record.getMessage() for record in caplog.records] == [
                f"the index cache {path} is damaged: building it again"
            ]


def test_a_cache_under_another_name_is_noticed(tmp_path: Path) -> None:
    """The files of another epoch have a right checksum of their own."""
    for inputs in ((1,), (2,)):
        get(tmp_path, Builder(), inputs=inputs)
    first, second = sorted(tmp_path.glob("*-samples.npy"))
    first.write_bytes(second.read_bytes())
    build = Builder()
    for inputs in ((1,), (2,)):
        assert_right(get(tmp_path, build, inputs=inputs))
    assert build.calls == 1


def test_a_damaged_cache_that_cannot_be_replaced_is_built_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On nodes that see the folder read-only a run goes on, and says which file is wrong."""
    get(tmp_path, Builder())
    (path,) = tmp_path.glob("*-samples.npy")
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").mkdir()
    assert_right(get(tmp_path, Builder()))
    check_line(caplog.text, path)
    check_line(caplog.text, "keeping")


def _build_in_process(folder: Path, start: Any, built: Any) -> None:
    start.wait()
    build = Builder()
    assert_right(get(folder, build))
    built.put(build.calls)


def test_concurrent_ranks_build_once(tmp_path: Path) -> None:
    """Ranks that start together wait for one of them, and all read the same."""
    fork = multiprocessing.get_context("fork")
    start, built = fork.Event(), fork.Queue()
    ranks = [fork.Process(target=_build_in_process, args=(tmp_path, start, built)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    start.set()
    counts = [built.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    assert sorted(counts) == [0, 0, 0, 0, 0, 1]
    assert not list(tmp_path.glob(".*-*"))


def test_digest_tells_values_and_borders_apart() -> None:
    """Two lists of inputs that read alike when run together are different inputs."""
    digests = {digest_of(*parts) for parts in [(1, 23), (12, 3), (123,), ("1", 23), (np.array([1, 23]),), (True, 23)]}
    assert len(digests) == 6
    assert digest_of(np.int64(3), np.float64(0.5)) == digest_of(3, 0.5)
    assert digest_of(np.arange(6)[::2]) == digest_of(np.array([0, 2, 4]))


def test_run_length_and_batch_size_do_not_change_the_files(tmp_path: Path) -> None:
    """Extending a run, or another number of GPUs, finds the cache of the first one."""
    names = []
    for num_samples in (100, 5000):
        cache = IndexCache(tmp_path, least_rows=1)
        EpochOrder(LENGTHS, seed=1, seq_length=64, num_samples=num_samples, cache=cache).find(0)
        names.append(sorted(path.name for path in tmp_path.iterdir()))
    assert names[0] == names[1]
    assert len(names[0]) == 3  # two tables and the lock


def places(order: Any) -> list[str]:
    """Where each sample lies."""
    find = order.pieces if isinstance(order, BestFitOrder) else order.find
    return [str(find(index)) for index in range(len(order))]


def test_runs_with_other_settings_share_a_folder(tmp_path: Path) -> None:
    """A name that leaves a setting out gives a run of another --seq-length or --mask-prob the samples of the first."""
    lengths = np.append(np.arange(20, 60), 4).astype(np.int32)  # 198 times 8 tokens: one sample more if none is shared
    sentences = Sentences(lengths, np.arange(0, len(lengths) + 1, 4)[:11])
    rules = SpanRules(max_tokens=90, min_sentences=1, short_probability=0.1)
    stream = {"seed": 1, "seq_length": 8, "num_samples": 300}
    spans = {"seed": 1, "rules": rules, "num_samples": 30}
    other_rules = [
        {"rules": SpanRules(max_tokens=most, min_sentences=least, short_probability=short)}
        for most, least, short in ((60, 1, 0.1), (90, 3, 0.1), (90, 1, 0.5))
    ]
    seeds: list[dict[str, Any]] = [{}, {"seed": 2}, {"copy": 1}]
    cases: list[tuple[Any, Any, dict[str, Any], list[dict[str, Any]]]] = [
        (EpochOrder, lengths, stream, [*seeds, {"seq_length": 9}, {"drop_last_partial": False}, {"shared": 0}]),
        (MegatronOrder, lengths, stream, [{}, {"seed": 2}, {"seq_length": 9}, {"num_samples": 200}]),
        (BestFitOrder, lengths, stream, [*seeds, {"seq_length": 9}]),
        (SpanOrder, sentences, spans, [*seeds, *other_rules]),
        (MegatronSpanOrder, sentences, spans, [{}, {"seed": 2}, {"num_samples": 3}, *other_rules]),
    ]
    for kind, documents, settings, changes in cases:
        for change in changes:
            stored, fresh = (
                kind(documents, **(settings | change), cache=IndexCache(folder, least_rows=1))
                for folder in (tmp_path, None)
            )
            assert len(stored) == len(fresh) > 0
            assert places(stored) == places(fresh), (kind, change)
