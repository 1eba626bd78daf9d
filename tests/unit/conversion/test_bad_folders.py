"""Hugging Face folders that are not what they say: unknown types, code, files that disagree, types that are mixed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.formats import model_from_config
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.huggingface.two_rotaries import scaled_windows
from megatron.errors import CheckpointError
from tests.harness.published import random_model
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.published.llama import LLAMA3
from tests.published.sizes import SIZES
from tests.unit.conversion.test_families import assert_same_bytes
from tests.unit.conversion.test_mistakes import change

Folder = Callable[[str], Path]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def llama(model_folder: Folder, tmp_path: Path) -> Path:
    """A folder of a small Llama that a test may damage."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "llama"))


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write the weights anew, after ``edit``."""
    save_file(edit(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path) -> str:
    """The one sentence about a folder, whose exit code is that of a user's mistake."""
    with pytest.raises(CheckpointError) as caught:
        read_huggingface(folder)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_type_is_compared_with_the_known_ones(llama: Path) -> None:
    """The nearest, and what differs: whether it is one setting or another model is what the user wants to know."""
    change(llama, model_type="llama9", logit_scale=0.5, some_switch=False)

    def other_norms(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name.replace("input_layernorm", "odd_layernorm"): each for name, each in tensors.items()}

    rewrite(llama, other_norms)
    check_sentence(
        refused(llama),
        f"{llama}/config.json",
        "'llama9'",
        "model.layers.N.input_layernorm.weight",
        "model.layers.N.odd_layernorm.weight",
        "logit_scale",
        "0.5",
        "tools/checkpoint/convert.py",
        "--list",
    )


def test_the_nearest_type_of_each_family(model_folder: Folder, tmp_path: Path) -> None:
    """Among types with the same names of tensors, biases and norms decide; without weights the settings do."""
    for case in ("gpt2", "llama", "qwen2", "qwen3"):
        folder = Path(shutil.copytree(model_folder(case), tmp_path / case))
        change(folder, model_type="unheard-of")
        named = (
            f"; its settings and tensors have the names of a {case}'s, but its own code may compute something else ("
        )
        assert named in refused(folder)
    config = {"d_model": 512, "d_ff": 1024, "num_layers": 6, "num_heads": 8, "d_kv": 64, "vocab_size": 100}
    bert: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    bert |= {"vocab_size": 100, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    for settings, nearest in ((config, "t5"), (bert, "bert")):
        with expect_error(CheckpointError, f"{nearest}'s"):
            model_from_config({**settings, "model_type": "unheard-of"}, where="x")


def test_a_type_that_is_often_asked_for(llama: Path) -> None:
    """BART was told that it is nearest to OPT, with forty names that differ, and not what is in the way."""
    change(llama, model_type="bart")
    check_sentence(refused(llama), f"{llama}/config.json", "'bart'", "tools/checkpoint/convert.py", "--list")


@pytest.mark.parametrize(
    ("inner", "whether"),
    [("gemma3_text", "which converts from a folder of its own ("), ("llama4_text", "which doesn't convert, either (")],
)
def test_a_text_model_beside_another_one(inner: str, whether: str, llama: Path) -> None:
    """Gemma 3 with images was told that it is nearest to GPT-2, with names of tensors that its files don't have."""
    change(llama, model_type="unheard-of", text_config={"model_type": inner})
    assert refused(llama).startswith(
        f"{llama}/config.json describes a model of type 'unheard-of', which does not convert; its text model is a "
        f"{inner}, {whether}"
    )


FALCON_40B = {"hidden_size": 8192, "n_layer": 60, "n_head": 128, "n_head_kv": 8, "parallel_attn": True, "bias": False}


@pytest.mark.parametrize(
    "config",
    [
        {**FALCON_40B, "model_type": "RefinedWeb"},
        {"model_type": "RefinedWebModel", "multi_query": True},
        {"model_type": "exaone4"},
        {"model_type": "kimi_linear"},
        {"model_type": "a_dbrx", "d_model": 8, "n_layers": 2, "n_heads": 2},
    ],
)
def test_no_type_that_misleads_is_called_near(config: dict[str, Any]) -> None:
    """Falcon's older config was sent to BLOOM, EXAONE 4 to mistral "with the same settings", a DBRX to Llama."""
    with expect_error(CheckpointError) as caught:
        model_from_config(config, where="x")
    assert not re.search("bloom|mistral|llama", str(caught.value))


OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "org/base"}, "adapter_model.bin": 0},
        " is an adapter (LoRA or the like) for org/base, and no whole model: merge the two with peft's",
    ),
    ({"adapter_config.json": 0}, " is an adapter (LoRA or the like) for another model, and no whole model"),
    ({"adapter_config.json": 0, "config.json": {}}, " is an adapter (LoRA or the like) for another model"),
    ({"llama.Q4_K.gguf": 0}, " holds a model in llama.cpp's format (GGUF): convert it with --from gguf"),
    ({"params.json": {}, "consolidated.safetensors": 0}, " is a model in the format in which Meta and Mistral publish"),
    ({"params.json": {}, "consolidated.00.pth": 0}, " is a model in the format in which Meta and Mistral publish"),
    ({"model_index.json": {}, "unet/config.json": {}}, " is a pipeline of diffusers, which makes images"),
    ({"config_sentence_transformers.json": {}}, " is a folder of sentence-transformers: give the folder of its"),
    ({"zero_to_fp32.py": 0, "global_step5/x.pt": 0}, " is a checkpoint of DeepSpeed's: the script zero_to_fp32.py"),
    (
        {"iter_0000005/mp_rank_00/model_optim_rng.pt": 0, "latest_checkpointed_iteration.txt": 5},
        " holds checkpoints of Megatron-LM: convert them with --from megatron-lm",
    ),
    ({"iter_0000005/common.pt": 0}, " holds checkpoints of Megatron-LM: convert them with --from megatron-lm"),
    ({"iter_0000005/manifest.json": {}}, " holds checkpoints of this project: convert them with --from megatron"),
    ({"snapshots/abc/config.json": {}}, "/snapshots/abc: give that folder"),
    ({"readme.txt": 0}, " has no config.json, so it is not a Hugging Face model"),
    ({"config.json": {}, "tf_model.h5": 0}, "or in parts with an index; its weights are for TensorFlow"),
    ({"config.json": {}, "model.gguf": 0, "model.onnx": 0}, "its weights are for llama.cpp (GGUF) and ONNX"),
    ({"config.json": {}, "model-00001-of-00002.safetensors": 0}, "and the index that names them is missing"),
]


