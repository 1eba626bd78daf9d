"""Microbatches of a run: every sample once, under its own number, however ranks and batch sizes divide them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.metadata import ContentDigests
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.rng import RngStreams
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import DataError, ParallelError
from megatron.training.run import data
from megatron.training.run.data import TrainingData
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error

LOADERS = ("single", "cyclic")
RAMP = "--mock-data --train-samples 40 --global-batch-size 12 --rampup-batch-size 4 4 16"
"""Global batches of 4, 4, 8, 12 and 12 samples."""


@pytest.fixture(autouse=True)
def _ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are simulated one by one, and see the same data."""
    monkeypatch.setattr(data, "gather_objects", lambda value, mesh: [value] * mesh.world_size)


def of_rank(flags: str, *, rank: int = 0, dp: int = 1, tp: int = 1) -> TrainingData:
    """The data of one rank out of dp·tp."""
    mesh, cpu = Mesh.of(dp=dp, tp=tp, rank=rank), torch.device("cpu")
    context = ParallelContext(mesh=mesh, rng=RngStreams(1, mesh, cpu), device=cpu, dtype=torch.float32)
    if tp > 1:
        flags += f" --tensor-model-parallel-size {tp}"
    config = tiny_config(flags, ranks=mesh.world_size)
    return TrainingData(config, GPTSpec(), context, build_tokenizer(config.tokenizer))


def by_number(microbatches: Iterable[Microbatch]) -> dict[int, list[int]]:
    """Tokens of each sample by its number; no number may occur twice."""
    found: dict[int, list[int]] = {}
    for microbatch in microbatches:
        for row, tokens in enumerate(microbatch.tensors["tokens"].tolist()):
            number = microbatch.rng_key.sample + row
            assert number not in found, f"sample {number} is read twice"
            found[number] = tokens
    return found


def test_each_sample_is_read_once_under_its_own_number() -> None:
    """The number seeds dropout: a wrong one would repeat masks, or draw others at another number of ranks."""
    whole = by_number(itertools.chain(*itertools.islice(of_rank("--mock-data").training_batches(0), 3)))
    assert list(whole) == list(range(24))
    assert len({tuple(tokens) for tokens in whole.values()}) > 12
    for step in range(3):
        parts = [
            next(itertools.islice(of_rank("--mock-data", rank=rank, dp=2).training_batches(0), step, None))
            for rank in range(2)
        ]
        keys = [[microbatch.rng_key.sample for microbatch in part] for part in parts]
        assert keys == [[8 * step, 8 * step + 4], [8 * step + 2, 8 * step + 6]]
        read = by_number(itertools.chain(*parts))
        assert read == {number: whole[number] for number in range(8 * step, 8 * step + 8)}


def test_tensor_parallel_ranks_read_the_same_samples() -> None:
    """They compute parts of the same product."""
    first, second = (next(of_rank("--mock-data", rank=rank, tp=2).training_batches(0)) for rank in range(2))
    assert by_number(first) == by_number(second)
    assert sorted(by_number(first)) == list(range(8))


@pytest.mark.parametrize("dataloader", LOADERS)
def test_a_resumed_run_reads_on(dataloader: str) -> None:
    """Otherwise a run that resumes trains twice on some samples, and its dropout repeats."""
    flags = f"--mock-data --dataloader-type {dataloader}"
    whole = by_number(itertools.chain(*itertools.islice(of_rank(flags).training_batches(0), 3)))
    resumed = by_number(itertools.chain(*itertools.islice(of_rank(flags).training_batches(8), 2)))
    assert resumed == {number: whole[number] for number in range(8, 24)}


