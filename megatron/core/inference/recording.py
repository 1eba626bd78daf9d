"""Records the torch calls of a decoding step and replays them without the model's Python, as a CUDA graph does.

Between two products a step of few texts spends more time in Python than in torch. Which calls it makes depends on the
shapes of its tensors alone, so they are recorded, and repeated with the tensors of later steps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from megatron.core.inference.cache import CachedStep
from megatron.core.inference.states import StateAccess, advanced
from megatron.core.ops.attention import AttentionOptions
from megatron.core.ops.text_cache import Advance, TextCache

# Functions that read only a tensor's shape or type.
_OF_SHAPE = frozenset(
    ("__get__", "__len__", "_set_grad_enabled", "dim", "is_contiguous", "is_floating_point", "numel", "size", "stride")
)

_KINDS = (torch.dtype, torch.device, torch.Size)

Compute = Callable[[TextCache, Sequence[Tensor]], Tensor]
"""Computes a step from a cache and tensors, which it doesn't change."""


class RecordedSteps:
    """Computes steps as ``compute`` does. From the fourth step of each shape on it replays the calls of the second.

    The first step makes what later steps reuse, such as packed weights. The third is computed both ways. Steps of a
    shape are never replayed if a bit differs there (a kernel was called that the recorder doesn't see), or if their
    calls depend on a tensor's numbers.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self._programs: dict[tuple[torch.Size, ...], _Program | None] = {}
        self._seen: dict[tuple[torch.Size, ...], int] = {}

    def __call__(self, cache: CachedStep, tensors: Sequence[Tensor]) -> Tensor:
        """The step's result."""
        shapes = tuple([each.shape for each in tensors])
        seen = self._seen.get(shapes, 0)
        program = self._programs.get(shapes)
        if seen > 2 and program is not None:
            return program.run(cache, tensors)
        self._seen[shapes] = seen + 1
        if seen == 1:
            self._programs[shapes], result = _recorded(self._compute, cache, tensors)
            return result
        rehearsal = cache.rehearsal()
        repeated = None if program is None else program.run(rehearsal, tensors)
        result = self._compute(cache, tensors)  # after it, so that the cache keeps what the model computes
        if repeated is not None and not (torch.equal(repeated, result) and cache.has_kept(rehearsal)):
            self._programs[shapes] = None
        return result


@dataclass
class _Program:
    """The recorded calls in order: function, places of its arguments, names of the last arguments, place of its result.

    ``places`` holds all values; the first are the cache and the tensors of the step.
    """

    places: list[Any]
    calls: list[tuple[Callable[..., Any], list[int], tuple[str, ...], int]] = field(default_factory=list)
    result: int = 0

    def run(self, cache: TextCache, tensors: Sequence[Tensor]) -> Tensor:
        """Replay the calls for another step."""
        places = self.places.copy()
        places[0], places[1 : 1 + len(tensors)] = cache, tensors
        for function, given, names, place in self.calls:
            values = [places[number] for number in given]
            if names:
                named = dict(zip(names, values[-len(names) :]))
                places[place] = function(*values[: -len(names)], **named)
            else:
                places[place] = function(*values)
        found: Tensor = places[self.result]
        return found


def _recorded(compute: Compute, cache: CachedStep, tensors: Sequence[Tensor]) -> tuple[_Program | None, Tensor]:
    """The recorded calls of a step, None if they depend on a tensor's numbers, and its result."""
    with _Recorder([cache, *tensors]) as recorder:
        result = compute(_RecordedCache(cache, recorder), tensors)
    return recorder.finished(result), result