@pytest.mark.parametrize(("files", "words"), OTHERS)
def test_folders_of_other_programs_are_told_what_they_are(
    files: dict[str, Any], words: str, model_folder: Folder, tmp_path: Path
) -> None:
    """A LoRA folder was "not a Hugging Face model", as was every other one, with advice to download it again."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content) if content != 0 else "")
    if "config.json" in files:
        shutil.copyfile(model_folder("llama") / "config.json", tmp_path / "config.json")
    assert words in refused(tmp_path)


def test_a_published_model_given_as_a_checkpoint(model_folder: Folder, tmp_path: Path) -> None:
    """``--load`` of one named the converter alone, and a run needs none; of an adapter it said nothing at all."""
    folder = model_folder("llama")
    with expect_error(CheckpointError, f"--load-hf {folder}", "--load"):
        find_checkpoint(folder)
    (tmp_path / "adapter_config.json").write_text("{}")
    with expect_error(CheckpointError, "tools/checkpoint/convert.py"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("case", "settings", "words"),
    [
        ("llama", {"sliding_window": 16, "use_cache": True}, "a llama: sliding_window = 16"),
        ("qwen2", {"attention_bias": True}, "a qwen2: attention_bias = true"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 3},
            "a mistral: layer_types = a list of 3",
        ),
        ("gpt2", {"rope_scaling": {"factor": 2.0}}, "a gpt2: rope_scaling = an object of 1"),
        ("mixtral", {"n_shared_experts": 1}, "a mixtral: n_shared_experts = 1"),
        (
            "llama 3",
            {"rope_parameters": {**LLAMA3, "attn_factor": 0.8}, "alibi": True},
            "a llama: alibi = true, rope_parameters.attn_factor = 0.8",
        ),
        ("bert", {"embedding_size": 24}, "a bert: embedding_size = 24"),
        ("t5", {"num_key_value_heads": 2}, "a t5: num_key_value_heads = 2"),
    ],
)
def test_settings_that_are_not_read_are_named(
    case: str, settings: dict[str, Any], words: str, model_folder: Folder, tmp_path: Path
) -> None:
    """transformers skips them without a word; whoever meant a window by it would train full attention."""
    assert read_huggingface(model_folder(case)).notes == ()
    folder = Path(shutil.copytree(model_folder(case), tmp_path / "folder"))
    change(folder, **settings)
    assert read_huggingface(folder).notes == (f"note: {folder}/config.json has settings that are not read in {words}",)


def test_heads_of_another_width_than_gpt_neox_computes(model_folder: Folder, tmp_path: Path) -> None:
    """Rotary positions would be made for ``head_dim`` channels, which transformers' heads do not have."""
    folder = Path(shutil.copytree(model_folder("gpt_neox"), tmp_path / "folder"))
    config = json.loads((folder / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    change(folder, head_dim=width)
    read_huggingface(folder)
    change(folder, head_dim=2 * width)
    check_sentence(refused(folder), "hidden_size / num_attention_heads", width)


def test_yarn_that_does_not_round_beside_windows(model_folder: Folder, tmp_path: Path) -> None:
    """transformers rounds the range of corrected channels there, whatever ``truncate`` says."""
    folder = Path(shutil.copytree(model_folder("olmo3 scaled, tied"), tmp_path / "folder"))
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    rope["full_attention"]["truncate"] = False
    change(folder, rope_parameters=rope)
    check_sentence(refused(folder))
    model = read_huggingface(model_folder("olmo3 scaled, tied")).model
    assert scaled_windows(model) == []
    unrounded = replace(model, yarn_correction_range_round_to_int=False)
    assert scaled_windows(unrounded) == ["the range of channels that YaRN corrects is not rounded"]


def test_a_part_of_each_head_that_is_null(model_folder: Folder, tmp_path: Path) -> None:
    """It ended in a TypeError; null means that the other settings say it, as for every other setting."""
    folder = Path(shutil.copytree(model_folder("gpt_neox"), tmp_path / "folder"))
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    change(folder, rope_parameters={**rope, "partial_rotary_factor": None}, rotary_pct=0.5)
    assert read_huggingface(folder).model.rotary_percent == 0.5


def test_code_that_comes_with_a_model_is_never_executed(llama: Path, tmp_path: Path) -> None:
    """Neither by the converter nor by the proof; of a known type, the code is not needed."""
    (llama / "modeling_evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    names = {name: f"modeling_evil.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    change(llama, auto_map=names)
    (llama / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["modeling_evil.X", None]}}))
    said: list[str] = []
    convert(Conversion("hf", llama, "megatron", tmp_path / "ours"), said.append)
    assert said[0].endswith("(auto_map), which is never executed: the model is read as transformers' llama")
    check_sentence(said[1], llama)
    convert(Conversion("megatron", tmp_path / "ours", "hf", tmp_path / "back"), said.append)
    assert "auto_map" not in json.loads((tmp_path / "back/config.json").read_text())
    change(llama, model_type="evil")
    check_line(refused(llama), "auto_map")
    assert not (tmp_path / "executed").exists()


