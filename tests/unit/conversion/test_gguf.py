"""GGUF files: llama.cpp computes what the model computes, and they are read back as they were written."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="GGUF files are written with the extra gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp proves GGUF files; it is in the extra dev-all")

import gguf
import numpy as np

from megatron.core.conversion.gguf import writing
from megatron.core.conversion.gguf.files import open_gguf
from megatron.core.conversion.gguf.k_types import packed
from megatron.core.conversion.gguf.number_types import tensor_types
from megatron.core.conversion.gguf.proof import gguf_file, transformers_answer
from megatron.core.conversion.gguf.reading import read_gguf
from megatron.core.conversion.gguf.writing import gguf_form
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.proof import ProofError, portable_answer
from megatron.core.conversion.questions import question_for
from megatron.core.models.gpt.gguf import DecoderFiles
from megatron.core.models.gpt.gguf.architectures import ARCHITECTURES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError
from tests.harness.published import random_model
from tests.harness.sentences import check_line, expect_error
from tests.published import MODELS
from tests.published.deepseek import V2, V3, YARN
from tests.published.llama import LONGROPE
from tests.published.sizes import SIZES
from tests.tiers import tiers
from tests.unit.conversion.test_families import do
from tests.unit.conversion.test_later_layers import with_later_layer
from tests.unit.conversion.test_mistakes import change
from tests.unit.conversion.test_starting import first_step

Folder = Callable[[str], Path]

_WIDE = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
_LONG = {"max_position_embeddings": 1024, "original_max_position_embeddings": 512}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2, usual scale": ("gemma2", {**_WIDE, "query_pre_attn_scalar": 16, "sliding_window": 9}),
    "gemma3, usual scale": (
        "gemma3_text",
        {**_WIDE, "query_pre_attn_scalar": 16, "sliding_window": 9, "layer_types": None, "num_hidden_layers": 7},
    ),
    "gemma3, every third layer full, stretched, capped": (
        "gemma3_text",
        {
            **_WIDE,
            "query_pre_attn_scalar": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
        },
    ),
    "cohere without norms of queries and keys": ("cohere", {**SIZES, "use_qk_norm": False}),
    "phi3 longrope within the original length": (
        "phi3",
        {**SIZES, **_LONG, "pad_token_id": 0, "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 512}},
    ),
    "llama in blocks": ("llama", _WIDE),
    "deepseek_v3 in groups, yarn": (
        "deepseek_v3",
        {
            **V3,
            "num_nextn_predict_layers": 0,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek_v2 lite of 27 layers": (
        "deepseek_v2",
        {
            **V2,
            "q_lora_rank": None,
            "num_hidden_layers": 27,
            "rope_parameters": {**YARN, "mscale": 1, "mscale_all_dim": 1},
        },
    ),
    "nemotron_h, hardly limited steps": ("nemotron_h", {**MODELS["nemotron_h"][1], "time_step_min": 1e-4}),
    "nemotron_h with biases, hardly limited steps": (
        "nemotron_h",
        {**MODELS["nemotron_h with biases"][1], "time_step_min": 1e-4},
    ),
    "nemotron_h with experts, hardly limited steps": (
        "nemotron_h",
        {**MODELS["nemotron_h with experts"][1], "time_step_min": 1e-4},
    ),
    "nemotron_h with experts in groups and attention": (
        "nemotron_h",
        {
            **MODELS["nemotron_h with experts in groups"][1],
            "time_step_min": 1e-4,
            "hybrid_override_pattern": "M*E",
        },
    ),
    "mamba2 tied, a convolution of 3": (
        "mamba2",
        {**MODELS["mamba2 tied, limited steps, a convolution of 3"][1], "time_step_limit": [0.0, 1e31]},
    ),
    "qwen3_next with square states": (
        "qwen3_next",
        {**MODELS["qwen3_next"][1], "linear_key_head_dim": 10, "rms_norm_eps": 1e-6},
    ),
    "gpt_oss clamped at 7": ("gpt_oss", {**MODELS["gpt_oss"][1], "swiglu_limit": 7.0}),
    "deepseek_v2 yarn": ("deepseek_v2", {**V2, "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}}),
}
"""Cases that llama.cpp's architectures know, where those of ``MODELS`` are others."""
FIRST = (
    "llama 3",
    "llama yarn, two scales",
    "qwen2_moe",
    "gpt2",
    "falcon newer, six heads, one group",
    "stablelm norms of heads, grouped",
    "gemma3, every third layer full, stretched, capped",
    "nemotron",
    "glm yarn",
    "deepseek_v3 in groups, yarn",
    "granitemoehybrid with experts",
    "qwen3_next with square states",
    "gpt_oss clamped at 7",
)
MEASURED = (
    *FIRST,
    *(name for name in OWN if name not in FIRST),
    *("bloom", "bloom three heads, untied", "falcon newer", "falcon newer, one norm, one group", "falcon multi-query"),
    *("gemma", "glm", "glm without biases, tied", "glm three heads, whole heads rotated", "glm4"),
    *("glm4 without biases, wide heads", "gpt2 narrow mlp", "gpt_neox", "gpt_neox in sequence, three heads, tied"),
    *("granitemoehybrid", "bamba", "mamba2"),
    *("granite", "granite tied, usual scale, wide heads", "granite with biases, three heads", "llama"),
    *("llama multi-head, tied", "llama one group, wide heads", "llama with biases", "llama with attention biases"),
    *("llama with mlp biases", "llama stretched", "llama 3 with other factors", "llama yarn", "smollm2", "mistral"),
    *("mistral, window as long as sequences", "qwen2", "qwen2 tied", "qwen2 yarn", "qwen3", "qwen3 tied"),
    *("qwen3 yarn", "mixtral", "mixtral three heads, one group", "qwen3_moe", "olmoe", "nemotron with biases"),
    *("nemotron whole heads rotated", "olmo", "olmo not clipped, tied", "olmo2", "olmo3", "olmo2 tied, three heads"),
    *("phi", "phi three heads, one group", "phi whole heads rotated", "phi3", "phi4 mini", "smollm3", "stablelm"),
    *("stablelm parallel, three heads, one group, biases", "stablelm grouped, tied", "starcoder2"),
)
"""Models that llama.cpp is measured with; the default tier has one of each way to differ."""

