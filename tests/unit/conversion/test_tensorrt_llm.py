"""Checkpoints of TensorRT-LLM: the rank files hold what its code multiplies, and what it lacks is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.huggingface.reading import from_transformers, read_huggingface
from megatron.core.conversion.native import write_native
from megatron.core.conversion.portable import LazyScales, LazyTensor, PortableModel, Quantization
from megatron.core.conversion.programs import Program
from megatron.core.conversion.proof import ProofError
from megatron.core.conversion.tensorrt_llm.architecture import known_architectures
from megatron.core.conversion.tensorrt_llm.cuts import Layout, by_rows
from megatron.core.conversion.tensorrt_llm.forward import TensorRTModel
from megatron.core.conversion.tensorrt_llm.pieces import Plan
from megatron.core.conversion.tensorrt_llm.proof import prove_tensorrt_llm
from megatron.core.conversion.tensorrt_llm.writing import plan_for, write_tensorrt_llm
from megatron.core.quantization.grid import codes_of, scales_of, values_of_codes
from megatron.core.quantization.scheme import scheme_named
from megatron.errors import CheckpointError, ConfigError
from tests.harness.published import random_model
from tests.harness.sentences import check_line, expect_error
from tests.published import MODELS
from tests.published.sizes import SIZES
from tests.tiers import tiers
from tests.unit.conversion.megatron_checkpoints import CLASSIC, portable, random_tensors
from tests.unit.conversion.test_families import do
from tools.checkpoint import convert as tool

Folder = Callable[[str], Path]

ONE, MOST = Layout(), Layout(4, 3)
FIRST = [
    *(("llama 3", MOST), ("mixtral", Layout(2, 3)), ("gpt2", MOST), ("nemotron", Layout(2, 1)), ("gemma2", ONE)),
    *(("qwen3", MOST), ("granite", Layout(1, 3))),
]
"""Few heads of keys, experts, learned positions and ties, squared ReLU and 1 + weights, norms behind, normed heads."""
CASES = [
    *FIRST,
    *((name, layout) for name in ("llama", "llama stretched", "llama multi-head, tied") for layout in (ONE, MOST)),
    *(("mistral with a window", MOST), ("mixtral", MOST), ("qwen2", MOST), ("qwen2 tied", ONE), ("qwen3 tied", MOST)),
    *(("llama with biases", MOST), ("llama with attention biases", Layout(2, 1)), ("llama with mlp biases", MOST)),
    *(
        ("gemma", ONE),
        ("starcoder2", MOST),
        ("nemotron with biases", Layout(4, 2)),
        ("nemotron whole heads rotated", MOST),
    ),
    *(("granite tied, usual scale, wide heads", MOST), ("llama one group, wide heads", MOST)),
]


def named(case: Any) -> str:
    return f"{case[0]}-{case[1].tensor}x{case[1].pipeline}"


@pytest.mark.parametrize("case", tiers(CASES, first=FIRST), ids=named)
def test_the_rank_files_compute_the_model(case: tuple[str, Layout], model_folder: Folder, tmp_path: Path) -> None:
    """A wrong half of the MLP, or keys of another rank, builds into an engine that writes nonsense."""
    name, layout = case
    said = do("hf", model_folder(name), "tensorrt-llm", tmp_path / "theirs", layout=layout)
    assert any("never built by trtllm-build" in line for line in said)
    ranks = [f"rank{rank}.safetensors" for rank in range(layout.world)]
    assert {*ranks, "config.json"} <= {path.name for path in (tmp_path / "theirs").iterdir()}


def test_every_architecture_is_proven() -> None:
    """A table that nobody has run is a guess."""
    proven = {plan_for(_as_if(name), ONE, None).architecture.name for name, _ in FIRST}
    proven |= {"Qwen2ForCausalLM", "GemmaForCausalLM"}  # in the whole tier
    assert {each.name for each in known_architectures()} == proven


def _as_if(name: str) -> PortableModel:
    return from_transformers(random_model(*MODELS[name]))


def of_rank(folder: Path, rank: int) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / f"rank{rank}.safetensors")


def test_what_each_rank_holds(model_folder: Folder, tmp_path: Path) -> None:
    """Names, shapes and numbers as trtllm-build expects them: it refuses what is missing, and takes wrong halves."""
    do("hf", model_folder("llama"), "tensorrt-llm", tmp_path / "theirs", layout=MOST, skip_proof=True)
    theirs = random_model(*MODELS["llama"]).state_dict()
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    assert config["mapping"] == {"world_size": 12, "tp_size": 4, "pp_size": 3}
    assert (config["architecture"], config["num_key_value_heads"], config["vocab_size"]) == ("LlamaForCausalLM", 2, 101)
    layer = {
        f"transformer.layers.0.{name}.weight": shape
        for name, shape in {
            "input_layernorm": [48],
            "attention.qkv": [3 * 12, 48],
            "attention.dense": [48, 12],
            "post_layernorm": [48],
            "mlp.fc": [20, 48],
            "mlp.gate": [20, 48],
            "mlp.proj": [48, 20],
        }.items()
    }
    first, last = of_rank(tmp_path / "theirs", 1), of_rank(tmp_path / "theirs", 11)
    words = {"transformer.vocab_embedding.weight": [101, 48]}
    assert {name: list(each.shape) for name, each in first.items()} == {**layer, **words}
    ends = {"transformer.ln_f.weight": [48], "lm_head.weight": [26, 48]}
    assert {name: list(each.shape) for name, each in last.items()} == {**layer, **ends}
    own = "model.layers.2"
    fc, gate = last["transformer.layers.0.mlp.fc.weight"], last["transformer.layers.0.mlp.gate.weight"]
    assert torch.equal(fc, theirs[f"{own}.mlp.gate_proj.weight"][60:])  # theirs is named after the other half
    assert torch.equal(gate, theirs[f"{own}.mlp.up_proj.weight"][60:])
    query, key, value = (theirs[f"{own}.self_attn.{kind}_proj.weight"] for kind in "qkv")
    qkv = torch.cat((query[36:], key[12:], value[12:]))  # its own query head, and the second of two key heads
    assert torch.equal(last["transformer.layers.0.attention.qkv.weight"], qkv)
    head = last["lm_head.weight"]
    assert torch.equal(head[:23], theirs["lm_head.weight"][78:]) and not head[23:].any()


def test_experts_are_the_other_way_round(model_folder: Folder, tmp_path: Path) -> None:
    """In experts the linear half comes first, and routers stay in fp32."""
    random_model(*MODELS["mixtral"]).bfloat16().save_pretrained(tmp_path / "source")
    do("hf", tmp_path / "source", "tensorrt-llm", tmp_path / "theirs", layout=Layout(2, 1))
    found, theirs = of_rank(tmp_path / "theirs", 1), random_model(*MODELS["mixtral"]).bfloat16().state_dict()
    fused = found["transformer.layers.1.mlp.fc.weight"]
    held = theirs["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(fused, torch.cat((held[:, 120:], held[:, 40:80]), 1)) and fused.dtype == torch.bfloat16
    assert found["transformer.layers.1.mlp.router.weight"].dtype == torch.float32


def test_the_vocabulary_of_gemma_is_divided(tmp_path: Path) -> None:
    """Its code divides the embedding whatever config.json says, and norms are the factors themselves."""
    model = random_model("gemma", {**SIZES, "vocab_size": 104, "head_dim": 16})
    model.save_pretrained(tmp_path / "source")
    do("hf", tmp_path / "source", "tensorrt-llm", tmp_path / "theirs", layout=Layout(2, 1))
    found, theirs = of_rank(tmp_path / "theirs", 1), model.state_dict()
    assert torch.equal(found["transformer.vocab_embedding.weight"], theirs["model.embed_tokens.weight"][52:])
    assert torch.equal(found["transformer.ln_f.weight"], theirs["model.norm.weight"] + 1)


_WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}


def wide(kind: str = "llama", **settings: Any) -> PortableModel:
    return from_transformers(random_model(kind, {**_WIDE, **settings}).bfloat16())


def written(model: PortableModel, folder: Path, layout: Layout, scheme: str = "", *ignored: str) -> list[str]:
    """Write and prove; what was said."""
    said: list[str] = []
    group = 64 if scheme == "int4" else None
    rounding = Rounding(scheme_named(scheme, group_size=group), ignored) if scheme else None
    write_tensorrt_llm(model, folder, layout=layout, rounding=rounding, say=said.append)
    return [*said, str(prove_tensorrt_llm(model, folder, layout=layout, rounding=rounding))]


@pytest.mark.parametrize("kind", ["llama", pytest.param("mixtral", marks=pytest.mark.slow(reason="as llama"))])
def test_weights_of_four_bits(kind: str, tmp_path: Path) -> None:
    """Two outputs share a byte, the even one in its lower half: the other order is a model of noise."""
    model = wide(kind, **({"num_local_experts": 4} if kind == "mixtral" else {}))
    said = written(model, tmp_path / "theirs", Layout(2, 1), "int4")
    assert "activations not rounded" in said[-1]
    config = json.loads((tmp_path / "theirs/config.json").read_text())["quantization"]
    assert (config["quant_algo"], config["group_size"], config["has_zero_point"]) == ("W4A16_AWQ", 64, False)
    assert not config["pre_quant_scale"] and config["exclude_modules"][:2] == ["*lm_head", "*router"]
    found = of_rank(tmp_path / "theirs", 1)
    name = "transformer.layers.0.attention.dense"
    weight = model.tensors["decoder.layers.0.self_attention.linear_proj.weight"].make()[:, 128:].float()
    scales = found[f"{name}.weights_scaling_factor"].float()
    codes = (weight / scales.repeat_interleave(64, 1)).round().clamp(-8, 7).to(torch.int8)
    by_hand = (codes[::2] & 15) + 16 * codes[1::2].to(torch.int32)
    assert torch.equal(found[f"{name}.weight"], by_hand.to(torch.int8)) and scales.shape == (256, 2)


def test_numbers_that_trtllm_build_rounds(tmp_path: Path) -> None:
    """W8A16 is rounded while it is loaded; layers that stay as they are must be named for modules and for tensors."""
    said = written(wide(), tmp_path / "theirs", ONE, "int8", "decoder.layers.*.mlp.linear_fc1")
    check_line(said[0], "W8A16")
    config = json.loads((tmp_path / "theirs/config.json").read_text())["quantization"]
    left = ["*mlp.fc", "*mlp.fc.weight", "*mlp.gate", "*mlp.gate.weight"]
    assert config["quant_algo"] == "W8A16" and config["exclude_modules"][4:] == left
    assert of_rank(tmp_path / "theirs", 0)["transformer.layers.0.mlp.fc.weight"].dtype == torch.bfloat16


def in_fp8(model: PortableModel) -> PortableModel:
    """The model as tools/quantize.py leaves it, with scales of inputs, keys and values."""
    scheme = scheme_named("fp8-tensor")
    tensors, scales, cache = dict(model.tensors), dict[str, LazyScales](), dict[str, LazyTensor]()

    def lazy(tensor: Tensor) -> LazyTensor:
        return LazyTensor(tuple(tensor.shape), tensor.dtype, partial(torch.clone, tensor))

    for name, tensor in model.tensors.items():
        if "linear_" not in name or not name.endswith(".weight"):
            continue
        weight = tensor.make().float()
        flat = [weight] if "experts" not in name else list(weight.flatten(1, -2))
        held = [scales_of(each, scheme.weights) for each in flat]
        values = [values_of_codes(codes_of(*pair, scheme.weights), pair[1], scheme.weights) for pair in zip(flat, held)]
        factors = torch.stack([each.factors.expand(len(value), 1) for each, value in zip(held, values)])
        tensors[name] = lazy(torch.stack(values).view(weight.shape).to(tensor.dtype))
        scales[name] = LazyScales(lazy(factors.view(*weight.shape[:-1], 1)), inputs=lazy(torch.tensor([0.25])))
    for layer in range(model.model.num_layers):
        for kind, scale in (("k", 0.5), ("v", 0.75)):
            cache[f"decoder.layers.{layer}.self_attention.{kind}_scale"] = lazy(torch.tensor([scale]))
    return dataclasses.replace(model, tensors=tensors, quantization=Quantization(scheme, scales, "rtn", {}, cache))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_fp8_with_its_scales(kind: str, tmp_path: Path) -> None:
    """One scale of a weight on every rank, one of its inputs, and the larger of keys' and values'."""
    model = in_fp8(wide(kind, **({"num_local_experts": 3} if kind == "mixtral" else {}), num_hidden_layers=2))
    written(model, tmp_path / "theirs", Layout(2, 2))
    config = json.loads((tmp_path / "theirs/config.json").read_text())["quantization"]
    assert (config["quant_algo"], config["kv_cache_quant_algo"]) == ("FP8", "FP8")
    found, layer = of_rank(tmp_path / "theirs", 3), "transformer.layers.0"
    for name in (f"{layer}.attention.qkv", f"{layer}.mlp.fc", f"{layer}.mlp.proj"):
        assert found[f"{name}.weight"].dtype == torch.float8_e4m3fn, name
        shape = [3, 1] if kind == "mixtral" and "mlp" in name else [1]
        assert list(found[f"{name}.weights_scaling_factor"].shape) == shape
        assert found[f"{name}.activation_scaling_factor"].tolist() == [0.25]
    assert found[f"{layer}.attention.kv_cache_scaling_factor"].tolist() == [0.75]


def louder(model: PortableModel, module: str, rows: Callable[[Tensor], Tensor]) -> PortableModel:
    """The model in FP8 with some rows of a weight, and their scales, four times as large."""
    name, quantization = f"decoder.layers.0.{module}.weight", model.quantization
    assert quantization is not None

    def four_times(tensor: LazyTensor | None) -> LazyTensor:
        assert tensor is not None
        made = tensor.make().clone()
        rows(made).mul_(4)
        return dataclasses.replace(tensor, make=partial(torch.clone, made))

    held = quantization.scales[name]
    scales = {**quantization.scales, name: dataclasses.replace(held, factors=four_times(held.factors))}
    tensors = {**model.tensors, name: four_times(model.tensors[name])}
    return dataclasses.replace(model, tensors=tensors, quantization=dataclasses.replace(quantization, scales=scales))


def test_parts_with_scales_of_their_own(tmp_path: Path) -> None:
    """Queries, keys and values of published FP8 folders have a scale each, and so have the halves of experts.

    TensorRT-LLM has one for all. The first was written for codes made by others: values four times too small.
    """
    model = louder(in_fp8(wide()), "self_attention.linear_qkv", lambda each: each.view(2, 4, 64, -1)[:, 3])
    model = louder(model, "mlp.linear_fc1", lambda each: each[256:])  # two matrices there, so this one stays exact
    said = written(model, tmp_path / "theirs", Layout(2, 1))
    check_line(said[0], "has several scales", "decoder.layers.0.self_attention.linear_qkv.weight")
    found = of_rank(tmp_path / "theirs", 1)

    def numbers(name: str) -> Tensor:
        module = f"transformer.layers.0.{name}"
        return found[f"{module}.weight"].float() * found[f"{module}.weights_scaling_factor"]

    fused = model.tensors["decoder.layers.0.self_attention.linear_qkv.weight"].make().float().view(2, 4, 64, 256)
    qkv = numbers("attention.qkv")
    assert torch.allclose(qkv[192:], fused[1, 3], rtol=0.01) and torch.allclose(qkv[:64], fused[1, 0], 0.07, 1e-3)
    gate = model.tensors["decoder.layers.0.mlp.linear_fc1.weight"].make().float()[384:]
    assert torch.allclose(numbers("mlp.gate"), gate, rtol=0.01)
    experts = louder(in_fp8(wide("mixtral", num_local_experts=3)), "mlp.experts.linear_fc1", lambda each: each[1, 1])
    written(experts, tmp_path / "experts", Layout(2, 1))


def test_learned_positions_are_those_of_config_json(tmp_path: Path) -> None:
    """With a window config.json says fewer positions, and trtllm-build refused the whole table."""
    model = ModelConfig(**CLASSIC, activation="gelu_tanh", window_size=(7, 0))
    written(portable(model, random_tensors(model)), tmp_path / "theirs", ONE)
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    table = of_rank(tmp_path / "theirs", 0)["transformer.position_embedding.weight"]
    assert (config["max_position_embeddings"], len(table)) == (8, 8)
    (tmp_path / "theirs/config.json").write_text(json.dumps({**config, "max_position_embeddings": 9}))
    with expect_error(CheckpointError, "8 positions", "max_position_embeddings", "9"):
        TensorRTModel(tmp_path / "theirs").logits(torch.zeros(1, 4, dtype=torch.long))


def test_ranks_that_do_not_divide_experts() -> None:
    """The width of experts is their own: ranks had parts of several sizes, and config.json said one."""
    model = from_transformers(random_model("mixtral", {**_WIDE, "intermediate_size": 90, "num_local_experts": 3}))
    wider = dataclasses.replace(model, model=dataclasses.replace(model.model, ffn_hidden_size=256))
    with expect_error(ConfigError, "--target-tensor-parallel-size 4", "MLP's width 90"):
        plan_for(wider, Layout(4, 1), None)
    with expect_error(ConfigError, "--target-tensor-parallel-size 4", "90", "[90, 8]"):
        by_rows("mlp.fc", 4)(torch.empty(90, 8))


def test_a_wrong_cut_is_not_kept(model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof reads the files and not the tables that made them."""
    right = Plan._layer_piece

    def swapped(plan: Any, stage: int, name: str, tensor: LazyTensor) -> Any:
        piece = right(plan, stage, name, tensor)
        if "linear_fc1" not in name:
            return piece
        return dataclasses.replace(piece, make=lambda weight: piece.make(torch.cat(weight.chunk(2)[::-1])))

    monkeypatch.setattr(Plan, "_layer_piece", swapped)
    with expect_error(ProofError):
        do("hf", model_folder("llama"), "tensorrt-llm", tmp_path / "theirs", layout=Layout(2, 1))
    assert not list(tmp_path.iterdir())


