"""Keys and values of all texts, in blocks, and what one step of the model sees of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.inference.invariance import TILE, fewest_queries
from megatron.core.inference.step_plan import PlanRow, RunnerLimits, StepPlan
from megatron.core.ops.attention import AttentionOptions, attention
from megatron.core.ops.attention.cached import CachedHeads
from megatron.core.ops.attention.cached_calls import CachedBackend, CachedCall, cached_backend

_Kind = tuple[tuple[int, int] | None, int]
"""The window of a layer, and of how many queries its calls have a multiple."""

Encoded = tuple[Tensor, Tensor]
"""Keys and values of an encoder prompt, ``[T, 1, groups, width]``."""

_MOST_QUERIES = 512  # of a call, which has a number for each query and key


class KeyValueCache:
    """Keys and values of every layer, ``[groups, places, width]``: position p of a text lies at the place that its
    block table gives. Block 0 is never written: its zeros stand for keys behind a text.

    ``encoded``: for each request's slot the encoder's output ``[T, 1, h]``, and by layer the keys and values of it.
    """

    def __init__(
        self, layers: Mapping[int, CachedHeads], limits: RunnerLimits, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size, self.max_length, self.device = limits.block_size, limits.max_length, device
        places = limits.num_blocks * limits.block_size

        def table(groups: int, width: int) -> Tensor:
            return torch.zeros(groups, places, width, dtype=dtype, device=device)

        self.keys = {layer: table(heads.groups, heads.key_width) for layer, heads in layers.items()}
        self.values = {
            layer: self.keys[layer][..., : heads.value_width]
            if heads.values_in_keys
            else table(heads.groups, heads.value_width)
            for layer, heads in layers.items()
        }
        self.encoded: dict[int, tuple[Tensor, dict[int, Encoded]]] = {}
        self._gathered: dict[str, Tensor] = {}
        self.tail: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values: tokens x layers x groups x (width of a key and of a value) x size of a number."""
        tensors = (*self.keys.values(), *self.values.values())
        return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())

    def keep_encoded(self, slot: int, encoded: Tensor) -> None:
        """Keep the encoder's output for the request that has the slot now."""
        self.encoded[slot] = (encoded, {})

    def step(self, plan: StepPlan, *, backend: str, in_tiles: bool = False) -> CachedStep:
        """What the model sees in a step. ``in_tiles``: results don't depend on how texts are cut into steps."""
        return CachedStep(self, plan, backend, in_tiles=in_tiles)

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
        size = shape[0] * shape[1] * shape[2]
        if kind not in self._gathered or len(self._gathered[kind]) < size:
            self._gathered[kind] = tensor.new_empty(2 * size)
        return torch.index_select(tensor, 1, places, out=self._gathered[kind][:size].view(shape))


@dataclass(frozen=True)
class _Part:
    """A call, which of the step's tokens are its queries, where its keys lie, and how many queries of nothing it has
    before and after them.
    """

    call: CachedCall
    tokens: slice
    places: slice | Tensor
    padding: tuple[int, int] = (0, 0)


