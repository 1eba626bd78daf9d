"""Folders of compressed-tensors, read: packed whole numbers, whole numbers and floats of 8 bits, with their scales."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.conversion.huggingface.micro_scales import MICRO_FORMATS, MicroFormat
from megatron.core.conversion.huggingface.quantized_weights import StoredWeight, inputs_of, rows_of
from megatron.core.conversion.matching import Pattern, matches_of
from megatron.core.conversion.portable import LazyScales, LazyTensor
from megatron.core.ops.quantize import E4M3
from megatron.core.quantization.grid import Grid
from megatron.core.quantization.packing import PACKED_BITS, WORD_BITS, signed, unpacked
from megatron.errors import CheckpointError
from megatron.small_files import as_kind

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
_MICRO = {each.format: each for each in MICRO_FORMATS.values()}
_STRATEGIES = ("tensor", "channel", "group", "block")
_OF_WEIGHTS = ("weight", "weight_packed")
BESIDE = (
    "weight_scale",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
)
"""Tensors beside a quantized weight."""
OF_CACHE = ("k_scale", "v_scale", "output_scale")
"""Ends of names of scales of keys and values."""


@dataclass(frozen=True)
class _Group:
    """Settings of some layers. ``targets``: their names, patterns, or class. ``micro``: a format of its own."""

    targets: tuple[str, ...]
    grid: Grid
    micro: MicroFormat | None = None

    @property
    def patterns(self) -> list[Pattern]:
        """The targets that are regular expressions."""
        return [Pattern(each.removeprefix("re:")) for each in self.targets if each.startswith("re:")]


def groups_in(settings: Mapping[str, Any], *, where: str) -> list[_Group]:
    """The groups of layers that the settings describe; CheckpointError for what isn't read."""
    name = settings.get("format")
    if name not in (*_FORMATS, *_MICRO):  # which may be anything
        raise CheckpointError(
            f"{where}: weights of format {name!r} of compressed-tensors are not read, only "
            f"{', '.join((*_FORMATS, *_MICRO))}; take the model in bf16"
        )
    if settings.get("quantization_status", "compressed") != "compressed":
        raise CheckpointError(
            f"{where}: quantization_status is {settings['quantization_status']!r}, and only compressed is read: save "
            "the model with compressed weights, or in bf16"
        )
    for kind in ("transform_config", "sparsity_config"):
        given = settings.get(kind) or {}
        if not isinstance(given, dict) or (any(given.values()) and given.get("format") != "dense"):
            raise CheckpointError(
                f"{where}: {kind} changes what layers compute, and is not read; take the model in bf16"
            )
    groups = as_kind(
        settings.get("config_groups"), dict[str, dict[str, Any]], where=f"{where}: config_groups", error=CheckpointError
    )
    micro = _MICRO.get(name)
    found = [_group(group, micro, where=f"{where}: {title}") for title, group in groups.items()]
    if not found:
        raise CheckpointError(f"{where}: config_groups is empty, so nothing says how weights are read")
    return found


def _group(group: Mapping[str, Any], micro: MicroFormat | None, *, where: str) -> _Group:
    targets = as_kind(group.get("targets"), list[str], where=f"{where}: targets", error=CheckpointError)
    weights = as_kind(group.get("weights"), dict[str, Any], where=f"{where}: weights", error=CheckpointError)
    if micro is not None:
        wrong = [key for key, value in micro.arguments().items() if weights.get(key, value) not in (value, None)]
        if wrong:
            raise CheckpointError(
                f"{where}: {wrong[0]} is {weights[wrong[0]]!r}, and {micro.format} is read with "
                f"{micro.arguments()[wrong[0]]!r} alone"
            )
        return _Group(tuple(targets), Grid("float", micro.bits, (1, micro.group)), micro)
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    fits = (kind == "int" and bits in PACKED_BITS) or (kind == "float" and bits == 8)
    if not fits or strategy not in _STRATEGIES or weights.get("dynamic") or not isinstance(bits, int):
        raise CheckpointError(
            f"{where}: weights of type {kind!r}, {bits!r} bits and strategy {strategy!r} are not read; int of "
            f"{', '.join(map(str, PACKED_BITS))} bits and float of 8 are, with scales by {', '.join(_STRATEGIES)}"
        )
    block = (1, 0)
    if strategy == "tensor":
        block = (0, 0)
    elif strategy == "group":
        size = as_kind(weights.get("group_size"), int, where=f"{where}: group_size", error=CheckpointError)
        block = (1, _positive(size, f"{where}: group_size"))
    elif strategy == "block":
        sides = as_kind(
            weights.get("block_structure"), list[int], where=f"{where}: block_structure", error=CheckpointError
        )
        if len(sides) != 2:
            raise CheckpointError(f"{where}: block_structure {sides} must be two numbers")
        rows, columns = (_positive(each, f"{where}: block_structure") for each in sides)
        block = (rows, columns)
    symmetric = as_kind(weights.get("symmetric", True), bool, where=f"{where}: symmetric", error=CheckpointError)
    return _Group(tuple(targets), Grid("float" if kind == "float" else "int", bits, block, symmetric))