@pytest.mark.parametrize(("dataloader", "samples"), [("single", 32), ("cyclic", 48)])
def test_a_run_that_resumes_in_any_epoch_reads_on(dataloader: str, samples: int, tmp_path: Path) -> None:
    """A resume in the second epoch read the order of the first, elsewhere; one at the border skipped an epoch.

    Four epochs of 8 samples and a rest of the data; ``cyclic`` begins its second round of 32 samples.
    """
    prefix = str(tmp_path / "data")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for first in range(7):
            writer.add_document(range(first, first + 20))
    flags = f"--tokenizer-type NullTokenizer --data-path {prefix} --split 1,0,0 --dataloader-type {dataloader} "
    flags += "--train-samples 32 --global-batch-size 2"

    def after(consumed: int) -> dict[int, list[int]]:
        batches = of_rank(flags).training_batches(consumed)
        return by_number(itertools.chain(*itertools.islice(batches, (samples - consumed) // 2)))

    whole = after(0)
    assert sorted(whole) == list(range(samples))
    rounds = [[whole[number] for number in range(start, start + 8)] for start in range(0, samples, 8)]
    assert all(one != other for one, other in itertools.combinations(rounds, 2))
    for consumed in range(2, samples, 2):
        assert after(consumed) == {number: whole[number] for number in range(consumed, samples)}


def test_cyclic_shuffles_the_samples() -> None:
    """--dataloader-type cyclic would otherwise be the same as single, and end where the data do."""
    single, cyclic = (next(of_rank(f"--mock-data --dataloader-type {kind}").training_batches(0)) for kind in LOADERS)
    assert by_number(single).keys() == by_number(cyclic).keys()
    assert by_number(single) != by_number(cyclic)


@pytest.mark.parametrize("dp", [1, 2])
def test_batch_ramp_up_has_more_microbatches_as_it_goes(dp: int) -> None:
    """Ramp-up with the wrong number of microbatches trains on other batch sizes than the schedule counts."""
    parts = [list(itertools.islice(of_rank(RAMP, rank=rank, dp=dp).training_batches(0), 5)) for rank in range(dp)]
    for part in parts:
        assert [len(batch) for batch in part] == [2 // dp, 2 // dp, 4 // dp, 6 // dp, 6 // dp]
    steps = [by_number(itertools.chain(*step)) for step in zip(*parts)]
    edges = [0, 4, 8, 16, 28, 40]
    assert [sorted(step) for step in steps] == [list(range(*edge)) for edge in itertools.pairwise(edges)]


def test_the_last_batch_of_the_data_is_read_whole() -> None:
    """A run would otherwise fail on its last step, or train on less than it was asked for."""
    batches = of_rank("--mock-data --train-iters 3").training_batches(0)
    assert [len(next(batches)) for _ in range(3)] == [4, 4, 4]
    with expect_error(DataError, "24 samples"):
        next(batches)


def test_ranks_that_see_other_data_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale file on one node would silently mix two data sets."""
    monkeypatch.setattr(data, "gather_objects", lambda value, mesh: [value, ("ab" * 32, {})])
    with expect_error(ParallelError, "1", "0", exit_code=2):
        of_rank("--mock-data", dp=2)


def test_ranks_that_see_other_bytes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of one size and one beginning passed for the same; ranks that know no digest have nothing to compare."""
    here, there = ContentDigests("a", "b"), ContentDigests("c", "b")
    for views, wrong in (
        ([{"x": here}, {}, {"x": here, "y": there}], False),
        ([{}, {"x": here}, {"x": there}], True),
    ):
        monkeypatch.setattr(
            data, "gather_objects", lambda value, mesh, views=views: [(value[0], contents) for contents in views]
        )
        with expect_error(ParallelError, "rank 2", "x", "rank 1", exit_code=2) if wrong else nullcontext():
            of_rank("--mock-data", dp=2)


@pytest.mark.parametrize("reset", [False, True])
def test_position_ids_travel_only_when_they_say_something(reset: bool) -> None:
    """Without resets positions are 0, 1, 2 …, which the model makes up faster by itself."""
    flags = "--mock-data" + " --reset-position-ids" * reset
    (first, *_) = next(of_rank(flags).training_batches(0))
    assert ("position_ids" in first.tensors) == reset
