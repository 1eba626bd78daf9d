"""The weights of a quantized checkpoint in their own bits, for generation: this rank's part of codes and scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.quantized_checkpoints import read_quantization
from megatron.core.inference.products import StoredForm
from megatron.core.inference.stored_weights import Room, stored_form
from megatron.core.parallel.sharding import sharded_parameters
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.errors import ConfigError
from megatron.training.checkpoints.stored_parts import part_of
from megatron.training.checkpoints.trained_model import TrainedModel

FLAG = "--quantization stored"
_LAYERS = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


@dataclass(frozen=True)
class StoredWeights:
    """Forms of this rank's weights, by the ids that products ask for. ``scheme``: its name, and its ``bits``.
    ``before``: bytes of these weights as numbers, of ``itemsize`` bytes each. ``others``: weights on the grid that stay
    numbers, since they aren't multiplied alone (experts).
    """

    forms: dict[int, StoredForm]
    scheme: str
    bits: int
    before: int
    others: int
    itemsize: int

    def report(self) -> str:
        """A line for the start-up report."""
        after = self.before // self.itemsize * self.bits / 8
        line = (
            f"{len(self.forms)} weights stay in {self.scheme}: {after / 2**20:,.2f} MiB and their scales, instead of "
            f"{self.before / 2**20:,.2f} MiB"
        )
        return line + (f"; {self.others} of experts don't" if self.others else "")


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
    own = {id(layer.weight) for layer in _layers(trained.models) if layer.weight is not None}
    forms, before, others, room = dict[int, StoredForm](), 0, 0, Room()
    for model in trained.models:
        for name, weight, sharding in sharded_parameters(model):
            scales = quantization.scales.get(sharding.tied or name)
            if scales is None:
                continue
            if id(weight) not in own:
                others += 1
                continue
            part = part_of(scales, quantization.scheme.weights, weight, sharding, trained.context.mesh)
            forms[id(weight)] = stored_form(weight, part, room)
            before += weight.nbytes
    scheme = quantization.scheme
    return StoredWeights(forms, scheme.name, scheme.weights.bits, before, others, trained.context.dtype.itemsize)


def _layers(models: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for model in models for module in model.modules() if isinstance(module, _LAYERS)]
