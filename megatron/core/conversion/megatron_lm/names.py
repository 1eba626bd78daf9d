"""Megatron-LM's names of our tensors: of its core models, with Transformer Engine (and in torch_dist), and before core.

A row holds our name and theirs, ``{n}`` standing for the layer's number and ``{e}`` for that of an expert among a
rank's; rows are read in both directions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

LAYER = re.compile(r"\b(\w+)\.layers\.(\d+)\.")
"""Pattern of our names of layers' tensors: the stack, and the layer's number."""

_NUMBER = re.compile(r"\blayers\.(\d+)\.")
_FUSED_NORM = re.compile(r"\.layer_norm_(weight|bias)$")
_EXPERT = re.compile(r"(local_experts\.|experts\.experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))(\d+)")


@dataclass(frozen=True)
class Spelling:
    """Names of one tensor. ``core``: with norms as modules of their own. ``fused``: with norms inside the matrix that
    follows them.

    ``legacy``: of the models before core, as today's checkpoints spell them; see ``_todays`` for older ones.
    ``copy``: a second name in core, under which files hold the same numbers again. ``others``: further names in core,
    which are read only.
    """

    ours: str
    core: str
    fused: str
    legacy: str | None
    copy: str | None = None
    others: tuple[str, ...] = ()


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


# The same of a layer with latent attention, of which only core knows.
_LATENTS = (
    *((f"self_attention.linear_{name}", None, None) for name in ("q_proj", "q_down_proj", "q_up_proj")),
    *((f"self_attention.linear_{name}", None, None) for name in ("kv_down_proj", "kv_up_proj")),
    ("self_attention.q_layernorm", None, "self_attention.linear_q_up_proj.layer_norm"),
    ("self_attention.kv_layernorm", None, "self_attention.linear_kv_up_proj.layer_norm"),
)
_ROUTER = (
    ("mlp.router", None, None),
    *((f"mlp.shared_experts.linear_fc{number}", None, None) for number in (1, 2)),
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
    stack: str, legacy: str, parts: Iterable[tuple[str, str | None, str | None]] = (*ATTENTION, *MLP)
) -> Iterator[Spelling]:
    """The layers of a stack, and the norm behind them."""
    before, theirs = f"{stack}.layers.{{n}}", f"language_model.{legacy}"
    yield sinks(f"{before}.self_attention")
    yield from _parts(before, parts, legacy=f"{theirs}.layers.{{n}}")
    yield from both(f"{stack}.final_layernorm", f"{theirs}.final_norm")


def _parts(
    before: str, parts: Iterable[tuple[str, str | None, str | None]], *, legacy: str | None = None
) -> Iterator[Spelling]:
    for name, old, fused in parts:
        for kind in ("weight", "bias"):
            ours = f"{before}.{name}.{kind}"
            inside = f"{before}.{fused}_{kind}" if fused else ours
            yield Spelling(ours, ours, inside, f"{legacy}.{old}.{kind}" if legacy and old else None)


def latents_and_experts(before: str) -> Iterator[Spelling]:
    """What a layer of core may have in place of its attention and of its MLP. ``before``: its names begin with this.

    A rank's experts are modules of their own, one module with a matrix of each, or (before core 0.13) one matrix.
    """
    yield from _parts(before, (*_LATENTS, *_ROUTER))
    yield same(f"{before}.mlp.router.expert_bias", None)
    yield same(f"{before}.mlp.shared_experts.gate.weight", None, core=f"{before}.mlp.shared_experts.gate_weight")
    experts = f"{before}.mlp.experts"
    for number in (1, 2):
        for kind in ("weight", "bias"):
            name = f"linear_fc{number}.{kind}"
            yield Spelling(
                f"{experts}.{name}",
                core=f"{experts}.local_experts.{{e}}.{name}",
                fused=f"{experts}.experts.{name}",
                legacy=None,
                others=(
                    f"{experts}.{name}{{e}}",
                    f"{experts}.experts.{{e}}.{name}",
                    *([f"{experts}.{kind}{number}"] if kind == "weight" else []),
                ),
            )


_COMPONENTS = {
    ".mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    **dict.fromkeys((".mixer.conv1d.weight", ".mixer.conv1d.bias"), ("x", "B", "C")),
    ".self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    ".self_attention.conv1d.weight": ("query", "key", "value"),
}


def components_of(ours: str) -> tuple[str, ...]:
    """What torch_dist keeps of a tensor of a mixer with a state in a key each, one below the other; none for others."""
    return next((components for ending, components in _COMPONENTS.items() if ours.endswith(ending)), ())


def mamba_layers(before: str) -> Iterator[Spelling]:
    """A Mamba-2 layer of a hybrid. Newer releases have the convolution under names of its own."""
    mixer = f"{before}.mixer"
    yield Spelling(f"{before}.norm.weight", f"{before}.norm.weight", f"{mixer}.in_proj.layer_norm_weight", None)
    for name in ("in_proj.weight", "dt_bias", "A_log", "D", "norm.weight", "out_proj.weight"):
        yield same(f"{mixer}.{name}", None)
    for kind in ("weight", "bias"):
        name = f"{mixer}.conv1d.{kind}"
        yield Spelling(name, name, name, None, others=(f"{mixer}.conv1d_{kind}",))


def delta_net_layers(before: str) -> Iterator[Spelling]:
    """A gated delta net in place of a layer's attention."""
    net = f"{before}.self_attention"
    norm = f"{before}.input_layernorm.weight"
    yield Spelling(norm, norm, f"{net}.in_proj.layer_norm_weight", None)
    for name in ("in_proj.weight", "conv1d.weight", "dt_bias", "A_log", "out_norm.weight", "out_proj.weight"):
        yield same(f"{net}.{name}", None)


