"""Layers of multi-token prediction in published files, which transformers leaves out.

Their outputs and gradients are compared with transformers' own layers, put together as the models' authors describe.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("transformers", reason="models of published types come from the dev extra's transformers")

from safetensors.torch import load_file, save_file

from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.huggingface.writing import write_huggingface
from megatron.core.conversion.native import read_native
from megatron.core.conversion.portable import load_weights
from megatron.core.models.gpt.multi_token import shifted_fields
from megatron.core.models.registry import family_of
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import CheckpointError
from tests.harness.published import fp64_model, in_fp64, random_model, without_dropout
from tests.harness.sentences import expect_error
from tests.published import MODELS

Folder = Callable[[str], Path]


def with_later_layer(source: Path, target: Path) -> dict[str, Tensor]:
    """A copy of a model of three layers with one of multi-token prediction."""
    shutil.copytree(source, target)
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(3)
    last, later = "model.layers.2.", "model.layers.3."
    found = {name.replace(last, later): tensor for name, tensor in tensors.items() if name.startswith(last)}
    hidden = tensors["model.norm.weight"].shape[0]
    shapes = {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    found |= {
        f"{later}{name}": torch.empty(shape)
        for name, shape in {**shapes, "eh_proj.weight": (hidden, 2 * hidden)}.items()
    }
    found = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in found.items()}
    found[f"{later}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    found[f"{later}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | found, target / "model.safetensors", metadata={"format": "pt"})
    return tensors | found


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_they_are_kept(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """A run that goes on from DeepSeek-V3 would train new layers of multi-token prediction, and servers lack them."""
    tensors = with_later_layer(model_folder(name), tmp_path / "source")
    convert(Conversion("hf", tmp_path / "source", "megatron", tmp_path / "ours"), lambda line: None)
    portable = read_native(tmp_path / "ours")
    assert portable.model.mtp_num_layers == 1
    projection = portable.tensors["mtp.layers.0.eh_proj.weight"].make()
    assert torch.equal(projection, tensors["model.layers.3.eh_proj.weight"])
    write_huggingface(portable, tmp_path / "back", max_shard_size=1 << 40)
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[each], tensor) for each, tensor in tensors.items())
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_copy_that_is_none(model_folder: Folder, tmp_path: Path) -> None:
    """The embedding of the last stage is that of the first one: another in the files would be lost."""
    tensors = with_later_layer(model_folder("deepseek_v3"), tmp_path / "source")
    tensors["model.layers.3.embed_tokens.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    with expect_error(CheckpointError, "model.embed_tokens.weight"):
        read_huggingface(tmp_path / "source")


QWEN3_NEXT, NEMOTRON_H = "qwen3_next", "nemotron_h with experts"
QWEN3_NEXT_ENDS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "last": "norm"}
NEMOTRON_H_ENDS = {
    **{name: f"layers.0.{name}" for name in ("enorm", "hnorm", "eh_proj")},
    "last": "layers.1.final_layernorm",
}
LAYERS = {QWEN3_NEXT: ("model.layers.3.",), NEMOTRON_H: ("backbone.layers.2.", "backbone.layers.1.")}
"""Layers of the models that those of the depth are like: gated attention with experts; attention, then experts."""
ENDS = {QWEN3_NEXT: QWEN3_NEXT_ENDS, NEMOTRON_H: NEMOTRON_H_ENDS}


def with_depth(name: str, source: Path, target: Path) -> dict[str, Tensor]:
    """A copy of a model with a depth of multi-token prediction, by the names of its authors; its tensors."""
    shutil.copytree(source, target)
    tensors, generator = load_file(source / "model.safetensors"), torch.Generator().manual_seed(3)
    found = {
        each.replace(before, f"mtp.layers.{number}."): tensor
        for number, before in enumerate(LAYERS[name])
        for each, tensor in tensors.items()
        if each.startswith(before)
    }
    hidden = tensors["lm_head.weight"].shape[1]
    for ours, theirs in ENDS[name].items():
        found[f"mtp.{theirs}.weight"] = torch.empty((hidden, 2 * hidden) if ours == "eh_proj" else (hidden,))
    tensors |= {each: 0.2 * torch.randn(tensor.shape, generator=generator) for each, tensor in found.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    if name == NEMOTRON_H:
        config = json.loads((target / "config.json").read_text())
        more = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
        (target / "config.json").write_text(json.dumps({**config, **more}))
    return tensors


@pytest.mark.parametrize("name", [QWEN3_NEXT, NEMOTRON_H])
def test_those_of_hybrids_are_kept(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """Qwen3-Next's was left out with a note, and a Nemotron 3 with one was refused."""
    tensors = with_depth(name, model_folder(name), tmp_path / "source")
    convert(Conversion("hf", tmp_path / "source", "megatron", tmp_path / "ours"), lambda line: None)
    portable = read_native(tmp_path / "ours")
    assert portable.model.mtp_num_layers == 1
    write_huggingface(portable, tmp_path / "back", max_shard_size=1 << 40)
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[each], tensor) for each, tensor in tensors.items())
    again, first = (read_huggingface(tmp_path / each) for each in ("back", "source"))
    assert (again.model, again.groups) == (first.model, first.groups)
    assert read_huggingface(model_folder(name)).model.mtp_num_layers == 0


