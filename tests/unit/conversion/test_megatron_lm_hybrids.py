"""Hybrids of Mamba-2 in Megatron-LM's checkpoints: every layout in, both formats out, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.hybrid import HybridConfig
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.native import read_native, write_native
from megatron.core.models.gpt.config import GPTConfig
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error
from tests.tiers import tiers
from tests.unit.conversion.megatron_checkpoints import MODERN, arguments, portable, random_tensors, shards_of, stage_of

SETTINGS: dict[str, Any] = {**MODERN, "position_embedding_type": "none", "add_position_embedding": False}
SIZES: dict[str, Any] = {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 2}
MOE: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
WIDTHS = {"z": 64, "x": 64, "B": 12, "C": 12, "dt": 8}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, norms by themselves": {"tp": 2},
    "pp 2, fused norms": {"pp": 2, "fused": True},
    "tp 2, pp 2, fused norms, newer names": {"tp": 2, "pp": 2, "fused": True, "newer": True},
    "one rank, newer names": {"newer": True},
}


def groups_of(pattern: str) -> tuple[object, ...]:
    """The parts of a hybrid; with experts where the pattern has some."""
    frequency = f"[{','.join(str(int(each == 'E')) for each in pattern)}]"
    moe = MoEConfig(**MOE, moe_layer_freq=frequency) if "E" in pattern else MoEConfig()
    return GPTConfig(), HybridConfig(hybrid_layer_pattern=pattern), MambaConfig(**SIZES), moe


def model_of(**more: Any) -> ModelConfig:
    return ModelConfig(**{**{name: SETTINGS[name] for name in MODERN}, **more})


def shards(name: str, value: Tensor, tp: int) -> list[Tensor]:
    """What each tensor-parallel rank saves: of stacked matrices its rows of the first, then of the next."""
    kind = name.partition(".mixer.")[2]
    if not kind:
        return shards_of(name, value, tp, SETTINGS, 3.0)
    if kind == "out_proj.weight":
        return list(value.chunk(tp, dim=1))
    components = "z x B C dt" if kind == "in_proj.weight" else "x B C" if kind.startswith("conv1d.") else ""
    if not components:
        return list(value.chunk(tp))
    split = [part.chunk(tp) for part in torch.split(value, [WIDTHS[each] for each in components.split()])]
    return [torch.cat(rank) for rank in zip(*split)]


def write_shards(
    root: Path,
    values: Mapping[str, Tensor],
    *,
    tp: int = 1,
    pp: int = 1,
    fused: bool = False,
    newer: bool = False,
    ep: int = 1,
    **args: Any,
) -> Path:
    """A folder of the torch format as the ranks of a Mamba model write it; experts in Transformer Engine's modules."""
    folder = root / "iter_0000500"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("500\n")
    split = {name: shards(name, value, tp) for name, value in values.items() if ".experts." not in name}
    experts = {name: value.chunk(ep) for name, value in values.items() if ".experts." in name}
    for rank, own in itertools.product(range(tp), range(ep)):
        for stage in range(pp):
            mine = {name: parts[rank] for name, parts in split.items()}
            mine |= {name: parts[own] for name, parts in experts.items()}
            held = stage_of(mine, SETTINGS, place=stage, places=pp)
            state = dict[str, Tensor]()
            for name in [each for each in held if ".experts." in each]:
                each = held.pop(name).flatten(1, -2)
                state |= {f"{name}{number}": matrix for number, matrix in enumerate(each)}
            for name, tensor in held.items():
                name = name.replace("decoder.final_layernorm.", "decoder.final_norm.")
                if fused and ".mixer.norm." not in name:
                    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                    name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
                    name = name.replace(".norm.weight", ".mixer.in_proj.layer_norm_weight")
                state[name.replace("conv1d.", "conv1d_") if newer else name] = tensor
            saved = {
                "iteration": 500,
                **SIZES,
                "spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
            }
            content = {
                "args": arguments(SETTINGS, **{**saved, **args}),
                "iteration": 500,
                "checkpoint_version": 3.0,
                "model": state,
            }
            names = [f"mp_rank_{rank:02d}", *([f"{stage:03d}"] if pp > 1 else []), *([f"{own:03d}"] if ep > 1 else [])]
            path = folder / "_".join(names)
            path.mkdir()
            torch.save(content, path / "model_optim_rng.pt")
    return root