def mixers_and_experts(before: str) -> Iterator[Spelling]:
    """What a layer of a decoder may have beside ``stack``'s."""
    for rows in (latents_and_experts, mamba_layers, delta_net_layers):
        yield from rows(before)


def final_norm_of_hybrids() -> Iterator[Spelling]:
    """The norm behind a hybrid's layers."""
    for kind in ("weight", "bias"):
        yield same(f"decoder.final_layernorm.{kind}", None, core=f"decoder.final_norm.{kind}")


_DEPTH = "mtp.layers.{n}"


def _around_depths() -> Iterator[Spelling]:
    for name in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
        yield from (same(f"{_DEPTH}.{name}.{kind}", None) for kind in ("weight", "bias"))


def _layer_of_depth(before: str) -> Iterator[Spelling]:
    yield from _parts(before, (*ATTENTION, *MLP))
    yield from mixers_and_experts(before)
    yield sinks(f"{before}.self_attention")


def mtp_layers() -> Iterator[Spelling]:
    """Multi-token prediction, each depth with a layer of its own."""
    yield from _around_depths()
    for row in _layer_of_depth(f"{_DEPTH}.transformer_layer"):
        known = (row.core, row.fused, *row.others)
        again = (name.replace(".transformer_layer.", ".mtp_model_layer.") for name in known)
        yield dataclasses.replace(row, others=(*row.others, *dict.fromkeys(again)))


def mtp_layers_of_hybrids(size: int) -> Iterator[Spelling]:
    """Multi-token prediction with ``size`` layers in each depth, which are a stack of their own there."""
    yield from _around_depths()
    for number in range(size):
        ours = f"{_DEPTH}.transformer_layer." if size == 1 else f"{_DEPTH}.layers.{number}."
        for row in _layer_of_depth(f"{_DEPTH}.mtp_model_layer.layers.{number}"):
            yield dataclasses.replace(row, ours=row.ours.replace(f"{_DEPTH}.mtp_model_layer.layers.{number}.", ours))


def _without_number(name: str) -> str:
    return name.replace("layers.{n}.", "layers.")


