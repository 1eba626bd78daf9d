"""Units: the parts of a model whose weights or gradients are in memory together (ZeRO 2 and 3).

A unit is a layer, or a module outside of layers that holds parameters itself: an embedding, a final norm, a head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """One unit of a chunk. ``layer``: the module that is called once in a forward pass; None outside of layers.

    ``module``: outside of layers, the one that has these parameters for itself. It may be called, such as a final norm,
    or others read its parameters, such as the loss an output matrix, or both. None: parameters that are read anywhere.
    """

    name: str
    layer: nn.Module | None
    parameters: tuple[nn.Parameter, ...]
    module: nn.Module | None = None

    @property
    def looks_up(self) -> bool:
        """Whether its module only picks rows, whose gradients don't depend on the weights."""
        return type(self.module) is nn.Embedding or getattr(self.module, "looks_up", False)


def units_of(model: nn.Module) -> list[Unit]:
    """The units of a chunk, in the order in which their parameters are registered; together they hold each once.

    Layers are the members of the outermost ``ModuleList`` or ``ModuleDict``. Tied parameters are a unit each, and those
    that a layer has in common with another one, or with a module outside of layers.
    """
    layers = dict(_layers(model, ""))
    within = {module for layer in layers.values() for module in layer.modules()}
    owners = Counter(each for layer in layers.values() for each in layer.parameters())
    outside = dict[nn.Parameter, list[nn.Module]]()
    for module in model.modules():
        for each in set(module.parameters(recurse=False)) if module not in within else ():
            outside.setdefault(each, []).append(module)
    owners.update(each for each, modules in outside.items() for _ in modules)
    groups: dict[str, tuple[nn.Module | None, list[nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        tied = getattr(parameter, "sharding", None) and sharding_of(parameter).tied
        tied = tied or (name if owners[parameter] > 1 else None)
        place = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        unit = tied or place or name.rpartition(".")[0] or name
        layer = None if tied or place is None else layers[place]
        groups.setdefault(unit, (layer, []))[1].append(parameter)
    return [
        Unit(name, layer, tuple(parameters), None if layer else _only_owner(parameters, outside, owners))
        for name, (layer, parameters) in groups.items()
    ]


def _only_owner(
    parameters: Sequence[nn.Parameter], outside: Mapping[nn.Parameter, list[nn.Module]], owners: Counter[nn.Parameter]
) -> nn.Module | None:
    """The module outside of layers, without modules inside, that alone has all of the parameters."""
    modules = {module for each in parameters for module in outside.get(each, ())}
    if len(modules) != 1 or any(owners[each] > 1 for each in parameters):
        return None
    (module,) = modules
    return None if any(True for _ in module.children()) else module


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
        """Free the unit's weights, unless memory keeps them for later passes."""

    def complete(self, unit: Unit) -> None:
        """Start to sum the unit's gradients over the ranks: those of one backward pass are there."""

    def settle(self) -> None:
        """Wait for gradients that are being summed, as their memory is about to be needed."""


class _Chunk:
    """The units of a chunk, and what passes have shown of those that a module outside of layers has.

    ``anywhere``: units that no module has for itself. ``read``: units that were read by others than their module.
    ``early``: those that were needed before the last layer had ended. ``held``: those that were read in this pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units = units_of(model)
        self.layers = [unit for unit in self.units if unit.layer is not None]
        self.owned = [unit for unit in self.units if unit.module is not None]
        self.anywhere = [unit for unit in self.units if unit.layer is None and unit.module is None]
        self.read, self.early, self.held = set[Unit](), set[Unit](), set[Unit]()
        self.is_past_layers = False


class UnitBorders:
    """Tells ``memory`` when each unit of the chunks ``models`` begins and ends, in forward and backward passes.

    Layers: hooks around their calls, and nodes of autograd's graph at their outputs and inputs. Modules outside of
    them: the same, and reads. A weight that is read without a call, as the loss reads an output matrix, stays until the
    end of a forward pass, and is there in the backward pass until that reaches the last layer, or ends. What no module
    has for itself is there during a whole pass. See ``during``. ``weight_gradients``: where the running backward pass
    leaves gradients of weights for later, a unit is complete later, too.
    """

    def __init__(self, models: Sequence[nn.Module], memory: UnitMemory, weight_gradients: WeightGradients) -> None:
        self._memory, self._weight_gradients = memory, weight_gradients
        self._hooks: list[RemovableHandle] = []
        self._running: _Chunk | None = None
        self._in_backward = self._only_evaluates = False
        self._completed = set[Unit]()
        self._chunks = [_Chunk(model) for model in models]
        for chunk in self._chunks:
            near = [unit for unit in chunk.units if unit not in chunk.anywhere]
            for before, unit, after in zip([None, *near[:-1]], near, [*near[1:], None]):
                before = None if before is None or before.looks_up else before
                (self._watch_layer if unit.layer is not None else self._watch_module)(chunk, unit, before, after)

    def detach(self) -> None:
        """Watch no calls and reads any more."""
        for hook in self._hooks:
            hook.remove()
        for parameter in (each for chunk in self._chunks for unit in chunk.owned for each in unit.parameters):
            del parameter.acquired_on_reading  # type: ignore[attr-defined]

    @contextmanager
    def during(self, chunk: int, kind: Pass) -> Iterator[None]:
        """Mark the block as one pass of a chunk, if chunks are watched."""
        if not self._chunks:
            yield
            return
        self._running = here = self._chunks[chunk]
        self._in_backward, self._only_evaluates = kind != "F", not torch.is_grad_enabled()
        here.is_past_layers = False
        here.held.clear()
        self._completed.clear()
        needed = [*here.anywhere, *(unit for unit in here.owned if self._in_backward and unit in here.read)]
        if self._in_backward:
            self._memory.settle()
        for unit in needed if kind != "W" else ():
            self._memory.acquire(unit, None)
        with _explained():
            yield
        if kind in ("B", "W"):
            for unit in reversed(here.units):
                if unit not in self._completed:
                    self._memory.complete(unit)
        for unit in here.units:
            self._memory.release(unit)
        self._running, self._in_backward = None, False

    def _watch_layer(self, chunk: _Chunk, unit: Unit, before: Unit | None, after: Unit | None) -> None:
        layer, memory = unit.layer, self._memory
        assert layer is not None, "the unit is a layer"
        is_last = unit is chunk.layers[-1]

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            memory.acquire(unit, None if self._in_backward else after)
            return _with_border((args, kwargs), partial(self._leave_backward, unit))

        def enter_backward() -> None:
            if is_last and not chunk.is_past_layers:
                self._end_before_layers(chunk)
            memory.acquire(unit, before)

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            output = _with_border(output, enter_backward, of=unit)
            if not self._in_backward:  # a layer that is computed again is about to be needed
                memory.release(unit)
                if is_last:
                    chunk.is_past_layers = True
                    memory.settle()
            return output

        self._hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        self._hooks.append(layer.register_forward_hook(leave))

    def _watch_module(self, chunk: _Chunk, unit: Unit, before: Unit | None, after: Unit | None) -> None:
        module, memory = unit.module, self._memory
        assert module is not None, "the unit is a module's"

        def enter(module: nn.Module, args: Any) -> None:
            if self._running is chunk:
                self._note_use(chunk, unit)
                memory.acquire(unit, None if self._in_backward else after)

        def enter_backward(grads: Any) -> None:
            memory.acquire(unit, before)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self._running is not chunk:
                return
            leaves, _ = tree_flatten(output)
            storages = {each.untyped_storage()._cdata for each in unit.parameters}
            tensors = [each for each in leaves if isinstance(each, Tensor)]
            if _others(leaves) or any(each.untyped_storage()._cdata in storages for each in tensors):
                self._hold(chunk, unit, for_backward=not unit.looks_up)  # others read its weights, or may
            elif not unit.looks_up:
                for node in (each.grad_fn for each in tensors if each.grad_fn is not None):
                    node.register_prehook(enter_backward)
            if not self._in_backward and unit not in chunk.held:
                memory.release(unit)

        self._hooks.append(module.register_forward_pre_hook(enter))
        self._hooks.append(module.register_forward_hook(leave))
        for parameter in unit.parameters:
            parameter.acquired_on_reading = partial(self._read, chunk, unit)  # type: ignore[attr-defined]

    def _note_use(self, chunk: _Chunk, unit: Unit) -> None:
        if not (self._in_backward or chunk.is_past_layers):
            chunk.early.add(unit)

    def _read(self, chunk: _Chunk, unit: Unit, *, for_backward: bool = True) -> bool:
        """Acquire a unit outside of layers that is read while it is released, if its chunk runs; whether it did."""
        if self._running is not chunk:
            return False
        self._note_use(chunk, unit)
        self._hold(chunk, unit, for_backward=for_backward)
        self._memory.acquire(unit, None)
        return True

    def _hold(self, chunk: _Chunk, unit: Unit, *, for_backward: bool) -> None:
        """Keep the unit until the pass ends, and have it in the backward pass of what has one."""
        chunk.held.add(unit)
        if for_backward and not (self._in_backward or self._only_evaluates):
            chunk.read.add(unit)

    def _end_before_layers(self, chunk: _Chunk) -> None:
        """The backward pass reaches the last layer: what was needed after it alone is complete."""
        chunk.is_past_layers = True
        for unit in reversed(chunk.owned):
            if unit not in chunk.early:
                self._leave_backward(unit)

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
    if of is not None and (strange := _others(leaves)):
        raise ParallelError(
            f"what the layer {of.name} returns holds an object of class {type(strange[0]).__name__}: with "
            "--data-parallel-sharding-strategy optim_grads and optim_grads_params let the layer return tensors, or "
            "tuples, lists and dicts of them",
            exit_code=RESTART_CANNOT_HELP,
        )
    places = [place for place, each in enumerate(leaves) if isinstance(each, Tensor) and each.requires_grad]
    if not places:
        return tensors
    marked: tuple[Tensor, ...] = _Border.apply(passed, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, each in zip(places, marked):
        leaves[place] = each
    return tree_unflatten(leaves, structure)


def _others(leaves: Sequence[Any]) -> list[Any]:
    return [each for each in leaves if not isinstance(each, (Tensor, int, float, str, bool, type(None)))]


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
