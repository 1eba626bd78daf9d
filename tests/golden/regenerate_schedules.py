"""Record in which order the megatron-core package runs microbatches, on every rank of many pipelines.

Needs ``MEGATRON_CORE_PATH`` (see tests/harness/megatron_core.py): ``python -m tests.golden.regenerate_schedules``.
Its own schedules run, with steps that note when they are called and messages that nobody sends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from tests.harness.megatron_core import run_megatron_core

RECORDED = Path(__file__).with_name("schedules_megatron_core.json")

WRITTEN = ((3, 1, 4, None), (2, 2, 4, 2), (2, 2, 7, 4))
"""Cases of which the file holds the orders themselves; of the others it holds digests, a rank each."""

SCRIPT = """
import importlib.metadata
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import p2p_communication, schedules

taken = []

def forward_step(function, data, model, count, received, *others, current_microbatch, **options):
    chunk = parallel_state.get_virtual_pipeline_model_parallel_rank() or 0
    taken.append(f"{chunk}F{current_microbatch}")
    return (chunk, current_microbatch), 0

def backward_step(received, output, *others):
    taken.append("{}B{}".format(*output))

schedules.forward_step, schedules.backward_step = forward_step, backward_step
schedules.deallocate_output_tensor = schedules.get_tensor_shapes = lambda *given, **options: None
parallel_state.get_context_parallel_world_size = lambda: 1
for module in (schedules, p2p_communication):
    for name in dir(module):
        if name.startswith(("send_", "recv_")):
            nothing = (None, None) if "forward_backward_recv" in name else None
            setattr(module, name, lambda *given, nothing=nothing, **options: nothing)

def order(rank, ranks, chunks, microbatches, group_size):
    parallel_state.set_pipeline_model_parallel_world_size(ranks)
    parallel_state.set_pipeline_model_parallel_rank(rank)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if group_size else None)
    parallel_state.set_virtual_pipeline_model_parallel_rank(None)
    model = torch.nn.Module()
    model.model_type = ModelType.encoder_or_decoder
    model.config = ModelParallelConfig(
        pipeline_model_parallel_size=ranks, pipeline_dtype=torch.float32, microbatch_group_size_per_vp_stage=group_size
    )
    model.config.hidden_size = 1
    taken.clear()
    schedules.get_forward_backward_func()(
        forward_step_func=None, data_iterator=[None] * chunks, model=[model] * chunks,
        num_microbatches=microbatches, seq_length=1, micro_batch_size=1,
    )
    return " ".join(taken)

answer({
    "version": importlib.metadata.version("megatron-core"),
    "schedules": [[*case, [order(rank, *case) for rank in range(case[0])]] for case in cases],
})
"""


def cases() -> Iterator[tuple[int, int, int, int | None]]:
    """Ranks, chunks, microbatches and group size (None: not interleaved) of pipelines that megatron-core accepts.

    Groups of as many microbatches as ranks, of multiples of that and of one more, and groups that leave a smaller one.
    """
    yield from WRITTEN
    for ranks in (2, 3, 4, 6, 8):
        for microbatches in (1, ranks - 1, ranks, ranks + 1, 2 * ranks, 3 * ranks + 1):
            yield ranks, 1, microbatches, None
        for chunks in (2, 3, 4):
            for microbatches in range(ranks, 4 * ranks + 1, ranks):
                for group_size in range(ranks, microbatches + 1, ranks):
                    yield ranks, chunks, microbatches, group_size
            for microbatches in (2 * ranks + 1, 2 * ranks + 2):
                yield ranks, chunks, microbatches, ranks + 1


def digest(order: str) -> str:
    """Eight letters that another order does not have."""
    return hashlib.sha256(order.encode()).hexdigest()[:8]


if __name__ == "__main__":
    recorded = run_megatron_core(SCRIPT, cases=[*dict.fromkeys(cases())])
    for *case, orders in recorded["schedules"]:
        if tuple(case) not in WRITTEN:
            orders[:] = map(digest, orders)
    RECORDED.write_text(
        json.dumps(recorded, separators=(",", ":")).replace(",[[", ",\n[[").replace("]],[", "]],\n[") + "\n"
    )
