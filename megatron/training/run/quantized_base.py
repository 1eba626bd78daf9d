"""Adapters beside a quantized base (QLoRA): frozen weights stay in the bits of the checkpoint that they come from."""

from __future__ import annotations

from megatron.config.lora import LoraConfig
from megatron.core.checkpointing.base import base_of
from megatron.core.checkpointing.find import CheckpointFolder
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.native import PREFIX
from megatron.core.conversion.quantized_checkpoints import read_quantization
from megatron.core.files.remote_path import AnyPath
from megatron.core.parallel.sharding import sharded_parameters
from megatron.core.quantization.stored import StoredWeight, StoredWeights
from megatron.core.tensor_parallel.layers import LinearBase
from megatron.errors import ConfigError
from megatron.training.checkpoints.stored_parts import part_of
from megatron.training.run.run import Run

FLAG = "--lora-quantized-base"


def hold_in_few_bits(run: Run, loaded: CheckpointFolder) -> None:
    """Keep the frozen weights of the run, which it has loaded, as their codes. A collective.

    Raises ConfigError for a base that isn't quantized, and where checkpoints of the run would have to hold its weights.
    """
    operands = run.context.operands
    if not run.config.part(LoraConfig).has_quantized_base or not isinstance(operands, StoredWeights):
        return
    base: AnyPath = base_of(loaded.path) or loaded.path
    if run.config.checkpoint.save is not None and run.base is None:
        raise ConfigError(
            f"{FLAG}: checkpoints in --save {run.config.checkpoint.save} would hold the weights of {base}, too, since "
            "that is the folder of the base itself: give another --save"
        )
    stored = StoredTensors(base)
    quantization = read_quantization(CheckpointFolder(base, 0), stored)
    if quantization is None:
        raise ConfigError(
            f"{FLAG}: the checkpoint {base} is not quantized; quantize it with tools/quantize.py, or leave the flag out"
        )
    linear = {id(each.weight) for model in run.models for each in model.modules() if isinstance(each, LinearBase)}
    before, count, others = 0, 0, 0
    for model in run.models:
        for name, weight, sharding in sharded_parameters(model):
            scales = quantization.scales.get(name)
            if scales is None or weight.requires_grad:
                continue
            if id(weight) not in linear:
                others += 1
                continue
            part = part_of(scales, quantization.scheme.weights, weight, sharding, run.context.mesh)
            dtype = stored.entries[PREFIX + name].dtype
            before, count = before + weight.nbytes, count + 1
            codes = part.codes(weight)
            operands.hold(weight, StoredWeight.of(codes, part.grid, part.factors, part.zeros, part.groups, dtype))
    line = f"{count} frozen weights stay in {quantization.scheme.name}: {operands.nbytes / 2**20:,.2f} MiB on this rank"
    line += f" with their scales, instead of {before / 2**20:,.2f} MiB"
    run.reporter.say(f"  {line}{f'; {others} of experts do not' if others else ''}")
