"""Recorded from megatron-core: every rank runs its microbatches in the order that Megatron-LM's runs them."""

from __future__ import annotations

import json
from typing import Any

from megatron.core.pipeline_parallel.settings import PipelineSettings
from tests.golden.regenerate_schedules import RECORDED, WRITTEN, digest

GOLDEN: dict[str, Any] = json.loads(RECORDED.read_text())


def test_orders_are_those_recorded() -> None:
    """Memory, bubbles and hangs of a run moved here would differ from what its flags gave before.

    With a last group smaller than the others they did: it took as many turns as the others, and left most of them out.
    """
    assert len(GOLDEN["schedules"]) > 192
    for ranks, chunks, microbatches, group_size, recorded in GOLDEN["schedules"]:
        case = ranks, chunks, microbatches, group_size
        settings = PipelineSettings("interleaved" if group_size else "1f1b", ranks, chunks, group_size)
        schedule = settings.schedule(microbatches)
        orders = [" ".join(map(str, order)) for order in schedule.orders]
        found = orders if case in WRITTEN else [digest(order) for order in orders]
        assert found == recorded, f"ranks, chunks, microbatches, group size {case}: ours are {orders}"