def _positive(size: int, what: str) -> int:
    if size < 1:
        raise CheckpointError(f"{what} {size} must be above zero")
    return size


def read_compressed(
    settings: Mapping[str, Any], tensors: Mapping[str, LazyTensor], *, where: str
) -> tuple[dict[str, LazyTensor], dict[str, StoredWeight]]:
    """Tensors that aren't quantized, and weights that are, by the names that weights have elsewhere."""
    groups = groups_in(settings, where=where)
    plain: dict[str, LazyTensor] = {}
    found: dict[str, StoredWeight] = {}
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    members = _members(groups, modules, where=f"{where}/config.json: targets")
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last in (*OF_CACHE, "output_zero_point") or (
            last in BESIDE and any(f"{module}.{each}" in tensors for each in _OF_WEIGHTS)
        ):
            continue
        if last == "weight_packed" or (last == "weight" and tensor.dtype in (torch.int8, E4M3)):
            named = (each for each, of_group in zip(groups, members) if module in of_group)
            group = next(named, None) or _by_class(groups)
            read = partial(_weight, grid=group.grid) if group.micro is None else partial(_micro, group.micro)
            found[f"{module}.weight"] = read(module, last, tensors, where=where)
        else:
            plain[name] = tensor
    return plain, found


def _members(groups: list[_Group], modules: Collection[str], *, where: str) -> list[set[str]]:
    """The modules that each group names."""
    matches = iter(matches_of([each for group in groups for each in group.patterns], modules, where=where))
    return [{*group.targets}.intersection(modules).union(*(next(matches) for _ in group.patterns)) for group in groups]


def _by_class(groups: list[_Group]) -> _Group:
    """The group whose targets are classes of modules, which files don't tell."""
    return next((each for each in groups if not any("." in target for target in each.targets)), groups[0])


def _micro(
    micro: MicroFormat, module: str, last: str, tensors: Mapping[str, LazyTensor], *, where: str
) -> StoredWeight:
    """A weight with small groups."""
    stored = tensors[f"{module}.{last}"]
    rows, columns = (*stored.shape, 0, 0)[:2]
    columns *= 2 if micro.bits == 4 else 1
    held: dict[str, LazyTensor] = {}
    for kind, (shape, dtype) in micro.shapes(rows, columns).items():
        tensor = tensors.get(f"{module}.{kind}")
        if tensor is None or tensor.shape not in (shape, shape if shape != (1,) else ()) or tensor.dtype != dtype:
            raise _lacks(where, module, last, kind, shape)
        held[kind] = tensor
    scales = {kind: tensor for kind, tensor in held.items() if "scale" in kind}
    factors = LazyTensor(scales["weight_scale"].shape, torch.float32, partial(_made, micro.factors, scales))
    grid = Grid("float", micro.bits, (1, micro.group))
    codes = {kind: tensor for kind, tensor in held.items() if "scale" not in kind}
    return StoredWeight((rows, columns), grid, partial(_made, micro.codes, codes), LazyScales(factors), torch.bfloat16)


def _made(join: Callable[[Mapping[str, Tensor]], Tensor], held: Mapping[str, LazyTensor]) -> Tensor:
    return join({kind: tensor.make() for kind, tensor in held.items()})


