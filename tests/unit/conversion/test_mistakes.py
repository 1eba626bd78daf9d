"""What can't be converted is said in a sentence, and a conversion that doesn't end well leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import resource
import shutil
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.checkpointing.save import save_streamed
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.checkpointing.streamed import StreamedBox
from megatron.core.conversion import convert as conversion
from megatron.core.conversion import proof
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.formats import config_from_model, model_from_config
from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.huggingface.writing import write_safetensors
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.proof import ProofError
from megatron.core.conversion.tensorrt_llm.cuts import Layout
from megatron.core.quantization.scheme import SCHEMES
from megatron.errors import CheckpointError, ConfigError, MegatronError
from tests.harness.data import REPOSITORY
from tests.harness.scripts import start_script
from tests.harness.sentences import check_line, check_sentence, expect_error
from tests.published.llama import LLAMA3
from tests.published.sizes import SIZES
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, portable, random_tensors
from tools.checkpoint import convert as tool

Folder = Callable[[str], Path]


@pytest.fixture
def llama(model_folder: Folder, tmp_path: Path) -> Path:
    """A folder of a small Llama that a test may damage."""
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "llama"))


def change(folder: Path, **settings: Any) -> None:
    """Change settings in config.json; None takes one out."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))


BAD_CONFIGS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_type": "absent"}, ["model_type"]),
    ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    ({"hidden_size": "absent"}, ["hidden_size"]),
    ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
    (
        {"rope_parameters": {"rope_type": "proportional"}},
        ["rope_parameters", "rope_type = 'proportional'", "default", "linear"],
    ),
    (
        {"rope_parameters": "absent", "rope_scaling": {"type": "proportional"}},
        ["config.json", "rope_scaling", "type = 'proportional'", "default"],
    ),
    ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, ["low_freq_factor = 4.0", "high_freq_factor"]),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 0.5}}, ["factor = 0.5", "at least 1"]),
    ({"rope_parameters": {"rope_type": "yarn"}, "head_dim": 11}, ["11 channels"]),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": []}},
        ["--longrope-short-factors", "--longrope-long-factors 0", "6"],
    ),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        ["rope_parameters", "partial_rotary_factor = 0.5"],
    ),
    ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window is 0"]),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, ["3 layers", "sliding_attention", "full_attention"]),
    (
        {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3},
        ["'chunked_attention'", "sliding_attention"],
    ),
    ({"num_hidden_layers": 4}, ["missing: model.layers.3.input_layernorm.weight"]),
    ({"num_hidden_layers": 2}, ["model.layers.2.input_layernorm.weight"]),
    ({"intermediate_size": 81}, ["model.layers.0.mlp.gate_proj.weight is [80, 48]", "[81, 48]"]),
    ({"tie_word_embeddings": False, "vocab_size": 102}, ["lm_head.weight is [101, 48]", "[102, 48]"]),
    ({"num_key_value_heads": 4}, ["model.layers.0.self_attn.k_proj.weight is [24, 48]", "[48, 48]"]),
]


@pytest.mark.parametrize(("settings", "facts"), BAD_CONFIGS, ids=[str(settings)[:70] for settings, _ in BAD_CONFIGS])
def test_settings_that_cannot_be_converted(settings: dict[str, Any], facts: list[str], llama: Path) -> None:
    """By name, with the value: the alternative is a model that is quietly another one."""
    change(llama, **settings)
    with expect_error(CheckpointError, *facts):
        read_huggingface(llama)


def test_windows() -> None:
    """transformers counts the query's own position, and takes 4096 where nothing is said."""
    config = {**SIZES, "model_type": "mistral", "sliding_window": None}
    assert model_from_config(config, where="x").window_size is None
    assert model_from_config({**config, "sliding_window": 8}, where="x").window_size == (7, 0)
    qwen = {**SIZES, "model_type": "qwen2"}
    assert model_from_config(qwen, where="x").window_size is None
    used = model_from_config({**qwen, "use_sliding_window": True, "max_window_layers": 1}, where="x")
    assert [used.window_of(layer) for layer in range(3)] == [None, (4095, 0), (4095, 0)]