def in_parts(folder: Path) -> dict[str, str]:
    """Cut the weights into two files with an index; the file of each tensor."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    homes = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(tensors)}
    for file in set(homes.values()):
        save_file({name: each for name, each in tensors.items() if homes[name] == file}, folder / file)
    write_index(folder, homes)
    return homes


def write_index(folder: Path, homes: Any) -> None:
    """An index of the parts."""
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))


def test_parts_that_are_missing_or_elsewhere(llama: Path) -> None:
    """An index that names a missing file, or one elsewhere on the disk, or none."""
    homes = in_parts(llama)
    assert read_huggingface(llama).num_parameters == 65_328
    second = max(homes.values())
    (llama / second).rename(llama.parent / second)
    check_line(refused(llama), f"'{second}'")
    write_index(llama, {**homes, "x": f"../{second}"})
    check_line(refused(llama), f"'../{second}'", f"'{second}'")
    (llama.parent / second).rename(llama / second)
    write_index(llama, homes)
    (llama / second).write_bytes((llama / second).read_bytes()[:-8])
    check_line(refused(llama), second)
    (llama / INDEX).write_text("{}")
    check_line(refused(llama), "weight_map")
    write_index(llama, {})
    check_sentence(refused(llama))


def test_an_index_that_disagrees_with_the_files(llama: Path) -> None:
    """Which of two tensors of one name is the model's, nobody can tell; one was taken in silence."""
    homes = in_parts(llama)
    first, second = sorted(set(homes.values()))
    norm = "model.norm.weight"
    other = {first: second, second: first}[homes[norm]]
    write_index(llama, {**homes, norm: other})
    check_line(refused(llama), norm, other, homes[norm])
    write_index(llama, {**homes, "model.more.weight": first})
    check_line(refused(llama), "model.more.weight", first)
    write_index(llama, homes)
    save_file({**load_file(llama / other), norm: torch.zeros(48)}, llama / other)
    check_line(refused(llama), norm, first, second)


