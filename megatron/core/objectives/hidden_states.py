"""Losses of hidden states in distillation: a layer's output is to be like that of a layer of the teacher.

They are side losses, so any pipeline stage may have some: their gradients start where the layer ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.distillation import DistillationConfig, HiddenPair
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.costs import Costs, Workload
from megatron.core.parallel.sharding import Sharding, sharding_of
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.core.tensor_parallel.initialize import Normal, initialize_parameters
from megatron.core.tensor_parallel.layers import make_parameter, partial_under_sequence_parallel
from megatron.core.tensor_parallel.regions import sequence_slice
from megatron.core.transformer.inputs import LayerInputs

TOKENS = "distilled_tokens"
"""Field of a batch: the loss mask [b, S] once more, for stages that have no other loss."""


@dataclass
class _Pass:
    """A microbatch on its way through both models. ``taught``: outputs of the teacher's layers."""

    losses: SideLosses
    mask: Tensor | None
    taught: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Compared:
    """What one layer's output is compared with: by pair, the teacher's hidden states, and which tokens count."""

    losses: SideLosses
    mask: Tensor
    targets: Mapping[HiddenPair, Tensor]


class HiddenStateLosses:
    """The losses of the pairs in ``settings``, each with the same share of their factor."""

    def __init__(self, settings: DistillationConfig) -> None:
        self.pairs = settings.hidden_pairs
        self._coefficient = settings.distill_hidden_scale / max(len(self.pairs), 1)
        self._pass: _Pass | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the losses in reports."""
        return tuple(pair.name for pair in self.pairs)

    def attach(
        self,
        student: nn.Module,
        teacher: nn.Module,
        *,
        widths: tuple[int, int],
        context: ParallelContext,
        seed: int | None,
    ) -> None:
        """Compare the layers of parts of both models from now on, which must both have a pair's layers or neither.

        ``widths``: of both models' hidden states. Projections become parameters of ``student``. ``seed``: of their
        initial values; without it they are whatever memory holds.
        """
        by_layer = dict[nn.Module, list[HiddenPair]]()
        for pair in self.pairs:
            layer, source = _layer(student, pair.student), _layer(teacher, pair.teacher)
            if layer is None or source is None:
                continue
            source.register_forward_hook(self._note(pair.teacher))
            by_layer.setdefault(layer, []).append(pair)
            if widths[0] != widths[1]:
                made = _projection(widths, context)
                student.register_parameter(pair.parameter, made)
                if seed is not None:
                    initialize_parameters([(pair.parameter, made, sharding_of(made))], context.mesh, seed=seed)
        for layer, pairs in by_layer.items():
            projections = {pair: getattr(student, pair.parameter, None) for pair in pairs}
            layer.register_forward_hook(self._compare(projections, context))

    @contextmanager
    def during(self, microbatch: Microbatch) -> Iterator[None]:
        """Mark the block as a microbatch's forward pass through both models, the teacher's first."""
        self._pass = _Pass(microbatch.side_losses, microbatch.tensors.get(TOKENS))
        try:
            yield
        finally:
            self._pass = None

    def _note(self, number: int | None) -> Any:
        def note(module: nn.Module, given: Any, output: Tensor) -> None:
            if self._pass is not None:
                self._pass.taught[number] = output

        return note

    def _compare(self, projections: Mapping[HiddenPair, nn.Parameter | None], context: ParallelContext) -> Any:
        """A hook that adds a layer's losses. What it compares is kept for a recomputation, when no pass is going on."""

        def compare(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            inputs = given[1] if len(given) > 1 and isinstance(given[1], LayerInputs) else None
            compared = None if inputs is None else inputs.kept.get(module)
            if compared is None and self._pass is not None:
                assert self._pass.mask is not None, "stages with a pair of layers read which tokens count"
                targets = {pair: self._pass.taught[pair.teacher] for pair in projections}
                compared = _Compared(self._pass.losses, self._pass.mask, targets)
                if inputs is not None:
                    inputs.kept[module] = compared
            return output if compared is None else self._added(output, compared, projections, context)

        return compare

    def _added(
        self,
        hidden: Tensor,
        compared: _Compared,
        projections: Mapping[HiddenPair, nn.Parameter | None],
        context: ParallelContext,
    ) -> Tensor:
        mask = sequence_slice(compared.mask.t(), context)  # [s, b]
        for pair, target in compared.targets.items():
            found = hidden
            if (projection := projections[pair]) is not None:
                found = torch.nn.functional.linear(hidden.to(projection.dtype), projection)
            distances = _distances(found, target, pair) * mask
            hidden = compared.losses.add(
                hidden, pair.name, distances.sum(), mask.sum(), context=context, coefficient=self._coefficient
            )
        return hidden

    def costs(self, student: nn.Module, width: int, workload: Workload) -> Costs:
        """Costs of the losses of a part of the model: of a teacher's ``width`` its hidden states are kept, and the
        student's projected ones, both also in fp32.
        """
        found = Costs()
        for pair in self.pairs:
            if _layer(student, pair.student) is None:
                continue
            projection = getattr(student, pair.parameter, None)
            wide = max(workload.stream_itemsize, 4)
            kept = workload.rows * width * (workload.stream_itemsize + 2 * wide)
            flops = 0.0 if projection is None else 2.0 * projection.numel() * workload.all_tokens
            found += Costs(flops=flops, kept=kept)
        return found


def _projection(widths: tuple[int, int], context: ParallelContext) -> nn.Parameter:
    """A matrix from the student's hidden states to the teacher's width, whole on every rank."""
    student, teacher = widths
    sharding = Sharding((teacher, student), partial_grad=partial_under_sequence_parallel(context))
    return make_parameter(sharding, Normal(student**-0.5), context)


def _layer(model: nn.Module, number: int | None) -> nn.Module | None:
    """A layer of a part of a model by its number, or the norm after the last one; None where the part hasn't got it."""
    name = "decoder.final_layernorm" if number is None else f"decoder.layers.{number}"
    return next((module for found, module in model.named_modules() if found == name), None)


def _distances(hidden: Tensor, target: Tensor, pair: HiddenPair) -> Tensor:
    """``[s, b, h]`` twice to ``[s, b]``, in fp32 or wider."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    hidden, target = hidden.to(dtype), target.to(dtype)
    if pair.distance == "mse":
        return (hidden - target).square().mean(-1)
    return 1.0 - torch.nn.functional.cosine_similarity(hidden, target, dim=-1)


def stage_of_pair(pair: HiddenPair, ours: Sequence[range], theirs: Sequence[range]) -> tuple[int, int]:
    """The numbers of the stages that have a pair's layers. ``ours``, ``theirs``: layers of each stage."""

    def place(number: int | None, stages: Sequence[range]) -> int:
        return len(stages) - 1 if number is None else next(at for at, held in enumerate(stages) if number in held)

    return place(pair.student, ours), place(pair.teacher, theirs)
