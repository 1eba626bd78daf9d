"""Hybrids and gated delta nets in Megatron-LM's checkpoints: every layout in, both formats out, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.hybrid import HybridConfig
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.megatron_lm.files import ShardFiles, open_checkpoint
from megatron.core.conversion.megatron_lm.names import components_of
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.portable import PortableModel
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.megatron_lm import FORMAT
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error
from tests.tiers import tiers
from tests.unit.conversion.megatron_checkpoints import MODERN, arguments, portable, random_tensors, shards_of, stage_of

SETTINGS: dict[str, Any] = {**MODERN, "position_embedding_type": "none", "add_position_embedding": False}
SIZES: dict[str, Any] = {"mamba_state_dim": 6, "mamba_head_dim": 8, "mamba_num_groups": 2}
MOE: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
NETS: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}
WIDTHS = {"z": 64, "x": 64, "B": 12, "C": 12, "dt": 8}
NET_WIDTHS = {"query": 12, "key": 12, "value": 40, "z": 40, "beta": 4, "alpha": 4}
_SPLIT = {
    "mixer.in_proj.weight": [*WIDTHS.values()],
    **dict.fromkeys(("mixer.conv1d.weight", "mixer.conv1d.bias"), [*WIDTHS.values()][1:4]),
    "self_attention.in_proj.weight": [*NET_WIDTHS.values()],
    "self_attention.conv1d.weight": [*NET_WIDTHS.values()][:3],
    **dict.fromkeys(("mixer.dt_bias", "mixer.A_log", "mixer.D", "mixer.norm.weight"), None),
    **dict.fromkeys(("self_attention.dt_bias", "self_attention.A_log"), None),
    "eh_proj.weight": None,
}
"""Rows of the stacked parts of what ranks split by rows; None for a single part."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, norms by themselves": {"tp": 2},
    "pp 2, fused norms": {"pp": 2, "fused": True},
    "tp 2, pp 2, fused norms, newer names": {"tp": 2, "pp": 2, "fused": True, "newer": True},
    "one rank, newer names": {"newer": True},
    "G, tp 2, pp 2, fused norms": {"pattern": "G*-G", "tp": 2, "pp": 2, "fused": True},
    "G and a depth of several, tp 2, pp 2, fused norms": {"pattern": "M*-G/*G-", "tp": 2, "pp": 2, "fused": True},
    "two depths, fused norms": {"pattern": "M*-M/M/M", "fused": True},
    "a depth in an argument of its own": {"pattern": "M*-M/M-", "fused": True, "older": True},
}


def groups_of(pattern: str) -> tuple[object, ...]:
    """The parts of a hybrid; with experts and gated delta nets where the pattern has some."""
    main = pattern.partition("/")[0]
    moe = MoEConfig(**MOE, moe_layer_freq=marks(main, "E")) if "E" in pattern else MoEConfig()
    nets = nets_of(marks(main, "G")) if "G" in pattern else GatedDeltaNetConfig()
    return GPTConfig(), HybridConfig(hybrid_layer_pattern=pattern), MambaConfig(**SIZES), moe, nets


def marks(letters: str, letter: str) -> str:
    return f"[{','.join(str(int(each == letter)) for each in letters)}]"


def nets_of(frequency: str) -> GatedDeltaNetConfig:
    return GatedDeltaNetConfig(
        experimental_attention_variant="gated_delta_net", linear_attention_freq=frequency, **NETS
    )


def model_of(**more: Any) -> ModelConfig:
    return ModelConfig(**{**{name: SETTINGS[name] for name in MODERN}, **more})


def hybrid_of(pattern: str) -> ModelConfig:
    return model_of(mtp_num_layers=pattern.count("/"))


def shards(name: str, value: Tensor, tp: int) -> list[Tensor]:
    """What each tensor-parallel rank saves: of stacked matrices its rows of the first, then of the next."""
    kind = next((each for each in _SPLIT if name.endswith(f".{each}")), None)
    if kind is not None:
        split = [part.chunk(tp) for part in torch.split(value, _SPLIT[kind] or [len(value)])]
        return [torch.cat(rank) for rank in zip(*split)]
    if name.endswith(".out_proj.weight"):
        return list(value.chunk(tp, dim=1))
    return shards_of(name, value, tp, SETTINGS, 3.0)


