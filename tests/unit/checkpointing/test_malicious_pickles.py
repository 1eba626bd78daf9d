"""Some hundred malicious files: each ends in plain data or in a CheckpointError, and leaves the process as it was."""

from __future__ import annotations

import argparse
import builtins
import collections
import copyreg
import io
import os
import pathlib
import pickle
import struct
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as dcp_metadata

from megatron.core.checkpointing import contents_table, torch_files, unpickling
from megatron.core.checkpointing.contents_table import read_table
from megatron.core.checkpointing.torch_files import load_torch_bytes
from megatron.core.checkpointing.unpickling import Placeholder
from megatron.errors import CheckpointError
from tests.harness.sentences import expect_error, has_fact

NAMES = """
argparse Namespace, pathlib PosixPath, pathlib WindowsPath, collections OrderedDict, torch Size, torch device,
torch float32, torch FloatStorage, torch.storage UntypedStorage, torch._utils _rebuild_tensor, torch._utils
_rebuild_tensor_v2, torch._utils _rebuild_tensor_v3, torch._utils _rebuild_parameter, torch.serialization
_get_layout, torch.hub load, torch load, torch.distributed.checkpoint.metadata Metadata,
torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING, torch.distributed.checkpoint.filesystem _StorageInfo,
numpy ndarray, numpy.core.multiarray _reconstruct, numpy load, functools partial, functools reduce, enum EnumMeta,
signal Signals, signal raise_signal, builtins getattr, builtins set, __builtin__ set, builtins bytearray, builtins
complex, builtins eval, __builtin__ exec, builtins __import__, _codecs encode, _codecs decode, os system, posix
system, subprocess Popen, importlib import_module, copyreg _reconstructor, operator attrgetter, megatron.errors
CheckpointError, megatron.core.checkpointing.unpickling Placeholder, types FunctionType
"""
STATE = b"}S'parent'\nS'evil'\nsS'__class__'\nS'evil'\nsS'__setstate__'\nS'evil'\nsS'__defaults__'\n)s"


def operations(name: str) -> Iterator[bytes]:
    """What pickles can do with a name."""
    named = b"c" + name.strip().replace(" ", "\n").encode() + b"\n"
    evil, huge = b"S'evil'\n", b"I9223372036854775807\n"
    for made in (named, named + b")R", named + b")\x81", b"(" + named + b"o", named + b"(" + evil * 2 + b"tR"):
        yield made + b"."
        yield made + STATE + b"b."  # BUILD with a dict
        yield made + b"N" + STATE + b"\x86b."  # BUILD with slots: what set pathlib.PosixPath.parent
        yield made + b"(" + evil + b"K\x01J\xff\xff\xff\xfftb."
        yield made + evil + b"a."
        yield made + evil + evil + b"s."
        yield b"}" + made + evil + b"s."
        yield made + b"(" + evil + b"tR."
    yield named + b"(" + huge * 4 + b"tR."
    yield named + b"(" + evil + b"S'rot13'\ntR."
    yield named + b"}" + STATE + b"\x92."  # NEWOBJ_EX
    yield b"(i" + named[1:] + b"."  # INST


def tensor(count: int, arguments: bytes) -> bytes:
    """A tensor on storage 0, which holds four floats and says ``count``."""
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\n" + b"I%d\n" % count + b"tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + arguments + b"I00\nNtR."


OTHERS = {
    "storage longer than its record": tensor(10**12, b"I0\n(I1\nt(I1\nt"),
    "storage of negative length": tensor(-4, b"I0\n(I1\nt(I1\nt"),
    "offset outside": tensor(4, b"I4\n(I1\nt(I1\nt"),
    "negative offset": tensor(4, b"I-1\n(I1\nt(I1\nt"),
    "shape outside": tensor(4, b"I0\n(I2\nI4\nt(I4\nI1\nt"),
    "stride outside": tensor(4, b"I0\n(I2\nt(I4\nt"),
    "negative stride": tensor(4, b"I3\n(I2\nt(I-1\nt"),
    "expanded to a petabyte": tensor(4, b"I0\n(I1000000000000000\nt(I0\nt"),
    "shape and strides of other lengths": tensor(4, b"I0\n(I2\nt(I1\nI1\nt"),
    "shape of texts": tensor(4, b"I0\n(S'4'\nt(I1\nt"),
    "another persistent id": b"(S'module'\nctorch\nFloatStorage\nS'a'\nS'b'\ntQ.",
    "a persistent id of text": b"Pevil\n.",
    "a record that isn't there": tensor(4, b"I0\n(I1\nt(I1\nt").replace(b"S'0'", b"S'../0'"),
    "an extension": b"\x82\x01.",
    "a buffer out of band": b"\x97.",
    "a length of 2**60": b"\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "bytes of 2**60": b"\x96" + struct.pack("<Q", 2**60) + b"x.",
    "a number of 10,000 digits": b"I" + b"9" * 10_000 + b"\n.",
    "lists doubled 100 times": b"]q\x00" + b"(h\x00h\x00lq\x00" * 100 + b".",
    "a list within itself": b"]q\x00h\x00a.",
    "a mapping within itself": b"}q\x00K\x01h\x00s.",
    "nested 30,000 deep": b")" + b"\x85" * 30_000 + b".",
    "a key nested 30,000 deep": b"})" + b"\x85" * 30_000 + b"Ns.",
    "an element nested 30,000 deep": b"\x8f()" + b"\x85" * 30_000 + b"\x90.",
    "a key of nested tuples": b"})\x85\x85Ns.",
    "keys of nested tuples": b"(" + b")\x85\x85" + b"Nd.",
    "elements of nested tuples": b"(" + b")\x85\x85" + b"\x91.",
    "too few values": b"\x87.",
    "no mark": b"t.",
    "nothing": b".",
    "no end": b"N",
    "calls a number": b"K\x01)R.",
    "state of a number": b"K\x01}b.",
    "state of a tensor": tensor(4, b"I0\n(I1\nt(I1\nt")[:-1] + STATE + b"b.",
    "state of a list": b"]" + STATE + b"b.",
    "items of a text": b"S'x'\nNa.",
}