def reference(name: str, model: Any, tensors: Mapping[str, Tensor], tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the depth for ``tokens`` ``[b, s + 1]``, and its parameters: the model's last hidden states and the
    embeddings of the next tokens, each normalized, through a projection, copies of the model's layers and a norm.
    """
    from copy import deepcopy

    bare, ends = getattr(model, "model", None) or model.backbone, {**ENDS[name]}
    norm = getattr(bare, "norm", None) or bare.norm_f
    embed, parameters = model.get_input_embeddings(), dict[str, Tensor]()

    def filled(module: Any, theirs: str) -> Any:
        copy = deepcopy(module)
        state = copy.state_dict()
        for each in state:
            if theirs and f"mtp.{theirs}.{each}" in tensors:
                state[each] = tensors[f"mtp.{theirs}.{each}"].double()
            else:  # experts, stacked in memory
                *before, kind = f"mtp.{theirs}.{each}".split(".")
                pair = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind.removesuffix("_proj") + "_proj",)
                stacked = [
                    torch.cat([tensors[".".join((*before, str(number), part, "weight"))] for part in pair])
                    for number in range(state[each].shape[0])
                ]
                state[each] = torch.stack(stacked).double()
        copy.load_state_dict(state)
        parameters.update({f"mtp.{theirs}.{each}": value for each, value in copy.named_parameters()})
        return copy

    with in_fp64():
        hidden = bare(tokens[:, :-1], use_cache=False).last_hidden_state
        both = [filled(norm, ends["enorm"])(embed(tokens[:, 1:])), filled(norm, ends["hnorm"])(hidden)]
        projection = torch.nn.Parameter(tensors[f"mtp.{ends['eh_proj']}.weight"].double())
        parameters[f"mtp.{ends['eh_proj']}.weight"] = projection
        x = functional.linear(torch.cat(both, dim=-1), projection)
        length = x.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None].double()
        positions = torch.arange(length)[None]
        more = {"position_embeddings": bare.rotary_emb(x, positions)} if name == QWEN3_NEXT else {}
        for number, before in enumerate(LAYERS[name]):
            layer = filled(bare.layers[int(before.split(".")[2])], f"layers.{number}")
            x = layer(x, attention_mask=mask, **more)
            x = x[0] if isinstance(x, tuple) else x
        logits = model.lm_head(filled(norm, ends["last"])(x))
    return logits, parameters


@pytest.mark.parametrize("name", [QWEN3_NEXT, NEMOTRON_H])
def test_a_depth_computes_what_its_authors_describe(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """Halves of the projection or two norms in each other's place would train on quietly from a worse depth."""
    tensors = with_depth(name, model_folder(name), tmp_path / "source")
    theirs = fp64_model(*MODELS[name])
    theirs.load_state_dict(random_model(*MODELS[name]).double().state_dict())  # the numbers of the folder
    portable, context = read_huggingface(tmp_path / "source"), ModelContext.single(dtype=torch.float64)
    spec = family_of(portable.groups).train_spec
    ours = spec.build_model(without_dropout(portable.model), portable.groups, context).eval()
    load_weights(ours, portable, context.mesh)
    tokens = torch.randint(8, 101, (2, 22), generator=torch.Generator().manual_seed(1))
    expected, parameters = reference(name, theirs, tensors, tokens)
    fields = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": torch.ones(2, 21)}
    future = shifted_fields(fields, 1)["mtp_tokens"]
    output = ours(tokens[:, :-1], future_tokens=future)
    found = output.mtp[0].logits_with_gradient()[:, :-1]  # at the last position there is no next token
    torch.testing.assert_close(found, expected[:, :-1], rtol=0, atol=1e-9)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.autograd.backward(((found * weights).sum(), (expected[:, :-1] * weights).sum()))
    own = dict(ours.named_parameters())
    for each, named in ENDS[name].items():
        found, wanted = own[f"mtp.layers.0.{each.replace('last', 'final_layernorm')}.weight"], f"mtp.{named}.weight"
        torch.testing.assert_close(found.grad, parameters[wanted].grad, rtol=0, atol=1e-8, msg=each)


def test_a_depth_unlike_the_last_layer(model_folder: Folder, tmp_path: Path) -> None:
    """Multi-token prediction has layers like the last one here; any other would be loaded as that, or lost."""
    tensors = with_depth(QWEN3_NEXT, model_folder(QWEN3_NEXT), tmp_path / "source")
    tensors["mtp.layers.0.self_attn.sinks"] = torch.ones(4)
    save_file(tensors, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    with expect_error(CheckpointError, "only one of the two has self_attn.sinks"):
        read_huggingface(tmp_path / "source")
