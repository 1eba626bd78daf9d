"""Folders of GPTQ and AWQ, read: numbers from zero with a zero point, packed in int32 across the transposed weight."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.conversion.huggingface.compressed_tensors import check_order
from megatron.core.conversion.huggingface.quantized_weights import StoredWeight
from megatron.core.conversion.portable import LazyScales, LazyTensor
from megatron.core.quantization.grid import Grid
from megatron.core.quantization.packing import PACKED_BITS, WORD_BITS, signed, unpacked
from megatron.errors import CheckpointError
from megatron.small_files import as_kind

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of a word in AWQ, from its lowest bits."""
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def check_settings(settings: Mapping[str, Any], *, where: str) -> tuple[int, int]:
    """Bits, and inputs that share a scale (0: all); CheckpointError for what isn't read."""
    method = settings["quant_method"]
    bits = settings.get("bits", settings.get("w_bit", 4 if method == "awq" else None))
    group = settings.get("group_size", settings.get("q_group_size", 128 if method == "awq" else -1))
    group = as_kind(group, int, where=f"{where}: group_size", error=CheckpointError)
    if bits not in (PACKED_BITS if method == "gptq" else (4,)) or group == 0 or group < -1:
        raise CheckpointError(f"{where}: {method} of {bits!r} bits in groups of {group} is not read; take it in bf16")
    version = settings.get("version", "gemm") if method == "awq" else settings.get("checkpoint_format", "gptq")
    known = ("gemm",) if method == "awq" else ("gptq", "gptq_v2")
    if str(version).lower() not in known:
        raise CheckpointError(
            f"{where}: {method} in the layout {version!r} is not read, only {' and '.join(known)}; take it in bf16"
        )
    if settings.get("dynamic"):
        raise CheckpointError(f"{where}: layers with settings of their own (dynamic) are not read; take it in bf16")
    return int(bits), max(group, 0)


def read_gptq_or_awq(
    settings: Mapping[str, Any], tensors: Mapping[str, LazyTensor], *, where: str
) -> tuple[dict[str, LazyTensor], dict[str, StoredWeight]]:
    """Tensors that aren't quantized, and weights that are, by the names that weights have elsewhere."""
    bits, group = check_settings(settings, where=where)
    is_awq = settings["quant_method"] == "awq"
    offset = 0 if is_awq or settings.get("checkpoint_format") == "gptq_v2" else 1
    plain: dict[str, LazyTensor] = {}
    found: dict[str, StoredWeight] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last == "qweight":
            found[f"{module}.weight"] = _weight(module, tensors, bits, group, is_awq, offset, where=where)
        elif last not in _PARTS or f"{module}.qweight" not in tensors:
            plain[name] = tensor
    return plain, found


def _weight(
    module: str,
    tensors: Mapping[str, LazyTensor],
    bits: int,
    group: int,
    is_awq: bool,
    offset: int,
    *,
    where: str,
) -> StoredWeight:
    """The weight of a module. ``offset``: what is added to stored zero points."""
    each, words = WORD_BITS // bits, tensors[f"{module}.qweight"]
    if len(words.shape) != 2 or words.dtype != torch.int32:
        raise CheckpointError(f"{where}: {module}.qweight is {list(words.shape)} {words.dtype}, and no matrix of int32")
    inputs, outputs = words.shape
    inputs, outputs = (inputs, outputs * each) if is_awq else (inputs * each, outputs)
    groups = -(-inputs // group) if group else 1
    scales, zeros = (tensors.get(f"{module}.{name}") for name in ("scales", "qzeros"))
    if scales is None or scales.shape != (groups, outputs) or not scales.dtype.is_floating_point:
        raise CheckpointError(f"{where}: {module}.qweight has no {module}.scales of shape {[groups, outputs]}")
    if zeros is None or zeros.shape != (groups, outputs // each) or zeros.dtype != torch.int32 or outputs % each:
        raise CheckpointError(f"{where}: {module}.qweight has no {module}.qzeros of shape {[groups, outputs // each]}")
    order = tensors.get(f"{module}.g_idx")
    if order is not None:
        check_order(order, inputs, groups, f"{where}: {module}.g_idx")
    held = LazyScales(
        LazyTensor((outputs, groups), scales.dtype, lambda: scales.make().t().contiguous()),
        LazyTensor((outputs, groups), torch.int8, partial(_zeros, zeros, bits, outputs, is_awq, offset)),
        groups=order,
    )
    codes = partial(_awq_codes if is_awq else _gptq_codes, words, bits, (outputs, inputs))
    return StoredWeight((outputs, inputs), Grid("int", bits, (1, group), symmetric=False), codes, held)


def _gptq_codes(words: LazyTensor, bits: int, shape: tuple[int, int]) -> Tensor:
    return signed(unpacked(words.make().t(), bits, shape[1]), bits)


def _awq_codes(words: LazyTensor, bits: int, shape: tuple[int, int]) -> Tensor:
    return signed(_in_order(unpacked(words.make(), bits, shape[0])), bits).t().contiguous()


def _zeros(words: LazyTensor, bits: int, outputs: int, is_awq: bool, offset: int) -> Tensor:
    found = unpacked(words.make(), bits, outputs)
    return signed((_in_order(found) if is_awq else found) + offset, bits).t().contiguous()


def _in_order(numbers: Tensor) -> Tensor:
    """Numbers of AWQ's words, eight a word, in the order of columns."""
    inverse = torch.tensor([_AWQ_ORDER.index(place) for place in range(len(_AWQ_ORDER))])
    return numbers.view(len(numbers), -1, len(_AWQ_ORDER))[..., inverse].flatten(1)
