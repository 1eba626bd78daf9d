"""Checkpoints of Megatron-LM with experts, of every kind and layout, become ours with the same numbers, and go back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.family import PartConfig
from megatron.config.moe import MoEConfig
from megatron.core.checkpointing.storage import CheckpointWriter
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.checkpointing.streamed import StreamedBox, table_of, write_boxes
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.megatron_lm import reading
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.proof import ProofError
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.registry import with_all_groups
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error
from tests.unit.conversion.expert_checkpoints import (
    BIASED,
    LATENT,
    MOE,
    SHARED,
    model_and_experts,
    values_of,
    write_expert_shards,
)
from tests.unit.conversion.megatron_checkpoints import MODERN, portable
from tests.unit.conversion.test_megatron_lm import assert_holds, do

SHALLOW: dict[str, Any] = {**MODERN, "num_layers": 2}
LATER: dict[str, Any] = {**SHALLOW, "mtp_num_layers": 2}
YARN: dict[str, Any] = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
KINDS = ("sequential", "grouped", "legacy")


def layout(tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "ep": ep, "etp": etp}


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("sequential", layout()),
    *((kind, layout(ep=2)) for kind in KINDS),
    *((kind, layout(tp=2, ep=2)) for kind in KINDS),
    ("grouped", layout(pp=2, ep=2)),
    ("legacy", layout(tp=2)),
    ("sequential", layout(tp=2, pp=2, ep=4)),
    ("grouped", layout(tp=2, ep=2, etp=1)),
    ("sequential", layout(tp=4, ep=2, etp=2)),
    ("grouped", layout(tp=2, pp=2, ep=4, etp=1)),
]


@pytest.mark.parametrize(("kind", "sizes"), LAYOUTS, ids=str)
def test_every_kind_at_every_layout(kind: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """With expert parallelism, two numbers in a folder's name are either of stages or of experts, and with fewer ranks
    to an expert than to a dense layer not every pair of numbers has a folder. The proof reads the same shards.
    """
    settings, moe = {**SHALLOW, "num_query_groups": 4, "group_query_attention": False}, {**MOE, **SHARED, **BIASED}
    values = values_of(settings, moe)
    fused_norms = kind != "sequential"
    write_expert_shards(
        tmp_path / "theirs", moe, values, settings=settings, kind=kind, fused_norms=fused_norms, **sizes
    )
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", true_vocab_size=101)
    found = read_native(tmp_path / "ours")
    assert_holds(found, values)
    groups = with_all_groups((GPTConfig(), model_and_experts(settings, moe)[1]))
    assert found.groups == tuple(each for each in groups if not (isinstance(each, PartConfig) and each.is_added))


ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": MOE,
    "softmax of all, scaled": {**MOE, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
    "one expert": {**MOE, "moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    "softplus": {**MOE, "moe_router_score_function": "sqrtsoftplus", "moe_router_topk": 3},
    "groups of two": {**MOE, "num_experts": 8, "moe_router_topk": 4, **BIASED, "moe_router_num_groups": 4}
    | {"moe_router_group_topk": 2},
    "groups of softmax": {**MOE, "moe_router_num_groups": 2, "moe_router_group_topk": 2},
    "listed layers": {**MOE, "moe_layer_freq": [0, 1]},
    "shared, gated": {**MOE, **SHARED, "moe_shared_expert_gate": True},
}


@pytest.mark.parametrize("dist", [True, False], ids=["torch_dist", "torch"])
@pytest.mark.parametrize("router", ROUTERS)
def test_ours_goes_to_megatron_lm_and_back(router: str, dist: bool, tmp_path: Path) -> None:
    """Each routing is proven by code that doesn't share ours, and comes back with the same bytes and settings."""
    model, moe = model_and_experts(SHALLOW, ROUTERS[router])
    values = values_of(SHALLOW, ROUTERS[router])
    write_native(portable(model, values, (moe,)), tmp_path / "ours", final=tmp_path / "ours")
    do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs", dist=dist)
    found = read_megatron_lm(tmp_path / "theirs")
    assert_holds(found, values)
    assert (found.model, found.groups) == (model, read_native(tmp_path / "ours").groups)