class _Recorder(TorchFunctionMode):
    """Records the calls of torch's functions in its ``with`` block. ``given``: the cache and tensors of the step."""

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self.program, self._is_whole, self._is_inside = _Program(list(given)), True, False
        self._made = list(range(len(given)))
        self._place = {id(each): place for place, each in enumerate(given)}

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, and record the call if it makes or changes tensors."""
        named = kwargs or {}
        if self._is_inside:
            return func(*args, **named)
        result, name = func(*args, **named), getattr(func, "__name__", "")
        if _has_tensors(result) or name == "__setitem__":
            if name.endswith("_") or "out" in named or not (args and result is args[0]):
                self._keep(func, args, named, result)
        elif name not in _OF_SHAPE and not isinstance(result, _KINDS):
            self._is_whole = False
        return result

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call, and record it as one call, whatever it calls itself."""
        self._is_inside = True
        try:
            result = function(*args)
        finally:
            self._is_inside = False
        self._keep(function, args, {}, result)
        return result

    def place_of(self, value: Any) -> int:
        """The place of a value: a result of an earlier call, or a constant such as a weight or a number."""
        if isinstance(value, (tuple, list)) and _has_tensors(value):
            return self._keep(_listed, value, {}, value)
        if id(value) not in self._place:
            self.program.places.append(value)
            if not isinstance(value, Tensor):
                return len(self.program.places) - 1
            self._place[id(value)] = len(self.program.places) - 1
        return self._place[id(value)]

    def finished(self, result: Tensor) -> _Program | None:
        """The program that computes ``result``; this step's tensors are dropped."""
        self.program.result = self.place_of(result)
        for place in self._made:
            self.program.places[place] = None
        return self.program if self._is_whole else None

    def _keep(self, function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any], result: Any) -> int:
        given = [self.place_of(each) for each in (*args, *named.values())]
        self.program.calls.append((function, given, tuple(named), place := self._place_for(result)))
        if isinstance(result, (tuple, list)) and function is not _listed:
            for number, each in enumerate(result):
                getter = operator.itemgetter(number)
                self.program.calls.append((getter, [place], (), self._place_for(each)))
        return place

    def _place_for(self, result: Any) -> int:
        """The place of an argument that is returned, or else a new one."""
        if id(result) not in self._place:
            self._place[id(result)] = len(self.program.places)
            self._made.append(len(self.program.places))
            self.program.places.append(result)
        return self._place[id(result)]


class _RecordedCache:
    """Records the methods of ``cache`` as single calls, since what they do depends on places and lengths."""

    def __init__(self, cache: CachedStep, recorder: _Recorder) -> None:
        self._cache, self._recorder = cache, recorder

    @property
    def max_length(self) -> int:
        """How long a text can get."""
        return self._cache.max_length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Attend to the cached keys, as a call that the recorder replays."""
        found: Tensor = self._recorder.call(type(self._cache).attend, self._cache, layer, q, k, v, options)
        return found

    def advance(self, layer: int, advance: Advance, *inputs: Tensor) -> Tensor:
        """Advance states: reading and keeping them are calls that the recorder replays, as is what lies between."""
        kind, call, cache = type(self._cache), self._recorder.call, self._cache
        access = StateAccess(
            cache.state_names(layer),
            lambda group: call(kind.read_states, cache, layer, group),
            lambda group, *states: call(kind.write_states, cache, layer, group, *states),
        )
        return advanced(cache.groups, advance, inputs, access)

    def attend_encoder(
        self, layer: int, q: Tensor, project: Callable[[Tensor], tuple[Tensor, Tensor]], options: AttentionOptions
    ) -> Tensor:
        """Attend to the encoder prompts, as a call that the recorder replays."""
        function = type(self._cache).attend_encoder
        found: Tensor = self._recorder.call(function, self._cache, layer, q, project, options)
        return found

    def with_bias(self, bias: Callable[[Tensor, Tensor], Tensor]) -> TextCache:
        """A recorded cache whose ``attend`` adds ``bias`` to the scores."""
        cache = self._recorder.call(type(self._cache).with_bias, self._cache, bias)
        return _RecordedCache(cache, self._recorder)


def _listed(*values: Any) -> list[Any]:
    return list(values)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(each, Tensor) for each in value)
    )
