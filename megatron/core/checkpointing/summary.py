"""What is in a checkpoint and how two differ, from the tables of contents; numbers are read only to compare them."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.checkpointing.find import CheckpointFolder
from megatron.core.checkpointing.load import read_run_document
from megatron.core.checkpointing.manifest import Manifest
from megatron.core.checkpointing.stored_tensors import StoredTensors, TensorEntry
from megatron.core.files.remote_path import AnyPath


@dataclass(frozen=True)
class Summary:
    """A checkpoint at a glance.

    ``layout``: sizes of the axes it was saved at. ``state``: settings and progress as the run stored them. ``model``:
    tensors by name. ``optimizer``: number of tensors and of elements by kind of state. ``num_bytes``: of all files.
    """

    path: AnyPath
    iteration: int
    saved_at: float
    layout: Mapping[str, int]
    versions: Mapping[str, str]
    state: Mapping[str, Any]
    model: Mapping[str, TensorEntry]
    optimizer: Mapping[str, tuple[int, int]]
    num_files: int
    num_bytes: int

    @property
    def num_parameters(self) -> int:
        """Numbers of the model's tensors, tied ones once."""
        return sum(math.prod(entry.shape) for entry in self.model.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Parameters by their type, most first."""
        counts: Counter[str] = Counter()
        for entry in self.model.values():
            counts[short(entry.dtype)] += math.prod(entry.shape)
        return dict(counts.most_common())

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "path": str(self.path),
            "iteration": self.iteration,
            "saved_at": self.saved_at,
            "layout": dict(self.layout),
            "versions": dict(self.versions),
            "state": dict(self.state),
            "parameters": self.num_parameters,
            "dtypes": self.dtypes,
            "tensors": {
                name: {"shape": list(entry.shape), "dtype": short(entry.dtype)} for name, entry in self.model.items()
            },
            "optimizer": {
                kind: {"tensors": tensors, "elements": elements} for kind, (tensors, elements) in self.optimizer.items()
            },
            "files": self.num_files,
            "bytes": self.num_bytes,
        }


def summarize(folder: CheckpointFolder) -> Summary:
    """The summary of a complete checkpoint; no tensor is read.

    Raises CheckpointError when its settings or its table of contents are damaged.
    """
    document = read_run_document(folder)
    manifest = Manifest.read(folder.path)
    stored = StoredTensors(folder.path)
    kinds: dict[str, list[int]] = defaultdict(list)
    for name, entry in stored.entries.items():
        if name.startswith("optimizer."):
            kinds[name.split(".")[1]].append(math.prod(entry.shape))
    return Summary(
        path=folder.path,
        iteration=folder.iteration,
        saved_at=manifest.saved_at,
        layout=document["layout"],
        versions=document["versions"],
        state=document["state"],
        model=stored.model,
        optimizer={kind: (len(sizes), sum(sizes)) for kind, sizes in sorted(kinds.items())},
        num_files=len(manifest.files),
        num_bytes=sum(record.size for record in manifest.files.values()),
    )


def short(dtype: torch.dtype) -> str:
    """Short name of a dtype, such as ``bf16`` and ``fp32``; torch's own name for others."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints against each other: settings by name with both values, names on one side, differing tensors by
    name with their differences in words.
    """

    settings: Mapping[str, tuple[Any, Any]]
    only_in: tuple[tuple[str, ...], tuple[str, ...]]
    differences: Mapping[str, str]
    num_equal: int

    @property
    def is_empty(self) -> bool:
        """Whether the two are the same."""
        return not (self.settings or any(self.only_in) or self.differences)


def compare(first: CheckpointFolder, second: CheckpointFolder) -> Comparison:
    """Compare two checkpoints, one pair of tensors in memory at a time."""
    one, other = StoredTensors(first.path), StoredTensors(second.path)
    shared = [name for name in one.entries if name in other.entries]
    differences = {name: words for name in shared if (words := _difference(name, one, other)) is not None}
    mine, theirs = (dict(_flat(read_run_document(folder)["state"])) for folder in (first, second))
    return Comparison(
        settings={
            name: (mine.get(name), theirs.get(name))
            for name in sorted(mine.keys() | theirs.keys())
            if json.dumps(mine.get(name)) != json.dumps(theirs.get(name))
        },
        only_in=(
            tuple(sorted(one.entries.keys() - other.entries.keys())),
            tuple(sorted(other.entries.keys() - one.entries.keys())),
        ),
        differences=differences,
        num_equal=len(shared) - len(differences),
    )


def _difference(name: str, one: StoredTensors, other: StoredTensors) -> str | None:
    mine, theirs = one.entries[name], other.entries[name]
    if mine.shape != theirs.shape:
        return f"{list(mine.shape)} and {list(theirs.shape)}"
    left, right = one.read(name), other.read(name)
    if mine.dtype == theirs.dtype and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (left, right))):
        return None
    wide = torch.promote_types(torch.promote_types(mine.dtype, theirs.dtype), torch.float32)
    largest = (left.to(wide) - right.to(wide)).abs().max().item() if left.numel() else 0.0
    types = "" if mine.dtype == theirs.dtype else f" ({short(mine.dtype)} and {short(theirs.dtype)})"
    return f"up to {largest:.6g}{types}"


def _flat(nested: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(nested, Mapping) and nested:
        for name, value in nested.items():
            yield from _flat(value, f"{prefix}{name}.")
    else:
        yield prefix.removesuffix("."), nested