REFUSED = {
    "bert": ("BERT", "--to hf"),
    "falcon newer": ("GPTForCausalLM", "--parallel-attention", "trtllm-serve"),
    "deepseek_v3": ("yarn", "15 more", "trtllm-serve"),
    "qwen2_moe": ("MixtralForCausalLM", "trtllm-serve"),
    "llama yarn": ("--position-embedding-type", "yarn"),
    "gpt_oss": ("trtllm-serve",),
}


@pytest.mark.parametrize("name", tiers(REFUSED, first=["bert", "llama yarn"]))
def test_models_that_it_lacks(name: str, model_folder: Folder) -> None:
    """A setting that config.json can't say would be dropped without a word."""
    with expect_error(CheckpointError, *REFUSED[name]):
        plan_for(read_huggingface(model_folder(name)), ONE, None)


def test_layers_for_later_tokens_are_refused(model_folder: Folder) -> None:
    """TensorRT-LLM's checkpoints have no layers of multi-token prediction, which would be dropped without a word."""
    portable = read_huggingface(model_folder("llama"))
    with expect_error(CheckpointError, "--mtp-num-layers is 1"):
        plan_for(dataclasses.replace(portable, model=dataclasses.replace(portable.model, mtp_num_layers=1)), ONE, None)


def test_ranks_that_do_not_divide(model_folder: Folder) -> None:
    """trtllm-build would end in a traceback, hours later on another machine."""
    llama, gemma = read_huggingface(model_folder("llama")), read_huggingface(model_folder("gemma"))
    for layout, words in (
        (Layout(3, 1), ("--target-tensor-parallel-size 3", "4 attention heads")),
        (Layout(1, 2), ("--target-pipeline-parallel-size 2", "3 layers")),
    ):
        with expect_error(ConfigError, *words):
            plan_for(llama, layout, None)
    with expect_error(ConfigError, "101"):
        plan_for(gemma, Layout(2, 1), None)