def values_of(pattern: str) -> dict[str, Tensor]:
    """A value for every parameter, by our names."""
    return random_tensors(model_of(), groups_of(pattern))


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=[*LAYOUTS][2:3]))
def test_every_layout(layout: str, tmp_path: Path) -> None:
    """Hybrids were refused. A rank's rows of z, x, B, C and dt are one matrix, so ranks can't be joined as they are."""
    pattern, more = "M*-M", LAYOUTS[layout]
    values = values_of(pattern)
    write_shards(tmp_path / "theirs", values, hybrid_override_pattern=pattern, **more)
    found = read_megatron_lm(tmp_path / "theirs")
    assert HybridConfig.among(found.groups).hybrid_layer_pattern == pattern
    assert found.tensors.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(found.tensors[name].make(), value), name
    convert(Conversion("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours"), lambda said: None)


@pytest.mark.parametrize(
    "name", tiers([f"{p} {d}" for p in ("ME*M", "MMMM", "*-M-") for d in ("dist", "torch")], first=["ME*M dist"])
)
def test_ours_goes_to_megatron_lm_and_back(name: str, tmp_path: Path) -> None:
    """torch_dist keeps a key for each component of a stacked matrix, and the number of each layer in its keys."""
    pattern, kind = name.split()
    values = values_of(pattern)
    ours = portable(model_of(), values, groups_of(pattern))
    write_native(ours, tmp_path / "ours", final=tmp_path / "ours")
    there = Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs", dist=kind == "dist")
    convert(there, lambda said: None)
    if kind == "dist":
        shapes = {
            key: entry.shape for key, entry in StoredTensors(tmp_path / "theirs/release", foreign=True).entries.items()
        }
        first = f"decoder.layers.{pattern.index('M')}.mixer"
        for component, width in WIDTHS.items():
            assert shapes[f"{first}.in_proj.weight.{component}"] == (width, 32)
        assert shapes[f"{first}.conv1d.bias.x"] == (64,)
        assert "decoder.final_norm.weight" in shapes and "decoder.final_layernorm.weight" not in shapes
    convert(Conversion("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "back"), lambda said: None)
    back = read_native(tmp_path / "back")
    assert back.groups == read_native(tmp_path / "ours").groups
    for key, value in values.items():
        assert torch.equal(back.tensors[key].make(), value), key


@pytest.mark.parametrize("layout", tiers(["tp 1, pp 1", "tp 1, pp 2"], first=["tp 1, pp 2"]))
def test_experts_of_a_hybrid_over_expert_parallel_ranks(layout: str, tmp_path: Path) -> None:
    """Layers of a pattern without experts lie in all files, and each file has a part of the others' experts: taken for
    one another, ranks would get the first one's experts twice.
    """
    pattern, values = "ME*E", values_of("ME*E")
    pp = int(layout[-1])
    sizes: dict[str, Any] = {
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": pp,
    }
    more = {**MOE, "moe_layer_freq": [0, 1, 0, 1]}
    write_shards(tmp_path, values, ep=2, pp=pp, fused=True, hybrid_override_pattern=pattern, **sizes, **more)
    found = read_megatron_lm(tmp_path)
    assert HybridConfig.among(found.groups).hybrid_layer_pattern == pattern
    assert found.tensors.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(found.tensors[name].make(), value), name


def test_a_model_without_a_pattern(tmp_path: Path) -> None:
    """pretrain_mamba.py without ratios trains Mamba-2 layers alone, and saves no argument that says so."""
    write_shards(tmp_path, values_of("MMMM"))
    assert HybridConfig.among(read_megatron_lm(tmp_path).groups).hybrid_layer_pattern == "MMMM"


@pytest.mark.parametrize(
    "args",
    [
        {"hybrid_override_pattern": "M*-"},
        {"hybrid_override_pattern": "M*-X"},
        {"hybrid_layer_pattern": "M*-M/*-"},
        {"hybrid_override_pattern": "M*-M", "norm_epsilon": 1e-6},
    ],
    ids=["length", "letter", "later layers", "epsilon"],
)
def test_what_cannot_be_converted_is_said(args: dict[str, Any], tmp_path: Path) -> None:
    """Each would be another model without a word."""
    write_shards(tmp_path, values_of("M*-M"), **args)
    with expect_error(CheckpointError):
        read_megatron_lm(tmp_path)


@pytest.mark.parametrize(
    "more", [{"mamba_time_step_limits": (0.1, 1e30)}, {"mamba_conv_kernel_dim": 3}], ids=["limits", "convolution"]
)
def test_what_megatron_lm_lacks(more: dict[str, Any], tmp_path: Path) -> None:
    """Megatron-LM's layer has no limits of the step, and always four taps."""
    gpt, hybrid, _, moe = groups_of("M*-M")
    groups = (gpt, hybrid, MambaConfig(**SIZES, **more), moe)
    write_native(
        portable(model_of(), random_tensors(model_of(), groups), groups), tmp_path / "ours", final=tmp_path / "ours"
    )
    with expect_error(CheckpointError):
        convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs"), lambda said: None)
