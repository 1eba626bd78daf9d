"""The weights of a quantized checkpoint in their own bits, for generation: this rank's part of codes and scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.quantized_checkpoints import read_quantization
from megatron.core.inference.products import StoredForm
from megatron.core.inference.stored_weights import Room, stored_form
from megatron.core.moe.experts import StackedLinear
from megatron.core.parallel.sharding import sharded_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.errors import ConfigError
from megatron.training.checkpoints.stored_parts import of_each_expert, part_of
from megatron.training.checkpoints.trained_model import TrainedModel

FLAG = "--quantization stored"
_LAYERS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


@dataclass(frozen=True)
class StoredWeights:
    """Forms of this rank's weights, by the ids that products ask for; ``experts``: of the matrices of stacked ones.
    ``scheme``: its name, and its ``bits``. ``before``: bytes of these weights as numbers, of ``itemsize`` bytes each.
    ``others``: weights on the grid that stay numbers, since parts of them are multiplied (of latent attention).
    """

    forms: dict[int, StoredForm]
    experts: dict[int, list[StoredForm]]
    scheme: str
    bits: int
    before: int
    others: int
    itemsize: int

    def report(self) -> str:
        """A line for the start-up report."""
        after = self.before // self.itemsize * self.bits / 8
        count = len(self.forms) + len(self.experts)
        line = (
            f"{count} weights stay in {self.scheme}: {after / 2**20:,.2f} MiB and their scales, instead of "
            f"{self.before / 2**20:,.2f} MiB"
        )
        return line + (f"; {self.others} of latent attention don't" if self.others else "")


def stored_weights(trained: TrainedModel) -> StoredWeights:
    """The weights of the model that lie on its checkpoint's grid. ConfigError for a checkpoint that isn't quantized,
    and for other devices than CPUs.
    """
    folder, device = trained.folder, trained.context.device
    quantization = read_quantization(folder, StoredTensors(folder.path))
    if quantization is None:
        raise ConfigError(
            f"{FLAG} can't be used: the checkpoint {folder.path} is not quantized; give --quantization int8, which "
            "rounds its weights, or quantize it with tools/quantize.py"
        )
    if device.type != "cpu":
        raise ConfigError(
            f"{FLAG} can't be used: it is for CPUs, and the model is on {device.type}; leave the flag out"
        )
    own, stacked = _weights(trained.models)
    forms, experts, before, others, room = dict[int, StoredForm](), dict[int, list[StoredForm]](), 0, 0, Room()
    for model in trained.models:
        for name, weight, sharding in sharded_parameters(model):
            scales = quantization.scales.get(sharding.tied or name)
            if scales is None:
                continue
            if id(weight) not in own | stacked:
                others += 1
                continue
            part = part_of(scales, quantization.scheme.weights, weight, sharding, trained.context.mesh)
            if id(weight) in own:
                forms[id(weight)] = stored_form(weight, part, room)
            else:
                pairs = zip(weight.flatten(1, -2), of_each_expert(part, len(weight)), strict=True)
                experts[id(weight)] = [stored_form(matrix, each, room) for matrix, each in pairs]
            before += weight.nbytes
    scheme, itemsize = quantization.scheme, trained.context.dtype.itemsize
    return StoredWeights(forms, experts, scheme.name, scheme.weights.bits, before, others, itemsize)


def _weights(models: Iterable[nn.Module]) -> tuple[set[int], set[int]]:
    """Ids of the weights that are multiplied as they are, and of the stacked ones of experts."""
    modules = [module for model in models for module in model.modules()]
    in_parts = {id(each.linear_kv_up_proj) for each in modules if isinstance(each, LatentAttention)}
    layers = [each for each in modules if isinstance(each, _LAYERS) and id(each) not in in_parts]
    return (
        {id(each.weight) for each in layers if each.weight is not None},
        {id(each.weight) for each in modules if isinstance(each, StackedLinear)},
    )