def test_settings_of_one_type_that_cannot_be_converted() -> None:
    """The first was a TypeError, and the second a ZeroDivisionError."""
    window = {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": None}
    with expect_error(CheckpointError, "max_window_layers"):
        model_from_config({**SIZES, **window}, where="x")
    layers = ["sliding_attention"] * 3
    assert model_from_config({**SIZES, **window, "layer_types": layers}, where="x").window_size == (4095, 0)
    with expect_error(MegatronError, "0", exit_code=2) as found:
        model_from_config({**SIZES, "model_type": "granite", "hidden_size": 1}, where="x")
    with expect_error(MegatronError, exit_code=2) as of_llama:
        model_from_config({**SIZES, "model_type": "llama", "hidden_size": 1}, where="x")
    assert str(found.value) == str(of_llama.value)


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json:1"),
        (lambda folder: (folder / "config.json").write_text("[]"), "list"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 50), "model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9]),
            "model.safetensors",
        ),
    ],
    ids=["no config", "broken config", "list", "no weights", "other file", "truncated"],
)
def test_folders_that_are_incomplete(damage: Callable[[Path], object], fact: str, llama: Path) -> None:
    damage(llama)
    with expect_error(CheckpointError, fact, hide=[r"(?<=incomplete \().*(?=\))"]):  # the library's words
        read_huggingface(llama)


def test_a_tokenizer_that_is_larger_than_the_model(llama: Path, tmp_path: Path) -> None:
    """Added tokens without rows of their own: training would look up what isn't there."""
    from tools import train_tokenizer

    (tmp_path / "corpus.txt").write_text("some text to learn from\n" * 50)
    train_tokenizer.main(["--input", str(tmp_path / "corpus.txt"), "--output-dir", str(llama), "--vocab-size", "265"])
    with expect_error(CheckpointError, "101"):
        read_huggingface(llama)


def test_models_of_unknown_families(tmp_path: Path) -> None:
    """A family that a later version may have is named."""
    box = StreamedBox("model.weight", (2,), torch.float32, (0,), (2,), lambda: torch.zeros(2))
    state: dict[str, Any] = {
        "model": "mamba",
        "config": {"model": {}, "tokenizer": {}, "precision": {}},
        "progress": dict.fromkeys(("iteration", "consumed_samples", "scheduled_samples"), 0),
        "tokenizer": dict.fromkeys(("name", "fingerprint"), "x"),
        **dict.fromkeys(("schedule", "optimizer", "random_seed")),
    }
    save_streamed(tmp_path / "later", 0, [box], state)
    with expect_error(CheckpointError, "'mamba'", "t5"):
        read_native(tmp_path / "later")


class Attack:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self._target = target

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._target), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_malicious_pytorch_bin(zipped: bool, llama: Path, tmp_path: Path) -> None:
    """The most common malicious download of all; torch's own words would say how to let it run all the same."""
    (llama / "model.safetensors").unlink()
    content = {"model.norm.weight": Attack(tmp_path / "pwned")}
    torch.save(content, llama / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with expect_error(CheckpointError, "io.open"):
        read_huggingface(llama)
    assert not (tmp_path / "pwned").exists()


def test_a_malicious_checkpoint_of_ours(tmp_path: Path) -> None:
    """Table of contents and tensors, read by the converter's own path."""
    model = ModelConfig(**CLASSIC)
    write_native(portable(model, random_tensors(model)), tmp_path / "ours", final=tmp_path / "ours")
    folder = tmp_path / "ours/iter_0000000"
    stored = StoredTensors(folder)
    (folder / "manifest.json").write_text("{}")
    with expect_error(CheckpointError, "manifest.json"):
        read_native(tmp_path / "ours")
    data = folder / "__0_0.distcp"
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Attack(tmp_path / "pwned"), protocol=2))
        archive.writestr("archive/version", b"3\n")
    with expect_error(CheckpointError):
        stored.read("model.decoder.final_layernorm.weight")
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "pwned")))
    with expect_error(CheckpointError):
        StoredTensors(folder)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"activation": "geglu_tanh"}, ["gpt2", "GELU"]),
        ({"normalization": "RMSNorm"}, ["gpt2", "LayerNorm"]),
        ({"apply_layernorm_1p": True}, ["gpt2", "norm weights"]),
        ({"activation": "relu"}, ["gpt2", "GELU"]),
        ({**MODERN, "rotary_percent": 0.5, "no_rope_freq": "2"}, ["part of each head"]),
        ({**MODERN, "qk_layernorm": True, "add_qkv_bias": True}, ["queries and keys"]),
    ],
)
def test_architectures_that_no_family_has(settings: dict[str, Any], facts: list[str]) -> None:
    """Our own models can be what nobody else has."""
    with expect_error(CheckpointError, *facts):
        config_from_model(ModelConfig(**{**CLASSIC, **settings}), dtype="float32", source={}, tokens={})


