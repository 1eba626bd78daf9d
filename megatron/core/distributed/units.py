"""Units: the parts of a model whose weights or gradients are in memory together (ZeRO 2 and 3).

A unit is a layer, or a module outside of layers that holds parameters itself: an embedding, a final norm, a head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from megatron.core.parallel.sharding import sharding_of
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.errors import RESTART_CANNOT_HELP, ParallelError

Pass = Literal["F", "B", "I", "W"]
"""Forward, backward, and its halves: gradients of inputs, gradients of weights."""


@dataclass(frozen=True, eq=False)
class Unit:
    """One unit of a chunk. ``layer``: the module that is called once in a forward pass; None outside of layers, where
    parameters are read by others, too, such as an output matrix by the loss.
    """

    name: str
    layer: nn.Module | None
    parameters: tuple[nn.Parameter, ...]


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a chunk, in the order in which their parameters are registered; together they hold each once.

    Layers are the members of the outermost ``ModuleList`` or ``ModuleDict``. Tied parameters are a unit each, and those
    that a layer has in common with another one, or with a module outside of layers.
    """
    layers = dict(_layers(model, ""))
    within = {module for layer in layers.values() for module in layer.modules()}
    owners = Counter(each for layer in layers.values() for each in layer.parameters())
    for module in model.modules():
        owners.update(set(module.parameters(recurse=False)) if module not in within else ())
    groups: dict[str, tuple[nn.Module | None, list[nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        tied = getattr(parameter, "sharding", None) and sharding_of(parameter).tied
        tied = tied or (name if owners[parameter] > 1 else None)
        place = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        unit = tied or place or name.rpartition(".")[0] or name
        layer = None if tied or place is None else layers[place]
        groups.setdefault(unit, (layer, []))[1].append(parameter)
    return [Unit(name, layer, tuple(parameters)) for name, (layer, parameters) in groups.items()]


def _layers(module: nn.Module, place: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        at = f"{place}.{name}" if place else name
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{at}.{number}", layer) for number, layer in child.named_children())
        else:
            yield from _layers(child, at)


class UnitMemory(Protocol):
    """What happens at the borders of units; every rank calls these in the same order."""

    def acquire(self, unit: Unit, following: Unit | None) -> None:
        """Have the unit's weights in memory, and start to bring those of the ``following`` one."""

    def release(self, unit: Unit) -> None:
        """The unit's weights are not needed for now."""

    def complete(self, unit: Unit) -> None:
        """The unit's gradients of one backward pass are complete."""


class UnitBorders:
    """Tells ``memory`` when each unit of the chunks ``models`` begins and ends, in forward and backward passes.

    Layers: hooks around their calls, and nodes of autograd's graph at their outputs and inputs. What lies outside of
    layers is needed for a whole pass of its chunk, see ``during``. ``weight_gradients``: where the running backward
    pass leaves gradients of weights for later, a unit is complete later, too.
    """

    def __init__(self, models: Sequence[nn.Module], memory: UnitMemory, weight_gradients: WeightGradients) -> None:
        self._memory, self._weight_gradients = memory, weight_gradients
        self._hooks: list[RemovableHandle] = []
        self._in_backward = False
        self._completed = set[Unit]()
        units = [units_of(model) for model in models]
        self._layers = [[unit for unit in each if unit.layer is not None] for each in units]
        self._outside = [[unit for unit in each if unit.layer is None] for each in units]
        for layers in self._layers:
            for before, unit, after in zip([None, *layers[:-1]], layers, [*layers[1:], None]):
                self._watch(unit, before, after)

    def detach(self) -> None:
        """Watch no calls any more."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def during(self, chunk: int, kind: Pass) -> Iterator[None]:
        """Mark the block as one pass of a chunk, if chunks are watched."""
        if not self._layers:
            yield
            return
        layers, outside = self._layers[chunk], self._outside[chunk]
        self._in_backward = kind != "F"
        self._completed.clear()
        for unit in outside if kind != "W" else ():
            self._memory.acquire(unit, None)
        with _explained():
            yield
        if kind in ("B", "W"):
            for unit in (*reversed(layers), *outside):
                if unit not in self._completed:
                    self._memory.complete(unit)
        for unit in (*layers, *outside):
            self._memory.release(unit)
        self._in_backward = False

    def _watch(self, unit: Unit, before: Unit | None, after: Unit | None) -> None:
        layer, memory = unit.layer, self._memory
        assert layer is not None, "units outside of layers are called by nobody"

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            memory.acquire(unit, None if self._in_backward else after)
            return _with_border((args, kwargs), partial(self._leave_backward, unit))

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            output = _with_border(output, partial(memory.acquire, unit, before), of=unit)
            if not self._in_backward:  # a layer that is computed again is about to be needed
                memory.release(unit)
            return output

        self._hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        self._hooks.append(layer.register_forward_hook(leave))

    def _leave_backward(self, unit: Unit) -> None:
        self._memory.release(unit)
        self._weight_gradients.do(partial(self._complete, unit), at_once=False)

    def _complete(self, unit: Unit) -> None:
        self._completed.add(unit)
        self._memory.complete(unit)


@contextmanager
def _explained() -> Iterator[None]:
    """Name the cause and the ways out where torch says what it does of an output of ``_Border``."""
    try:
        yield
    except RuntimeError as error:
        if f"of {_Border.__name__} is a view and is being modified inplace" not in str(error):
            raise
        raise ParallelError(
            "the model changes the input or output of a layer in place, as nn.ReLU(inplace=True) and x += y do: make "
            "new tensors there, or leave --data-parallel-sharding-strategy optim_grads and optim_grads_params out",
            exit_code=RESTART_CANNOT_HELP,
        ) from error


def _with_border(tensors: Any, passed: Callable[[], None], of: Unit | None = None) -> Any:
    """A structure of tensors; when all of their gradients are there, ``passed`` is called, and then they go on.

    ``of``: the unit whose output this is, in which every tensor must be found.
    """
    if not torch.is_grad_enabled():
        return tensors
    leaves, structure = tree_flatten(tensors)
    strange = [each for each in leaves if not isinstance(each, (Tensor, int, float, str, bool, type(None)))]
    if of is not None and strange:
        raise ParallelError(
            f"the layer {of.name} returns a {type(strange[0]).__name__}: with --data-parallel-sharding-strategy "
            "optim_grads and optim_grads_params a layer returns tensors, or tuples, lists and dicts of them",
            exit_code=RESTART_CANNOT_HELP,
        )
    places = [place for place, each in enumerate(leaves) if isinstance(each, Tensor) and each.requires_grad]
    if not places:
        return tensors
    marked: tuple[Tensor, ...] = _Border.apply(passed, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, each in zip(places, marked):
        leaves[place] = each
    return tree_unflatten(leaves, structure)


class _Border(torch.autograd.Function):
    """Identity of tensors that calls ``passed`` in the backward pass, when all their gradients are there."""

    @staticmethod
    @override
    def forward(ctx: Any, passed: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.passed = passed
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.passed()
        return None, *grads
