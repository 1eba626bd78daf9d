"""What a forward pass keeps for the backward pass, as torch tells it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.parallel.rng import StreamKey


def bytes_kept(model: nn.Module, *tokens: Tensor, **inputs: Tensor) -> int:
    """Bytes of all storages, parameters aside, that a forward pass over ``tokens`` leaves behind."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(*tokens, rng_key=StreamKey(0), **inputs)
    assert output is not None  # alive until here, with all that it refers to
    return sum(storage.nbytes() for storage in kept.values())