@pytest.mark.parametrize(
    ("scheme", "ignored", "words"),
    [
        ("w8a8", (), ("w8a8", "W8A16")),
        ("fp8", (), ("fp8", "fp8-tensor")),
        ("fp8-tensor", (), ("tools/quantize.py",)),
        ("int8", ("nothing",), ("--quantize-ignore nothing",)),
        ("int8", ("decoder.layers.0.mlp.linear_fc1",), ("mlp.fc", "all layers")),
        ("int8", ("*",), ("nothing is left",)),
        ("int4", (), ("float32", "bf16")),
    ],
)
def test_what_is_not_quantized(
    scheme: str, ignored: tuple[str, ...], words: tuple[str, ...], model_folder: Folder
) -> None:
    """Layouts that no source proves would be guesses."""
    with expect_error(ConfigError, *words):
        plan_for(read_huggingface(model_folder("llama")), ONE, Rounding(scheme_named(scheme), ignored))


def test_groups_that_it_would_pad(tmp_path: Path) -> None:
    """TensorRT-LLM pads matrices of 4 bits, and then finds other shapes in the files."""
    rounding = Rounding(scheme_named("int4", group_size=128))
    with expect_error(ConfigError, "int4", "groups of 64"):
        write_tensorrt_llm(wide(), tmp_path / "theirs", layout=Layout(4, 1), rounding=rounding, say=print)
    assert not list(tmp_path.iterdir())


