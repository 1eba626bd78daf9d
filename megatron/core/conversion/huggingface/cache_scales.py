"""FP8 scales of the keys and values that attention keeps, in quantized Hugging Face folders.

compressed-tensors names them ``ATTENTION.k_scale`` and ``ATTENTION.v_scale``; ModelOpt's readers look for
``ATTENTION.k_proj.k_scale`` and ``ATTENTION.v_proj.v_scale``, so folders that they read have these, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.tables import Match

CACHE_SCHEME: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "dynamic": False,
    "symmetric": True,
}
"""What config.json says of them as ``kv_cache_scheme``."""
_KINDS = ("k", "v")
_PROJECTION = ".self_attention.linear_proj.weight"


def cache_names(kind: str, attention: str) -> tuple[str, ...]:
    """Names that programs give to the scale of a ``kind``, k or v."""
    projection = f"{attention}.{kind}_proj"
    return f"{attention}.{kind}_scale", f"{projection}.{kind}_scale", f"{projection}.output_scale"


def _attentions(found: Sequence[Match]) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Each attention by our name and theirs, with their names of its projections' weights."""
    theirs = frozenset(name for match in found for name in match.theirs)
    for match in found:
        if match.ours.endswith(_PROJECTION):
            own = match.theirs[0].removesuffix(".weight").rpartition(".")[0]
            yield match.ours.removesuffix(".linear_proj.weight"), own, theirs


def written_cache_scales(
    found: Sequence[Match], cache: Mapping[str, LazyTensor], *, for_modelopt: bool
) -> dict[str, LazyTensor]:
    """The scales by their names in a folder, both programs' where ModelOpt's readers take it."""
    made: dict[str, LazyTensor] = {}
    for ours, own, theirs in _attentions(found):
        for kind in _KINDS:
            scale = cache.get(f"{ours}.{kind}_scale")
            if scale is None:
                continue
            plain, modelopt, _ = cache_names(kind, own)
            made[plain] = scale
            if for_modelopt and f"{own}.{kind}_proj.weight" in theirs:
                made[modelopt] = scale
    return made


def read_cache_scales(found: Sequence[Match], tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Scales of one number by our names; those of attention that has one without the other are left out."""
    made: dict[str, LazyTensor] = {}
    for ours, own, _ in _attentions(found):
        pair = [
            (kind, tensors[name])
            for kind in _KINDS
            for name in cache_names(kind, own)
            if name in tensors and math.prod(tensors[name].shape) == 1
        ]
        kinds = dict(reversed(pair))  # the first name of each
        if len(kinds) == len(_KINDS):
            made |= {f"{ours}.{kind}_scale": _one(scale) for kind, scale in kinds.items()}
    return made


def _one(scale: LazyTensor) -> LazyTensor:
    return LazyTensor((1,), torch.float32, lambda: scale.make().float().view(1))
