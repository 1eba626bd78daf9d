"""Gated delta nets: linear attention in place of some attention layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from megatron.config.family import PartConfig, Rule
from megatron.config.flags import architecture_flag, architecture_switch, flag, plural_s, subject
from megatron.config.hybrid import HybridConfig, pattern_is_one
from megatron.config.layer_patterns import listed_layers, window_layers, window_pattern
from megatron.config.model import ModelConfig, NormPlacement
from megatron.config.rules.sentence import changed_flags
from megatron.config.rules.sizes import divide, divisors, some
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

FREQUENCY = "--linear-attention-freq"
VARIANT = "--experimental-attention-variant"


class GatedDeltaNetConfig(PartConfig):
    """Gated delta nets (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next and OLMo Hybrid."""

    experimental_attention_variant: Literal["gated_delta_net"] | None = architecture_flag(
        "gated_delta_net: a gated delta net in place of attention in the layers of --linear-attention-freq, which keep "
        "their MLP or experts.",
        default=None,
        aliases=("--linear-attention-type",),
    )
    linear_attention_freq: str | None = architecture_flag(
        "Which layers have linear attention: all but every N-th for a number N, or those with a 1 in a list such as "
        "'[1]*3+[0]'.",
        default=None,
    )
    linear_conv_kernel_dim: int = architecture_flag(
        "Width of the causal convolution of gated delta nets, in tokens.", default=4, at_least=1, at_most=64
    )
    linear_key_head_dim: int = architecture_flag("Width of a key head of gated delta nets.", default=128, at_least=1)
    linear_value_head_dim: int = architecture_flag(
        "Width of a value head of gated delta nets.", default=128, at_least=1
    )
    linear_num_key_heads: int = architecture_flag("Key heads of gated delta nets.", default=16, at_least=1)
    linear_num_value_heads: int = architecture_flag(
        "Value heads of gated delta nets, a multiple of --linear-num-key-heads.", default=32, at_least=1
    )
    linear_negative_eigenvalues: bool = architecture_switch(
        "Double the write strength (beta) of gated delta nets to between 0 and 2, so that the state's transition may "
        "have negative eigenvalues (OLMo Hybrid)."
    )
    linear_norm_epsilon: float | None = architecture_flag(
        "Epsilon of the norm of each value head of gated delta nets. Default: --norm-epsilon.",
        default=None,
        above=0,
    )
    linear_norm_placement: NormPlacement | None = architecture_flag(
        "--norm-placement of the layers with linear attention, where it differs from the others' (OLMo Hybrid).",
        default=None,
    )
    linear_attention_backend: Literal["auto", "fla", "chunked", "recurrent"] = flag(
        "How gated delta nets are computed. fla: kernels of flash-linear-attention, on a GPU; chunked: matrix "
        "products, chunk by chunk; recurrent: token by token, for comparison; auto: the first of these that serves.",
        default="auto",
    )
    linear_attention_chunk_size: int = flag(
        "Tokens in a chunk, with --linear-attention-backend chunked.",
        default=64,
        at_least=1,
        at_most=4096,
    )
    linear_cp_comm_type: Literal["a2a", "states"] = flag(
        "What context-parallel ranks exchange in a gated delta net. a2a: parts of the sequence for heads (all-to-all); "
        "states: only the state that each part of the sequence leaves, for long sequences and any number of heads.",
        default="a2a",
    )

    @property
    def has_delta_nets(self) -> bool:
        """Whether the model has gated delta nets in place of attention."""
        return self.experimental_attention_variant is not None

    def linear_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Whether each of ``num_layers`` layers has linear attention.

        Raises ConfigError for a pattern that isn't one.
        """
        if not self.has_delta_nets or self.linear_attention_freq is None:
            return (False,) * num_layers
        return window_layers(self.linear_attention_freq, num_layers, flag=FREQUENCY)

    @property
    def key_width(self) -> int:
        """Channels of all keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of all values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @override
    def resolved(self, model: ModelConfig, stacks: Sequence[int]) -> Self:
        """The group with the shortest spelling of its pattern."""
        with suppress(ConfigError):  # a rule reports it
            marked = self.linear_layers(stacks[-1])
            if self.linear_attention_freq is not None and any(marked):
                pattern = window_pattern(marked) or listed_layers(marked)
                return dataclasses.replace(self, linear_attention_freq=pattern)
        return self

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """Number of gated delta nets, unless a hybrid's pattern gives it, and their heads and states."""
        count = sum(self.linear_layers(run.stacks[-1]))
        if not self.has_delta_nets:
            return ()
        where = "" if run.part(HybridConfig).is_hybrid else f" in {count} layer{plural_s(count)}"
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        state = f"{self.linear_key_head_dim} x {self.linear_value_head_dim}"
        return (f"gated delta nets{where} of {keys} key and {values} value heads with states of {state}",)

    @override
    def recompute_modules(self) -> Mapping[str, str]:
        """What gated delta nets compute, with the flag that adds them where the model has none."""
        flags = "G in --hybrid-layer-pattern or --experimental-attention-variant gated_delta_net"
        return {"gated_delta_net": "" if self.has_delta_nets else flags}

    @override
    def shrunk(self, stacks: Sequence[int], small: Sequence[int]) -> Self:
        """Keep the numbers of heads, but narrow them, and keep both kinds of layers where there are two."""
        changes: dict[str, Any] = {
            name: min(getattr(self, name), 16) for name in ("linear_key_head_dim", "linear_value_head_dim")
        }
        marked, layers = self.linear_layers(stacks[-1]), small[-1]
        if any(marked):
            kept = marked if layers == len(marked) else (*marked[: layers - 1], marked[-1])
            if not any(kept):
                kept = (True, *kept[1:])
            changes["linear_attention_freq"] = listed_layers(kept)
        return dataclasses.replace(self, **changes)

    @override
    def with_layers(self, num_layers: int, kept: Sequence[int]) -> Self:
        """Linear attention in those of the layers that have it; ordinary attention in all where none has."""
        marked = self.linear_layers(num_layers)
        if not any(marked):
            return self
        left = tuple(marked[layer] for layer in kept)
        if not any(left):
            return type(self)()
        return dataclasses.replace(self, linear_attention_freq=window_pattern(left) or listed_layers(left))

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about gated delta nets."""
        return RULES


def settings_need_layers(run: RunConfig) -> str | None:
    """A setting of linear attention has no effect without such layers; a pattern that can't be read may have some."""
    given = changed_flags(run, GatedDeltaNetConfig)
    if run.part(GatedDeltaNetConfig).has_delta_nets or not given or pattern_is_one(run) is not None:
        return None
    is_hybrid = run.part(HybridConfig).is_hybrid
    advice = "write G in --hybrid-layer-pattern" if is_hybrid else f"give {VARIANT} gated_delta_net, too"
    return f"{subject(given, 'has', 'have')} no effect without gated delta nets; {advice}"


def layers_are_marked(run: RunConfig) -> str | None:
    """The pattern is one, and marks a layer."""
    part = run.part(GatedDeltaNetConfig)
    if not part.has_delta_nets or run.part(HybridConfig).is_hybrid:
        return None
    if part.linear_attention_freq is None:
        return (
            "--experimental-attention-variant gated_delta_net does not say which layers have linear attention; give "
            f"{FREQUENCY} 4 for all but every fourth, or a list"
        )
    try:
        marked = part.linear_layers(run.model.num_layers)
    except ConfigError as error:
        return str(error)
    if any(marked):
        return None
    return (
        f"{FREQUENCY} {part.linear_attention_freq} leaves no layer with linear attention; leave it and "
        "--experimental-attention-variant out"
    )


def key_heads_serve_value_heads(run: RunConfig) -> str | None:
    """Each key head serves equally many value heads."""
    part = run.part(GatedDeltaNetConfig)
    keys, values = part.linear_num_key_heads, part.linear_num_value_heads
    if not part.has_delta_nets or values % keys == 0:
        return None
    return (
        f"--linear-num-value-heads {values} is not divisible by --linear-num-key-heads {keys}; key heads that fit: "
        f"{some(divisors(values), near=keys)}"
    )


def heads_divide_over_ranks(run: RunConfig) -> str | None:
    """Ranks hold equally many value heads and whole key heads, which several of them may share."""
    part, ranks = run.part(GatedDeltaNetConfig), run.parallel.tensor_model_parallel_size
    keys, values = part.linear_num_key_heads, part.linear_num_value_heads
    if not part.has_delta_nets or values % keys or (values % ranks == 0 and divide(keys, ranks)):
        return None
    fits = [size for size in divisors(values) if divide(keys, size)]
    return (
        f"--linear-num-value-heads {values} and --linear-num-key-heads {keys} do not divide over "
        f"--tensor-model-parallel-size {ranks}; sizes that fit: {some(fits, near=ranks)}"
    )


def heads_divide_over_context_ranks(run: RunConfig) -> str | None:
    """Context-parallel ranks that exchange heads hold equally many of both kinds."""
    part, ranks = run.part(GatedDeltaNetConfig), run.parallel.context_parallel_size
    if not part.has_delta_nets or part.linear_cp_comm_type != "a2a" or ranks == 1:
        return None
    shared = run.parallel.tensor_model_parallel_size
    keys, values = max(part.linear_num_key_heads // shared, 1), part.linear_num_value_heads // shared
    if values % ranks == 0 and divide(keys, ranks):
        return None
    fits = some((size for size in divisors(values) if divide(keys, size)), near=ranks)
    return (
        f"--linear-cp-comm-type a2a divides the {values} value heads and {keys} key head{plural_s(keys)} of a rank "
        f"over --context-parallel-size {ranks}; give --linear-cp-comm-type states, or a size that divides them: {fits}"
    )


def patterns_mark_layers_once(run: RunConfig) -> str | None:
    """A hybrid's pattern has a letter for gated delta nets."""
    asked = {
        field: run.given(field) and field not in run.inherited
        for field in ("linear_attention_freq", "experimental_attention_variant")
    }
    if not run.part(HybridConfig).is_hybrid or not any(asked.values()):
        return None
    flags = " and ".join(f"--{field.replace('_', '-')}" for field, given in asked.items() if given)
    return f"{flags} and --hybrid-layer-pattern both say which layers have linear attention; write G in the pattern"


RULES: tuple[Rule, ...] = (
    patterns_mark_layers_once,
    settings_need_layers,
    layers_are_marked,
    key_heads_serve_value_heads,
    heads_divide_over_ranks,
    heads_divide_over_context_ranks,
)
