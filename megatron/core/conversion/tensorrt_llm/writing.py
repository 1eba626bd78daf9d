"""A portable model as a checkpoint of TensorRT-LLM: config.json and the tensors of each rank, as trtllm-build reads.

One tensor is in memory at a time: the files of a stage's ranks are written together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.core.conversion.companions import TOKENIZER_FILES, copy_files
from megatron.core.conversion.huggingface.quantizing import Rounding
from megatron.core.conversion.huggingface.writing import SafetensorsFile
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.tensorrt_llm.architecture import architecture_for, fields_of
from megatron.core.conversion.tensorrt_llm.cuts import Layout
from megatron.core.conversion.tensorrt_llm.few_bits import chosen_few_bits, dequantized
from megatron.core.conversion.tensorrt_llm.pieces import Plan, by_stage
from megatron.errors import CheckpointError

_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_POSITIONS = "embedding.position_embeddings.weight"


def plan_for(portable: PortableModel, layout: Layout, rounding: Rounding | None) -> Plan:
    """How the model is written; an error for one that has no place there, all before anything is written."""
    model = _without_windows(portable.model)
    if model.activation in ("gelu", "geglu"):
        model = dataclasses.replace(model, activation="gelu_tanh" if model.activation == "gelu" else "geglu_tanh")
    architecture = architecture_for(model, portable.groups)
    if portable.dtype not in _TYPES:
        raise CheckpointError(f"TensorRT-LLM has no type {str(portable.dtype).removeprefix('torch.')}")
    scheme, ignored = (None, ()) if rounding is None else (rounding.scheme, rounding.ignored)
    few_bits = chosen_few_bits(portable, scheme, ignored)
    tensors = {**portable.tensors}
    if (positions := tensors.get(_POSITIONS)) is not None:
        tensors[_POSITIONS] = _first_rows(positions, model.max_position_embeddings)
    plan = Plan(dataclasses.replace(portable, model=model, tensors=tensors), architecture, layout, few_bits)
    plan.check()
    return plan


def _without_windows(model: ModelConfig) -> ModelConfig:
    """The model with full attention, and no longer texts than its window: both compute the same."""
    if model.window_size is None:
        return model
    longest = min(model.max_position_embeddings, model.window_size[0] + 1)
    full: Any = dict.fromkeys(("window_size", "window_attn_skip_freq", "rotary_base_local"))
    return dataclasses.replace(model, **full, max_position_embeddings=longest)


def _first_rows(table: LazyTensor, rows: int) -> LazyTensor:
    """The table's first ``rows``: trtllm-build takes no other number than config.json's."""
    if table.shape[0] == rows:
        return table
    return LazyTensor((rows, *table.shape[1:]), table.dtype, lambda: table.make()[:rows])


def notes_on(plan: Plan, source: ModelConfig) -> Collection[str]:
    """What a user should know of a model that is written otherwise than it is."""
    notes = []
    if plan.model.activation != source.activation:
        notes.append("note: TensorRT-LLM computes GELU by its tanh form, about 0.0005 from the exact one of this model")
    if plan.model.max_position_embeddings != source.max_position_embeddings:
        notes.append(
            f"note: config.json has no windows: its maximum length is the window, {plan.model.max_position_embeddings} "
            f"of {source.max_position_embeddings} positions, within which full attention is the same"
        )
    if plan.few_bits is not None and plan.few_bits.algorithm == "W8A16":
        notes.append("note: W8A16: the files hold unquantized weights, which trtllm-build rounds to int8")
    if plan.few_bits is not None and (joined := plan.few_bits.joined(plan.portable.tensors)):
        others = f", as have {len(joined) - 1} more weights" if len(joined) > 1 else ""
        notes.append(
            f"note: FP8: {joined[0]} has several scales{others}, and TensorRT-LLM takes one for each weight: rounded "
            "again with the largest"
        )
    return notes


def config_of(plan: Plan) -> dict[str, Any]:
    """config.json."""
    layout, portable = plan.layout, plan.portable
    quantization: dict[str, Any] = {"quant_algo": None} if plan.few_bits is None else plan.few_bits.settings()
    cache = portable.quantization is not None and bool(portable.quantization.cache)
    return {
        **fields_of(plan.model, portable.groups, plan.architecture),
        "dtype": _TYPES[portable.dtype],
        "logits_dtype": "float32",
        "use_parallel_embedding": plan.architecture.splits_words and layout.tensor > 1,
        "embedding_sharding_dim": 0,
        "quantization": {**quantization, "kv_cache_quant_algo": "FP8" if cache else None},
        "mapping": {"world_size": layout.world, "tp_size": layout.tensor, "pp_size": layout.pipeline},
    }


def write_tensorrt_llm(
    portable: PortableModel,
    folder: Path,
    *,
    layout: Layout,
    say: Callable[[str], None],
    rounding: Rounding | None = None,
) -> None:
    """Write the model into the new ``folder`` for ranks of ``layout``, with its tokenizer's files."""
    plan = plan_for(portable, layout, rounding)
    pieces = [*plan.pieces()]
    shapes = [piece.shapes() for piece in pieces]
    for note in notes_on(plan, portable.model):
        say(note)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(plan), indent=2) + "\n", encoding="utf-8")
    copy_files({name: path for name, path in portable.companions.items() if name in TOKENIZER_FILES}, folder)
    for stage, own in enumerate(by_stage(pieces, layout.pipeline)):
        held = [shape for piece, shape in zip(pieces, shapes) if piece.stage == stage]
        with ExitStack() as stack:
            files = []
            for rank in range(layout.tensor):
                made = {name: part for each in held for name, part in each[rank].items()}
                path = folder / f"rank{stage * layout.tensor + rank}.safetensors"
                files.append(stack.enter_context(SafetensorsFile(path, made)))
            for piece in own:
                for file, parts in zip(files, piece.make(piece.source.make())):
                    for name, part in parts.items():
                        file.put(name, part)


def as_computed(plan: Plan) -> PortableModel:
    """The model that TensorRT-LLM computes from the files, from the source and not from them, in fp32."""
    tensors = {
        name: LazyTensor(tensor.shape, torch.float32, partial(_as_stored, plan, name, tensor))
        for name, tensor in plan.portable.tensors.items()
    }
    return dataclasses.replace(plan.portable, tensors=tensors, quantization=None)


def _as_stored(plan: Plan, name: str, tensor: LazyTensor) -> Tensor:
    few_bits, dtype = plan.few_bits, plan.portable.dtype
    if few_bits is not None and name in few_bits.names and few_bits.algorithm != "W8A16":
        return dequantized(name, tensor, few_bits, dtype)
    factor = plan.added(name, tensor)
    if factor is not tensor:
        return factor.make().to(dtype).float() - 1
    kept = torch.float32 if name.endswith("mlp.router.weight") else dtype
    return tensor.make().to(kept).float()
