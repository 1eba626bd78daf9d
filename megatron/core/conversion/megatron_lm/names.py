"""Megatron-LM's names of our tensors: of its core models, with Transformer Engine (and in torch_dist), and before core.

A row holds our name and theirs, ``{n}`` standing for the layer's number; rows are read in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

LAYER = re.compile(r"\b(\w+)\.layers\.(\d+)\.")
"""In our names: the stack, and the layer's number."""

_NUMBER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Spelling:
    """``core``: with norms as modules of their own. ``fused``: with norms inside the matrix that follows them.

    ``legacy``: of the models before core, as today's checkpoints spell them; see ``_todays`` for older ones.
    ``copy``: a second name in core, under which files hold the same numbers again.
    """

    ours: str
    core: str
    fused: str
    legacy: str | None
    copy: str | None = None


# Parts of a layer: ours and core's; before core; and, for a norm, inside the matrix behind it.
ATTENTION = (
    ("input_layernorm", "input_norm", "self_attention.linear_qkv.layer_norm"),
    ("self_attention.linear_qkv", "self_attention.query_key_value", None),
    ("self_attention.q_layernorm", "self_attention.q_layernorm", None),
    ("self_attention.k_layernorm", "self_attention.k_layernorm", None),
    ("self_attention.linear_proj", "self_attention.dense", None),
)
MLP = (
    ("pre_mlp_layernorm", "post_attention_norm", "mlp.linear_fc1.layer_norm"),
    ("mlp.linear_fc1", "mlp.dense_h_to_4h", None),
    ("mlp.linear_fc2", "mlp.dense_4h_to_h", None),
)


def same(name: str, legacy: str | None, *, core: str | None = None, copy: str | None = None) -> Spelling:
    """A tensor that has one name in core, which is ours unless given."""
    return Spelling(name, core or name, core or name, legacy, copy)


def both(name: str, legacy: str) -> Iterator[Spelling]:
    """Weight and bias of a module that has one name in core."""
    return (same(f"{name}.{kind}", f"{legacy}.{kind}") for kind in ("weight", "bias"))


def sinks(attention: str) -> Spelling:
    """The attention sinks of a module."""
    return same(f"{attention}.sinks", None, core=f"{attention}.core_attention.softmax_offset")


def stack(
    stack: str, legacy: str, parts: Iterable[tuple[str, str, str | None]] = (*ATTENTION, *MLP)
) -> Iterator[Spelling]:
    """The layers of a stack, and the norm behind them."""
    before, theirs = f"{stack}.layers.{{n}}", f"language_model.{legacy}"
    yield sinks(f"{before}.self_attention")
    for name, old, fused in parts:
        for kind in ("weight", "bias"):
            ours = f"{before}.{name}.{kind}"
            inside = f"{before}.{fused}_{kind}" if fused else ours
            yield Spelling(ours, ours, inside, f"{theirs}.layers.{{n}}.{old}.{kind}")
    yield from both(f"{stack}.final_layernorm", f"{theirs}.final_norm")


def _without_number(name: str) -> str:
    return name.replace("layers.{n}.", "layers.")


class Names:
    """The spellings of one family."""

    def __init__(self, *rows: Spelling) -> None:
        self._ours = {their: row.ours for row in rows for their in (row.core, row.fused, row.legacy, row.copy) if their}
        self._rows = {row.ours: row for row in rows}
        self._stacks = {_without_number(row.fused): row.ours for row in rows if "{n}" in row.ours}
        self.roots = {their.split(".")[0] for row in rows for their in (row.core, row.copy) if their}
        """What the names of its weights in core begin with."""

    def our_name(self, theirs: str, *, first_layers: Mapping[str, int] | None = None) -> str | None:
        """Our name of a tensor; None for one that our model doesn't have.

        ``first_layers``: by stack, the number of the first layer in the tensor's stage, where they count from 0.
        """
        name = _todays(theirs)
        layer = _NUMBER.search(name)
        ours = self._ours.get(_NUMBER.sub("layers.{n}.", name, count=1))
        if ours is None or layer is None:
            return ours
        return ours.format(n=int(layer[1]) + (first_layers or {}).get(ours.split(".")[0], 0))

    def core_names(self, ours: str) -> list[str]:
        """Their core models' names."""
        row, layer = self._row(ours)
        return [name.format(n=layer) for name in (row.core, row.copy) if name]

    def stacked_names(self, ours: str) -> list[str]:
        """The keys of a torch_dist folder that hold our tensor, the only one or one layer of a stack."""
        row, _ = self._row(ours)
        return [_without_number(name) for name in (row.fused, row.copy) if name]

    def our_names_of_stack(self, key: str, num_layers: int) -> list[str] | None:
        """Our names of the layers in a stacked tensor of a torch_dist folder; None for a key that is no stack."""
        ours = self._stacks.get(key)
        return None if ours is None else [ours.format(n=number) for number in range(num_layers)]

    def _row(self, ours: str) -> tuple[Spelling, str]:
        layer = _NUMBER.search(ours)
        return self._rows[_NUMBER.sub("layers.{n}.", ours, count=1)], layer[1] if layer else ""


WORDS = same("embedding.word_embeddings.weight", "language_model.embedding.word_embeddings.weight")
POSITIONS = same("embedding.position_embeddings.weight", "language_model.embedding.position_embeddings.weight")
OUTPUT = same("output_layer.weight", "language_model.output_layer.weight")
# What a model's tensors are mixed with: states of fp8 kernels, buffers, and the last stage's copy of tied embeddings.
_NOT_WEIGHTS = re.compile(r"(.*\._extra_state.*|.*\.inv_freq|word_embeddings_for_head\.weight)")


def is_weight(name: str) -> bool:
    """Whether a name of theirs is one of a model's weights."""
    return not _NOT_WEIGHTS.fullmatch(name)


def depths_of(ours: Iterable[str]) -> dict[str, int]:
    """Layers by stack, of our names."""
    depths: dict[str, int] = {}
    for layer in filter(None, map(LAYER.match, ours)):
        depths[layer[1]] = max(depths.get(layer[1], 0), int(layer[2]) + 1)
    return depths


def is_legacy(names: Iterable[str]) -> bool:
    """Whether these are names from before core."""
    return any(name.startswith("language_model.") for name in names)


def _todays(name: str) -> str:
    """Names of older legacy checkpoints in today's spelling."""
    if not name.startswith("language_model."):
        return name.replace("lm_head.layernorm.", "lm_head.norm.")
    name = name.replace("language_model.transformer.", "language_model.encoder.")
    name = name.replace(".attention.", ".self_attention.")
    return re.sub(r"\b(input|post_attention|post_inter_attention|final)_layernorm\b", r"\1_norm", name)
