"""Every family converts there and back: logits equal to fp32 rounding, files equal byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.model import ModelConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.formats import format_of
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.proof import huggingface_answer, native_answer
from megatron.core.conversion.questions import Answer, question_for
from tests.harness.published import random_model
from tests.published import FIRST, LIKE_ANOTHER, MODELS
from tests.published.sizes import SIZES
from tests.tiers import tiers
from tests.unit.conversion.logits import fixed_tokens, native_logits
from tests.unit.conversion.megatron_checkpoints import MODERN, portable, random_tensors

Folder = Callable[[str], Path]


def do(source: Any, load: Path, target: Any, save: Path, **options: Any) -> list[str]:
    """Convert, and return what was said."""
    said: list[str] = []
    convert(Conversion(source, load, target, save, **options), said.append)
    return said


def weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_bytes(first: Path, second: Path) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def furthest(one: Answer, other: Answer) -> float:
    """The largest difference of logits of any kind."""
    assert one.keys() == other.keys()
    return max((one[kind] - other[kind]).abs().max().item() for kind in one)


def spellings(model_type: str) -> Collection[str]:
    """Settings of which several combinations mean the same model."""
    published = format_of(model_type)
    assert published is not None
    return published.types[model_type].spellings


ALSO_FIRST = ("gpt_oss with full attention alone", "deepseek_v3 of five choices in three groups", "bamba", "olmo")
REARRANGED = ("gpt2", "falcon newer", "phi3")  # matrices that are turned, or parts of others
TRIED = [*(each for each in FIRST.values() if each not in LIKE_ANOTHER), *ALSO_FIRST, *REARRANGED]
"""In the default tier: tests/unit/models/test_published.py reads models of every type there."""


@pytest.mark.parametrize("name", tiers(MODELS, first=TRIED))
def test_there_and_back(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """A mapping that loses or turns anything would train on quietly from a worse model; the settings come back as well,
    so that transformers computes the same logits bit for bit.
    """
    source = model_folder(name)
    said = do("hf", source, "megatron", tmp_path / "ours")
    assert any(line.startswith("proof: largest difference") for line in said)
    portable = read_native(tmp_path / "ours")
    question = question_for(portable.model, portable.groups)
    theirs, ours = huggingface_answer(source, question), native_answer(tmp_path / "ours", question)
    # Scores of T5 make more of rounding than others', and so do states.
    amplifies = portable.model.softmax_scale == 1.0 or GatedDeltaNetConfig.among(portable.groups).has_delta_nets
    assert furthest(theirs, ours) < (3e-5 * theirs["words"].abs().max() if amplifies else 1e-5)
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back", max_shard_size=40_000)
    assert (tmp_path / "back/model.safetensors.index.json").exists()
    assert_same_bytes(source, tmp_path / "back")
    written, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "back", source))
    for same in ("model_type", "architectures", *spellings(MODELS[name][0])):
        assert written.get(same) == original.get(same)
    assert furthest(theirs, huggingface_answer(tmp_path / "back", question)) == 0.0
    do("hf", tmp_path / "back", "megatron", tmp_path / "again", skip_proof=True)
    assert furthest(ours, native_answer(tmp_path / "again", question)) == 0.0


@pytest.mark.parametrize("name", ["gpt2", "llama 3", "qwen3 tied"])
@pytest.mark.parametrize("dist", [True, False], ids=["torch_dist", "torch"])
def test_by_way_of_megatron_lm(name: str, dist: bool, model_folder: Folder, tmp_path: Path) -> None:
    """Hugging Face to Megatron-LM, to ours, to Hugging Face: proven at each step, and the same bytes at the end."""
    do("hf", model_folder(name), "megatron-lm", tmp_path / "theirs", dist=dist)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs2", dist=not dist)
    do("megatron-lm", tmp_path / "theirs2", "hf", tmp_path / "back")
    assert_same_bytes(model_folder(name), tmp_path / "back")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """Published weights are bf16: nothing is rounded, and a run that takes the settings trains in bf16."""
    random_model("llama", SIZES).to(dtype).save_pretrained(tmp_path / "source")
    do("hf", tmp_path / "source", "megatron", tmp_path / "ours")
    state = json.loads((tmp_path / "ours/iter_0000000/run.json").read_text())["state"]
    precision = state["config"]["precision"]
    assert (precision["bf16"], precision["fp16"]) == (dtype == torch.bfloat16, dtype == torch.float16)
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    assert_same_bytes(tmp_path / "source", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == str(dtype).split(".")[1]


def test_pytorch_bin(tmp_path: Path) -> None:
    """Older models come as pytorch_model.bin, one or several with an index."""
    model = random_model("gpt2", MODELS["gpt2"][1])
    model.config.save_pretrained(tmp_path / "bin")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    torch.save(state, tmp_path / "bin/pytorch_model.bin")
    model.save_pretrained(tmp_path / "safe")
    do("hf", tmp_path / "bin", "megatron", tmp_path / "ours")
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    assert_same_bytes(tmp_path / "safe", tmp_path / "back")
    (tmp_path / "bin/pytorch_model.bin").unlink()
    names = sorted(state)
    halves = {"a.bin": names[::2], "b.bin": names[1::2]}
    for file, part in halves.items():
        torch.save({name: state[name] for name in part}, tmp_path / "bin" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "bin/pytorch_model.bin.index.json").write_text(json.dumps(index))
    do("hf", tmp_path / "bin", "megatron", tmp_path / "again")


def test_names_of_the_bare_model(tmp_path: Path) -> None:
    """GPT-2's own files on the hub lack the prefix of the language model, and hold buffers."""
    from safetensors.torch import save_file

    model = random_model("gpt2", MODELS["gpt2"][1])
    model.config.save_pretrained(tmp_path / "bare")
    state = {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}
    state |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(3)}
    save_file(state, tmp_path / "bare/model.safetensors", metadata={"format": "pt"})
    do("hf", tmp_path / "bare", "megatron", tmp_path / "ours")
    model.save_pretrained(tmp_path / "whole")
    do("hf", tmp_path / "whole", "megatron", tmp_path / "of the whole")
    tokens = fixed_tokens(read_native(tmp_path / "ours").model)
    assert torch.equal(native_logits(tmp_path / "ours", tokens), native_logits(tmp_path / "of the whole", tokens))


