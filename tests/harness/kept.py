"""What a forward pass keeps for the backward pass, as torch tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megatron.core.parallel import recompute
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

    hooks = torch.autograd.graph.saved_tensors_hooks

    def inner(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        """Hooks of the model itself, which take the place of those here."""

        def keep_packed(tensor: Tensor) -> Any:
            packed = pack(tensor)
            return keep(packed) if isinstance(packed, Tensor) else packed

        return hooks(keep_packed, unpack)

    with hooks(keep, lambda tensor: tensor), patch.object(recompute, "saved_tensors_hooks", inner):
        output = model(*tokens, rng_key=StreamKey(0), **inputs)
    assert output is not None  # alive until here, with all that it refers to
    return sum(storage.nbytes() for storage in kept.values())