def test_megatron_lm_has_no_geglu(tmp_path: Path) -> None:
    model = ModelConfig(**CLASSIC, activation="geglu_tanh")
    write_native(portable(model, random_tensors(model)), tmp_path / "ours", final=tmp_path / "ours")
    with expect_error(CheckpointError, "MLP", "GELU"):
        convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs"), print)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_nothing_is_overwritten(llama: Path, tmp_path: Path) -> None:
    """Neither a folder with anything in it, nor a file; an empty folder is fine."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there/x").touch()
    (tmp_path / "file").touch()
    for name in ("there", "file"):
        with expect_error(CheckpointError, f"--save {tmp_path / name}"):
            convert(Conversion("hf", llama, "megatron", tmp_path / name), print)
    (tmp_path / "empty").mkdir()
    convert(Conversion("hf", llama, "megatron", tmp_path / "empty"), lambda words: None)
    assert read_native(tmp_path / "empty").model.num_layers == 3


@pytest.mark.parametrize("target", ["megatron", "megatron-lm"])
def test_a_wrong_conversion_is_not_kept(
    target: Any, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matrix a little off: the proof says so, the exit code too, and there is no target. The folder that it would
    have been in stayed.
    """

    def slightly_off(folder: Path) -> Any:
        found = read_huggingface(folder)
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        right = found.tensors[name]
        wrong = LazyTensor(right.shape, right.dtype, lambda: right.make() * 1.01)
        return type(found)(**{**vars(found), "tensors": {**found.tensors, name: wrong}})

    monkeypatch.setattr(conversion, "read_huggingface", slightly_off)
    with expect_error(ProofError) as caught:
        convert(Conversion("hf", llama, target, tmp_path / "new/ours"), print)
    assert caught.value.exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


@pytest.mark.parametrize("source", [torch.full((2, 3), torch.nan), torch.zeros(2, 3)])
def test_nan_proves_nothing(source: torch.Tensor) -> None:
    """NaN compares false with everything, also with a tolerance; weights that give it are the source's fault."""
    with expect_error(ProofError, exit_code=1 if source.isfinite().all() else 2):
        proof.compare({"words": source}, {"words": torch.full((2, 3), torch.nan)})


