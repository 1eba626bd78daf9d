"""Saved at one layout, loaded at another: every weight and every optimizer number in its place."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import load_checkpoint, read_run_document
from megatron.core.checkpointing.save import save_checkpoint
from megatron.core.checkpointing.sharded_view import sharded_views
from megatron.core.checkpointing.storage import CheckpointReader, tensors_in
from megatron.core.files.remote_path import AnyPath
from megatron.core.parallel.mesh import Mesh
from tests.unit.checkpointing.simulated import Layout, assert_holds, logical_values, on_ranks, state_of

LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=dp, cp=cp, zero=zero, vpp=vpp)
    for tp in (1, 2, 3, 4)
    for pp in (1, 2, 4)
    for dp in (1, 2, 3, 4)
    for cp in (1, 2)
    for zero in (False, True)
    for vpp in ((1, 2) if pp == 2 else (1,))
    if tp * pp * dp * cp <= 8
]
PAIRS = [tuple(random.Random(seed).sample(LAYOUTS, 2)) for seed in range(16)]


def save(root: Path, layout: Layout, values: dict[str, Tensor], iteration: int = 10) -> AnyPath:
    def save_rank(mesh: Mesh) -> AnyPath:
        return save_checkpoint(root, iteration, state_of(layout, mesh, values), {"iteration": iteration}, mesh)

    return on_ranks(layout.meshes(), save_rank)[0]


@pytest.mark.parametrize(
    ("saved", "loaded"), [*PAIRS[:6], *(pytest.param(*each, marks=pytest.mark.slow) for each in PAIRS[6:])], ids=str
)
def test_random_pairs(saved: Layout, loaded: Layout, tmp_path: Path) -> None:
    """A cluster of another size, or ZeRO switched on or off: the run goes on from the same numbers."""
    values = logical_values(seed=1)
    save(tmp_path, saved, values)

    def load(mesh: Mesh) -> None:
        states = state_of(loaded, mesh, None)
        folder = find_checkpoint(tmp_path, mesh=mesh)
        load_checkpoint(folder, states, mesh)
        assert_holds(states, mesh, values)
        assert read_run_document(folder)["state"] == {"iteration": 10}

    on_ranks(loaded.meshes(), load)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=4), Layout(tp=2, pp=2, dp=2), Layout(tp=2, dp=4, zero=True), Layout(pp=2, dp=4, zero=True)],
    ids=str,
)
def test_every_element_is_written_once_and_all_ranks_write(layout: Layout, tmp_path: Path) -> None:
    """Replicas cost no disk, padding never reaches a file, and no rank writes for all the others."""
    values = logical_values(seed=2)
    metadata = CheckpointReader(save(tmp_path, layout, values)).read_metadata()
    for name, entry in tensors_in(metadata).items():
        assert entry.size == values[name].shape
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == values[name].numel()
    bytes_of: Counter[str] = Counter()
    for place in metadata.storage_data.values():
        bytes_of[place.relative_path] += place.length
    assert len(bytes_of) == len(layout.meshes())
    assert max(bytes_of.values()) < 1.5 * sum(bytes_of.values()) / len(bytes_of)


def test_tools_of_torch_read_our_folders(tmp_path: Path) -> None:
    """The format is DCP's own: plain ``dcp.load`` into plain tensors works, with the logical vocabulary."""
    values = logical_values(seed=3)
    folder = save(tmp_path, Layout(tp=2, dp=2, zero=True), values)
    plain = {name: torch.zeros_like(value) for name, value in values.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(plain, checkpoint_id=folder)
    for name, value in values.items():
        assert torch.equal(plain[name], value), name


def test_views_work_with_plain_dcp_calls(tmp_path: Path) -> None:
    """``ShardedView`` keeps DCP's protocol, so ``dcp.save`` and ``dcp.load`` can be called on our state directly."""
    values, mesh = logical_values(seed=4), Mesh.single()
    states = state_of(Layout(), mesh, None)
    with pytest.warns(UserWarning, match="single process"):
        dcp_save(dict(sharded_views(state_of(Layout(), mesh, values), mesh)), checkpoint_id=tmp_path / "dcp")
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(dict(sharded_views(states, mesh)), checkpoint_id=tmp_path / "dcp")
    assert_holds(states, mesh, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_are_converted_to_the_dtype_of_the_run(dtype: torch.dtype, tmp_path: Path) -> None:
    """A checkpoint of an fp32 run continues in bf16, and the other way round."""
    values, mesh = logical_values(seed=5), Mesh.single()
    save(tmp_path, Layout(), values)
    states = state_of(Layout(), mesh, None, model_dtype=dtype)
    load_checkpoint(find_checkpoint(tmp_path), states, mesh)
    assert states[0].tensor.dtype == dtype
    assert_holds(states, mesh, values)


def test_views_refuse_arithmetic() -> None:
    """Whoever mistakes a view for the tensor is told, not given a fraction of the numbers."""
    view = sharded_views(state_of(Layout(), Mesh.single(), None), Mesh.single())["model.final_layernorm.weight"]
    with pytest.raises(NotImplementedError, match="holds no numbers"):
        view + 1