def as_theirs(name: str, *, fused: bool, newer: bool, size: int) -> str:
    """Megatron-LM's name of a tensor of ours. ``size``: layers of a depth."""
    name = name.replace("decoder.final_layernorm.", "decoder.final_norm.")
    if name.startswith("mtp.") and size:
        name = name.replace(".transformer_layer.", ".layers.0.") if size == 1 else name
        name = re.sub(r"^(mtp\.layers\.\d+)\.layers\.", r"\1.mtp_model_layer.layers.", name)
    if fused and ".mixer.norm." not in name:
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        name = re.sub(r"(layers\.\d+)\.norm\.weight", r"\1.mixer.in_proj.layer_norm_weight", name)
    return name.replace("mixer.conv1d.", "mixer.conv1d_") if newer else name


def of_nets(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The norm of a gated delta net lies in its first matrix."""
    found, within = dict[str, Tensor](), ".self_attention.linear_qkv.layer_norm_weight"
    for name, tensor in state.items():
        layer = name.removesuffix(within)
        is_net = name.endswith(within) and f"{layer}.self_attention.in_proj.weight" in state
        found[name.replace("linear_qkv", "in_proj") if is_net else name] = tensor
    return found


def write_shards(
    root: Path,
    values: Mapping[str, Tensor],
    *,
    tp: int = 1,
    pp: int = 1,
    fused: bool = False,
    newer: bool = False,
    ep: int = 1,
    size: int = 0,
    **args: Any,
) -> Path:
    """A folder of the torch format as the ranks of a Mamba model write it; experts in Transformer Engine's modules.

    ``size``: layers of each depth of multi-token prediction, which is on the last stage.
    """
    folder = root / "iter_0000500"
    folder.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("500\n")
    split = {name: shards(name, value, tp) for name, value in values.items() if ".experts." not in name}
    experts = {name: value.chunk(ep) for name, value in values.items() if ".experts." in name}
    for rank, own in itertools.product(range(tp), range(ep)):
        for stage in range(pp):
            mine = {name: parts[rank] for name, parts in split.items()}
            mine |= {name: parts[own] for name, parts in experts.items()}
            later = {name: mine.pop(name) for name in [*mine] if name.startswith("mtp.")}
            held = stage_of(mine, SETTINGS, place=stage, places=pp) | (later if stage == pp - 1 else {})
            state = dict[str, Tensor]()
            for name in [each for each in held if ".experts." in each]:
                each = held.pop(name).flatten(1, -2)
                state |= {f"{name}{number}": matrix for number, matrix in enumerate(each)}
            theirs = {as_theirs(name, fused=fused, newer=newer, size=size): each for name, each in held.items()}
            state |= of_nets(theirs)
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
    return random_tensors(hybrid_of(pattern), groups_of(pattern))


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=[[*LAYOUTS][2], [*LAYOUTS][5], [*LAYOUTS][7]]))
def test_every_layout(layout: str, tmp_path: Path) -> None:
    """Hybrids were refused, then those with gated delta nets or depths. A rank's rows of z, x, B, C and dt are one
    matrix, so ranks can't be joined as they are.
    """
    more = {**LAYOUTS[layout]}
    pattern = more.pop("pattern", "M*-M")
    main, *depths = pattern.split("/")
    values, sizes = values_of(pattern), NETS if "G" in pattern else {}
    args: dict[str, Any] = {"hybrid_override_pattern": pattern, "mtp_num_layers": len(depths) or None}
    if more.pop("older", False):
        args |= {"hybrid_override_pattern": main, "mtp_hybrid_override_pattern": depths[0]}
    size = len(depths[0]) if depths else 0
    write_shards(tmp_path / "theirs", values, size=size, **more, **args, **sizes)
    found = read_megatron_lm(tmp_path / "theirs")
    assert HybridConfig.among(found.groups).hybrid_layer_pattern == pattern
    assert found.tensors.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(found.tensors[name].make(), value), name
    convert(Conversion("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours"), lambda said: None)


def there_and_back(ours: PortableModel, folder: Path, *, dist: bool) -> PortableModel:
    """The model after a conversion to Megatron-LM and one from it, both proven."""
    write_native(ours, folder / "ours", final=folder / "ours")
    there = Conversion("megatron", folder / "ours", "megatron-lm", folder / "theirs", dist=dist)
    convert(there, lambda said: None)
    convert(Conversion("megatron-lm", folder / "theirs", "megatron", folder / "back"), lambda said: None)
    back = read_native(folder / "back")
    assert back.groups == read_native(folder / "ours").groups
    for key, value in ours.tensors.items():
        torch.testing.assert_close(back.tensors[key].make(), value.make(), rtol=0, atol=6e-8, check_dtype=False)
    return back


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    entries = StoredTensors(folder / "theirs/release", foreign=True).entries
    return {key: entry.shape for key, entry in entries.items()}


def names_in(folder: Path) -> set[str]:
    path = folder / "theirs/release/mp_rank_00/model_optim_rng.pt"
    return {*torch.load(path, weights_only=False)["model"]}


def test_newer_names_of_the_convolution_have_components() -> None:
    """A torch_dist folder of a newer release was refused for a tensor that is not known, ``conv1d_weight.x``."""
    ours = FORMAT.names.our_name("decoder.layers.1.mixer.conv1d_weight")
    assert ours == "decoder.layers.1.mixer.conv1d.weight"
    assert components_of(ours) == ("x", "B", "C")


PATTERNS = ("ME*M", "MMMM", "*-M-", "GE*-/MG", "G*-M/-/-")


@pytest.mark.parametrize(
    "name", tiers([f"{p} {d}" for p in PATTERNS for d in ("dist", "torch")], first=["ME*M dist", "GE*-/MG dist"])
)
def test_ours_goes_to_megatron_lm_and_back(name: str, tmp_path: Path) -> None:
    """torch_dist keeps a key for each component of a stacked matrix, and the number of each layer in its keys. Newer
    releases ask for the convolution under other names.
    """
    pattern, kind = name.split()
    ours = portable(hybrid_of(pattern), values_of(pattern), groups_of(pattern))
    there_and_back(ours, tmp_path, dist=kind == "dist")
    main = pattern.partition("/")[0]
    if kind == "dist":
        shapes = shapes_in(tmp_path)
        for letter, module, widths in (("M", "mixer", WIDTHS), ("G", "self_attention", NET_WIDTHS)):
            for layer in (number for number, each in enumerate(main) if each == letter):
                before = f"decoder.layers.{layer}.{module}.in_proj"
                assert {key: shapes[f"{before}.weight.{key}"] for key in widths} == {
                    key: (width, 32) for key, width in widths.items()
                }
                assert shapes[f"{before}.layer_norm_weight"] == (32,)
        if "M" in main:
            mixer = f"decoder.layers.{main.index('M')}.mixer"
            assert shapes[f"{mixer}.conv1d.bias.x"] == shapes[f"{mixer}.conv1d_bias.x"] == (64,)
        assert "decoder.final_norm.weight" in shapes and "decoder.final_layernorm.weight" not in shapes
        if pattern.endswith("/MG"):
            assert shapes["mtp.layers.0.mtp_model_layer.layers.1.self_attention.conv1d.weight.value"] == (40, 1, 3)
            assert "mtp.layers.0.mtp_model_layer.layers.0.mixer.in_proj.layer_norm_weight" in shapes


@pytest.mark.parametrize("kind", tiers(["dist", "torch"], first=["torch"]))
def test_nets_in_place_of_attention(kind: str, tmp_path: Path) -> None:
    """The layers of Qwen3-Next were refused. Where norms are 1 + weight, so is that of each value head there and not
    here: the model answered as if these norms were 1 larger.
    """
    model = model_of(apply_layernorm_1p=True, attention_output_gate=True, qk_layernorm=True)
    experts = MoEConfig(**{**MOE, "moe_shared_expert_intermediate_size": 16}, moe_shared_expert_gate=True)
    groups = (GPTConfig(), experts, nets_of("3"))
    values = random_tensors(model, groups)
    back = there_and_back(portable(model, values, groups), tmp_path, dist=kind == "dist")
    assert GatedDeltaNetConfig.among(back.groups) == nets_of("3")
    net = "decoder.layers.0.self_attention"
    held = names_in(tmp_path) if kind == "torch" else {*shapes_in(tmp_path)}
    assert f"{net}.in_proj.layer_norm_weight" in held
    assert ("decoder.layers.0.mlp.experts.linear_fc1.weight3" in held) == (kind == "torch")
    theirs = open_checkpoint(tmp_path / "theirs")
    if isinstance(theirs, ShardFiles):
        norm = theirs.stages[0].ranks[0][f"{net}.out_norm.weight"]
        torch.testing.assert_close(norm, values[f"{net}.out_norm.weight"] - 1)
    assert theirs.args("linear_attention_freq") == 3


def test_nets_of_bf16_keep_their_norms(tmp_path: Path) -> None:
    """1 + weight in bf16 has only three digits: a small weight was lost, and the proof failed."""
    model, groups = model_of(apply_layernorm_1p=True), (GPTConfig(), nets_of("2"))
    values = random_tensors(model, groups, dtype=torch.bfloat16)
    back = there_and_back(portable(model, values, groups), tmp_path, dist=False)
    norms = [name for name in values if name.endswith(".self_attention.out_norm.weight")]
    assert norms
    for name in norms:
        assert torch.equal(back.tensors[name].make().float(), values[name].float()), name


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
        {"hybrid_override_pattern": "G*-M", "swiglu": False, "squared_relu": True, **NETS},
        {"hybrid_override_pattern": "G*-M", "gdn_output_gate_type": "sigmoid", **NETS},
        {"hybrid_override_pattern": "G*-M", **NETS, "linear_num_key_heads": 3},
        {"experimental_attention_variant": "gdn", "linear_attention_freq": [1, 0], **NETS},
        {"experimental_attention_variant": "gdn2", "linear_attention_freq": 4, **NETS},
    ],
    ids=[
        *("length", "letter", "later layers", "epsilon"),
        *("activation", "gate of nets", "heads of nets", "nets in no layers", "other nets"),
    ],
)
def test_what_cannot_be_converted_is_said(args: dict[str, Any], tmp_path: Path) -> None:
    """Each would be another model without a word."""
    values = values_of("M*-M") if "hybrid" in str(args) else random_tensors(model_of())
    write_shards(tmp_path, values, **args)
    with expect_error(CheckpointError):
        read_megatron_lm(tmp_path)


@pytest.mark.parametrize(
    "more",
    [
        {"linear_negative_eigenvalues": True},
        {"linear_norm_epsilon": 1e-3},
        {"linear_norm_placement": "after"},
        {"activation": "squared_relu"},
    ],
    ids=["strength", "epsilon", "placement", "activation"],
)
def test_which_nets_megatron_lm_lacks(more: dict[str, Any], tmp_path: Path) -> None:
    """Its net has the norms and the activation of the other layers, and writes at most all of a value."""
    own = {name: value for name, value in more.items() if name.startswith("linear_")}
    model = model_of(**{name: value for name, value in more.items() if name not in own})
    groups = (GPTConfig(), dataclasses.replace(nets_of("2"), **own))
    write_native(portable(model, random_tensors(model, groups), groups), tmp_path / "ours", final=tmp_path / "ours")
    with expect_error(CheckpointError):
        convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs"), lambda said: None)


@pytest.mark.parametrize(
    "more", [{"mamba_time_step_limits": (0.1, 1e30)}, {"mamba_conv_kernel_dim": 3}], ids=["limits", "convolution"]
)
def test_what_megatron_lm_lacks(more: dict[str, Any], tmp_path: Path) -> None:
    """Megatron-LM's layer has no limits of the step, and always four taps."""
    gpt, hybrid, _, moe, _ = groups_of("M*-M")
    groups = (gpt, hybrid, MambaConfig(**SIZES, **more), moe)
    write_native(
        portable(model_of(), random_tensors(model_of(), groups), groups), tmp_path / "ours", final=tmp_path / "ours"
    )
    with expect_error(CheckpointError):
        convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs"), lambda said: None)