def types_of(folder: Path) -> dict[str, torch.dtype]:
    """The type of each tensor."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118  (it is no mapping)


@pytest.mark.parametrize("through", ["megatron", "megatron-lm"])
def test_mixed_types_are_kept(through: Any, llama: Path, tmp_path: Path) -> None:
    """bf16 with norms in fp32 and an output in fp16: every tensor comes back in its own type, to the byte, and a line
    says which are not of the type of most.
    """

    def mix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: each if "norm" in name else each.half() if "lm_head" in name else each.bfloat16()
            for name, each in tensors.items()
        }

    rewrite(llama, mix)
    said: list[str] = []
    for source, load, target, save in (("hf", llama, through, "there"), (through, tmp_path / "there", "hf", "back")):
        convert(Conversion(source, load, target, tmp_path / save), said.append)  # type: ignore[arg-type]
    assert [line for line in said if "mixes types" in line] == [
        f"note: {llama} mixes types: 22 of 30 tensors are bfloat16, but lm_head.weight is float16, "
        "model.layers.0.input_layernorm.weight is float32, model.layers.0.post_attention_layernorm.weight is float32, "
        "model.layers.1.input_layernorm.weight is float32, model.layers.1.post_attention_layernorm.weight is float32, "
        "model.layers.2.input_layernorm.weight is float32 and 2 more; a conversion keeps the type of each, and a run "
        "trains all in its own"
    ]
    assert set(types_of(llama).values()) == {torch.float32, torch.bfloat16, torch.float16}
    assert types_of(tmp_path / "back") == types_of(llama)
    assert_same_bytes(llama, tmp_path / "back")


def test_types_that_cannot_be_kept(llama: Path) -> None:
    """Of three matrices that are one here, the way back can't tell which was in fp32."""
    key = "model.layers.1.self_attn.k_proj.weight"
    rewrite(llama, lambda tensors: {name: each if name == key else each.bfloat16() for name, each in tensors.items()})
    words = (
        "q_proj.weight is bfloat16, model.layers.1.self_attn.k_proj.weight is float32, model.layers.1.self_attn.v_proj"
    )
    said = refused(llama)
    assert words in said
    check_line(said, "tensor")


def test_quantized_weights(llama: Path) -> None:
    """By their settings, or by types that no weights have."""
    change(llama, quantization_config=None)
    assert read_huggingface(llama).num_parameters == 65_328
    rewrite(llama, lambda tensors: {**tensors, "model.norm.weight": torch.zeros(48, dtype=torch.int8)})
    check_sentence(refused(llama), "model.norm.weight", "int8", "quantization_config")
    rewrite(llama, lambda tensors: {**tensors, "model.norm.weight": torch.zeros(48, dtype=torch.bool)})
    words = r"model\.norm\.weight is of type BOOL; weights are float64, float32, float16, bfloat16"
    assert re.search(words, refused(llama))
    change(llama, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    rewrite(llama, lambda tensors: {**tensors, "model.norm.weight": torch.zeros(48)})
    check_line(refused(llama), "quantization_config", "bf16")


def test_settings_go_before_weights(llama: Path) -> None:
    """Of an unknown type, files in a form that isn't read are not what is wrong."""
    change(llama, model_type="unheard-of")
    (llama / "model.safetensors").unlink()
    check_line(refused(llama), "'unheard-of'")


def test_a_tied_output_that_has_weights_of_its_own(tmp_path: Path) -> None:
    """They were dropped without a word: the model was another one wherever no proof was asked for."""

    model = random_model("llama", {**SIZES, "tie_word_embeddings": True})
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    words = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": words.clone()}, file, metadata={"format": "pt"})
    read_huggingface(tmp_path / "model")
    save_file({**tensors, "lm_head.weight": words + 1}, file, metadata={"format": "pt"})
    with expect_error(CheckpointError, "lm_head.weight", "model.embed_tokens.weight"):
        read_huggingface(tmp_path / "model")