# A bytearray and a frozenset: both are read as plain data.
PLAIN_IN_THE_END = (b"\x96" + struct.pack("<Q", 3) + b"abc.", b"(K\x01\x91.")
# For which Python's unpickler takes 64 GB.
FAR_IN_THE_MEMO = b"Nr\xff\xff\xff\xff."


def archive_of(data: bytes, **more: bytes) -> bytes:
    """A file of torch.save whose pickle is ``data``."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": data, "byteorder": b"little", "data/0": bytes(16), **more}.items():
            archive.writestr(f"archive/{name}", content)
    return file.getvalue()


def read_zip(data: bytes) -> Any:
    archive = archive_of(data)
    return load_torch_bytes(io.BytesIO(archive), len(archive), name="here")


def read_metadata(data: bytes) -> Any:
    try:
        return read_table(io.BytesIO(data), is_foreign=True)
    except Exception as error:  # its caller makes any of them a CheckpointError
        raise CheckpointError(str(error)) from error


def surroundings() -> dict[str, dict[str, Any]]:
    """What a malicious file could want to change: attributes of classes, functions and modules."""
    ours = [
        each
        for module in (unpickling, torch_files, contents_table)
        for each in (module, *vars(module).values())
        if isinstance(each, (type, types.FunctionType, types.ModuleType))
    ]
    metadata = [each for each in vars(dcp_metadata).values() if isinstance(each, type)]
    classes = [
        argparse.Namespace,
        pathlib.PosixPath,
        pathlib.PurePath,
        collections.OrderedDict,
        torch.Tensor,
        torch.Size,
    ]
    modules = [os, builtins, torch, torch._utils, torch.serialization, torch.storage, copyreg]
    watched = [*ours, *metadata, *classes, *modules, torch._utils._rebuild_tensor_v2, torch.UntypedStorage]
    found = {f"{each!r} {number}": dict(vars(each)) for number, each in enumerate(watched)}
    functions = {f"{each!r} defaults": each.__defaults__ for each in watched if isinstance(each, types.FunctionType)}
    return found | {"functions": functions}


PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype, Placeholder, dcp_metadata.Metadata)


def is_one_sentence(said: str) -> bool:
    """Whether an error names the file in one line of a length that is read."""
    return has_fact(said, "here") and "\n" not in said and len(said) <= 320


def is_plain(value: Any) -> bool:
    if isinstance(value, argparse.Namespace):
        return is_plain(vars(value))
    if type(value) is dict:
        return all(map(is_plain, [*value, *value.values()]))
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    return type(value) in PLAIN or type(value) is torch.Tensor


@pytest.mark.parametrize("read", [read_zip, read_metadata], ids=["file of torch.save", "table of contents"])
def test_malicious_pickles_change_nothing(read: Callable[[bytes], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded checkpoint set ``pathlib.PosixPath.parent``, and training saved into another folder."""

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError(f"something was run: {arguments}")

    corpus = [data for name in NAMES.split(",") for data in operations(name)] + [
        *OTHERS.values(),
        *PLAIN_IN_THE_END,
        FAR_IN_THE_MEMO,
    ]
    assert len(corpus) > 2000
    before = surroundings()
    refused = 0
    with monkeypatch.context() as patched:
        for module, name in ((torch, "load"), (os, "system"), (builtins, "eval")):
            patched.setattr(module, name, never)
        for data in corpus:
            try:
                assert is_plain(read(data)), data[:200]
            except CheckpointError:
                refused += 1
    assert refused > 1000
    assert surroundings() == before