@pytest.mark.parametrize("chosen", [1, 2])
def test_sinkhorn_routing(chosen: int, tmp_path: Path) -> None:
    """Sigmoids or a softmax over all experts weigh choices there, whatever else the arguments say."""
    theirs, moe = tmp_path / "theirs", {**MOE, "moe_router_topk": chosen}
    routing: dict[str, Any] = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk_scaling_factor": 3.0}
    write_expert_shards(theirs, moe, values_of(SHALLOW, moe), settings=SHALLOW, ep=2, **routing)
    do("megatron-lm", theirs, "megatron", tmp_path / "ours", true_vocab_size=101)
    found = MoEConfig.among(read_native(tmp_path / "ours").groups)
    score = {"moe_router_score_function": "sigmoid"} if chosen == 1 else {"moe_router_pre_softmax": True}
    assert found == MoEConfig(**{**moe, **score})


CLASSIC_MOE: dict[str, Any] = {
    **{name: MODERN[name] for name in ("hidden_size", "num_attention_heads", "vocab_size")},
    "num_layers": 1,
    "max_position_embeddings": 32,
    "ffn_hidden_size": 48,
}


@pytest.mark.parametrize("kind", ["sequential", "grouped", "torch_dist"])
def test_experts_with_biases_and_without_gates(kind: str, tmp_path: Path) -> None:
    """Releases before core 0.15 have no bias in a router: ours is zero then."""
    values = values_of(CLASSIC_MOE, MOE)
    if kind == "torch_dist":
        model, moe = model_and_experts(CLASSIC_MOE, MOE)
        write_native(portable(model, values, (moe,)), tmp_path / "first", final=tmp_path / "first")
        do("megatron", tmp_path / "first", "megatron-lm", tmp_path / "theirs")
    else:
        held = {name: value for name, value in values.items() if not name.endswith("router.bias")}
        values = {name: value if name in held else torch.zeros_like(value) for name, value in values.items()}
        write_expert_shards(tmp_path / "theirs", MOE, held, settings=CLASSIC_MOE, kind=kind, ep=2)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", true_vocab_size=101)
    assert_holds(read_native(tmp_path / "ours"), values)


LATENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latents": ({**MODERN, **LATENT}, MOE),
    "queries without latents, YaRN": ({**MODERN, **LATENT, **YARN, "q_lora_rank": None}, {}),
    "latents and future tokens": (
        {**MODERN, **LATENT, "mtp_num_layers": 1},
        {**MOE, **BIASED, "moe_layer_freq": [0, 1]},
    ),
    "future tokens": (LATER, {**MOE, **SHARED}),
    "future tokens, dense": (LATER, {}),
}