def test_settings_of_transformers_4(model_folder: Folder, tmp_path: Path) -> None:
    """Most folders in the world say rope_theta, rope_scaling and torch_dtype."""
    import shutil

    shutil.copytree(model_folder("llama 3"), tmp_path / "old")
    config = json.loads((tmp_path / "old/config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "torch_dtype": config.pop("dtype", "float32"),
    }
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    do("hf", tmp_path / "old", "megatron", tmp_path / "ours")
    model = read_native(tmp_path / "ours").model
    assert (model.rotary_base, model.use_rope_scaling, model.rope_scaling_factor) == (500000.0, True, 8.0)
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert (written["rope_theta"], written["rope_scaling"]) == (500000.0, rope)


def test_what_else_stood_in_config_json_comes_back(tmp_path: Path) -> None:
    """Ids of special tokens and generation settings are nothing to us, and missed by whoever uses the result."""
    model = random_model("llama", {**SIZES, "bos_token_id": 7, "eos_token_id": [8, 9]})
    model.generation_config.top_p = 0.83
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "source")
    do("hf", tmp_path / "source", "megatron", tmp_path / "ours")
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert (written["bos_token_id"], written["eos_token_id"]) == (7, [8, 9])
    assert json.loads((tmp_path / "back/generation_config.json").read_text())["top_p"] == 0.83


@pytest.mark.parametrize("more", [{}, {"add_qkv_bias": True}, {"qk_layernorm": True}], ids=["llama", "qwen2", "qwen3"])
def test_rotary_pairs_that_are_neighbours(more: dict[str, Any], tmp_path: Path) -> None:
    """--rotary-interleaved pairs channels that Hugging Face's families keep apart: rows, biases and norms move."""
    model = ModelConfig(**MODERN, **more, rotary_interleaved=True)
    write_native(portable(model, random_tensors(model)), tmp_path / "ours", final=tmp_path / "ours")
    said = do("megatron", tmp_path / "ours", "hf", tmp_path / "theirs")
    assert said[1].startswith("proof: largest difference")
    do("hf", tmp_path / "theirs", "megatron", tmp_path / "again")
    assert read_native(tmp_path / "again").model.rotary_interleaved is False


def test_olmo_hybrid_as_transformers_writes_it(model_folder: Folder, tmp_path: Path) -> None:
    """transformers' own files name norms in another way than released ones and divide the convolution in thirds,
    wherever queries and keys end: they were refused as damaged, and thirds taken for the parts would turn channels.
    """
    random_model(*MODELS["olmo_hybrid"]).save_pretrained(tmp_path / "saved")
    released, saved = (read_huggingface(folder) for folder in (model_folder("olmo_hybrid"), tmp_path / "saved"))
    assert weights(tmp_path / "saved").keys() != weights(model_folder("olmo_hybrid")).keys()
    assert saved.model == released.model and saved.tensors.keys() == released.tensors.keys()
    for name, tensor in released.tensors.items():
        assert torch.equal(saved.tensors[name].make(), tensor.make()), name