def test_what_is_quantized_is_not_quantized_again() -> None:
    with expect_error(ConfigError, "quantized already"):
        plan_for(in_fp8(wide()), ONE, Rounding(scheme_named("int8")))


def test_exact_gelu_is_named(tmp_path: Path) -> None:
    """A model trained here with the exact GELU is built with the other one."""
    model = ModelConfig(**CLASSIC, activation="gelu")
    write_native(portable(model, random_tensors(model)), tmp_path / "ours", final=tmp_path / "ours")
    said = do("megatron", tmp_path / "ours", "tensorrt-llm", tmp_path / "theirs", layout=Layout(2, 1))
    check_line("\n".join(said), "GELU by its tanh form")
    assert json.loads((tmp_path / "theirs/config.json").read_text())["architecture"] == "GPTForCausalLM"


@pytest.mark.parametrize(
    ("target", "why"),
    [("megatron", "loads at any layout"), ("gguf", "is not divided over ranks"), ("onnx", "is not divided over ranks")],
)
def test_layouts_that_have_no_effect(target: Program, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of GGUF files and ONNX graphs, too, it was said that checkpoints load at any layout."""
    tool.job_of(tool.ConvertConfig(source="hf", load="x", target=target, save="y", target_tensor_parallel_size=2))
    check_line(capsys.readouterr().err, "--target-tensor-parallel-size 2", f"--to {target}", why)
