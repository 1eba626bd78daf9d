"""Orders in which a rank runs its microbatches."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.schedules import forward_only, one_f_one_b


def text(actions: object) -> str:
    """Actions as ``F0 B0 …``."""
    return " ".join(str(action)[1:] for action in actions)  # type: ignore[attr-defined]


def test_one_stage_is_gradient_accumulation() -> None:
    """Each microbatch's activations are gone before the next one's arrive."""
    assert text(one_f_one_b(0, 1, 3)) == "F0 B0 F1 B1 F2 B2"


def test_first_of_three_stages() -> None:
    """Two forward passes fill the pipeline."""
    assert text(one_f_one_b(0, 3, 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"


@pytest.mark.parametrize("num_stages", range(1, 6))
@pytest.mark.parametrize("num_microbatches", range(1, 9))
def test_every_microbatch_once_each_way(num_stages: int, num_microbatches: int) -> None:
    """A backward pass follows its forward pass, and at most as many are in flight as stages remain."""
    for rank in range(num_stages):
        live: set[int] = set()
        done = []
        for action in one_f_one_b(rank, num_stages, num_microbatches):
            if action.kind == "F":
                live.add(action.microbatch)
            else:
                live.remove(action.microbatch)
                done.append(action.microbatch)
            assert len(live) <= num_stages - rank
        assert not live and done == list(range(num_microbatches))


def test_forward_only() -> None:
    """Evaluation runs no backward pass."""
    assert text(forward_only(3)) == "F0 F1 F2"
