"""Texts that share a call of attention see their own keys, wherever these lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.inference.decode_attention import OneQuery, shared_calls

TABLE = torch.arange(2 * 400 * 3).view(2, 400, 3)


def query(start: int, keys: int, *, scattered: bool = False) -> OneQuery:
    """A text of ``keys`` tokens from place ``start`` on."""
    places = np.arange(start, start + keys)[::-1].copy() if scattered else slice(start, start + keys)
    return OneQuery(keys - 1, 0, keys, places)


@pytest.mark.parametrize(
    ("queries", "is_exact", "groups", "is_view"),
    [
        ([query(10, 9), query(110, 9), query(60, 9)], False, [[0, 2, 1]], True),
        ([query(10, 9), query(110, 9), query(70, 9)], False, [[0, 1, 2]], False),
        ([query(10, 9), query(60, 12), query(110, 70)], False, [[0, 1], [2]], False),
        ([query(10, 9), query(60, 12), query(110, 9)], True, [[0, 2], [1]], True),
        ([query(10, 9), query(60, 9, scattered=True)], True, [[0, 1]], False),
        ([query(10, 61), query(110, 62), query(210, 61)], False, [[0, 2], [1]], True),
        ([query(10, 61), query(80, 61), query(310, 61)], False, [[0], [1], [2]], True),
        ([query(10, 61), query(80, 61), query(310, 61)], True, [[0], [1], [2]], True),
        (
            [query(10, 61), query(90, 61, scattered=True), query(180, 61), query(310, 61, scattered=True)],
            False,
            [[0], [2], [1, 3]],
            True,
        ),
        ([query(10, 9), query(60, 61), query(200, 12)], False, [[0, 2], [1]], False),
    ],
    ids=[
        "regular",
        "irregular",
        "near in length",
        "equal in length",
        "scattered",
        "long",
        "long and irregular",
        "long, irregular, exact",
        "long, some scattered",
        "long and short",
    ],
)
def test_each_text_sees_its_own_keys(
    queries: list[OneQuery], is_exact: bool, groups: list[list[int]], is_view: bool
) -> None:
    """Regular distances need no copy; a bias hides what shorter texts don't have. Long ones are never copied to share a
    call: a step of 16 texts of 700 tokens took 1.5 times as long.
    """
    device = torch.device("cpu")
    calls = shared_calls(queries, fewest=2, is_exact=is_exact, is_alone=False, most_copied=50, device=device)
    found = [list(range(len(queries))) if call.rows is None else call.rows.tolist() for call in calls]
    assert found == groups
    assert isinstance(calls[0].places, tuple) == is_view
    for call, members in zip(calls, groups):
        keys = call.by_text(TABLE[:, call.places]) if isinstance(call.places, torch.Tensor) else call.view_of(TABLE)
        bias = call.bias(torch.zeros(1))
        assert bias is not None or not is_exact
        for number, member in enumerate(members):
            one = queries[member]
            assert torch.equal(keys[number, :, : one.keys], TABLE[:, one.places])
            if bias is not None:
                assert bias[number, 0, 0].isfinite().tolist() == [n < one.keys for n in range(call.keys)]
    assert [
        call.chosen
        for call in shared_calls(queries[:1], fewest=2, is_exact=True, is_alone=True, most_copied=50, device=device)
    ] == [0]
