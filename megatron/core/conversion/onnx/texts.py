"""Attention of a graph: a batch of texts that go on after keys and values which the caller keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron.core.ops.attention.request import AttentionOptions
from megatron.core.ops.text_cache import Advance, TextCache

Kept = tuple[Tensor, ...]
"""Keys ``[b, g, p, d]`` and values of a layer, or keys alone where values are parts of them."""


@dataclass(frozen=True)
class Texts:
    """The cache of a step, as layers see it. Unlike in our own generation, a batch has rows: ``q`` is [s, b, n, d].

    ``mask`` [b, p + s]: 1 for tokens, 0 for padding, of what is kept and of the step. ``kept``: of layers before this
    step; none of an encoder's. ``after``: gets the same with this step's tokens. ``max_length``: how long a text can
    get. ``encoder``: what cross-attention attends to, [t, b, h], with its ``encoder_mask`` [b, t]; its keys and values
    of each layer are in ``of_encoder``, where they are put if they are missing. ``bias``: of positions of queries and
    keys.
    """

    mask: Tensor
    kept: Mapping[int, Kept]
    max_length: int
    after: dict[int, Kept] = field(default_factory=dict)
    encoder: Tensor | None = None
    encoder_mask: Tensor | None = None
    of_encoder: dict[int, Kept] = field(default_factory=dict)
    bias: Callable[[Tensor, Tensor], Tensor] | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """Attention [s, b, n·d] of the step's tokens to those before them and to themselves."""
        keys, values = _by_head(k), _by_head(v)
        if layer in self.kept:
            key, *value = self.kept[layer]
            keys = torch.cat((key, keys), 2)
            values = torch.cat((value[0], values), 2) if value else keys[..., : v.shape[-1]]
            self.after[layer] = (keys, values) if value else (keys,)
        places = torch.arange(keys.shape[2])
        queries = torch.arange(q.shape[0]) + (keys.shape[2] - q.shape[0])
        ahead = places - queries.unsqueeze(1)
        scores = _scores(q, keys, options)
        if options.slopes is not None:
            scores = scores - ahead.abs() * options.slopes.to(scores.dtype)[:, None, None]
        if self.bias is not None:
            scores = scores + self.bias(queries, places)
        before, after = options.sides
        seen = self.mask[:, None, None, :].bool()
        if before is not None:
            seen = seen & (ahead >= -before)
        if after is not None:
            seen = seen & (ahead <= after)
        return _mixed(scores, seen, values, options)

    def attend_encoder(
        self, layer: int, q: Tensor, project: Callable[[Tensor], tuple[Tensor, Tensor]], options: AttentionOptions
    ) -> Tensor:
        """Attention [s, b, n·d] of the step's tokens to the encoder's."""
        if layer not in self.of_encoder:
            assert self.encoder is not None, "a decoder that begins is given the encoder's output"
            keys, values = project(self.encoder)
            self.of_encoder[layer] = (_by_head(keys), _by_head(values))
        keys, values = self.of_encoder[layer]
        assert self.encoder_mask is not None, "cross-attention has a mask"
        return _mixed(_scores(q, keys, options), self.encoder_mask[:, None, None, :].bool(), values, options)

    def advance(self, layer: int, advance: Advance, *inputs: Tensor) -> Tensor:
        """Not there: models with recurrent states are refused before."""
        raise AssertionError("recurrent layers have no graph")

    def with_bias(self, bias: Callable[[Tensor, Tensor], Tensor]) -> TextCache:
        """The cache with ``bias(query_positions, key_positions)`` [n, queries, keys] added to scores."""
        return replace(self, bias=bias)


def _by_head(x: Tensor) -> Tensor:
    """[s, b, g, d] -> [b, g, s, d]."""
    return x.permute(1, 2, 0, 3)


def _scores(q: Tensor, keys: Tensor, options: AttentionOptions) -> Tensor:
    """[b, n, s, t], capped where the model caps them."""
    query, keys = _by_head(q) * options.scale, _for_queries(keys, q)
    scores = torch.matmul(query, keys.transpose(2, 3))
    return scores if options.soft_cap is None else (scores / options.soft_cap).tanh() * options.soft_cap


def _for_queries(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values [b, g, t, d] as [b, n, t, d]: each head serves several of queries."""
    times = q.shape[2] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, dim=1)


def _mixed(scores: Tensor, seen: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """What scores [b, n, s, t] make of values, [s, b, n·d]."""
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if options.sinks is not None:
        sinks = options.sinks[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    probabilities = scores.softmax(-1)[..., : values.shape[2]]
    times = scores.shape[1] // values.shape[1]
    values = values if times == 1 else values.repeat_interleave(times, dim=1)
    return torch.matmul(probabilities, values).permute(2, 0, 1, 3).flatten(2)