def test_advice_names_the_flag_of_the_command() -> None:
    """A run that starts from published weights has no --skip-proof."""
    unknown = torch.full((2, 3), torch.nan)
    with expect_error(ProofError, "--load-hf-proof off", exit_code=2):
        proof.compare({"words": unknown}, {"words": unknown}, skip="--load-hf-proof off")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_conversions_leave_nothing(
    error: Any, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, and a disk that is full before the end."""
    calls = []

    def stop(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        raise error

    monkeypatch.setattr(proof, "native_answer", stop)
    is_disk = isinstance(error, OSError)
    full = expect_error(CheckpointError, "No space left on device", tmp_path / "ours", exit_code=1)
    with full if is_disk else pytest.raises(KeyboardInterrupt):
        convert(Conversion("hf", llama, "megatron", tmp_path / "ours"), print)
    assert len(calls) == 1, "once, when all is written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "hf": ("hf", {}),
    "hf in int8": ("hf", {"rounding": Rounding(SCHEMES["int8"])}),
    "megatron-lm": ("megatron-lm", {}),
    "megatron-lm torch": ("megatron-lm", {"dist": False}),
    "gguf": ("gguf", {}),
    "tensorrt-llm": ("tensorrt-llm", {"layout": Layout(2, 2)}),
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_disk_that_is_full_leaves_nothing(target: str, tmp_path: Path) -> None:
    """Whatever is written, no part of it looks like a model: here no file may be larger than 16 KB."""
    if target == "gguf":
        pytest.importorskip("gguf", reason="GGUF files are written with the extra gguf")
    model = ModelConfig(**MODERN)
    write_native(portable(model, random_tensors(model)), tmp_path / "ours", final=tmp_path / "ours")
    kind, options = TARGETS[target]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:  # its words name a folder by chance
            convert(Conversion("megatron", tmp_path / "ours", kind, tmp_path / "new/theirs", **options), print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


ENDLESS = """
import runpy, time
from megatron.core.conversion import proof
proof.native_answer = lambda *arguments, **options: time.sleep(1000)
runpy.run_path({!r}, run_name="__main__")
"""
"""A conversion whose proof does not end."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_killed_conversions_leave_nothing_that_looks_complete(
    number: int, llama: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A job's time is up in the middle: cleaned up where a process is asked to go, hidden where it is not."""
    words = ["--from", "hf", "--load", str(llama), "--to", "megatron", "--save", str(tmp_path / "ours")]
    script = tmp_path_factory.mktemp("script") / "convert.py"
    script.write_text(ENDLESS.format(str(REPOSITORY / "tools/checkpoint/convert.py")))
    process = start_script(str(script), words, log=Path(os.devnull))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".ours.partial-*")) and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid or 0, number)
    process.join(60)
    assert process.exitcode in (-number, 128 + number)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[-1] == "llama"
    assert all(name.startswith(".ours.partial-") for name in left[:-1])
    assert len(left) == 1 or number == signal.SIGKILL
    said: list[str] = []
    convert(Conversion("hf", llama, "megatron", tmp_path / "ours"), said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "ours"]
    assert any("a killed conversion left" in line for line in said) == (len(left) == 2)