def test_of_those_that_are_no_data_none_is_accepted() -> None:
    """Sizes, depths and places that end in a crash of the process, or in all of its memory, come to one sentence."""
    for what, data in OTHERS.items():
        with pytest.raises(CheckpointError) as caught:
            pytest.fail(f"{what}: {read_zip(data)!r:.100}")
        assert is_one_sentence(str(caught.value))


def test_other_operations_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extension that the process has met before is a live object, which no check of names would see."""
    monkeypatch.setitem(copyreg._extension_cache, 1, os.system)  # type: ignore[attr-defined]
    for name in ("EXT1", "EXT2", "EXT4", "INST", "NEWOBJ_EX", "NEXT_BUFFER", "READONLY_BUFFER"):
        with expect_error(CheckpointError, name):
            read_zip(b"N" + getattr(pickle, name) + bytes([1, 0, 0, 0]) + b".")


def test_archives_that_say_two_things_are_refused() -> None:
    """Readers differ in which they believe: two records of a name, other names in directory and header, compression."""
    good = archive_of(b"K\x01.")
    assert load_torch_bytes(io.BytesIO(good), len(good), name="here") == 1
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x8e" + struct.pack("<Q", 10**6) + bytes(10**6) + b".")
    two = archive_of(b"K\x01.", **{"data.pkX": b"K\x02."}).replace(b"data.pkX", b"data.pkl")
    script = archive_of(b"K\x01.", **{"constants.pkl": b"N."})
    cut = archive_of(tensor(4, b"I0\n(I1\nt(I1\nt"))
    for content in (
        packed.getvalue(),
        two,
        script,
        good.replace(b"archive/data.pkl", b"archive/data.pkX", 1),
        good.replace(b"little", b"bigbig"),
        good.replace(b"K\x01.", b"K\x02."),
        cut.replace(bytes(16), bytes(15) + b"x"),
        good[:-30],
        b"\x80" + b"storages".ljust(511, b"\0") * 4,  # a tar archive, which torch.load would unpack
    ):
        with pytest.raises(CheckpointError) as caught:
            load_torch_bytes(io.BytesIO(content), len(content), name="here")
        assert is_one_sentence(str(caught.value))


def crafted_tables() -> Iterator[bytes]:
    """Tables of contents of about 14 kB that share objects, so that they are large when written out."""
    sizes = torch.Size([1])
    chunk = dcp_metadata.ChunkStorageMetadata(sizes, sizes)
    properties = dcp_metadata.TensorProperties(dtype=torch.float32)
    entry = dcp_metadata.TensorStorageMetadata(properties, sizes, [chunk] * 2500)
    yield pickle.dumps(dcp_metadata.Metadata({f"{number}": entry for number in range(1500)}))
    nested: Any = chunk
    for _ in range(40):
        nested = dcp_metadata.ChunkStorageMetadata(nested, nested)
    yield pickle.dumps(nested)
    entry = dcp_metadata.TensorStorageMetadata(properties, torch.Size([1]), [nested])
    yield pickle.dumps(dcp_metadata.Metadata({"w": entry}))


def test_files_far_larger_when_written_out_are_refused() -> None:
    """A table of contents of 14 kB took 41 s to read: one list of chunks was shared by thousands of tensors."""
    for data in crafted_tables():
        assert len(data) < 25_000
        began = time.process_time()
        for read in (read_zip, read_metadata):
            with expect_error(CheckpointError):
                read(data)
        assert time.process_time() - began < 2


def test_copies_of_one_large_object_are_bounded() -> None:
    """A file of 1 MB asks for 300,000 copies of its largest text, or of its longest list, in two bytes each."""
    large, again = b"X" + struct.pack("<I", 10**6) + b"x" * 10**6, 20_000
    calls = {
        "a name": large + b"q\x00" + b"S'torch'\nh\x00\x930" * again,
        "encoded": b"c_codecs\nencode\nq\x01" + large + b"S'latin1'\n\x86q\x000" + b"h\x01h\x00R0" * again,
        "state": b"}q\x00("
        + b"".join(b"I%d\nN" % at for at in range(1000))
        + b"ucargparse\nNamespace\n)R"
        + b"h\x00b" * again,
        "a set": b"c__builtin__\nset\nq\x01](" + b"K\x00" * 10_000 + b"e\x85q\x000" + b"h\x01h\x00R0" * again,
    }
    for what, data in calls.items():
        with expect_error(CheckpointError):
            pytest.fail(f"{what}: {read_zip(b'0'.join([data, b'N.']))!r:.100}")
    with expect_error(CheckpointError):
        read_zip(b"}(" + b"N" * 10_000 + b"tNs.")
