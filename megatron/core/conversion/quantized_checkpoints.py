"""Scales of quantized weights in our checkpoints: tensors beside the model's, and what they are in a settings file.

``quantization.PARAMETER_scale`` and the like lie beside ``model.PARAMETER``, which holds the numbers that codes and
scales stand for: whoever loads the model finds ordinary weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.core.checkpointing.find import CheckpointFolder
from megatron.core.checkpointing.stored_tensors import StoredTensors, TensorEntry
from megatron.core.checkpointing.streamed import StreamedBox
from megatron.core.conversion.portable import LazyScales, LazyTensor, Quantization
from megatron.core.quantization.grid import Grid
from megatron.core.quantization.scheme import SCHEMES, scheme_named
from megatron.errors import CheckpointError
from megatron.small_files import read_json

FILE = "quantization.json"
_PREFIX = "quantization."
_PARTS = {"factors": "scale", "zeros": "zero_point", "groups": "group", "inputs": "input_scale"}
_FORMAT = 1


@dataclass(frozen=True)
class _Settings:
    """Content of the file. ``weights``: names of the parameters that are quantized."""

    format: int
    scheme: str
    group_size: int | None
    method: str
    weights: list[str]
    calibration: dict[str, Any] = field(default_factory=dict)


def settings_file(quantization: Quantization) -> bytes:
    """Content of the settings file."""
    grid = quantization.scheme.weights
    group = grid.block[1] if grid.block[0] == 1 and grid.block[1] else None
    settings = {
        "format": _FORMAT,
        "scheme": quantization.scheme.name,
        "group_size": group,
        "method": quantization.method,
        "weights": sorted(quantization.scales),
        "calibration": dict(quantization.calibration),
    }
    return (json.dumps(settings, indent=2) + "\n").encode()


def boxes_of_scales(quantization: Quantization) -> Iterator[StreamedBox]:
    """The tensors beside the model's, to be written one after the other."""
    for name, scales in quantization.scales.items():
        for part, ending in _PARTS.items():
            tensor: LazyTensor | None = getattr(scales, part)
            if tensor is not None:
                yield StreamedBox.whole(f"{_PREFIX}{name}_{ending}", tensor.shape, tensor.dtype, tensor.make)
    for name, tensor in quantization.cache.items():
        yield StreamedBox.whole(f"{_PREFIX}{name}", tensor.shape, tensor.dtype, tensor.make)


def notes_about(quantization: Quantization) -> tuple[str, ...]:
    """Lines for who reads the model."""
    found = (
        f"the weights of linear layers lie on the grid of {quantization.scheme.name}, chosen by {quantization.method}",
    )
    if not quantization.cache:
        return found
    return (*found, "note: FP8 scales of keys and values lie beside them: --to hf and --to tensorrt-llm write them")


def is_quantized(folder: CheckpointFolder) -> bool:
    """Whether the weights of a checkpoint lie on a grid, as tools/quantize.py writes them."""
    return (folder.path / FILE).is_file()


def read_quantization(folder: CheckpointFolder, stored: StoredTensors) -> Quantization | None:
    """The scales of a checkpoint, read when needed; None of one that isn't quantized.

    Raises CheckpointError for settings that this version doesn't know, or scales that are missing.
    """
    if not is_quantized(folder):
        return None
    where = folder.path / FILE
    settings: _Settings = read_json(where, _Settings, error=CheckpointError)
    if settings.format != _FORMAT or settings.scheme not in SCHEMES:
        raise CheckpointError(
            f"{where} has format {settings.format} and scheme {settings.scheme}, and this version knows format "
            f"{_FORMAT} and {', '.join(SCHEMES)}: read it with the version that wrote it"
        )

    scheme = SCHEMES[settings.scheme]
    if settings.group_size is not None:
        if settings.group_size < 1 or scheme.weights.block[0] != 1 or not scheme.weights.block[1]:
            raise CheckpointError(
                f"{where} has group_size {settings.group_size}, which {settings.scheme} can't have: the checkpoint is "
                "damaged"
            )
        scheme = scheme_named(settings.scheme, group_size=settings.group_size)

    def lazy(name: str) -> LazyTensor | None:
        entry = stored.entries.get(name)
        return None if entry is None else LazyTensor(entry.shape, entry.dtype, partial(stored.read, name))

    scales = dict[str, LazyScales]()
    for name in settings.weights:
        parts = {part: lazy(f"{_PREFIX}{name}_{ending}") for part, ending in _PARTS.items()}
        factors = parts.pop("factors")
        if factors is None:
            raise CheckpointError(f"{where} names {name}, whose scales are missing: the checkpoint is damaged")
        scales[name] = LazyScales(factors, **parts)
        _check(scales[name], scheme.weights, stored.model.get(name), f"{where}: {name}")
    endings = (".k_scale", ".v_scale")
    cache = {name: lazy(name) for name in stored.entries if name.startswith(_PREFIX) and name.endswith(endings)}
    return Quantization(
        scheme,
        scales,
        settings.method,
        settings.calibration,
        {name.removeprefix(_PREFIX): tensor for name, tensor in cache.items() if tensor is not None},
    )


def _check(scales: LazyScales, grid: Grid, weight: TensorEntry | None, what: str) -> None:
    """Raise CheckpointError for scales that aren't those of a ``weight`` [..., out, in] on ``grid``."""
    if weight is None:
        raise CheckpointError(f"{what} has scales, and the model has no such weight: the checkpoint is damaged")
    *experts, rows, columns = (1, *weight.shape) if len(weight.shape) < 2 else weight.shape
    wanted = (*experts, rows, grid.scales_shape((rows, columns))[1])
    wrong = [part for part in (scales.factors, scales.zeros) if part is not None and part.shape != wanted]
    if wrong or (scales.zeros is None) != grid.symmetric:
        found = list((wrong[0] if wrong else scales.factors).shape)
        points = "without" if scales.zeros is None else "with"
        raise CheckpointError(
            f"{what} has scales of shape {found} {points} zero points, and its grid needs {list(wanted)} "
            f"{'without' if grid.symmetric else 'with'} them: the checkpoint is damaged"
        )
