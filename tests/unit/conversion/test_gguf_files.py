"""Files that are damaged or made to harm end in a sentence, before any work."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="GGUF files are written with the extra gguf")

import gguf
import numpy as np

from megatron.core.conversion.gguf import reading
from megatron.core.conversion.gguf.files import open_gguf
from megatron.core.conversion.gguf.reading import read_gguf
from megatron.core.conversion.gguf.rotary import FREQS, factor_tensors, read_rotary
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.errors import CheckpointError, ConfigError
from tests.harness.sentences import expect_error
from tests.published.llama import LLAMA3
from tests.unit.conversion.test_families import do
from tools.checkpoint import convert as tool

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def whole(model_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a file."""
    folder = tmp_path_factory.mktemp("gguf") / "model"
    do("hf", model_folder("llama 3"), "gguf", folder, skip_proof=True)
    return next(folder.iterdir()).read_bytes()


def written(path: Path, **keys: Any) -> Path:
    """A file with these keys and a tensor in blocks."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        writer.add_uint32(name.replace("__", "."), value)
    blocks = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_cut_is_noticed(whole: bytes, tmp_path: Path) -> None:
    """A download that stopped would otherwise be a model with some weights of zero."""
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 20, 100, 1000, len(whole) // 2, len(whole) - 33):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_gguf(path)
    path.write_bytes(whole[: len(whole) - 33])
    with expect_error(CheckpointError, "cut.gguf", "download it again", hide=[r"\"\S+\""]):
        open_gguf(path)


@pytest.mark.parametrize(
    ("at", "value"), [(8, 1 << 60), (16, 1 << 60), (24, 1 << 62)], ids=["tensors", "keys", "length of a name"]
)
def test_counts_beyond_the_file(at: int, value: int, whole: bytes, tmp_path: Path) -> None:
    """A number in the header must not make the reader take memory, or run for hours."""
    path = tmp_path / "large.gguf"
    path.write_bytes(whole[:at] + struct.pack("<Q", value) + whole[at + 8 :])
    with expect_error(CheckpointError, "large.gguf", hide=[r"(?<=byte )[\d,]+"]):
        open_gguf(path)


def test_keys_that_describe_no_model(tmp_path: Path) -> None:
    """What is missing is named."""
    path = written(tmp_path / "model.gguf", llama__block_count=2)
    with expect_error(CheckpointError, "llama.embedding_length"):
        read_gguf(path, scratch=tmp_path / "scratch")
    keys = {"block_count": 2, "embedding_length": 1 << 30, "attention__head_count": 4, "feed_forward_length": 8}
    sizes = {**keys, "context_length": 16, "vocab_size": 1 << 30}
    path = written(tmp_path / "huge.gguf", **{f"llama__{name}": value for name, value in sizes.items()})
    with expect_error(CheckpointError, "huge.gguf"):
        read_gguf(path, scratch=tmp_path / "scratch")


def test_keys_of_other_types(whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that was a text, a list or no number in place of a number ended in a traceback, and so did a file without
    a context length.
    """
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    file = open_gguf(path)
    values = ("text", [1, 2], [True] * 3, -1, 0, 1.5, 1 << 62, float("nan"))
    changed = [(name, {**file.keys, name: value}) for name in file.keys for value in values]
    changed += [(name, {key: value for key, value in file.keys.items() if key != name}) for name in file.keys]
    taken = dict.fromkeys(file.keys, 0)
    for number, (name, keys) in enumerate(changed):
        monkeypatch.setattr(reading, "open_gguf", lambda place, keys=keys: dataclasses.replace(file, keys=keys))
        with suppress(CheckpointError):  # any other error fails
            read_gguf(path, scratch=tmp_path / str(number))
            taken[name] += 1
    assert not {name for name in taken if name.startswith("llama.") and taken[name] > 4}
    monkeypatch.setattr(
        reading, "open_gguf", lambda place: dataclasses.replace(file, keys={**file.keys, "llama.block_count": 1.5})
    )
    with expect_error(CheckpointError, "model.gguf", "block_count is 1.5"):
        read_gguf(path, scratch=tmp_path / "scratch")


def test_places_that_make_no_sense(tmp_path: Path) -> None:
    """A tensor that is there twice is one of two models; an alignment of no bytes puts all weights elsewhere."""
    path = written(tmp_path / "model.gguf", general__alignment=0)
    with expect_error(CheckpointError, "model.gguf", "general.alignment is 0"):
        open_gguf(path)
    content = written(path).read_bytes()
    at = content.index(b"token_embd.weight") - 8
    one = content[at : at + 8 + 17 + 4 + 16 + 4 + 8]
    twice = content[:8] + struct.pack("<Q", 2) + content[16:at] + one + one + content[at + len(one) :] + bytes(99)
    path.write_bytes(twice)
    with expect_error(CheckpointError, "token_embd.weight", "twice"):
        open_gguf(path)


def test_other_architectures_and_no_files(tmp_path: Path) -> None:
    """The architectures that are read are named."""
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with expect_error(CheckpointError, "rwkv7", "general.architecture"):
        read_gguf(tmp_path, scratch=tmp_path / "scratch")
    (tmp_path / "second.gguf").write_bytes((tmp_path / "other.gguf").read_bytes())
    with expect_error(CheckpointError, "2 models", "other.gguf", "second.gguf"):
        open_gguf(tmp_path)
    with expect_error(CheckpointError, "nothing"):
        open_gguf(tmp_path.parent / "nothing")


def test_scaling_of_llama_3_is_found_in_its_factors(model_folder: Folder) -> None:
    """Files of other programs hold factors alone; a model that trains on needs what made them."""
    model = read_huggingface(model_folder("llama 3")).model
    model = type(model)(**{**vars(model), "kv_channels": 64, "hidden_size": 256})
    factors = factor_tensors(model)[FREQS].make().tolist()
    keys = {"rope.dimension_count": 64, "rope.freq_base": model.rotary_base, FREQS: factors}
    found = read_rotary(keys, {"kv_channels": 64})
    assert found["rope_scaling_factor"] == pytest.approx(LLAMA3["factor"])
    assert found["rope_low_freq_factor"] == pytest.approx(LLAMA3["low_freq_factor"], rel=1e-3)
    assert found["rope_high_freq_factor"] == pytest.approx(LLAMA3["high_freq_factor"], rel=1e-3)
    with expect_error(CheckpointError, FREQS):
        read_rotary({**keys, FREQS: [*factors[:-1], 3.0]}, {"kv_channels": 64})


def test_flags_of_the_command() -> None:
    """``--gguf-type`` of another target would be silently ignored."""
    flags = ["--from", "hf", "--load", "x", "--save", "y"]
    with expect_error(ConfigError, "--gguf-type q8_0"):
        tool.main([*flags, "--to", "megatron", "--gguf-type", "q8_0"])
    with expect_error(ConfigError, "--ckpt-step 3"):
        tool.main(["--from", "gguf", "--load", "x", "--save", "y", "--to", "hf", "--ckpt-step", "3"])
    with expect_error(ConfigError, "--gguf-type", "q4_0"):
        tool.main([*flags, "--to", "gguf", "--gguf-type", "q4_k"])