def _weight(module: str, last: str, tensors: Mapping[str, LazyTensor], grid: Grid, *, where: str) -> StoredWeight:
    stored = tensors[f"{module}.{last}"]
    shape = _shape(module, stored, tensors, grid, where=where) if last == "weight_packed" else stored.shape
    if len(shape) != 2 or (last == "weight" and stored.dtype != grid.dtype):
        kind = str(stored.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{where}: {module}.{last} is {kind} of shape {list(shape)}, which its settings don't say"
        )
    rows, columns = shape
    wanted, sharing = grid.scales_shape((rows, columns)), grid.sides((rows, columns))[0]
    scale = tensors.get(f"{module}.weight_scale")
    one = wanted == (1, 1) and scale is not None and scale.shape in ((), (1,))
    if scale is None or not (one or scale.shape == wanted) or not scale.dtype.is_floating_point:
        raise _lacks(where, module, last, "weight_scale", wanted)
    zeros = None
    if not grid.symmetric:
        zeros = _zeros(module, last, tensors, grid, wanted, where=where)
        zeros = rows_of(zeros, rows, sharing)
    order = tensors.get(f"{module}.weight_g_idx")
    if order is not None:
        check_order(order, columns, wanted[1], f"{where}: {module}.weight_g_idx")
    inputs = inputs_of(tensors.get(f"{module}.input_scale"))
    held = LazyScales(rows_of(scale, rows, sharing), zeros, groups=order, inputs=inputs)
    make = partial(_codes, stored, grid.bits, columns) if last == "weight_packed" else stored.make
    return StoredWeight((rows, columns), grid, make, held)


def check_order(order: LazyTensor, columns: int, groups: int, what: str) -> None:
    """Raise CheckpointError for an order of inputs that names other groups than there are."""
    found = order.make() if order.shape == (columns,) and not order.dtype.is_floating_point else None
    if found is None or int(found.min()) < 0 or int(found.max()) >= groups:
        raise CheckpointError(f"{what} must be {columns} numbers of {groups} groups: download the file again")


def _codes(stored: LazyTensor, bits: int, columns: int) -> Tensor:
    return signed(unpacked(stored.make(), bits, columns), bits)


def _shape(
    module: str, stored: LazyTensor, tensors: Mapping[str, LazyTensor], grid: Grid, *, where: str
) -> tuple[int, int]:
    """Shape of a packed weight, as the file says and the words confirm."""
    said = tensors.get(f"{module}.weight_shape")
    numbers = said.make().tolist() if said is not None and said.shape == (2,) else []
    words = [numbers[0], -(-numbers[1] * grid.bits // WORD_BITS)] if numbers else []
    if stored.dtype != torch.int32 or list(stored.shape) != words or numbers[1] < 1:
        raise CheckpointError(
            f"{where}: {module}.weight_packed of shape {list(stored.shape)} doesn't hold {grid.bits}-bit "
            f"numbers of {module}.weight_shape {numbers}: download the file again"
        )
    return int(numbers[0]), int(numbers[1])


def _zeros(
    module: str, last: str, tensors: Mapping[str, LazyTensor], grid: Grid, wanted: tuple[int, int], *, where: str
) -> LazyTensor:
    """Zero points ``[rows, groups]``, int8: packed along outputs beside packed weights."""
    zeros, name = tensors.get(f"{module}.weight_zero_point"), "weight_zero_point"
    is_packed = last == "weight_packed"
    shape = (-(-wanted[0] * grid.bits // WORD_BITS), wanted[1]) if is_packed else wanted
    if zeros is None or zeros.shape != shape or zeros.dtype != (torch.int32 if is_packed else torch.int8):
        raise _lacks(where, module, last, name, shape)
    if not is_packed:
        return zeros

    def make() -> Tensor:
        return signed(unpacked(zeros.make().t(), grid.bits, wanted[0]), grid.bits).t().contiguous()

    return LazyTensor(wanted, torch.int8, make)


def _lacks(where: str, module: str, last: str, name: str, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{where}: {module}.{last} has no {module}.{name} of shape {list(shape)}")
