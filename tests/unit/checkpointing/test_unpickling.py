"""Files of other programs are pickles: their tensors and settings come out, and nothing in them is ever run."""

from __future__ import annotations

import argparse
import enum
import io
import pickle
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.checkpointing.torch_files import load_torch_bytes, load_torch_file
from megatron.core.checkpointing.unpickling import Placeholder
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error


class Attack:
    """A pickle of this calls ``function`` when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    @override
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


@pytest.fixture
def megatron_classes(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of Megatron-LM's that exists when the file is written and not when it is read."""
    module = types.ModuleType("megatron.core.somewhere")
    ModelType = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=module.__name__)  # noqa: N806
    module.ModelType = ModelType  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_settings_and_tensors_come_out(
    tmp_path: Path, zipped: bool, megatron_classes: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside stand-ins for what belongs to the program that wrote the file."""
    settings = argparse.Namespace(num_layers=2, dtype=torch.bfloat16, kind=megatron_classes.ModelType(1))
    saved: dict[str, Any] = {
        "args": settings,
        "w": torch.arange(6.0).view(2, 3),
        "b": torch.ones(2, dtype=torch.bfloat16),
    }
    torch.save(saved, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    monkeypatch.delitem(sys.modules, "megatron.core.somewhere")
    found = load_torch_file(tmp_path / "x.pt")
    assert (found["args"].num_layers, found["args"].dtype) == (2, torch.bfloat16)
    assert isinstance(found["args"].kind, Placeholder)
    assert torch.equal(found["w"], saved["w"])
    assert torch.equal(found["b"], saved["b"])


def test_old_files_with_too_few_numbers_are_refused(tmp_path: Path) -> None:
    """A storage of one number would fill a tensor of six with it, and a missing one would leave it as memory was."""
    torch.save({"w": torch.arange(6.0)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    good = (tmp_path / "x.pt").read_bytes()
    head = good[: -6 * 4 - 8]
    keys = head.rindex(b"\x80")
    for content in (
        head + (1).to_bytes(8, "little") + good[-24:],
        good[:-4],
        head[:keys] + pickle.dumps([], protocol=2),
    ):
        (tmp_path / "x.pt").write_bytes(content)
        with expect_error(CheckpointError, "x.pt", hide=[r"(?<=storage )\d+", r"(?<=storages ')\d+"]):
            load_torch_file(tmp_path / "x.pt")


def test_random_states_of_numpy_are_stood_in_for(tmp_path: Path) -> None:
    """Every checkpoint of Megatron-LM holds some, and nothing of them is needed."""
    import random

    import numpy as np

    torch.save({"np": np.random.RandomState(1).get_state(), "py": random.getstate(), "x": 1}, tmp_path / "x.pt")
    assert load_torch_file(tmp_path / "x.pt")["x"] == 1


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("function", [eval, exec, __import__, open], ids=lambda function: function.__name__)
def test_nothing_is_run(tmp_path: Path, zipped: bool, function: Callable[..., Any]) -> None:
    """A downloaded checkpoint that calls a function is refused by the function's name, before it is called."""
    code = str(tmp_path / "pwned") if function is open else f"open({str(tmp_path / 'pwned')!r}, 'w')"
    arguments = (code, "w") if function is open else (code,)
    torch.save({"x": Attack(function, *arguments)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with expect_error(CheckpointError, "x.pt", function.__name__):
        load_torch_file(tmp_path / "x.pt")
    assert not (tmp_path / "pwned").exists()


def torch_stream_of(data: bytes) -> Any:
    """A pickle inside torch's zip container, read."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (("data.pkl", data), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", content)
    length = file.seek(0, io.SEEK_CUR)
    file.seek(0)
    return load_torch_bytes(file, length, name="here")


def test_getattr_reaches_nothing() -> None:
    """Python 3.11 pickles members of enums through ``getattr``, which could reach ``os.system`` as well."""
    reach = b"cbuiltins\ngetattr\n(ctorch\nhub\nS'load'\ntR"
    assert isinstance(torch_stream_of(reach + b"."), Placeholder)
    with expect_error(CheckpointError, "builtins.getattr"):
        torch_stream_of(reach + b"(S'evil'\ntR.")


def test_programs_of_torchscript_are_refused(tmp_path: Path) -> None:
    """``torch.load`` would load and could run them."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/constants.pkl", pickle.dumps(()))
    with expect_error(CheckpointError):
        load_torch_file(tmp_path / "x.pt")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 truncated", b"\x80\x02 nonsense", b"ustar" * 200])
def test_other_files_are_named(tmp_path: Path, content: bytes) -> None:
    """Truncated downloads are common; a tar file, torch's oldest container, is not opened at all."""
    (tmp_path / "x.pt").write_bytes(content)
    with expect_error(CheckpointError):
        load_torch_file(tmp_path / "x.pt")


def test_foreign_tables_of_contents_run_nothing(tmp_path: Path) -> None:
    """A torch_dist folder of Megatron-LM's may name its own classes; anything else is refused all the same."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack(open, str(tmp_path / "pwned"), "w")))
    with expect_error(CheckpointError):
        StoredTensors(tmp_path, foreign=True)
    assert not (tmp_path / "pwned").exists()
