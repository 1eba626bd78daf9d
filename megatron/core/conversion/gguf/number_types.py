"""The types of numbers in GGUF files, and which of them each tensor gets."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.programs import GgufType
from megatron.errors import CheckpointError

FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k_m": 15, "q5_k_m": 17}
FILE_TYPES |= {"q6_k": 18, "bf16": 32}
"""``general.file_type`` of a file most of whose numbers have a type."""
_FEWER = ("q4_0", "q4_1", "q5_0", "q5_1")
_MIXES = {"q4_k_m": "Q4_K", "q5_k_m": "Q5_K", "q6_k": "Q6_K"}
"""Kinds that mix K types, by the type of most weights."""
FEW_BITS = ("q8_0", *_FEWER, *_MIXES)
"""Types that are blocks of whole numbers with a scale."""
BLOCK_OF_K = 256
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp takes where blocks of a K type don't divide rows."""
_MORE = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")
"""Weights of which a mix has some in Q6_K: those that lose most."""
# Small, and read as fp32 by llama.cpp whatever the others are.
_ALWAYS_FP32 = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight"),
    *("token_types.weight", "ssm_conv1d.weight", "attn_rel_b.weight"),
)


def library() -> Any:
    """The gguf package; CheckpointError without it."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise CheckpointError(
            "GGUF files are written and read with the gguf package, which is not installed: pip install gguf"
        ) from None


def tensor_types(tensors: Mapping[str, LazyTensor], kind: GgufType, *, say: Callable[[str], None]) -> dict[str, Any]:
    """The package's type of each tensor of a file of ``kind``.

    Norms, biases and routers stay fp32, the output layer has eight bits beside weights of fewer, and rows that no
    blocks divide become fp16, which ``say`` is told.

    CheckpointError where blocks divide no weight at all.
    """
    gguf = library()
    types = gguf.GGMLQuantizationType
    usual = types[_MIXES.get(kind, kind.upper())]
    block, _ = gguf.GGML_QUANT_SIZES[usual]
    layers = 1 + max((number for name in tensors if (number := _layer(name)) is not None), default=-1)
    found: dict[str, Any] = {}
    uneven: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        is_matrix = len(tensor.shape) > 1 and name.endswith(".weight") and not name.endswith(_ALWAYS_FP32)
        if not is_matrix:
            found[name] = types.F32
            continue
        wanted = types[_type_in_file(name, kind, usual.name, layers=layers, tied="output.weight" not in tensors)]
        found[name] = next(
            each
            for each in (wanted, types[_INSTEAD.get(wanted.name, "F16")], types.F16)
            if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[each][0] == 0
        )
        if found[name] != wanted:
            uneven.setdefault(found[name].name, []).append(name)
    if uneven and usual not in found.values():
        widths = sorted({tensors[name].shape[-1] for names in uneven.values() for name in names})
        others = "f16 or bf16" if block == 32 or any(width % 32 for width in widths) else "q5_0, q4_0 or q8_0"
        raise CheckpointError(
            f"--gguf-type {kind} stores blocks of {block} numbers of a row, and no weight here has rows of a multiple "
            f"of {block} ({', '.join(map(str, widths))}): give --gguf-type {others}"
        )
    for instead, names in uneven.items():
        blocks = BLOCK_OF_K if kind in _MIXES and instead != "F16" else 32
        say(
            f"note: rows of {listed(names)} are no multiples of {blocks}: these weights are stored as {instead.lower()}"
        )
    return found


def _type_in_file(name: str, kind: GgufType, usual: str, *, layers: int, tied: bool) -> str:
    """The type of a weight in a file of ``kind``, whose ``usual`` one most have, by the rules of llama.cpp's mixes."""
    if name == "output.weight" or (name == "token_embd.weight" and tied):
        return "Q8_0" if kind in _FEWER else "Q6_K" if kind in _MIXES else usual
    number, eighth = _layer(name), layers // 8
    if kind in _MIXES and number is not None and name.endswith(_MORE):
        is_chosen = number < eighth or number >= 7 * layers // 8 or (number - eighth) % 3 == 2
        return "Q6_K" if is_chosen else usual
    return usual


def _layer(name: str) -> int | None:
    """The number of the layer that a tensor belongs to."""
    first, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if first == "blk" and number.isdigit() else None
