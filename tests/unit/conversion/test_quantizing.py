"""Weights in few bits: what is written, that transformers reads the same numbers from it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="models of published types come from the dev extra's transformers")
pytest.importorskip("compressed_tensors", reason="transformers reads quantized folders with compressed-tensors")

from safetensors.torch import load_file

from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface import stored_codes
from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.huggingface.writing import write_huggingface
from megatron.core.conversion.portable import LazyScales, LazyTensor, PortableModel, Quantization
from megatron.core.conversion.proof import ProofError
from megatron.core.quantization.grid import scales_of
from megatron.core.quantization.packing import packed
from megatron.core.quantization.scheme import SCHEMES, scheme_named
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tests.tiers import tiers

Folder = Callable[[str], Path]

GROUP = 8
EVERYWHERE = ("int8", "fp8")
FIRST = [
    ("llama with biases", "int4"),
    ("llama multi-head, tied", "w8a8"),
    ("gpt_neox", "fp8"),
    ("qwen3_moe", "fp8-block"),
    ("qwen2 tied", "int4-asym"),
]
"""Biases, tied words, experts, another name of the output layer in memory: the array of the default tier."""
DECODERS = (
    *("bloom", "cohere", "deepseek_v2", "deepseek_v3", "qwen3_next", "falcon newer", "falcon multi-query", "gemma"),
    *("gemma2", "gemma3", "glm", "glm4", "glm4_moe", "gptj", "granite", "mamba2", "nemotron_h"),
    *("nemotron_h with experts", "bamba", "granitemoehybrid", "mistral", "qwen2", "qwen3", "qwen2_moe", "olmoe"),
    *("nemotron", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "smollm3", "stablelm", "starcoder2"),
)
CASES = [*FIRST, *((name, kind) for name in DECODERS for kind in EVERYWHERE), ("olmo_hybrid", "fp8")]
CASES += [("mixtral", "int8"), ("mixtral", "fp8")]
CASES += [(name, "int4") for name in ("bloom", "gemma2", "olmoe", "glm4_moe")]


def rounding(name: str, *ignored: str, group: int = GROUP) -> Rounding:
    grouped = SCHEMES[name].weights.block == (1, 128)
    return Rounding(scheme_named(name, group_size=group if grouped else None), ignored)


def quantize(source: Path, target: Path, how: Rounding) -> list[str]:
    """Convert with the proof; the lines that a user sees."""
    said: list[str] = []
    convert(Conversion("hf", source, "hf", target, rounding=how), said.append)
    return said


def in_bf16(tensor: LazyTensor) -> torch.Tensor:
    return tensor.make().bfloat16()


@pytest.mark.parametrize("case", tiers(CASES, first=FIRST), ids=lambda case: "-".join(case))
def test_transformers_reads_the_same_numbers(model_folder: Folder, tmp_path: Path, case: tuple[str, str]) -> None:
    """A folder that loads as another model, or not at all, is found by whoever serves it, weeks later."""
    name, scheme = case
    said = quantize(model_folder(name), tmp_path / "few", rounding(scheme))
    assert any("bit-equal" in line for line in said) and any(line.startswith("proof: ") for line in said)
    settings = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    assert "lm_head" in (settings.get("ignore") or settings["modules_to_not_convert"])


@pytest.mark.parametrize("scheme", tiers(["int4", "fp8"], first=["int4"]))
def test_a_model_in_bf16(model_folder: Folder, tmp_path: Path, scheme: str) -> None:
    """Scales are in bf16, too, and readers that dequantize whole weights round each to bf16."""
    portable = read_huggingface(model_folder("mixtral"))
    tensors = {
        name: LazyTensor(tensor.shape, torch.bfloat16, partial(in_bf16, tensor))
        for name, tensor in portable.tensors.items()
    }
    write_huggingface(dataclasses.replace(portable, tensors=tensors), tmp_path / "bf16", max_shard_size=1 << 30)
    said = quantize(tmp_path / "bf16", tmp_path / "few", rounding(scheme))
    assert any("bit-equal" in line for line in said)
    assert load_file(tmp_path / "few" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_what_is_never_quantized(model_folder: Folder, tmp_path: Path) -> None:
    """A router in 4 bits sends tokens to other experts."""
    write_huggingface(
        read_huggingface(model_folder("qwen2_moe")), tmp_path / "few", max_shard_size=1 << 30, rounding=rounding("int4")
    )
    found = load_file(tmp_path / "few" / "model.safetensors")
    whole = {name for name, tensor in found.items() if name.endswith(".weight") and tensor.ndim == 2}
    assert {".".join(name.split(".")[-3:-1]) for name in whole} == {
        "model.embed_tokens", "lm_head", "mlp.gate", "mlp.shared_expert_gate"
    }  # fmt: skip
    settings = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", r"re:.*\.gate$", r"re:.*\.shared_expert_gate$"]


def test_settings_of_fp8_lie_beside_it(model_folder: Folder, tmp_path: Path) -> None:
    """Programs of ModelOpt look for a file of their own."""
    write_huggingface(
        read_huggingface(model_folder("llama")), tmp_path / "few", max_shard_size=1 << 30, rounding=rounding("fp8")
    )
    found = json.loads((tmp_path / "few" / "hf_quant_config.json").read_text())["quantization"]
    assert found["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN" and found["exclude_modules"] == ["lm_head"]


def test_modelopt_patterns_match_what_is_not_quantized() -> None:
    r"""The file said ``*\.gate``, whose backslash its readers take as it is: they looked for scales of routers."""
    ignored = ["lm_head", r"re:.*\.gate$", r"re:.*\.dense_4h\-to\-h$"]
    found = stored_codes.modelopt_config(scheme_named("fp8"), ignored)
    assert found is not None
    modules = ("lm_head", "model.layers.0.mlp.gate", "model.layers.1.dense_4h-to-h")
    for module, pattern in zip(modules, found["quantization"]["exclude_modules"], strict=True):
        assert fnmatchcase(module, pattern), pattern
        assert not fnmatchcase("model.layers.0.mlp.gate_proj", pattern), pattern


def test_layers_that_a_user_leaves_out(model_folder: Folder, tmp_path: Path) -> None:
    """By name, and by a pattern; the rest is quantized."""
    ignored = ("model.layers.0.mlp.down_proj", r"re:.*\.o_proj$")
    portable = read_huggingface(model_folder("llama"))
    write_huggingface(portable, tmp_path / "few", max_shard_size=1 << 30, rounding=rounding("int4", *ignored))
    found = load_file(tmp_path / "few" / "model.safetensors")
    assert "model.layers.0.mlp.down_proj.weight" in found and "model.layers.1.mlp.down_proj.weight_packed" in found
    assert not any("o_proj.weight_packed" in name for name in found)


def given(portable: PortableModel, name: str) -> PortableModel:
    """``portable`` as a method leaves it: weights on a grid of scales that are larger than rounding would choose."""
    scheme = rounding(name).scheme
    tensors, scales = dict(portable.tensors), {}
    for each, tensor in portable.tensors.items():
        if "linear_" not in each or not each.endswith(".weight"):
            continue
        weight = tensor.make()
        factors = scales_of(weight.flatten(0, -2), scheme.weights).factors * 1.25
        factors = factors.view(*weight.shape[:-1], -1)
        codes = (weight / factors.repeat_interleave(GROUP, -1)).round().clamp(-8, 7)
        value = codes * factors.repeat_interleave(GROUP, -1)
        tensors[each] = LazyTensor(tensor.shape, tensor.dtype, partial(torch.clone, value))
        scales[each] = LazyScales(LazyTensor(tuple(factors.shape), factors.dtype, partial(torch.clone, factors)))
    return dataclasses.replace(portable, tensors=tensors, quantization=Quantization(scheme, scales, "gptq"))


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_codes_of_a_method_stay(model_folder: Folder, tmp_path: Path, name: str) -> None:
    """Scales that calibration chose were chosen anew, so that exported weights were not those that it measured."""
    source = given(read_huggingface(model_folder(name)), "int4")
    write_huggingface(source, tmp_path / "few", max_shard_size=1 << 30)
    back = read_huggingface(tmp_path / "few")
    assert all(torch.equal(back.tensors[each].make(), tensor.make()) for each, tensor in source.tensors.items())
    with expect_error(ConfigError, "--quantize int8", "quantized already", "gptq"):
        write_huggingface(source, tmp_path / "again", max_shard_size=1 << 30, rounding=rounding("int8"))
    assert not (tmp_path / "again").exists()


def test_a_reader_that_finds_other_numbers(
    monkeypatch: pytest.MonkeyPatch, model_folder: Folder, tmp_path: Path
) -> None:
    """Codes packed from the other end load without complaint."""
    monkeypatch.setattr(stored_codes, "packed", lambda codes, bits: packed(codes.flip(1), bits))
    with expect_error(
        ProofError, "transformers dequantizes other weights", "decoder.layers.0.self_attention.linear_qkv.weight"
    ):
        quantize(model_folder("llama"), tmp_path / "few", rounding("int8"))
    assert not (tmp_path / "few").exists()


BAD: list[tuple[str, Rounding, tuple[str, ...]]] = [
    ("llama", rounding("int4", group=7), ("--group-size 7", "48 inputs", "--group-size 16")),
    (
        "qwen3_moe",
        rounding("int4"),
        ("--group-size 8", "22 inputs", "model.layers.0.mlp.experts.0.down_proj.weight", "int8"),
    ),
    ("gpt2", rounding("int8"), ("transformer.h.0.attn.c_attn.weight", "Conv1D", "--to gguf")),
    ("gpt_oss", rounding("int8"), ("all experts in one tensor", r"--quantize-ignore 're:.*\.experts\b.*'")),
    (
        "granitemoehybrid with experts",
        rounding("fp8"),
        ("model.layers.0.block_sparse_moe.input_linear.weight", r"re:.*\.input_linear\b.*"),
    ),
    ("mixtral", rounding("w8a8"), ("w8a8", "model.layers.0.block_sparse_moe.experts.0.w1.weight", "int8 or fp8")),
    ("olmo_hybrid", rounding("int8"), ("joins convolutions of a olmo_hybrid", "fp8")),
    ("phi3", rounding("fp8-block"), ("rows", "no whole blocks of 128 x 128", "--quantize fp8")),
    ("llama", rounding("fp8-tensor"), ("activations", "tools/quantize.py")),
    ("llama", rounding("int8", "nix"), ("--quantize-ignore nix", "model.layers.0.self_attn.q_proj")),
    ("llama", rounding("int8", "re:("), ("re:(", "no regular expression")),
    ("llama", rounding("int8", "re:.*"), ("nothing is left to quantize",)),
]


@pytest.mark.parametrize(("name", "how", "facts"), BAD)
def test_refused_before_any_work(
    model_folder: Folder, tmp_path: Path, name: str, how: Rounding, facts: tuple[str, ...]
) -> None:
    """What no reader loads, with the nearest way that one does."""
    with expect_error(ConfigError, *facts):
        write_huggingface(read_huggingface(model_folder(name)), tmp_path / "few", max_shard_size=1 << 30, rounding=how)
    assert not (tmp_path / "few").exists()


def test_one_weight_in_memory_at_a_time(model_folder: Folder, tmp_path: Path) -> None:
    """A model of 70 billion is quantized on a laptop: each weight is read once, and let go before the next."""
    portable = read_huggingface(model_folder("llama"))
    read: list[str] = []
    alive: list[Any] = []

    def counted(name: str, tensor: LazyTensor) -> LazyTensor:
        def make() -> torch.Tensor:
            read.append(name)
            assert sum(each() is not None for each in alive) <= 1
            found = tensor.make()
            alive.append(weakref.ref(found))
            return found

        return dataclasses.replace(tensor, make=make)

    counting = {name: counted(name, tensor) for name, tensor in portable.tensors.items()}
    write_huggingface(
        dataclasses.replace(portable, tensors=counting),
        tmp_path / "few",
        max_shard_size=9000,
        rounding=rounding("int4"),
    )
    assert sorted(read) == sorted(portable.tensors)
