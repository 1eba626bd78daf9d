"""Mamba-2 layers as a part of a model: their sizes, and how they are computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from megatron.config.family import PartConfig, Rule
from megatron.config.flags import architecture_flag, flag, plural_s, subject
from megatron.config.hybrid import HybridConfig, pattern_is_one
from megatron.config.hybrid_pattern import MAMBA
from megatron.config.model import ModelConfig
from megatron.config.rules.sentence import changed_flags
from megatron.config.rules.sizes import divisors, indivisible, some
from megatron.config.run import RunConfig

if TYPE_CHECKING:
    from typing_extensions import Self


class MambaConfig(PartConfig):
    """Mamba-2 layers (state-space duality, arXiv:2405.21060)."""

    mamba_state_dim: int = architecture_flag("Size of the state of each channel of Mamba-2.", default=128, at_least=1)
    mamba_head_dim: int = architecture_flag("Channels of each head of Mamba-2.", default=64, at_least=1)
    mamba_num_groups: int = architecture_flag(
        "Groups of Mamba-2 heads. The heads of a group share B and C, the input and output matrices of the state, and "
        "the norm before the output projection.",
        default=8,
        at_least=1,
    )
    mamba_num_heads: int | None = architecture_flag(
        "Heads of Mamba-2. Default: 2 x --hidden-size / --mamba-head-dim.",
        default=None,
        at_least=1,
    )
    mamba_conv_kernel_dim: int = architecture_flag(
        "Width of the causal convolution of Mamba-2, in tokens.", default=4, at_least=2, at_most=256
    )
    mamba_time_step_limits: tuple[float, float] | None = architecture_flag(
        "Clamp the time step of Mamba-2, after softplus, to between these; an upper limit of 1e30 is none.",
        default=None,
        at_least=0,
    )
    mamba_chunk_size: int | None = flag(
        "Tokens in a chunk of the scan of Mamba-2, which changes speed and memory only. Default: 64 on a CPU, 128 on "
        "a GPU.",
        default=None,
        at_least=1,
    )
    mamba_scan_backend: Literal["auto", "recurrent", "chunked", "mamba-ssm"] = flag(
        "How the scan of Mamba-2 is computed. mamba-ssm: kernels of that package, on a GPU; chunked: matrix products, "
        "chunk by chunk; recurrent: token by token, for comparison; auto: the first of these that serves.",
        default="auto",
    )
    mamba_cp_comm_type: Literal["a2a", "states"] = flag(
        "What context-parallel ranks exchange in a Mamba-2 layer. a2a: parts of the sequence for heads (all-to-all); "
        "states: only the state that each part of the sequence leaves, for long sequences and any number of heads.",
        default="a2a",
    )

    def num_heads(self, model: ModelConfig) -> int:
        """Heads of a layer."""
        return self.mamba_num_heads or 2 * model.hidden_size // self.mamba_head_dim

    def inner_size(self, model: ModelConfig) -> int:
        """Channels of all heads of a layer."""
        return self.num_heads(model) * self.mamba_head_dim

    @override
    def resolved(self, model: ModelConfig, stacks: Sequence[int]) -> Self:
        """The group in which a number of heads that is the default isn't written out, so that both compare equal."""
        is_default = self.mamba_num_heads is not None and self.inner_size(model) == 2 * model.hidden_size
        return dataclasses.replace(self, mamba_num_heads=None) if is_default else self

    @override
    def described(self, run: RunConfig) -> Sequence[str]:
        """Heads, their states and their groups."""
        if not has_mamba_layers(run):
            return ()
        heads, groups = self.num_heads(run.model), self.mamba_num_groups
        state = f"{self.mamba_head_dim} x {self.mamba_state_dim}"
        return (f"Mamba-2 of {heads} heads in {groups} group{plural_s(groups)} with states of {state}",)

    @override
    def shrunk(self, stacks: Sequence[int], small: Sequence[int]) -> Self:
        """Keep groups and a given number of heads, which ranks divide; another one is divisible by usual sizes."""
        heads = self.mamba_num_heads or math.lcm(24, 8 * self.mamba_num_groups)
        state, width = min(self.mamba_state_dim, 4), min(self.mamba_head_dim, 2)
        return dataclasses.replace(self, mamba_num_heads=heads, mamba_state_dim=state, mamba_head_dim=width)

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules about sizes that ranks divide."""
        return RULES


def has_mamba_layers(run: RunConfig) -> bool:
    """Whether the model has such layers."""
    return MAMBA in run.part(HybridConfig).all_letters


def _heads_fill_the_width(run: RunConfig) -> str | None:
    """Twice the hidden size is whole heads."""
    mamba, width = run.part(MambaConfig), 2 * run.model.hidden_size
    if mamba.mamba_num_heads is not None or width % mamba.mamba_head_dim == 0:
        return None
    fits = some(divisors(width), near=mamba.mamba_head_dim)
    return (
        f"--mamba-head-dim {mamba.mamba_head_dim} does not divide twice --hidden-size {run.model.hidden_size}, and "
        f"--mamba-num-heads is not given; give it, or take a head of {fits} channels"
    )


def _heads_flag(mamba: MambaConfig) -> str:
    return "--mamba-num-heads" if mamba.mamba_num_heads is not None else "--mamba-num-heads (by default)"


def _heads_divide_over_groups(run: RunConfig) -> str | None:
    mamba = run.part(MambaConfig)
    return indivisible(_heads_flag(mamba), mamba.num_heads(run.model), "--mamba-num-groups", mamba.mamba_num_groups)


def _heads_divide_over_tensor_ranks(run: RunConfig) -> str | None:
    ranks = run.parallel.tensor_model_parallel_size
    return indivisible(
        _heads_flag(run.part(MambaConfig)),
        run.part(MambaConfig).num_heads(run.model),
        "--tensor-model-parallel-size",
        ranks,
    )


def _groups_divide_over_tensor_ranks(run: RunConfig) -> str | None:
    """Ranks hold whole groups, or share one with a whole number of others."""
    groups, ranks = run.part(MambaConfig).mamba_num_groups, run.parallel.tensor_model_parallel_size
    if groups % ranks == 0 or ranks % groups == 0:
        return None
    heads = run.part(MambaConfig).num_heads(run.model)
    fits = [each for each in divisors(heads) if groups % each == 0 or each % groups == 0]
    return (
        f"--mamba-num-groups {groups} is neither a multiple nor a divisor of --tensor-model-parallel-size {ranks}; "
        f"tensor-parallel sizes that fit: {some(fits, near=ranks)}"
    )


def _heads_divide_over_context_ranks(run: RunConfig) -> str | None:
    """Each context-parallel rank gets whole heads, and whole groups or a share of one."""
    mamba, parallel = run.part(MambaConfig), run.parallel
    ranks, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if ranks == 1 or mamba.mamba_cp_comm_type == "states" or mamba.num_heads(run.model) % tensor:
        return None
    heads, groups = mamba.num_heads(run.model) // tensor, max(1, mamba.mamba_num_groups // tensor)
    if heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0):
        return None
    fits = [each for each in divisors(heads) if groups % each == 0 or each % groups == 0]
    return (
        f"--context-parallel-size {ranks} can't divide what a tensor-parallel rank has of a Mamba-2 layer, {heads} "
        f"head{plural_s(heads)} in {groups} group{plural_s(groups)}; use --mamba-cp-comm-type states, or a size that "
        f"fits: {some(fits, near=ranks)}"
    )


_SIZES = (
    _heads_fill_the_width,
    _heads_divide_over_groups,
    _heads_divide_over_tensor_ranks,
    _groups_divide_over_tensor_ranks,
    _heads_divide_over_context_ranks,
)


def _sizes_fit(run: RunConfig) -> str | None:
    """The first of the rules about sizes that a model with such layers breaks."""
    if not has_mamba_layers(run):
        return None
    return next((found for each in _SIZES if (found := each(run)) is not None), None)


def _limits_ascend(run: RunConfig) -> str | None:
    limits = run.part(MambaConfig).mamba_time_step_limits
    if limits is None or limits[0] < limits[1]:
        return None
    return f"--mamba-time-step-limits {limits[0]:g} {limits[1]:g}: the first is the lower one, as in 0.001 0.1"


def _settings_need_layers(run: RunConfig) -> str | None:
    """A setting of such layers has no effect without them; a pattern that can't be read may have some."""
    given = changed_flags(run, MambaConfig)
    if not given or has_mamba_layers(run) or pattern_is_one(run) is not None or run.part(MambaConfig) not in run.extra:
        return None
    return (
        f"{subject(given, 'has', 'have')} no effect without Mamba-2 layers; give --hybrid-layer-pattern with an M for "
        f"each, or leave {'it' if len(given) == 1 else 'them'} out"
    )


RULES: tuple[Rule, ...] = (
    _sizes_fit,
    _limits_ascend,
    _settings_need_layers,
)