@pytest.mark.parametrize("source", ["tensor", "settings", "companion"])
def test_what_cannot_be_read_is_the_sources_fault(
    source: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are read while the result is written: a disk that failed under the source was said to be the target's."""
    if source == "tensor":

        def fails() -> torch.Tensor:
            raise OSError(5, "Input/output error")

        def damaged(folder: Path) -> Any:
            found = read_huggingface(folder)
            bad = {name: dataclasses.replace(tensor, make=fails) for name, tensor in found.tensors.items()}
            return dataclasses.replace(found, tensors=bad)

        monkeypatch.setattr(conversion, "read_huggingface", damaged)
        facts: list[object] = [f"--load {llama}", "Input/output error"]
    else:
        path = llama / ("generation_config.json" if source == "settings" else "merges.txt")
        path.unlink(missing_ok=True)
        path.symlink_to("/proc/self/mem")  # opens, and can't be read
        facts = [path]
    with expect_error(CheckpointError, *facts, exit_code=1) as caught:
        convert(Conversion("hf", llama, "megatron", tmp_path / "ours"), lambda words: None)
    assert "partial" not in str(caught.value), "the result is not at fault"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_a_proof_that_cannot_fit_is_refused_first(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after an hour, by the kernel."""
    monkeypatch.setattr(proof, "_free_memory", lambda: 1000)
    with expect_error(CheckpointError, "0.0", "GB", "--skip-proof"):
        convert(Conversion("hf", llama, "megatron", tmp_path / "ours"), print)
    said: list[str] = []
    convert(Conversion("hf", llama, "megatron", tmp_path / "ours", skip_proof=True), said.append)
    check_sentence(said[1], "NOT", "PROVEN", "--skip-proof")


def test_our_safetensors_are_the_librarys(tmp_path: Path) -> None:
    """The streamed writer gives what the library reads, and byte for byte what it writes for tensors of one type."""
    from safetensors.torch import load_file, save_file

    tensors = {f"t{number}": torch.randn(number + 1, 5).bfloat16() for number in range(4)}
    lazy = {name: LazyTensor(tuple(value.shape), value.dtype, value.clone) for name, value in tensors.items()}
    write_safetensors(lazy, tmp_path / "ours")
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    mixed = {"a": torch.ones(3), "b": torch.ones(1, 2).half(), "scalar": torch.tensor(2.0), "empty": torch.zeros(0, 4)}
    lazy = {name: LazyTensor(tuple(value.shape), value.dtype, value.clone) for name, value in mixed.items()}
    write_safetensors(lazy, tmp_path / "mixed")
    read = load_file(tmp_path / "mixed")
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in mixed.items())


COMMANDS: list[tuple[str, list[str]]] = [
    ("--load x --save y", ["--from", "hf", "megatron", "megatron-lm"]),
    ("--from hf --load x --save y", ["--to", "hf", "megatron", "megatron-lm", "peft"]),
    ("--from hf --to hf --load x --save y", ["--from hf --to hf"]),
    ("--from hf --to megatron --save y", ["--load"]),
    ("--from hf --to megatron --load x --load-dir y --save z", ["--load", "--load-dir"]),
    ("--from keras --to megatron --load x --save y", ["--from", "'keras'"]),
    ("--from hf --to megatron --load nowhere --save y", ["nowhere", "Hugging Face"]),
    ("--from megatron --to hf --load nowhere --save y", ["--load nowhere"]),
    ("--from megatron-lm --to hf --load nowhere --save y", ["nowhere", "Megatron-LM"]),
    ("--from megatron --to hf --load x --save y --max-shard-size big", ["--max-shard-size 'big'"]),
    ("--model-type RETRO --loader mcore --saver hf --load-dir x --save-dir y", ["--model-type", "'RETRO'"]),
    ("--loader mixtral_hf --saver mcore --load-dir x --save-dir y", ["--loader mixtral_hf", "--from"]),
    ("--loader llama_mistral --checkpoint-type meta --saver mcore --load-dir x --save-dir y", ["meta", "hf"]),
    ("--from hf --checkpoint-type=meta --to megatron --load x --save y", ["meta", "hf"]),
    ("--from hf --to megatron --load x --save y --ckpt-step 3", ["--ckpt-step 3"]),
    ("--from hf --to megatron --load x --save y --true-vocab-size 9", ["--true-vocab-size 9"]),
    ("--from hf --to megatron --load x --save y --max-shard-size 1GB", ["--max-shard-size 1GB", "--to hf"]),
    ("--from megatron --to hf --load x --save y --ckpt-format torch", ["--ckpt-format torch", "--to megatron-lm"]),
]


@pytest.mark.parametrize(("words", "facts"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_command_lines(words: str, facts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with expect_error(MegatronError, *facts, exit_code=2):
        tool.main(words.split())
    assert not list(tmp_path.iterdir())


def test_megatron_lms_own_spelling(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script written for its converter runs: its saver's checkpoints are for training, which is ours here."""
    without_effect = (
        "--target-tensor-parallel-size 2 --target-pipeline-parallel-size=2 --target-expert-parallel-size 1 --bf16 "
        "--model-size llama2-7B --tokenizer-model tokenizer.model --saver-transformer-impl transformer_engine "
        "--loader-transformer-impl local --megatron-path theirs --make-vocab-size-divisible-by 1"
    )
    tool.main(
        f"--model-type GPT --loader llama_mistral --saver mcore {without_effect} "
        f"--checkpoint-type hf --load-dir {llama} --save-dir {tmp_path / 'ours'}".split()
    )
    said = capsys.readouterr()
    check_line(said.err, "--saver-transformer-impl transformer_engine")
    assert all(word.partition("=")[0] in said.err for word in without_effect.split() if word.startswith("--"))
    check_line(said.out, "difference")
    assert read_native(tmp_path / "ours").model.num_layers == 3
    tool.main(f"--loader mcore --saver hf --load-dir {tmp_path / 'ours'} --save-dir {tmp_path / 'back'}".split())
    assert (tmp_path / "back/model.safetensors").exists()
    with expect_error(ConfigError, "--from megatron"):
        tool.main(f"--from megatron-lm --to hf --load {tmp_path / 'ours'} --save {tmp_path / 'x'}".split())


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("300", 300), ("2kb", 2000)])
def test_sizes(text: str, size: int) -> None:
    assert tool.bytes_of(text) == size


def test_sizes_that_are_none() -> None:
    for text in ("", "0GB", "-1", "5 parsecs"):
        with expect_error(ConfigError):
            tool.bytes_of(text)
