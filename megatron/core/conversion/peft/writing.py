"""Adapters of ours as a PEFT folder, for the published form of their base."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.lora import LoraConfig, is_adapter, without_adapters
from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.huggingface.writing import theirs_of, write_safetensors
from megatron.core.conversion.peft.reading import PREFIX, WEIGHTS, published_type
from megatron.core.conversion.peft.settings import SETTINGS
from megatron.core.conversion.peft.units import TheirMatrix, Unit, their_matrices, without_experts
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.questions import question_for
from megatron.core.conversion.tables import to_theirs
from megatron.errors import CheckpointError

# By the class that transformers loads the model with.
_TASKS = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}


def write_peft(
    portable: PortableModel, folder: Path, *, base: str | None, others: Collection[str] = frozenset()
) -> None:
    """Write the adapters of a model into the new ``folder``. ``base``: the name of the model beside which they are.
    ``others``: our parameters that were trained beside them, whose modules are written whole.

    Raises CheckpointError for a model without adapters, and for adapters of layers that the published type of the model
    holds in another way, before anything is written.
    """
    lora = LoraConfig.among(portable.groups)
    if not lora.is_on:
        raise CheckpointError(
            "the source has no adapters (--lora-rank), and a PEFT folder holds nothing else: give --to hf"
        )
    model_type = published_type(portable.model, portable.groups, portable.companions)
    theirs, stacked = their_matrices(portable.model, portable.groups, model_type)
    _refuse_stacked(portable, theirs, stacked, model_type)
    _refuse_unclear(portable, theirs, model_type)
    held = {name: tensor.make() for name, tensor in portable.tensors.items() if is_adapter(name)}
    pairs = {
        module: found for module, matrix in theirs.items() if (found := _pair(matrix, held, portable.dtype)) is not None
    }
    if not pairs:
        raise CheckpointError("all adapters of the source are zero, so there is nothing to write: train them first")
    tensors = {
        f"{PREFIX}{module}.lora_{factor}.weight": LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.clone)
        for module, pair in pairs.items()
        for factor, tensor in zip("AB", pair)
    }
    saved = _trained_whole(portable, others, pairs, model_type)
    tensors |= {f"{PREFIX}{name}": tensor for name, tensor in saved.items()}
    folder.mkdir(parents=True)
    ranks = {module: len(a) for module, (a, _) in pairs.items()}
    settings = _settings(lora, ranks, theirs) | {
        "task_type": _TASKS.get(question_for(portable.model, portable.groups).auto_class),
        "base_model_name_or_path": base,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None,
        "fan_in_fan_out": any(theirs[module].is_transposed for module in pairs),
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_safetensors(tensors, folder / WEIGHTS[0])


def _trained_whole(
    portable: PortableModel, others: Collection[str], adapted: Collection[str], model_type: str
) -> dict[str, LazyTensor]:
    """All tensors of the published model's modules that hold one of ``others``.

    Raises CheckpointError for a module that has an adapter as well.
    """
    plain = without_adapters(portable.groups)
    matches = theirs_of(portable.model, plain, model_type)
    touched = {name.rpartition(".")[0] for match in matches if match.ours in others for name in match.theirs}
    if both := sorted(touched & {*adapted}):
        raise CheckpointError(
            f"a PEFT folder can't hold both the adapter and the trained parameters (--train-only) of {listed(both)}: "
            "give --to hf, which merges adapters"
        )
    theirs = to_theirs(matches, portable.tensors, portable.model)
    return {name: tensor for name, tensor in theirs.items() if name.rpartition(".")[0] in touched}


def _refuse_stacked(
    portable: PortableModel, theirs: Mapping[str, TheirMatrix], stacked: Mapping[str, str], model_type: str
) -> None:
    layers = {name.partition(".lora.")[0] for name in portable.tensors if is_adapter(name)}
    covered = {unit.layer for matrix in theirs.values() for unit in matrix.units}
    wrong = {module: ours for module, ours in stacked.items() if ours.removesuffix(".weight") in layers}
    if lost := sorted((layers - covered) | {ours.removesuffix(".weight") for ours in wrong.values()}):
        why = f", which holds {listed(sorted(wrong))} as one tensor" if wrong else ""
        raise CheckpointError(
            f"adapters of {listed(lost)} have no form in PEFT for a {model_type}{why}: give --to hf, which merges them"
        )


def _refuse_unclear(portable: PortableModel, theirs: Mapping[str, TheirMatrix], model_type: str) -> None:
    """Raise CheckpointError for what PEFT would leave out: it takes modules for experts by their last names alone."""
    layers = {name.partition(".lora.")[0] for name in portable.tensors if is_adapter(name)}
    adapted = {name: each for name, each in theirs.items() if {unit.layer for unit in each.units} & layers}
    lasts = {
        module.rpartition(".")[2]
        for module, each in theirs.items()
        if any(unit.expert is not None for unit in each.units)
    }
    unclear = sorted(
        module
        for module, each in adapted.items()
        if module.rpartition(".")[2] in lasts and all(unit.expert is None for unit in each.units)
    )
    if unclear:
        raise CheckpointError(
            f"adapters of {listed(unclear)} can't be written: PEFT would take these modules of a {model_type} for "
            "experts, whose names end alike; leave them out of --lora-targets, or give --to hf, which merges adapters"
        )


def _pair(matrix: TheirMatrix, held: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """The factors of a matrix of theirs, ``a`` [r, in] and ``b`` [out, r], in fp32 or wider; None where no part of it
    has an adapter, or only zeros.

    Matrices of ours with the same ``a`` share it; else each has ranks of its own.
    """
    parts = list[tuple[Tensor, Tensor, int]]()
    for number, unit in enumerate(matrix.units):
        if (factors := _factors(unit, held)) is not None:
            parts.append((*factors, number))
    if not parts:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    is_shared = all(torch.equal(parts[0][0], a) for a, *_ in parts)
    groups = [parts] if is_shared else [[part] for part in parts]
    a = torch.cat([group[0][0] for group in groups]).to(wide)
    b = torch.zeros(matrix.rows, len(a), dtype=wide)
    first = 0
    for group in groups:
        rank = len(group[0][0])
        for _, own, number in group:
            rows = matrix.owners == number
            b[rows, first : first + rank] = own[matrix.positions[rows]].to(wide)
        first += rank
    return a, b


def _factors(unit: Unit, held: Mapping[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """The factors of a unit, without ranks that are zero in both: imported adapters are filled up with such."""
    name = without_experts(unit)
    if name.parameter("a") not in held:
        return None
    a, b = held[name.parameter("a")], held[name.parameter("b")]
    if unit.expert is not None:
        a, b = a[unit.expert], b[unit.expert]
    is_used = a.any(1) | b.any(0)
    if unit.expert is not None:  # whose ranks are one
        is_used[:] = held[name.parameter("a")].any() | held[name.parameter("b")].any()
    return (a[is_used], b[:, is_used]) if is_used.any() else None


def _settings(lora: LoraConfig, ranks: Mapping[str, int], theirs: Collection[str]) -> dict[str, Any]:
    """Settings under which every module has its rank and our scale."""
    rank = max(ranks.values(), key=lambda each: (sum(one == each for one in ranks.values()), each))
    others = {module: each for module, each in ranks.items() if each != rank}
    scale, is_root = lora.scale, lora.lora_rank_stabilized

    def alpha(own: int) -> float:
        exact = lora.lora_alpha if own == lora.rank else scale * (math.sqrt(own) if is_root else own)
        return int(exact) if float(exact).is_integer() else exact

    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha(rank),
        "rank_pattern": _patterns(others),
        "alpha_pattern": _patterns({module: alpha(each) for module, each in others.items()}),
        "use_rslora": is_root,
        "lora_dropout": lora.lora_dropout,
        "target_modules": _targets(ranks, theirs),
        "bias": "none",
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _patterns(of_modules: Mapping[str, float]) -> dict[str, float]:
    return {module.replace(".", r"\."): value for module, value in sorted(of_modules.items())}


def _targets(adapted: Collection[str], theirs: Collection[str]) -> list[str]:
    """The shortest names that mean the modules with adapters and no others: the last parts, or whole names."""
    taken = {module.rpartition(".")[2] for module in theirs if module not in adapted}
    lasts = {module: module.rpartition(".")[2] for module in adapted}
    return sorted({module if last in taken else last for module, last in lasts.items()})
