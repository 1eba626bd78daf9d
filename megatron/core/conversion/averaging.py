"""The mean of several checkpoints of one model, with weights of their own, as a portable model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatron.config.flags import flags_of
from megatron.core.conversion.native import read_native
from megatron.core.conversion.portable import LazyTensor, PortableModel, refuse_quantized
from megatron.core.files.remote_path import AnyPath
from megatron.errors import CheckpointError


def read_average(root: AnyPath, *, step: int | None = None, merges: bool = True) -> PortableModel:
    """The model of a checkpoint with the moving average of its weights, rounded to their type; raises CheckpointError
    as ``read_native``, and where there is no average.
    """
    return averaged([(str(root), read_native(root, step=step, averaged=True, merges=merges))], [1.0])


def averaged(named: Sequence[tuple[str, PortableModel]], shares: Sequence[float]) -> PortableModel:
    """The model whose tensors are sums of those of the models times their ``shares``, which add up to 1; each is made
    in fp64 when it is written, and rounded once to the type of the last model, whose settings it has.

    ``named``: what messages call each model. Raises CheckpointError for models of different architectures.
    """
    where, last = named[-1]
    for other, model in named:
        refuse_quantized(model, other, what="a mean of weights lies on no grid")
    for other, model in named[:-1]:
        if differences := _differences(other, model, where, last):
            raise CheckpointError(f"{other} and {where} are different models: {'; '.join(differences)}")
    tensors = {
        name: LazyTensor(
            tensor.shape, tensor.dtype, partial(_mean, [model.tensors[name] for _, model in named], shares)
        )
        for name, tensor in last.tensors.items()
    }
    return dataclasses.replace(last, tensors=tensors)


def _mean(tensors: Sequence[LazyTensor], shares: Sequence[float]) -> Tensor:
    last = tensors[-1]
    total = torch.zeros(last.shape, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total.add_(tensor.make().to(torch.float64), alpha=share)
    return total.to(last.dtype)


def _differences(here: str, model: PortableModel, there: str, other: PortableModel) -> list[str]:
    """What an average of the two would mix, a few words each."""
    mine, others = ({type(group): group for group in (each.model, *each.groups)} for each in (model, other))
    found = [f"only one of them has settings of {kind.__name__}" for kind in mine.keys() ^ others.keys()]
    for kind in mine.keys() & others.keys():
        for spec in flags_of(kind):
            values = [getattr(each[kind], spec.field) for each in (mine, others)]
            if spec.options.architecture and values[0] != values[1]:
                found.append(f"{spec.positive} is {values[0]} in {here} and {values[1]} in {there}")
    kinds = [each.tokenizer.tokenizer_type for each in (model, other)]
    if kinds[0] != kinds[1]:
        found.append(f"the tokenizer is a {kinds[0]} in {here} and a {kinds[1]} in {there}")
    return found
