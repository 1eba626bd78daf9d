"""Hybrid models: layers of one mixer each, whose kinds a pattern says (Mamba-2, attention, MLP and others)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from megatron.config.family import PartConfig, Rule
from megatron.config.flags import architecture_flag, flag, plural_s, switch
from megatron.config.hybrid_pattern import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    LETTERS,
    MAMBA,
    MLP,
    HybridPattern,
    allocated,
    read_pattern,
    sizes_of,
)
from megatron.config.layer_patterns import listed_layers, shortest_pattern
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


class HybridConfig(PartConfig):
    """Hybrid models: a decoder whose layers are single mixers, each ``x + mixer(norm(x))``."""

    hybrid_layer_pattern: str | None = architecture_flag(
        "A letter for each layer of a hybrid: M Mamba-2, G gated delta net, * attention, - MLP, E experts. A bar ends "
        "a pipeline stage, and a slash comes before the layers of each depth of multi-token prediction. The pattern "
        "sets --num-layers and --mtp-num-layers.",
        default=None,
        aliases=("--hybrid-override-pattern",),
        implies=sizes_of,
    )
    hybrid_attention_ratio: float = flag(
        "Fraction of a hybrid's layers that are attention, spread evenly, without --hybrid-layer-pattern. Layers that "
        "are neither attention nor MLP are Mamba-2.",
        default=0.0,
        at_least=0,
        at_most=1,
    )
    hybrid_mlp_ratio: float = flag(
        "Fraction of a hybrid's layers that are MLPs, without --hybrid-layer-pattern.",
        default=0.0,
        at_least=0,
        at_most=1,
    )
    is_hybrid_model: bool = switch(
        "Build a hybrid even without a pattern and with ratios of 0: all its layers are Mamba-2. On by default in "
        "pretrain_mamba.py and pretrain_hybrid.py."
    )
    hybrid_segments: tuple[int, ...] | None = flag(
        "Layers between the stage borders of the pattern.", default=None, internal=True
    )

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is a hybrid."""
        return self.hybrid_layer_pattern is not None

    @property
    def pattern(self) -> HybridPattern | None:
        """The pattern, read; None for other models, and for a pattern that can't be read, which a rule reports."""
        with suppress(ConfigError):
            return None if self.hybrid_layer_pattern is None else read_pattern(self.hybrid_layer_pattern)
        return None

    @property
    def letters(self) -> str:
        """The kind of each layer; none without a ``pattern``."""
        return "" if self.pattern is None else self.pattern.layers

    @property
    def depth_letters(self) -> str:
        """The kinds of the layers of each depth of multi-token prediction."""
        return self.pattern.depths[0] if self.pattern is not None and self.pattern.depths else ""

    @property
    def all_letters(self) -> str:
        """The kinds of all layers, with those of one depth of multi-token prediction."""
        return self.letters + self.depth_letters

    @property
    @override
    def segments(self) -> tuple[int, ...]:
        """Layers of each pipeline stage, where the pattern has stage borders."""
        return self.hybrid_segments or ()

    @property
    @override
    def least_layers(self) -> int:
        """One layer of each kind."""
        return max(len(set(self.letters)), 1)

    @override
    def resolved(self, model: ModelConfig, stacks: Sequence[int]) -> Self:
        """The group with the pattern that ratios mean, without the stage borders, which a checkpoint doesn't keep."""
        with suppress(ConfigError):  # rules report it
            return dataclasses.replace(self, **self._pattern(model))
        return self

    def _pattern(self, model: ModelConfig) -> dict[str, Any]:
        ratios = {"hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0, "is_hybrid_model": False}
        if self.hybrid_layer_pattern is not None:
            pattern = read_pattern(self.hybrid_layer_pattern)
            written: dict[str, Any] = {"hybrid_layer_pattern": pattern.written(model.mtp_num_layers)}
            if len(pattern.segments) > 1:
                written["hybrid_segments"] = pattern.segments
            return written | (ratios if self.counts_asked(model.num_layers) in (None, _counts(pattern.layers)) else {})
        if self.hybrid_attention_ratio == self.hybrid_mlp_ratio == 0 and not self.is_hybrid_model:
            return {}
        layers = allocated(model.num_layers, attention=self.hybrid_attention_ratio, mlp=self.hybrid_mlp_ratio)
        return {"hybrid_layer_pattern": layers, **ratios}

    def counts_asked(self, num_layers: int) -> tuple[int, int] | None:
        """Attention and MLP layers that ratios ask for; None without ratios."""
        ratios = self.hybrid_attention_ratio, self.hybrid_mlp_ratio
        return (round(num_layers * ratios[0]), round(num_layers * ratios[1])) if any(ratios) else None

    @override
    def implied(self, stacks: Sequence[int]) -> Mapping[str, Any]:
        """Which layers have experts, and which gated delta nets."""
        found, letters = dict[str, Any](), self.letters
        if EXPERTS in letters and len(letters) == sum(stacks):
            found["moe_layer_freq"] = shortest_pattern(tuple(letter == EXPERTS for letter in letters))
        if DELTA_NET in self.all_letters:
            found["experimental_attention_variant"] = "gated_delta_net"
            found["linear_attention_freq"] = listed_layers(tuple(letter == DELTA_NET for letter in letters))
        return found

    @override
    def recompute_modules(self) -> Mapping[str, str]:
        """What layers of a kind compute, each with what the model lacks without them."""
        is_unread = self.is_hybrid and self.pattern is None
        return {"mamba": "" if is_unread or MAMBA in self.all_letters else "M in --hybrid-layer-pattern"}

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """How many layers of each kind there are."""
        counts = Counter(self.letters)
        kinds = [f"{counts[letter]} {kind}" for letter, kind in LETTERS.items() if counts[letter]]
        return [*kinds[:-1], f"{kinds[-1]} layers"] if kinds else ()

    @override
    def shrunk(self, stacks: Sequence[int], small: Sequence[int]) -> Self:
        """Keep the first layer of each kind, and others from the start."""
        if self.pattern is None:
            return self
        first = {self.letters.index(letter) for letter in self.letters}
        others = (place for place in range(len(self.letters)) if place not in first)
        kept = sorted([*first, *others][: small[0]])
        layers = "".join(self.letters[place] for place in kept)
        pattern = "/".join((layers, *self.pattern.depths))
        return dataclasses.replace(self, hybrid_layer_pattern=pattern)

    @override
    def with_layers(self, num_layers: int, kept: Sequence[int]) -> Self:
        """The letters of the layers, without the borders of pipeline stages."""
        if self.pattern is None:
            return self
        layers = "".join(self.letters[layer] for layer in kept)
        pattern = "/".join((layers, *self.pattern.depths))
        return dataclasses.replace(self, hybrid_layer_pattern=pattern, hybrid_segments=None)

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about patterns."""
        return RULES

    @override
    def remarks(self) -> Sequence[Rule]:
        """Settings that a pattern replaces."""
        return REMARKS


def _counts(letters: str) -> tuple[int, int]:
    """Attention and MLP layers."""
    return letters.count(ATTENTION), letters.count(MLP)


def pattern_is_one(run: RunConfig) -> str | None:
    """The pattern can be read, or the ratios make one."""
    hybrid, layers = run.part(HybridConfig), run.model.num_layers
    try:
        if hybrid.hybrid_layer_pattern is not None:
            read_pattern(hybrid.hybrid_layer_pattern)
        else:
            allocated(layers, attention=hybrid.hybrid_attention_ratio, mlp=hybrid.hybrid_mlp_ratio)
    except ConfigError as error:
        return str(error)
    return None


def pattern_has_all_layers(run: RunConfig) -> str | None:
    """There is a letter for each layer."""
    layers, letters = run.model.num_layers, run.part(HybridConfig).letters
    if not letters or len(letters) == layers:
        return None
    return (
        f"--hybrid-layer-pattern has {len(letters)} layer{plural_s(len(letters))}, and --num-layers is {layers}; leave "
        f"--num-layers out, which follows from the pattern, or write {layers} letter{plural_s(layers)}"
    )


def ratios_agree_with_the_pattern(run: RunConfig) -> str | None:
    """Ratios beside a pattern must ask for what it has."""
    hybrid = run.part(HybridConfig)
    letters = hybrid.letters
    asked = hybrid.counts_asked(len(letters))
    if not letters or asked in (None, _counts(letters)):
        return None
    assert asked is not None
    found = _counts(letters)
    return (
        f"--hybrid-attention-ratio {hybrid.hybrid_attention_ratio:g} and --hybrid-mlp-ratio {hybrid.hybrid_mlp_ratio:g}"
        f" of {len(letters)} layers are {asked[0]} attention and {asked[1]} MLP layers, but --hybrid-layer-pattern has "
        f"{found[0]} and {found[1]}; leave the ratios out"
    )


def experts_are_in_the_pattern(run: RunConfig) -> str | None:
    """Layers with experts have the letter E, and need experts."""
    letters, experts = run.part(HybridConfig).all_letters, run.part(MoEConfig).num_experts
    if not letters or (EXPERTS in letters) == bool(experts):
        return None
    if experts:
        return f"--num-experts {experts} is given, but --hybrid-layer-pattern has no E; write E for layers with experts"
    return "E of --hybrid-layer-pattern is a layer with experts; give --num-experts, too, or write - for an MLP"


def depths_are_in_the_pattern(run: RunConfig) -> str | None:
    """Each depth of multi-token prediction has its layers in the pattern."""
    depths, pattern = run.model.mtp_num_layers, run.part(HybridConfig).pattern
    if pattern is None or len(pattern.depths) == depths:
        return None
    written = pattern.depths
    if not written:
        return (
            f"--mtp-num-layers {depths}: --hybrid-layer-pattern lacks the layers of a depth; write them after a /, as "
            f"in {pattern.layers[-8:]}/{ATTENTION}{MLP}"
        )
    return (
        f"--hybrid-layer-pattern has the layers of {len(written)} depth{plural_s(len(written))} of multi-token "
        f"prediction, and --mtp-num-layers is {depths}; leave --mtp-num-layers out, or write one part for all depths"
    )


RULES: tuple[Rule, ...] = (
    pattern_is_one,
    pattern_has_all_layers,
    ratios_agree_with_the_pattern,
    experts_are_in_the_pattern,
    depths_are_in_the_pattern,
    rule(
        "--parallel-attention computes attention and MLP of a layer together, but layers of a hybrid are one of them; "
        "leave it out",
        lambda run: run.part(HybridConfig).is_hybrid and run.model.parallel_attention,
    ),
    rule(
        "--first-k-dense-replace says which layers have experts, as E of --hybrid-layer-pattern does; leave it out",
        lambda run: run.part(HybridConfig).is_hybrid and run.given("first_k_dense_replace"),
    ),
)

REMARKS: tuple[Rule, ...] = (
    rule(
        "--moe-layer-freq: no effect with --hybrid-layer-pattern, whose letter E marks layers with experts",
        lambda run: (
            run.part(HybridConfig).is_hybrid
            and run.given("moe_layer_freq")
            and "moe_layer_freq" not in run.inherited
            and run.part(MoEConfig).has_experts
        ),
    ),
)
