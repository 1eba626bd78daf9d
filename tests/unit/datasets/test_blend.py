"""A blend gives each source its share at every moment, in Megatron-LM's order, and never runs a source dry."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest

from megatron.core.datasets.blend import BlendSpec, Interleaving, interleave, interleave_all, normalized, parse_blend
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error


def one_by_one(weights: list[float], sizes: list[float], size: int) -> list[int]:
    """The rule as it is written: the source that lags most, among those that aren't used up; the first of equals."""
    shares, counts, choices = normalized(weights), [0] * len(weights), []
    for position in range(size):
        lags = [
            share * max(position, 1) - count if count < most else -np.inf
            for share, count, most in zip(shares, counts, sizes)
        ]
        choices.append(int(np.argmax(lags)))
        counts[choices[-1]] += 1
    return choices


def located(interleaving: Interleaving) -> list[tuple[int, int]]:
    return [interleaving.locate(position) for position in range(len(interleaving))]


def test_choices_equal_recorded_ones(golden: dict[str, Any]) -> None:
    """Source and the source's own sample number, against Megatron-LM's compiled helper."""
    for key, (sources, numbers) in golden["blend"].items():
        weights, size = ast.literal_eval(key)
        assert located(interleave(normalized(weights), size=size)) == list(zip(sources, numbers))
    sources, numbers = golden["blend_exhaustive_5_3_2"]
    assert located(interleave_all(normalized([5, 3, 2]), sizes=[5, 3, 2])) == list(zip(sources, numbers))


@pytest.mark.parametrize("seed", range(12))
def test_parallel_stretches_equal_the_rule(seed: int) -> None:
    """Stretches are computed side by side from guesses; the outcome must be the sequential one, for any weights."""
    random = np.random.RandomState(seed)
    weights = (random.rand(random.randint(2, 8)) ** random.randint(1, 6)).tolist()
    size = 3000
    assert interleave(normalized(weights), size=size).choices.tolist() == one_by_one(
        weights, [size] * len(weights), size
    )


def test_words_that_python_alone_reads_as_numbers_are_prefixes() -> None:
    """``1_0`` was a weight of 10."""
    for word in ("1_0", "\u0661"):
        assert parse_blend([word, "b"]) == BlendSpec((word, "b"))


@pytest.mark.parametrize("weights", [[1, 1, 1], [0.5, 0.25, 0.25], [0.9999, 0.00005, 0.00005], [7]])
def test_equal_and_extreme_weights(weights: list[float]) -> None:
    """Ties go to the first source; a source of next to no weight waits long, and then gets its turn."""
    choices = interleave(normalized(weights), size=2000).choices.tolist()
    assert choices == one_by_one(weights, [2000.0] * len(weights), 2000)


@pytest.mark.parametrize("seed", range(8))
def test_all_samples_once_equals_the_rule(seed: int) -> None:
    """When a source is used up the others go on by the same rule, until all samples were given once."""
    random = np.random.RandomState(seed)
    sizes = random.randint(1, 900, random.randint(2, 7)).tolist()
    weights = random.rand(len(sizes)).tolist()
    mixed = interleave_all(normalized(weights), sizes=sizes)
    assert mixed.choices.tolist() == one_by_one(weights, sizes, sum(sizes))
    assert mixed.counts.tolist() == sizes


def test_no_samples() -> None:
    """An empty source or an empty request is no special case."""
    assert interleave_all(normalized([1, 1]), sizes=[0, 2]).choices.tolist() == [1, 1]
    assert len(interleave(normalized([1, 1]), size=0)) == 0


def test_longer_run_begins_with_the_shorter_one() -> None:
    """Extending a run must not shuffle what it has already seen."""
    weights = [0.53, 0.31, 0.16]
    longest = interleave(normalized(weights), size=20_000).choices
    for size in (1, 100, 4096, 12_345):
        assert (interleave(normalized(weights), size=size).choices == longest[:size]).all()


def test_shares_hold_at_every_moment() -> None:
    """No prefix of the run is more than two samples away from the asked mix."""
    shares = np.array(normalized([5, 3, 1.5, 0.5]))
    taken = np.cumsum(interleave(shares.tolist(), size=5000).choices[:, None] == np.arange(4), axis=0)
    assert np.abs(taken - np.arange(1, 5001)[:, None] * shares).max() < 2


def test_sample_numbers_count_up_without_gaps() -> None:
    """Each source's samples come in its own order, none skipped or repeated, across the borders of stored counts."""
    mixed = interleave(normalized([0.7, 0.3]), size=10_000)
    places = located(mixed)
    for source in (0, 1):
        numbers = [number for chosen, number in places if chosen == source]
        assert numbers == list(range(mixed.counts[source]))


def test_many_sources() -> None:
    """More than 255 sources need wider numbers."""
    mixed = interleave(normalized([1.0] * 300), size=900)
    assert mixed.counts.tolist() == [3] * 300


def test_lists_are_read_as_recorded(golden: dict[str, Any]) -> None:
    """Prefixes alone, or pairs of weight and prefix, as Megatron-LM reads them."""
    for key, (prefixes, weights) in golden["blend_list"].items():
        if not key.startswith("TRAP"):
            spec = parse_blend(ast.literal_eval(key))
            assert [list(spec.prefixes), spec.weights and list(spec.weights)] == [prefixes, weights]


def test_a_source_of_weight_0_is_left_out() -> None:
    """It would otherwise be chosen whenever all others are ahead of their shares."""
    assert parse_blend(["0", "a", "2", "b", "0.0", "c"]) == BlendSpec(("b",), (2.0,))


@pytest.mark.parametrize("entries", ["1 a b c", "0.5 a b", "a 0.5 b 0.5", "0.5 a 0.5", "a b 0.3"])
def test_mixed_up_lists_are_refused(entries: str) -> None:
    """Megatron-LM silently takes the numbers for file names, or the blend for one without weights."""
    with expect_error(ConfigError, f"--data-path {entries}", "WEIGHT", "PREFIX"):
        parse_blend(entries.split())


@pytest.mark.parametrize("entries", ["-1 a 2 b", "0 a 0 b", "nan a 1 b", "inf a 1 b"])
def test_impossible_weights_are_refused(entries: str) -> None:
    """The message names the flag and the weights."""
    with expect_error(ConfigError, "--train-data-path", "0"):
        parse_blend(entries.split(), flag="--train-data-path")
