"""The types of numbers in GGUF files, and which of them each tensor gets."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.programs import GgufType
from megatron.errors import CheckpointError

FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "bf16": 32}
"""``general.file_type`` of a file most of whose numbers have a type."""
_FEWER = ("q4_0", "q4_1", "q5_0", "q5_1")
FEW_BITS = ("q8_0", *_FEWER)
"""Types that are blocks of whole numbers with a scale."""
# Small, and read as fp32 by llama.cpp whatever the others are.
_ALWAYS_FP32 = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight"),
    *("token_types.weight", "ssm_conv1d.weight"),
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
    block, _ = gguf.GGML_QUANT_SIZES[types[kind.upper()]]
    found: dict[str, Any] = {}
    uneven: list[str] = []
    for name, tensor in tensors.items():
        is_matrix = len(tensor.shape) > 1 and name.endswith(".weight") and not name.endswith(_ALWAYS_FP32)
        is_head = name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in tensors)
        if not is_matrix:
            found[name] = types.F32
        elif tensor.shape[-1] % block:
            found[name] = types.F16
            uneven.append(name)
        else:
            found[name] = types.Q8_0 if is_head and kind in _FEWER else types[kind.upper()]
    if uneven and types[kind.upper()] not in found.values():
        widths = sorted({tensors[name].shape[-1] for name in uneven})
        raise CheckpointError(
            f"--gguf-type {kind} stores blocks of {block} numbers of a row, and no weight here has rows of a multiple "
            f"of {block} ({', '.join(map(str, widths))}): give --gguf-type f16 or bf16"
        )
    if uneven:
        say(f"note: rows of {listed(uneven)} are no multiples of {block}: these weights are stored as f16")
    return found