class Names:
    """The spellings of one family."""

    def __init__(self, *rows: Spelling) -> None:
        self._ours = {
            their: row.ours
            for row in rows
            for their in (row.core, row.fused, row.legacy, row.copy, *row.others)
            if their
        }
        self._rows: dict[str, list[Spelling]] = {}
        for row in rows:
            self._rows.setdefault(row.ours, []).append(row)
        self._stacks = {
            _without_number(their): row.ours
            for row in rows
            for their in (row.core, row.fused)
            if "{n}" in row.ours and "{e}" not in their
        }
        self.roots = {their.split(".")[0] for row in rows for their in (row.core, row.copy) if their}
        """What the names of its weights in core begin with."""

    def our_name(self, theirs: str, *, first_layers: Mapping[str, int] | None = None) -> str | None:
        """Our name of a tensor, whichever expert it is of; None for one that our model doesn't have.

        ``first_layers``: by stack, the number of the first layer in the tensor's stage, where they count from 0.
        """
        name = _todays(theirs)
        layer = _NUMBER.search(name)
        general = _EXPERT.sub(r"\1{e}", _NUMBER.sub("layers.{n}.", name, count=1))
        ours = self._ours.get(general)
        if ours is None or layer is None:
            return ours
        return ours.format(n=int(layer[1]) + (first_layers or {}).get(ours.split(".")[0], 0))

    def core_names(self, ours: str) -> list[str]:
        """Names of our tensor in Megatron-LM's core models, with ``{e}`` for the number of an expert."""
        (row, *_), layer = self._rows_of(ours)
        return [name.replace("{n}", layer) for name in (row.core, row.copy) if name]

    def engine_names(self, ours: str, tensors: Collection[str]) -> list[str]:
        """Names of our tensor in core models with Transformer Engine, as ``core_names``. ``tensors``: all of ours."""
        row, layer, is_fused = self._row_among(ours, tensors)
        name = row.others[0] if "{e}" in row.core else row.fused if is_fused else row.core
        return [name.replace("{n}", layer)]

    def dist_names(self, ours: str, tensors: Collection[str], *, has_numbers: bool, is_plain: bool) -> list[str]:
        """The keys of a torch_dist folder that hold our tensor, the only one or one layer of a stack.

        ``tensors``: all of ours. ``has_numbers``: keys name the layer, as where layers are not all alike. ``is_plain``:
        without latents and experts, with which norms have one name with Transformer Engine and another without.
        """
        row, layer, _ = self._row_among(ours, tensors)
        known = [row.fused, row.copy, None if is_plain or "{e}" in row.core else row.core]
        known += row.others if ".mixer.conv1d." in ours else ()
        names = dict.fromkeys(filter(None, known))
        return [name.replace("{n}", layer) if has_numbers else _without_number(name) for name in names]

    def our_names_of_stack(self, key: str, num_layers: int) -> list[str] | None:
        """Our names of the layers in a stacked tensor of a torch_dist folder; None for a key that is no stack."""
        ours = self._stacks.get(key)
        return None if ours is None else [ours.format(n=number) for number in range(num_layers)]

    def _row_among(self, ours: str, tensors: Collection[str]) -> tuple[Spelling, str, bool]:
        """The row and the layer's number of our tensor, and whether it is a norm's in front of a matrix that is there:
        the row then is that of this matrix.
        """
        rows, layer = self._rows_of(ours)
        for row in rows:
            matrix = self._ours.get(_FUSED_NORM.sub(".weight", row.fused), "")
            if matrix.replace("{n}", layer) in tensors and _FUSED_NORM.search(row.fused):
                return row, layer, True
        return rows[0], layer, False

    def _rows_of(self, ours: str) -> tuple[list[Spelling], str]:
        layer = _NUMBER.search(ours)
        return self._rows[_NUMBER.sub("layers.{n}.", ours, count=1)], layer[1] if layer else ""


def expert_number(theirs: str) -> int | None:
    """Number of the expert that a tensor belongs to, among those of a rank, or among all in torch_dist; None without
    one.
    """
    found = _EXPERT.search(theirs)
    return int(found[2]) if found else None


def is_of_experts(ours: str) -> bool:
    """Whether a tensor of ours holds all experts of a layer, along its first dim."""
    return ".mlp.experts." in ours


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
