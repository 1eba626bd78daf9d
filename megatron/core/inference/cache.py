"""The cache of all texts, paged keys and values and states of fixed size, and the view of it that one step uses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.inference.decode_attention import OneQuery, SharedCall, shared_calls
from megatron.core.inference.invariance import TILE, fewest_queries
from megatron.core.inference.states import RowGroup, StateAccess, StateTables, advanced, groups_of
from megatron.core.inference.step_plan import PlanRow, RunnerLimits, StepPlan
from megatron.core.ops.attention import AttentionOptions, attention
from megatron.core.ops.attention.cached_calls import CachedBackend, CachedCall, cached_backend
from megatron.core.ops.text_cache import Advance, Paged, Slotted
from megatron.errors import ConfigError

_Kind = tuple[tuple[int, int] | None, int]
"""A layer's window, and the multiple to which its calls pad the number of queries."""

Encoded = tuple[Tensor, Tensor]
"""Keys and values of an encoder prompt, ``[T, 1, groups, width]``."""

_MOST_QUERIES = 512  # of a call, whose scores take memory for each query and key
_COPIED_BYTES = 1 << 18  # of a text's keys and values in a layer: copying more takes a CPU longer than a call more


class KeyValueCache:
    """Keys and values of every layer, ``[groups, places, width]``: position p of a text is at the place that its
    block table gives. Block 0 is never written: its zeros pad the keys of a text. ``states``: of layers whose state has
    a fixed size.

    ``encoder_outputs``: for each request's slot the encoder's hidden states ``[T, 1, h]``, and by layer their keys and
    values. ``most_copied``: keys of a text that are copied so that it shares a call with others.
    """

    def __init__(
        self,
        layers: Mapping[int, Paged],
        limits: RunnerLimits,
        *,
        dtype: torch.dtype,
        device: torch.device,
        slotted: Mapping[int, Slotted] | None = None,
    ) -> None:
        self.block_size, self.max_length, self.device = limits.block_size, limits.max_length, device
        self.states = StateTables(slotted or {}, slots=limits.num_slots, device=device)
        self._dtype, self._joint_attention = dtype, limits.joint_attention
        places = limits.num_blocks * limits.block_size

        def table(groups: int, width: int) -> Tensor:
            return torch.zeros(groups, places, width, dtype=dtype, device=device)

        self.keys = {layer: table(heads.groups, heads.key_width) for layer, heads in layers.items()}
        self.has_values = {layer: not heads.values_in_keys for layer, heads in layers.items()}
        self.values = {
            layer: self.keys[layer][..., : heads.value_width]
            if heads.values_in_keys
            else table(heads.groups, heads.value_width)
            for layer, heads in layers.items()
        }
        widest = max(heads.groups * (heads.key_width + heads.value_width) for heads in layers.values()) if layers else 1
        self.most_copied = _COPIED_BYTES // (widest * dtype.itemsize) if device.type == "cpu" else sys.maxsize
        self.encoder_outputs: dict[int, tuple[Tensor, dict[int, Encoded]]] = {}
        self._gathered: dict[str, Tensor] = {}
        self._views: dict[int, tuple[tuple[int, ...], Tensor, Tensor]] = {}
        self._how: dict[tuple[int, bool], tuple[CachedBackend, int]] = {}

    def seen_together(self, row: PlanRow) -> list[tuple[int, int]]:
        """First position, and the one after the last, of each run of a row's tokens that see each other both ways."""
        if row.prefix > row.start:
            return [(row.start, min(row.prefix, row.start + len(row.tokens)))]
        if self._joint_attention != "bidirectional" or row.images is None:
            return []
        return [(row.start + first, row.start + stop) for first, stop in row.images.runs()]

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values, tokens x layers x groups x (width of a key and of a value) x size of a number, and
        of states.
        """
        tensors = (*self.keys.values(), *self.values.values())
        paged = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return sum(paged.values()) + self.states.num_bytes

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy the content of blocks, from the first of each pair to the second; all are read before any is written."""
        sources, targets = torch.tensor(blocks, device=self.device).unbind(1)
        tensors = {each.data_ptr(): each for each in (*self.values.values(), *self.keys.values())}
        for tensor in tensors.values():  # a key that holds its value comes after it
            by_block = tensor.view(len(tensor), -1, self.block_size, tensor.shape[2])
            by_block.index_copy_(1, targets, by_block[:, sources])

    def clear(self, places: Tensor) -> None:
        """Zero keys and values that an earlier text may have left."""
        for tensor in (*self.keys.values(), *self.values.values()):
            tensor.index_fill_(1, places, 0.0)

    def gathered(self, kind: str, tensor: Tensor, places: slice | Tensor) -> Tensor:
        """Keys or values at ``places``: a view, or copied to where the last of the ``kind`` were copied to."""
        if isinstance(places, slice):
            return tensor[:, places]
        shape = (len(tensor), len(places), tensor.shape[2])
        return torch.index_select(tensor, 1, places, out=self._buffer(kind, shape))

    def of_call(self, layer: int, call: SharedCall) -> tuple[Tensor, Tensor]:
        """Keys and values ``[texts, groups, keys, width]`` for texts that share a call. The layer's last views are
        kept, as texts often see the same places in the next step.
        """
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(call.places, Tensor):
            of_keys, of_values = (
                self.gathered(kind, each, call.places) for kind, each in (("keys", keys), ("values", values))
            )
            return call.by_text(of_keys), call.by_text(of_values)
        wanted = (call.texts, call.keys, *call.places)
        found = self._views.get(layer)
        if found is None or found[0] != wanted:
            self._views[layer] = found = (wanted, call.view_of(keys), call.view_of(values))
        return found[1:]

    def how(self, layer: int, heads: int, options: AttentionOptions, *, in_tiles: bool) -> tuple[CachedBackend, int]:
        """The backend of a layer's calls, and the number that their query counts are multiples of."""
        if (layer, in_tiles) not in self._how:
            keys, values = self.keys[layer], self.values[layer]
            backend, fewest = cached_backend(keys, values, options), 1
            if in_tiles:
                fewest = fewest_queries(backend, keys, values, options, heads=heads // len(keys))
            self._how[layer, in_tiles] = backend, fewest
        return self._how[layer, in_tiles]

    def _buffer(self, kind: str, shape: tuple[int, int, int]) -> Tensor:
        size = math.prod(shape)
        if kind not in self._gathered or len(self._gathered[kind]) < size:
            self._gathered[kind] = torch.empty(2 * size, dtype=self._dtype, device=self.device)
        return self._gathered[kind][:size].view(shape)


@dataclass(frozen=True)
class _Part:
    """A call of attention, the step's tokens that are its queries, the places of its keys, and how many padding queries
    it has before and after them.
    """

    call: CachedCall
    tokens: slice
    places: slice | Tensor
    padding: tuple[int, int] = (0, 0)


class CachedStep:
    """A ``TextCache`` for the rows of a plan. ``in_tiles``: results don't depend on how texts are cut."""

    def __init__(self, cache: KeyValueCache, plan: StepPlan, backend: str, *, in_tiles: bool) -> None:
        self._cache, self._backend, self._in_tiles = cache, backend, in_tiles
        self._rows = [row for row in plan.rows if not row.encoder]
        self._together = [cache.seen_together(row) for row in self._rows]
        self._ends = np.cumsum([0, *(len(row.tokens) for row in self._rows)]).tolist()
        self._is_decoding = all(len(row.tokens) == 1 for row in self._rows)
        written = [self._places(row, row.start, row.start + len(row.tokens)) for row in self._rows]
        self._written = self._index(written)
        self._more: Callable[[Tensor, Tensor], Tensor] | None = None
        self._parts: dict[_Kind, list[_Part]] = {}
        self._biases: dict[tuple[int, _Kind], Tensor | None] = {}
        self._shared: dict[tuple[_Kind, bool], list[tuple[SharedCall, Tensor | None]]] = {}
        self._groups = groups_of(self._rows, one_by_one=in_tiles, device=cache.device) if cache.states.tables else []
        self._rehearsed: dict[tuple[int, int], tuple[Tensor, ...]] | None = None
        cache.states.clear([row.slot for row in self._rows if row.start == 0])
        copies = [(row.copies, row.blocks[row.start // cache.block_size]) for row in self._rows if row.copies]
        if copies:
            cache.copy(copies)
        if in_tiles:
            behind = [self._behind(row) for row in self._rows if self._begins_tile(row)]
            if any(map(len, behind)):
                cache.clear(self._index(behind))

    @property
    def max_length(self) -> int:
        """How long a text can get."""
        return self._cache.max_length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Store keys and values of the step's tokens for ``layer``, and attend from each token to its text so far."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(1, self._written, k.squeeze(1).transpose(0, 1))
        if self._cache.has_values[layer]:
            values.index_copy_(1, self._written, v.squeeze(1).transpose(0, 1))
        if self._backend != "auto":
            return self._by_row(q[:, 0], keys, values, options).unsqueeze(1)
        backend, fewest = self._cache.how(layer, q.shape[2], options, in_tiles=self._in_tiles)
        kind = (options.window, fewest)
        if (
            self._is_decoding
            and self._more is None
            and options.slopes is None
            and not (options.window and self._in_tiles)
        ):
            return self._one_each(layer, q, options, backend, kind)
        return self._by_call(q[:, 0], keys, values, options, backend, kind).unsqueeze(1)

    def advance(self, layer: int, advance: Advance, *inputs: Tensor) -> Tensor:
        """Compute the step's tokens from their texts' states of ``layer``, and keep the states behind them."""
        if layer not in self._cache.states.tables:
            raise ConfigError(
                f"layer {layer} keeps a state of its texts and declares none, so they can't be generated with a cache: "
                "give its module a text_state that returns the state's shapes (Slotted)"
            )
        names = self.state_names(layer)
        access = StateAccess(names, partial(self.read_states, layer), partial(self.write_states, layer))
        return advanced(self._groups, advance, inputs, access)

    @property
    def groups(self) -> Sequence[RowGroup]:
        """The groups of rows whose states advance together."""
        return self._groups

    def state_names(self, layer: int) -> tuple[str, ...]:
        """The names of a layer's states, in the order in which they are read and written."""
        return tuple(self._cache.states.tables[layer])

    def read_states(self, layer: int, group: int) -> list[Tensor]:
        """The states of a group of rows, by its number."""
        found = self._cache.states.read(layer, self._groups[group].slots)
        is_kept = self._groups[group].is_kept and self._rehearsed is None
        return found if is_kept else [state.clone() for state in found]

    def write_states(self, layer: int, group: int, *states: Tensor) -> None:
        """Keep the states of a group of rows, unless it is of drafts."""
        if not self._groups[group].is_kept:
            return
        if self._rehearsed is None:
            self._cache.states.write(layer, self._groups[group].slots, states)
        else:
            self._rehearsed[layer, group] = states

    def rehearsal(self) -> CachedStep:
        """The step for a computation that is repeated: its states are not kept."""
        step = copy(self)
        step._rehearsed = {}
        return step

    def has_kept(self, rehearsal: CachedStep) -> bool:
        """Whether this step kept the states that ``rehearsal`` would have kept, bit for bit."""
        wanted = rehearsal._rehearsed or {}
        return all(
            torch.equal(state.to(kept.dtype), kept)
            for (layer, group), states in wanted.items()
            for state, kept in zip(states, self._cache.states.read(layer, self._groups[group].slots))
        )

    def attend_encoder(
        self, layer: int, q: Tensor, project: Callable[[Tensor], Encoded], options: AttentionOptions
    ) -> Tensor:
        """Attend from each token to all of its text's encoder prompt."""
        results = []
        for row, start, stop in zip(self._rows, self._ends, self._ends[1:]):
            hidden_states, layers = self._cache.encoder_outputs[row.slot]
            if layer not in layers:
                layers[layer] = project(hidden_states)
            results.append(attention(q[start:stop], *layers[layer], options, backend=self._backend))
        return torch.cat(results)

    def with_bias(self, bias: Callable[[Tensor, Tensor], Tensor]) -> CachedStep:
        """A cache whose ``attend`` adds ``bias`` to the scores."""
        step = copy(self)
        step._more, step._biases = bias, {}
        return step

    def _by_call(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        backend: CachedBackend,
        kind: _Kind,
    ) -> Tensor:
        """``q`` [t, n, d] to [t, n·e]."""
        groups = len(keys)
        if kind not in self._parts:
            self._parts[kind] = [part for number in range(len(self._rows)) for part in self._parts_of(number, kind)]
        is_causal = groups == q.shape[1] and not self._in_tiles and not self._is_biased(options)
        results = []
        for number, part in enumerate(self._parts[kind]):
            query = q[part.tokens]
            count = part.call.queries
            if count > len(query):
                query = F.pad(query, (0, 0, 0, 0, *part.padding))
            causal = is_causal and part.call.is_whole and count > 1 and not part.call.is_together
            bias = None if causal else self._bias((number, kind), part.call, q, groups, options)
            found = backend.attend(
                query.view(count, groups, -1, q.shape[2]).permute(1, 2, 0, 3).reshape(groups, -1, q.shape[2])
                if count > 1
                else query.view(groups, -1, q.shape[2]),
                self._cache.gathered("keys", keys, part.places),
                self._cache.gathered("values", values, part.places),
                options,
                bias,
                causal=causal,
            )
            if count > 1:
                found = found.view(groups, -1, count, found.shape[2]).permute(2, 0, 1, 3).reshape(count, -1)
                found = found[part.padding[0] : count - part.padding[1]]
            results.append(found.reshape(-1, q.shape[1] * values.shape[2]))
        return torch.cat(results)

    def _one_each(
        self, layer: int, q: Tensor, options: AttentionOptions, backend: CachedBackend, kind: _Kind
    ) -> Tensor:
        """``attend`` where each text has one query, repeated as often as a call must have queries."""
        shared = self._shared.get((kind, backend.takes_texts))
        if shared is None:
            shared = self._shared[kind, backend.takes_texts] = self._shared_calls(kind, q, backend)
        groups, fewest, width = len(self._cache.keys[layer]), kind[1], q.shape[3]
        results = []
        for call, bias in shared:
            query = q if call.rows is None else q[call.rows]
            if fewest == 1:
                query = query.view(call.texts, groups, -1, width)
            else:  # copied: by a stride of 0 bits would differ
                query = query.view(call.texts, groups, -1, 1, width).expand(-1, -1, -1, fewest, -1)
                query = query.contiguous().view(call.texts, groups, -1, width)
            found = backend.attend(query, *self._cache.of_call(layer, call), options, bias, causal=False)
            if isinstance(call.chosen, Tensor):
                found = found.view(call.texts, groups, -1, fewest, found.shape[3])
                found = found[torch.arange(call.texts, device=q.device), :, :, call.chosen]
            elif fewest > 1:
                found = found[:, :, call.chosen :: fewest]
            results.append(found.reshape(call.texts, 1, -1))
        if shared[0][0].rows is None:
            return results[0]
        order = torch.cat([call.rows for call, _ in shared if call.rows is not None])
        return torch.empty_like(together := torch.cat(results)).index_copy_(0, order, together)

    def _shared_calls(
        self, kind: _Kind, like: Tensor, backend: CachedBackend
    ) -> list[tuple[SharedCall, Tensor | None]]:
        """Calls of texts that have one query each, with what hides keys."""
        window, fewest = kind
        queries = []
        for row in self._rows:
            first = 0 if window is None else max(0, row.start - window[0])
            stop = row.start // TILE * TILE + TILE if self._in_tiles else row.start + 1
            queries.append(OneQuery(row.start, first, stop, self._slice_or_places(row, first, stop)))
        calls = shared_calls(
            queries,
            fewest=fewest,
            is_exact=self._in_tiles,
            is_alone=not backend.takes_texts,
            most_copied=self._cache.most_copied,
            device=self._cache.device,
        )
        return [(call, call.bias(like)) for call in calls]

    def _is_biased(self, options: AttentionOptions) -> bool:
        return options.slopes is not None or options.window is not None or self._more is not None

    def _bias(
        self, key: tuple[int, _Kind], call: CachedCall, q: Tensor, groups: int, options: AttentionOptions
    ) -> Tensor | None:
        """Bias of one call, made once for all layers, whose slopes are the same."""
        if key not in self._biases:
            bias = call.bias(options, self._more, q)
            if bias is not None:
                heads = q.shape[1] // groups
                by_group = bias.expand(heads, -1, -1) if len(bias) == 1 else bias
                bias = by_group.reshape(-1, heads * call.queries, by_group.shape[2])
            self._biases[key] = bias
        return self._biases[key]

    def _by_row(self, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """``attend`` by the backend of ``--attention-backend``, text by text."""
        results = []
        for number, (row, start, stop) in enumerate(zip(self._rows, self._ends, self._ends[1:])):
            positions = torch.arange(row.start + len(row.tokens), device=self._cache.device)
            places = self._index([self._places(row, 0, len(positions))])
            bias = None if self._more is None else self._more(positions[row.start :], positions)
            of_row = replace(options, window=_window_over(options.window, len(positions)), bias=bias)
            if together := self._together[number]:
                ahead = torch.zeros(1, len(row.tokens), dtype=torch.long, device=self._cache.device)
                for first, last in together:
                    own = positions[first:last]
                    ahead[0, first - row.start : last - row.start] = last - 1 - own
                of_row = replace(of_row, ahead=ahead)
            given = (q[start:stop, None], keys[:, places].transpose(0, 1)[:, None])
            value = values[:, places].transpose(0, 1)[:, None]
            results.append(attention(*given, value, of_row, backend=self._backend)[:, 0])
        return torch.cat(results)

    def _parts_of(self, number: int, kind: _Kind) -> Iterator[_Part]:
        """The calls of a row: one for each tile of queries, or for as many queries as a call may have."""
        (window, fewest), row, token = kind, self._rows[number], self._ends[number]
        start, end = row.start, row.start + len(row.tokens)
        runs = self._together[number]
        while start < end:
            run = next((last for first, last in runs if first <= start < last), None)
            if run is not None:
                last = run
            elif self._in_tiles:
                last = start // TILE * TILE + TILE
            else:
                last = min(end, start + _MOST_QUERIES)
            stop = min(end, last, *(first for first, _ in runs if first > start))
            last = last if self._in_tiles else stop
            begin = start // TILE * TILE if self._in_tiles else start
            first_key = 0 if window is None else max(0, begin - window[0])
            if self._in_tiles:
                first_key = first_key // TILE * TILE
            asking = range(start // fewest * fewest, -(-stop // fewest) * fewest)
            call = CachedCall(asking.start, len(asking), first_key, last, is_together=run is not None)
            places = self._slice_or_places(row, first_key, last)
            yield _Part(
                call,
                slice(token, token + stop - start),
                places if isinstance(places, slice) else self._index([places]),
                (start - asking.start, asking.stop - stop),
            )
            token += stop - start
            start = stop

    def _slice_or_places(self, row: PlanRow, first: int, stop: int) -> slice | np.ndarray:
        size = self._cache.block_size
        blocks = row.blocks[first // size : -(-stop // size)]
        if stop <= len(row.blocks) * size and blocks == tuple(range(blocks[0], blocks[0] + len(blocks))):
            start = blocks[0] * size + first % size
            return slice(start, start + stop - first)
        return self._places(row, first, stop)

    def _begins_tile(self, row: PlanRow) -> bool:
        return -(-row.start // TILE) < -(-(row.start + len(row.tokens)) // TILE)

    def _behind(self, row: PlanRow) -> np.ndarray:
        """Places after the text, in a tile that this row is the first to write to."""
        end = row.start + len(row.tokens)
        return self._places(row, end, min(-(-end // TILE) * TILE, len(row.blocks) * self._cache.block_size))

    def _places(self, row: PlanRow, start: int, stop: int) -> np.ndarray:
        """Places of a text's positions; in block 0 for positions after its blocks."""
        size = self._cache.block_size
        positions = np.arange(start, stop)
        known = np.arange(start, min(stop, len(row.blocks) * size))
        found = np.zeros_like(positions)
        found[: len(known)] = np.array(row.blocks, dtype=np.int64)[known // size] * size + known % size
        return found

    def _index(self, places: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(places)).to(self._cache.device)


def _window_over(window: tuple[int, int] | None, keys: int) -> tuple[int, int] | None:
    return None if window is None or window[0] >= keys - 1 else window