class CachedStep:
    """An ``AttentionCache`` for the rows of a plan."""

    def __init__(self, cache: KeyValueCache, plan: StepPlan, backend: str, *, in_tiles: bool) -> None:
        self._cache, self._backend, self._in_tiles = cache, backend, in_tiles
        self._rows = [row for row in plan.rows if not row.encoder]
        self._ends = np.cumsum([0, *(len(row.tokens) for row in self._rows)]).tolist()
        self._is_decoding = all(len(row.tokens) == 1 for row in self._rows)
        written = [self._places(row, row.start, row.start + len(row.tokens)) for row in self._rows]
        self._written = self._index(written)
        self._more: Callable[[Tensor, Tensor], Tensor] | None = None
        self._parts: dict[_Kind, list[_Part]] = {}
        self._biases: dict[tuple[int, _Kind], Tensor | None] = {}
        copies = [(row.copies, row.blocks[row.start // cache.block_size]) for row in self._rows if row.copies]
        if copies:
            cache.copy(copies)
        if in_tiles:
            behind = self._index([self._behind(row) for row in self._rows])
            if len(behind):
                cache.clear(behind)

    @property
    def max_length(self) -> int:
        """See ``AttentionCache``."""
        return self._cache.max_length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """See ``AttentionCache``."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(1, self._written, k[:, 0].transpose(0, 1))
        if values.data_ptr() != keys.data_ptr():
            values.index_copy_(1, self._written, v[:, 0].transpose(0, 1))
        by_call = self._by_call if self._backend == "auto" else self._by_row
        return by_call(q[:, 0], keys, values, options).unsqueeze(1)

    def attend_encoder(
        self, layer: int, q: Tensor, project: Callable[[Tensor], Encoded], options: AttentionOptions
    ) -> Tensor:
        """See ``AttentionCache``."""
        results = []
        for row, start, stop in zip(self._rows, self._ends, self._ends[1:]):
            encoded, layers = self._cache.encoded[row.slot]
            if layer not in layers:
                layers[layer] = project(encoded)
            results.append(attention(q[start:stop], *layers[layer], options, backend=self._backend))
        return torch.cat(results)

    def with_bias(self, bias: Callable[[Tensor, Tensor], Tensor]) -> CachedStep:
        """See ``AttentionCache``."""
        step = copy(self)
        step._more, step._biases = bias, {}
        return step

    def _by_call(self, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """``q`` [t, n, d] to [t, n·e]."""
        window, groups, backend = options.window, len(keys), cached_backend(keys, values, options)
        fewest = 1
        if self._in_tiles:
            fewest = fewest_queries(backend, keys, values, options, heads=q.shape[1] // groups)
        kind = (window, fewest)
        if kind not in self._parts:
            self._parts[kind] = [part for number in range(len(self._rows)) for part in self._parts_of(number, kind)]
        if self._is_decoding and self._more is None and options.slopes is None and not (window and self._in_tiles):
            return self._one_each(q, keys, values, options, backend, kind)
        is_causal = groups == q.shape[1] and not self._in_tiles and not self._is_biased(options)
        results = []
        for number, part in enumerate(self._parts[kind]):
            query = q[part.tokens]
            count = part.call.queries
            if count > len(query):
                query = F.pad(query, (0, 0, 0, 0, *part.padding))
            causal = is_causal and part.call.is_whole and count > 1
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
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        backend: CachedBackend,
        kind: _Kind,
    ) -> Tensor:
        """As ``_by_call``, where each text has one query, which stands for all that are computed together with it."""
        (texts, heads, width), groups, count = q.shape, len(keys), max(1, kind[1])
        each = q.view(texts, groups, -1, width)
        if count > 1:
            each = each.unsqueeze(3).expand(-1, -1, -1, count, -1).contiguous().view(texts, groups, -1, width)
        cache, parts = self._cache, self._parts[kind]
        results = [
            backend.attend(
                query,
                cache.gathered("keys", keys, part.places),
                cache.gathered("values", values, part.places),
                options,
                self._hides_tail(row.start, part.call, query.shape[1], q) if self._in_tiles else None,
                causal=False,
            )
            for query, part, row in zip(each.unbind(), parts, self._rows)
        ]
        found = torch.stack(results).view(texts, heads, count, -1)
        if count > 1:
            found = found[torch.arange(texts), :, [part.padding[0] for part in parts]]
        return found.reshape(texts, -1)

    def _hides_tail(self, position: int, call: CachedCall, queries: int, q: Tensor) -> Tensor:
        """A bias ``[1, queries, keys]`` without keys behind ``position``, a view."""
        visible = position + 1 - call.first_key
        zeros = self._cache.max_length
        if self._cache.tail is None or self._cache.tail.dtype != q.dtype:
            tail = q.new_full((zeros + TILE,), -math.inf)
            tail[:zeros] = 0
            self._cache.tail = tail
        row = self._cache.tail[zeros - visible : zeros - position - 1 + call.stop_key]
        return row.expand(1, queries, -1)

    def _is_biased(self, options: AttentionOptions) -> bool:
        return options.slopes is not None or options.window is not None or self._more is not None

    def _bias(
        self, key: tuple[int, _Kind], call: CachedCall, q: Tensor, groups: int, options: AttentionOptions
    ) -> Tensor | None:
        """Made once for all layers, whose slopes are the same."""
        if key not in self._biases:
            bias = call.bias(options, self._more, q)
            if bias is not None:
                heads = q.shape[1] // groups
                by_group = bias.expand(heads, -1, -1) if len(bias) == 1 else bias
                bias = by_group.reshape(-1, heads * call.queries, by_group.shape[2])
            self._biases[key] = bias
        return self._biases[key]

    def _by_row(self, q: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """The same by a backend that the user named."""
        results = []
        for row, start, stop in zip(self._rows, self._ends, self._ends[1:]):
            positions = torch.arange(row.start + len(row.tokens), device=self._cache.device)
            places = self._index([self._places(row, 0, len(positions))])
            bias = None if self._more is None else self._more(positions[row.start :], positions)
            of_row = replace(options, window=_window_over(options.window, len(positions)), bias=bias)
            given = (q[start:stop, None], keys[:, places].transpose(0, 1)[:, None])
            value = values[:, places].transpose(0, 1)[:, None]
            results.append(attention(*given, value, of_row, backend=self._backend)[:, 0])
        return torch.cat(results)

    def _parts_of(self, number: int, kind: _Kind) -> Iterator[_Part]:
        """The calls of a row: of all its queries that lie in one tile, or of as many as a call may have."""
        (window, fewest), row, token = kind, self._rows[number], self._ends[number]
        start, end = row.start, row.start + len(row.tokens)
        while start < end:
            if self._in_tiles:
                first = start // TILE * TILE
                last = first + TILE
            else:
                first, last = start, min(end, start + _MOST_QUERIES)
            stop = min(end, last)
            first_key = 0 if window is None else max(0, first - window[0])
            if self._in_tiles:
                first_key = first_key // TILE * TILE
            asking = range(start // fewest * fewest, -(-stop // fewest) * fewest)
            call = CachedCall(asking.start, len(asking), first_key, last)
            yield _Part(
                call,
                slice(token, token + stop - start),
                self._slice_or_index(row, first_key, last),
                (start - asking.start, asking.stop - stop),
            )
            token += stop - start
            start = stop

    def _slice_or_index(self, row: PlanRow, first: int, stop: int) -> slice | Tensor:
        size = self._cache.block_size
        blocks = row.blocks[first // size : -(-stop // size)]
        if stop <= len(row.blocks) * size and blocks == tuple(range(blocks[0], blocks[0] + len(blocks))):
            start = blocks[0] * size + first % size
            return slice(start, start + stop - first)
        return self._index([self._places(row, first, stop)])

    def _behind(self, row: PlanRow) -> np.ndarray:
        """Places behind the text, in the tile and in the blocks that this row is the first to write to."""
        end = row.start + len(row.tokens)
        full = min(-(-end // TILE) * TILE, len(row.blocks) * self._cache.block_size)
        is_new = -(-row.start // TILE) < -(-end // TILE)
        return self._places(row, end, full if is_new else end)

    def _places(self, row: PlanRow, start: int, stop: int) -> np.ndarray:
        """Where positions of a text lie, in block 0 behind its blocks."""
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
