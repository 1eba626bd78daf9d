"""Slices of the sequence: every position held once, each rank's causal work equal, and nothing but visible pairs."""

from __future__ import annotations

import pytest
import torch

from megatron.core.context_parallel.slicing import by_rank, in_order, positions, sequence_slices, take
from megatron.core.context_parallel.visible import Documents, Visible, visible

RANKS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("ranks", RANKS)
def test_every_position_is_held_once(ranks: int) -> None:
    """A position that is lost is never trained on; one that is held twice counts double."""
    for length in (2 * ranks, 6 * ranks):
        held = [positions(length, rank, ranks) for rank in range(ranks)]
        assert sorted(torch.cat(held).tolist()) == list(range(length))
        assert all(part.tolist() == sorted(part.tolist()) and len(part) == length // ranks for part in held)


def test_pieces_are_those_of_megatron() -> None:
    """A rank holds piece r and piece 2·cp - 1 - r; tools that gather hidden states rely on it."""
    assert [tuple(run.start for run in sequence_slices(8, rank, 4)) for rank in range(4)] == [
        (0, 7),
        (1, 6),
        (2, 5),
        (3, 4),
    ]
    assert positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert sequence_slices(8, 0, 2) == (slice(0, 2), slice(6, 8))


@pytest.mark.parametrize("ranks", RANKS)
def test_slices_come_back_in_order(ranks: int) -> None:
    """Ulysses puts slices together to whole sequences and cuts them again."""
    x = torch.arange(4 * ranks * 3).view(4 * ranks, 3)
    held = torch.stack([take(x, rank, ranks, dim=0) for rank in range(ranks)])
    assert torch.equal(by_rank(x, ranks), held)
    assert torch.equal(in_order(held), x)
    assert torch.equal(take(x.t(), ranks - 1, ranks, dim=1), held[-1].t())


@pytest.mark.parametrize(("exchanging", "ringing"), [(2, 2), (2, 4), (4, 2), (1, 3), (3, 1)])
def test_neighbours_hold_together_what_one_rank_of_a_smaller_ring_holds(exchanging: int, ringing: int) -> None:
    """Two levels need no slicing of their own: after the first exchange the second finds its own slices."""
    ranks, length = exchanging * ringing, 4 * exchanging * ringing
    for outer in range(ringing):
        held = [positions(length, outer * exchanging + inner, ranks) for inner in range(exchanging)]
        assert torch.equal(in_order(torch.stack(held)), positions(length, outer, ringing))


def pairs_seen(calls: list[tuple[int, int, list[Visible]]], length: int, ranks: int) -> torch.Tensor:
    """How often each (query, key) pair of the whole sequence is computed, for sample 0."""
    seen = torch.zeros(length, length, dtype=torch.int64)
    for asker, owner, parts in calls:
        queries, keys = positions(length, asker, ranks), positions(length, owner, ranks)
        for part in parts:
            if part.samples.start not in (None, 0):
                continue
            rows, columns = queries[part.rows], keys[part.keys]
            block = torch.ones(len(rows), len(columns), dtype=torch.int64)
            seen[rows.unsqueeze(1), columns] += block.tril() if part.causal else block
    return seen


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_calls_cover_what_is_visible_once(ranks: int, causal: bool) -> None:
    """A pair that is left out, or seen twice or too early, is a wrong attention that still trains."""
    length = 6 * ranks
    held = length // ranks
    calls = [
        (asker, owner, [visible(asker, owner, queries=held, keys=held, causal=causal)])
        for asker in range(ranks)
        for owner in range(ranks)
    ]
    ones = torch.ones(length, length, dtype=torch.int64)
    assert torch.equal(pairs_seen(calls, length, ranks), ones.tril() if causal else ones)


@pytest.mark.parametrize("ranks", RANKS)
def test_work_is_equal(ranks: int) -> None:
    """With slices from end to end the last rank would compute twice the average, and all others wait for it."""
    held = 10
    for step in range(1, ranks):
        sizes = set()
        for asker in range(ranks):
            part = visible(asker, (asker - step) % ranks, queries=held, keys=held, causal=True)
            sizes.add((part.rows.stop - part.rows.start) * (part.keys.stop - part.keys.start))
        assert sizes == {held * held // 2}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_documents_cut_calls_to_their_own_pairs(ranks: int, causal: bool) -> None:
    """One position that looks into another document leaks it, at certain lengths only: so many are tried."""
    generator, length = torch.Generator().manual_seed(ranks), 6 * ranks
    held = length // ranks
    for chance in (0.05, 0.2, 0.6):
        document_ids = (torch.rand(2, length, generator=generator) < chance).cumsum(1)
        document_ids[0] %= 2  # numbers come back: a document is a run, not a number
        documents = Documents(document_ids)
        calls = []
        for asker in range(ranks):
            for owner in range(ranks):
                whole = visible(asker, owner, queries=held, keys=held, causal=causal)
                calls.append((asker, owner, documents.cut(whole, asker, owner, ranks)))
        runs = torch.cat([torch.zeros(1, dtype=torch.int64), (document_ids[0, 1:] != document_ids[0, :-1]).cumsum(0)])
        expected = (runs.unsqueeze(1) == runs.unsqueeze(0)).long()
        assert torch.equal(pairs_seen(calls, length, ranks), expected.tril() if causal else expected)