@pytest.mark.parametrize("dist", [True, False], ids=["torch_dist", "torch"])
@pytest.mark.parametrize("name", LATENTS)
def test_latents_and_future_tokens_there_and_back(name: str, dist: bool, tmp_path: Path) -> None:
    """Latent attention and multi-token prediction, with experts and without."""
    settings, moe = LATENTS[name]
    model, experts = model_and_experts(settings, moe)
    values = values_of(settings, moe)
    write_native(portable(model, values, (experts,)), tmp_path / "ours", final=tmp_path / "ours")
    do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs", dist=dist)
    found = read_megatron_lm(tmp_path / "theirs")
    assert_holds(found, values)
    assert found.model == model


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("latents", {"tp": 2, "ep": 2}),
        ("latents", {"tp": 2, "ep": 2, "fused_norms": True, "whole_latents": True}),
        ("latents and future tokens", {"tp": 2, "pp": 2, "ep": 2}),
        ("latents and future tokens", {"ep": 2, "later": "mtp_model_layer", "kind": "grouped", "fused_norms": True}),
        ("queries without latents, YaRN", {"tp": 2}),
        ("future tokens", {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    ],
    ids=str,
)
def test_latents_and_future_tokens_in_shards(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Ranks split the matrices of latents or each have them; the last stage has the layers of future tokens."""
    settings, moe = LATENTS[name]
    values = values_of(settings, moe)
    theirs = dict(settings)
    if theirs.get("multi_latent_attention"):  # its kind of rotary positions is another argument
        theirs |= {"rope_type": theirs["position_embedding_type"], "position_embedding_type": "rope"}
    write_expert_shards(tmp_path / "theirs", moe, values, settings=theirs, **more)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", true_vocab_size=101)
    found = read_native(tmp_path / "ours")
    assert_holds(found, values)
    assert found.model == model_and_experts(settings, moe)[0]


def test_torch_dist_since_core_014(tmp_path: Path) -> None:
    """Its keys have the number of the layer and of the expert, and gates and values are tensors of their own."""
    moe = {**MOE, **SHARED, **BIASED, "moe_layer_freq": [0, 1]}
    values = values_of(SHALLOW, moe)
    model, experts = model_and_experts(SHALLOW, moe)
    write_native(portable(model, values, (experts,)), tmp_path / "first", final=tmp_path / "first")
    do("megatron", tmp_path / "first", "megatron-lm", tmp_path / "older")
    (older,) = (tmp_path / "older").glob("release")
    stored, newer = StoredTensors(older, foreign=True), tmp_path / "theirs"
    tensors: dict[str, Tensor] = {}
    for key in stored.entries:
        if key.startswith("decoder.layers.1.mlp.linear_fc1.layer_norm_"):
            continue  # the name of the layer's norm without Transformer Engine
        each = dict(enumerate(stored.read(key))) if ".experts.experts." in key else {None: stored.read(key)}
        for number, tensor in each.items():
            name = key if number is None else key.replace(".experts.experts.", f".experts.experts.{number}.")
            halves = tensor.chunk(2) if name.endswith("linear_fc1.weight") else [tensor]
            tensors |= dict(zip([f"{name}_w", f"{name}_v"] if len(halves) == 2 else [name], halves))
    assert "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_v" in tensors
    assert "decoder.layers.0.mlp.linear_fc1.weight_w" in tensors

    def write(folder: Path, held: dict[str, Tensor]) -> None:
        boxes = [StreamedBox.whole(key, tuple(each.shape), each.dtype, each.clone) for key, each in held.items()]
        folder.mkdir()
        writer = CheckpointWriter(folder)
        writer.set_up_storage_writer(True)
        writer.finish(table_of(boxes), [write_boxes(writer, folder, boxes)])
        shutil.copy(older / "common.pt", folder)

    write(newer, tensors)
    do("megatron-lm", newer, "megatron", tmp_path / "ours")
    assert_holds(read_native(tmp_path / "ours"), values)
    lacking = {key: each for key, each in tensors.items() if not key.endswith("experts.3.linear_fc1.weight_v")}
    write(tmp_path / "lacking", lacking)
    with expect_error(CheckpointError, "decoder.layers.1.mlp.experts.linear_fc1.weight"):
        read_megatron_lm(tmp_path / "lacking")


def test_what_a_user_has_to_know(tmp_path: Path) -> None:
    """Dropped choices are no part of a conversion, and Megatron-LM takes few settings of routers from a checkpoint."""
    moe = {**MOE, **BIASED}
    write_expert_shards(
        tmp_path / "theirs", moe, values_of(SHALLOW, moe), settings=SHALLOW, moe_expert_capacity_factor=1.5
    )
    said: list[str] = []
    convert(Conversion("megatron-lm", tmp_path / "theirs", "megatron-lm", tmp_path / "again"), said.append)
    assert any("trained with moe_expert_capacity_factor 1.5, which drops choices" in line for line in said)
    flags = "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 2"
    (note,) = (line for line in said if line.startswith("note: give Megatron-LM"))
    assert flags in note
    assert "--moe-router-enable-expert-bias:" in note


def test_the_proof_sees_experts_in_the_wrong_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The independent side reads the shards itself: here the mapping takes experts backwards."""
    write_expert_shards(tmp_path / "theirs", MOE, values_of(MODERN, MOE), ep=2)
    monkeypatch.setattr(reading, "expert_number", lambda name: -int(name.split("local_experts.")[1].split(".")[0]))
    with expect_error(ProofError):
        do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")


def test_missing_folders_and_other_shapes(tmp_path: Path) -> None:
    """Mistakes with the files of experts, each in one sentence."""
    values = values_of(MODERN, MOE)

    def written(name: str, **sizes: Any) -> Path:
        return write_expert_shards(tmp_path / name, MOE, values, **sizes) / "iter_0000500"

    folder = written("a", ep=2)
    (folder / "mp_rank_00_001/model_optim_rng.pt").unlink()
    with expect_error(CheckpointError, "tp 0", "pp 0", "ep 1"):
        read_megatron_lm(folder)
    folder = written("b", tp=2, ep=2)
    path = folder / "mp_rank_01_001/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    name = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    whole = content["model"][name]
    content["model"][name] = whole[:, :5]
    torch.save(content, path)
    with expect_error(CheckpointError, name, "[32, 5]", folder, "rank 1", "part 1", "[32, 12]"):
        read_megatron_lm(folder)
    del content["model"][name]
    torch.save(content, path)
    with expect_error(CheckpointError, "rank 1", "part 1", name):
        read_megatron_lm(folder)
    folder = written("c", ep=2, num_experts=8)
    with expect_error(
        CheckpointError, "decoder.layers.0.mlp.experts.linear_fc1.weight", "[4, 2, 24, 32]", "[8, 2, 24, 32]"
    ):
        read_megatron_lm(folder)
    folder = written("d", pp=2, ep=2, expert_model_parallel_size=1)
    with expect_error(CheckpointError, "expert_model_parallel_size 1"):
        read_megatron_lm(folder)
    folder = written("e", tp=2, ep=2, etp=2, expert_tensor_parallel_size=4)
    with expect_error(CheckpointError, "torch_dist"):
        read_megatron_lm(folder)


MISTAKES: list[tuple[dict[str, Any], list[str]]] = [
    ({"moe_router_topk": 5}, ["moe_router_topk 5", "num_experts 4"]),
    (
        {"moe_router_load_balancing_type": "quantile_balancing"},
        ["moe_router_load_balancing_type = 'quantile_balancing'"],
    ),
    ({"moe_router_load_balancing_type": ["aux_loss", "x"]}, ["moe_router_load_balancing_type = ['aux_loss', 'x']"]),
    (
        {"moe_router_score_function": "tanh"},
        ["moe_router_score_function = 'tanh'"],
    ),
    ({"moe_router_new_way": 3}, ["moe_router_new_way = 3", "--ignore-saved-args"]),
    ({"moe_apply_probs_on_input": True}, ["moe_apply_probs_on_input = True"]),
    ({"moe_latent_size": 8}, ["moe_latent_size = 8"]),
    ({"moe_layer_freq": [1, 0]}, ["moe_layer_freq '[1, 0]'", "2 layers"]),
    ({"moe_router_num_groups": 2}, ["moe_router_num_groups", "moe_router_group_topk"]),
    ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, ["2 of 4 experts", "1 of 3 groups"]),
    ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, ["moe_router_pre_softmax"]),
    ({"num_experts": "4"}, ['num_experts is "4"']),
]


