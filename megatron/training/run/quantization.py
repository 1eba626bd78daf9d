"""Quantization-aware training of a run, and trained models as their exports are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.config.lora import LoraConfig
from megatron.config.quantization_training import QuantizationTrainingConfig
from megatron.config.run import RunConfig
from megatron.core.conversion.portable import parameters_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.operands import Operands
from megatron.core.quantization.fake import FakeQuantized
from megatron.core.quantization.scheme import scheme_named
from megatron.core.quantization.stored import StoredWeights
from megatron.core.quantization.targets import is_quantized
from megatron.errors import ConfigError


def trained_operands(config: RunConfig, mesh: Mesh) -> Operands:
    """What layers of the run multiply: rounded operands with ``--quantization-aware-training``, frozen weights in their
    bits with ``--lora-quantized-base``.

    Raises ConfigError for a ``--qat-group-size`` that doesn't divide the inputs of a weight.
    """
    rounding = config.part(QuantizationTrainingConfig).rounding
    if rounding is None:
        return StoredWeights() if config.part(LoraConfig).has_quantized_base else Operands()
    name, group = rounding
    scheme = scheme_named(name, group_size=group)
    for weight, sharding in parameters_of(config.model, config.extra).items():
        if is_quantized(weight):
            try:
                scheme.weights.check_divides((sharding.shape[-2], sharding.shape[-1]), weight)
            except ConfigError as error:
                raise ConfigError(str(error).replace("--group-size", "--qat-group-size")) from None
    return FakeQuantized(scheme, mesh)


@torch.no_grad()
def round_weights(config: RunConfig, models: Sequence[nn.Module], mesh: Mesh) -> None:
    """Give models the rounded weights that they were trained with, once, for evaluation and generation. A collective of
    tensor-parallel ranks.
    """
    operands = trained_operands(config, mesh)
    if operands.replaces:
        for model in models:
            for name, parameter in model.named_parameters():
                if is_quantized(name):
                    parameter.copy_(operands.weight(parameter)())