OF_LLAMA_CPP = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")
"""Types that only llama.cpp writes, and that are read."""


@pytest.fixture(scope="session")
def source(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a case, of ``MODELS`` or ``OWN``."""
    base = tmp_path_factory.mktemp("gguf-models")

    def folder(name: str) -> Path:
        if name not in OWN:
            return model_folder(name)
        path = base / str(list(OWN).index(name))
        if not path.exists():
            random_model(*OWN[name]).save_pretrained(path)
        return path

    return folder


def packed_by_llama_cpp(numbers: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    """Numbers ``[rows, n]`` as bytes of ``kind``, by llama.cpp's own function."""
    spec = importlib.util.find_spec("xllamacpp")
    assert spec is not None and spec.origin is not None
    pack = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp.*so")))).ggml_quantize_chunk
    pack.restype, pointers, sizes = ctypes.c_size_t, [ctypes.c_void_p] * 2, [ctypes.c_int64] * 3
    pack.argtypes = [ctypes.c_int, *pointers, *sizes, ctypes.c_void_p]
    found = np.zeros(gguf.quant_shape_to_byte_shape(numbers.shape, kind), np.uint8)
    weights = np.ones(numbers.shape[1], np.float32)
    data = [each.ctypes.data for each in (numbers, found, weights)]
    assert pack(kind, *data[:2], 0, *numbers.shape, data[2]) == found.nbytes
    return found


def in_blocks_of_256(folder: Path, **settings: Any) -> Path:
    """A random Llama whose rows are blocks of K types."""
    wide = {**_WIDE, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = random_model("llama", {**wide, **settings})
    for parameter in model.parameters():
        parameter.data /= 4  # as far from chaos as a trained model
    model.save_pretrained(folder)
    return folder


def read(file: Path, tmp_path: Path) -> PortableModel:
    return read_gguf(file, scratch=tmp_path / "scratch")


@pytest.mark.parametrize("name", tiers(MEASURED, first=FIRST))
def test_llama_cpp_computes_the_same(name: str, source: Folder, tmp_path: Path) -> None:
    """A file that llama.cpp loads and computes otherwise answers with nonsense, or a little worse without a word."""
    said = do("hf", source(name), "gguf", tmp_path / "model", gguf_type="f32")
    assert any(line.startswith("proof: llama.cpp") for line in said)
    before, back = read_huggingface(source(name)), read(tmp_path / "model", tmp_path)
    assert back.tensors.keys() == before.tensors.keys()
    for each, tensor in back.tensors.items():
        # norms that are stored with one subtracted lose a bit when it is added
        assert (tensor.make() - before.tensors[each].make()).abs().max() < 2e-7, each


def test_every_architecture_is_measured() -> None:
    """A table that nobody has run is a guess."""
    types = {(OWN.get(name) or MODELS[name])[0] for name in MEASURED}
    assert [each.name for each in ARCHITECTURES if not types & {*each.types}] == []


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", pytest.param("q5_1", marks=pytest.mark.slow(reason="as q4_0"))])
def test_few_bits_are_what_transformers_reads(kind: Any, source: Folder, tmp_path: Path) -> None:
    """Weights of few bits that a reader takes for others would be blamed on quantization."""
    do("hf", source("llama in blocks"), "gguf", tmp_path / "model", gguf_type=kind)
    file, back = gguf_file(tmp_path / "model"), read(tmp_path / "model", tmp_path)
    question = question_for(back.model, back.groups)
    theirs = transformers_answer(file, question)
    assert theirs is not None
    assert (portable_answer(back, question)["words"] - theirs["words"]).abs().max() < 1e-5
    assert open_gguf(file).kinds == tuple(sorted({"F32", kind.upper(), "Q8_0"}))
    before = read_huggingface(source("llama in blocks")).tensors["decoder.layers.0.mlp.linear_fc2.weight"].make()
    after = back.tensors["decoder.layers.0.mlp.linear_fc2.weight"].make()
    assert 0 < (before - after).abs().max() < before.abs().max() * (0.01 if kind == "q8_0" else 0.15)


def test_types_that_llama_cpp_alone_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most published files have K types: a wrong order of their numbers would be a slightly worse model. All are read
    as transformers does, and llama.cpp computes the same.
    """
    plain, kinds = gguf.quants.quantize, itertools.cycle(OF_LLAMA_CPP)

    def quantize(numbers: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
        return packed_by_llama_cpp(numbers, kind) if kind.name in OF_LLAMA_CPP else plain(numbers, kind)

    def types(tensors: Any, kind: Any, *, say: Any) -> dict[str, Any]:
        found = tensor_types(tensors, kind, say=say)
        few = {name: gguf.GGMLQuantizationType[next(kinds)] for name, each in found.items() if each.name == "Q8_0"}
        return {**found, **few}

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    monkeypatch.setattr(writing, "tensor_types", types)
    do("hf", in_blocks_of_256(tmp_path / "source"), "gguf", tmp_path / "model", gguf_type="q8_0", skip_proof=True)
    file, back = gguf_file(tmp_path / "model"), read(tmp_path / "model", tmp_path)
    assert {*open_gguf(file).kinds} == {"F32", *OF_LLAMA_CPP}
    question = question_for(back.model, back.groups)
    theirs = transformers_answer(file, question)
    assert theirs is not None
    assert (portable_answer(back, question)["words"] - theirs["words"]).abs().max() < 1e-5
    said = do("gguf", file, "hf", tmp_path / "back")
    assert any(line.startswith("proof: llama.cpp") for line in said)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_types_lose_as_little_as_llama_cpp_does(name: str) -> None:
    """A scale that is a little off, or a code in another place, would be a slightly worse model."""
    numbers = np.random.default_rng(0).standard_normal((16, 1024)).astype(np.float32)
    numbers[0], numbers[1], numbers[2, :32] = 0, np.abs(numbers[1]), 0  # a block of zeros, and one without a minimum
    kind, plain = (
        gguf.GGMLQuantizationType[name],
        gguf.GGMLQuantizationType[f"Q{name[1]}_0" if name != "Q6_K" else "Q5_0"],
    )
    ours = gguf.quants.dequantize(packed(numbers, kind), kind)
    theirs = gguf.quants.dequantize(packed_by_llama_cpp(numbers, kind), kind)
    other = gguf.quants.dequantize(gguf.quants.quantize(numbers, plain), plain)
    lost, lost_there, lost_plainly = (np.square(each - numbers).sum() for each in (ours, theirs, other))
    assert 0 < lost < 1.05 * lost_there
    assert lost < 0.8 * lost_plainly


@pytest.mark.parametrize(
    "kind", ["q4_k_m", *(pytest.param(each, marks=pytest.mark.slow(reason="as q4_k_m")) for each in ("q5_k_m", "q6_k"))]
)
def test_mixes_of_k_types(kind: Any, tmp_path: Path) -> None:
    """Most people ask for Q4_K_M, and had to have a program of llama.cpp make it. Rows that aren't blocks of 256 have
    the types that llama.cpp gives them.
    """
    source = in_blocks_of_256(tmp_path / "source", intermediate_size=288)
    said = do("hf", source, "gguf", tmp_path / "model", gguf_type=kind)
    assert any(line.startswith("proof: llama.cpp") for line in said)
    instead = {"q4_k_m": ("Q4_K", "Q5_0"), "q5_k_m": ("Q5_K", "Q5_1"), "q6_k": ("Q6_K", "Q8_0")}[kind]
    file, back = gguf_file(tmp_path / "model"), read(tmp_path / "model", tmp_path)
    # two of three feed-forward outputs are Q6_K in a mix, for which Q8_0 is taken
    assert {*open_gguf(file).kinds} == {"F32", "Q6_K", "Q8_0", *instead}
    check_line("\n".join(said), "blk.2.ffn_down.weight", "256", "q8_0")
    question = question_for(back.model, back.groups)
    theirs = transformers_answer(file, question)
    assert theirs is not None
    assert (portable_answer(back, question)["words"] - theirs["words"]).abs().max() < 1e-5


def test_layers_with_windows_as_a_list(source: Folder) -> None:
    """llama.cpp's converter marks each layer of some models, which ended in an error about ``%``."""
    portable, tables = read_huggingface(source("gemma3, every third layer full, stretched, capped")), DecoderFiles()
    form, pattern = gguf_form(portable), "attention.sliding_window_pattern"
    marked = {**form.keys, pattern: [True, True, False]}
    found = tables.read(marked, form.tensors, form.architecture)
    assert found == tables.read(form.keys, form.tensors, form.architecture)
    with expect_error(CheckpointError, pattern, "2 entries for 3 layers"):
        tables.read({**marked, pattern: [True, False]}, form.tensors, form.architecture)


def test_numbers_keep_their_type_and_parts(source: Folder, tmp_path: Path) -> None:
    """Without ``--gguf-type`` nothing is rounded, and a model in parts is read whole."""
    random_model(*OWN["llama in blocks"]).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    do("hf", tmp_path / "source", "gguf", tmp_path / "model", max_shard_size=40_000)
    parts = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert len(parts) > 2 and parts[0] == f"model-BF16-00001-of-{len(parts):05d}.gguf"
    do("gguf", tmp_path / "model", "megatron", tmp_path / "ours")
    before = read_huggingface(tmp_path / "source")
    for name, tensor in read(tmp_path / "model" / parts[0], tmp_path).tensors.items():
        assert torch.equal(tensor.make().float(), before.tensors[name].make().float()), name
    (tmp_path / "model" / parts[1]).unlink()
    with expect_error(CheckpointError, parts[1]):
        read(tmp_path / "model", tmp_path)


def test_a_window_is_the_context_where_there_are_none(source: Folder, tmp_path: Path) -> None:
    """llama.cpp would attend beyond Mistral's window; within it both are the same. It refuses more positions than the
    file says, and the proof asked for as many as usual.
    """
    said = do("hf", source("mistral with a window"), "gguf", tmp_path / "model", gguf_type="f32")
    assert any(line.startswith("proof: llama.cpp") for line in said)
    portable = read_huggingface(source("mistral with a window"))
    form = gguf_form(portable)
    assert form.keys["context_length"] == 8
    assert "attention.sliding_window" not in form.keys
    check_line("\n".join(form.notes), "the window, 8 of 64 positions")


def test_layers_for_later_tokens_are_left_out(source: Folder, tmp_path: Path) -> None:
    """DeepSeek-V3 has one, and llama.cpp predicts one token: the file was refused for tensors without a name."""
    with_later_layer(source("deepseek_v3 in groups, yarn"), tmp_path / "source")
    change(tmp_path / "source", num_nextn_predict_layers=1)
    said = do("hf", tmp_path / "source", "gguf", tmp_path / "model", gguf_type="f32")
    check_line("\n".join(said), "note", "multi-token prediction")
    assert any(line.startswith("proof: llama.cpp") for line in said)
    assert not any(name.startswith("mtp.") for name in read(tmp_path / "model", tmp_path).tensors)


def test_sizes_of_each_layer_are_checked(source: Folder) -> None:
    """A list of another length than there are layers, or with two sizes, was taken for the first of them."""
    portable, tables = read_huggingface(source("nemotron_h with experts, hardly limited steps")), DecoderFiles()
    form = gguf_form(portable)
    assert form.keys["attention.head_count_kv"] == [0, 0, 2, 0]
    for key, value, facts in (
        ("attention.head_count_kv", [0, 2], ("2 entries", "4 layers")),
        ("attention.head_count_kv", [1, 2, 0, 0], ("attention.head_count_kv", "[1, 2]")),
        ("feed_forward_length", [24, 0, 0, 8], ("feed_forward_length", "[8, 24]")),
    ):
        with expect_error(CheckpointError, *facts):
            tables.read({**form.keys, key: value}, form.tensors, form.architecture)


REFUSED = {
    "opt": ("opt", "--to hf"),
    "llama dynamic, short": ("llama", "dynamic_ntk"),
    "llama yarn, every setting": ("--yarn-correction-range-round-to-int",),
    "gpt2 untied, exact gelu": ("--activation is gelu",),
    "qwen3 one group, five heads, biases": ("qwen3", "model.layers.0.self_attn.o_proj.bias"),
    "starcoder2 without biases, untied": ("blk.0.attn_output.bias",),
    "olmo2 one group, wide heads": ("hidden size / heads",),
    "cohere": ("64 layers",),
    "gemma untied, three heads": ("lm_head.weight",),
    "deepseek_v2 lite, three heads": ("no --q-lora-rank",),
    "deepseek_v2": ("--rotary-attention-factor",),
    "gpt_oss": ("--activation-func-clamp-value is 0.4",),
    "gpt_oss with full attention alone": ("--window-size",),
    "qwen3_next": ("--linear-key-head-dim is 6", "10", "--norm-epsilon is 0.01"),
    "qwen3_next other layers, dense ones, biases, tied": ("--linear-key-head-dim is 6",),
    "mamba2 tied, limited steps, a convolution of 3": ("--mamba-time-step-limits",),
    "nemotron_h": ("--mamba-time-step-limits is (0.4",),
    "granitemoehybrid with rotary positions and no state": ("Mamba-2",),
    "bert": ("BERT", "bert", "--to hf"),
    "modernbert": ("modernbert", "--to hf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_cannot_say_is_refused(name: str, source: Folder) -> None:
    """A setting that is dropped makes another model of it, which nothing tells."""
    portable = read_huggingface(source(name))
    with expect_error(CheckpointError, *REFUSED[name]):
        gguf_form(portable)


def test_rows_that_no_blocks_divide(source: Folder, tmp_path: Path) -> None:
    """Blocks have 32 numbers of a row: weights with other rows keep 16 bits, and a file of those alone is refused."""
    with expect_error(CheckpointError, "--gguf-type q4_0", "32", "48, 80"):
        do("hf", source("llama"), "gguf", tmp_path / "model", gguf_type="q4_0")
    with expect_error(CheckpointError, "--gguf-type q4_k_m", "256", "q8_0"):
        do("hf", source("llama in blocks"), "gguf", tmp_path / "model", gguf_type="q4_k_m")
    assert not (tmp_path / "model").exists()
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 80}
    random_model("llama", sizes).save_pretrained(tmp_path / "source")
    said = do("hf", tmp_path / "source", "gguf", tmp_path / "model", gguf_type="q4_0")
    check_line("\n".join(said), "blk.0.ffn_down.weight", "32")


def test_a_wrong_file_is_not_written(source: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is by llama.cpp: rows of queries in another order are another model there, and the same read back."""
    wrong = [
        dataclasses.replace(each, rules=lambda groups: ()) if each.name == "llama" else each for each in ARCHITECTURES
    ]
    monkeypatch.setattr(DecoderFiles, "architectures", wrong)
    with expect_error(ProofError, "llama.cpp", hide=[r"xllamacpp [\d.]+", r"difference \S+", r"up to [\d.]+"]):
        do("hf", source("llama in blocks"), "gguf", tmp_path / "model", gguf_type="f32")
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_leaves_nothing(source: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file would be loaded by a program that maps it."""

    def full(self: Any, tensor: Any, *_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with expect_error(CheckpointError, "No space left on device", exit_code=1):
        do("hf", source("llama in blocks"), "gguf", tmp_path / "model")
    assert [*tmp_path.iterdir()] == []


def test_one_tensor_is_in_memory(source: Folder, tmp_path: Path) -> None:
    """A model that is larger than memory is exported."""
    portable, alive, most = read_huggingface(source("llama in blocks")), 0, 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def counted(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return make().as_subclass(Counted)

    tensors = {
        name: dataclasses.replace(tensor, make=lambda make=tensor.make: counted(make))  # type: ignore[misc]
        for name, tensor in portable.tensors.items()
    }
    writing.write_gguf(
        dataclasses.replace(portable, tensors=tensors), tmp_path / "m", kind="q8_0", say=print, max_shard_size=1 << 40
    )
    assert most <= 3


def test_a_run_starts_from_a_file(source: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most quantized models are shared as such files alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    do("hf", source("llama in blocks"), "gguf", tmp_path / "model", gguf_type="f32")
    context = ParallelContext.single()
    losses = [
        first_step(context, "gpt", f"--load-hf {load} --load-hf-proof required")["lm loss"]
        for load in (source("llama in blocks"), gguf_file(tmp_path / "model"))
    ]
    assert losses[0] == losses[1]