@pytest.mark.parametrize(("flags", "facts"), MISTAKES, ids=[" ".join(facts) for _, facts in MISTAKES])
def test_what_cannot_be_converted_is_said(flags: dict[str, Any], facts: list[str], tmp_path: Path) -> None:
    """A router that is almost ours must not come out as one."""
    write_expert_shards(tmp_path, MOE, values_of(MODERN, MOE), **flags)
    with expect_error(CheckpointError, *facts):
        read_megatron_lm(tmp_path)


def test_what_megatron_lm_lacks(tmp_path: Path) -> None:
    """Groups scored by their best expert (DeepSeek-V2), biases in shared experts."""
    groups = {"moe_router_topk": 4, "num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
    cases = [
        (
            MODERN,
            {**MOE, **groups, "moe_router_pre_softmax": True, "moe_router_group_score": "max"},
            "groups",
        ),
        (CLASSIC_MOE, {**MOE, **SHARED}, "biases"),
    ]
    for number, (settings, moe, fact) in enumerate(cases):
        model, experts = model_and_experts(settings, moe)
        place = tmp_path / str(number)
        write_native(portable(model, values_of(settings, moe), (experts,)), place, final=place)
        with expect_error(CheckpointError, fact):
            convert(Conversion("megatron", place, "megatron-lm", tmp_path / "theirs"), print)
