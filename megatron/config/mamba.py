"""Mamba-2 layers as a part of a model: their sizes, and how they are computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from megatron.config.family import PartConfig
from megatron.config.flags import architecture_flag, flag
from megatron.config.model import ModelConfig

if TYPE_CHECKING:
    from typing_extensions import Self


class MambaConfig(PartConfig):
    """Mamba-2 layers (state-space duality, arXiv:2405.21060)."""

    mamba_state_dim: int = architecture_flag("Size of the state of each channel of Mamba-2.", default=128, at_least=1)
    mamba_head_dim: int = architecture_flag("Channels of each head of Mamba-2.", default=64, at_least=1)
    mamba_num_groups: int = architecture_flag(
        "Groups of heads of Mamba-2 that share input and output matrices of the state (B and C), and whose channels "
        "are normalized together.",
        default=8,
        at_least=1,
    )
    mamba_num_heads: int | None = architecture_flag(
        "Heads of Mamba-2. Default: as many as twice --hidden-size has of --mamba-head-dim channels.",
        default=None,
        at_least=1,
    )
    mamba_conv_kernel_dim: int = architecture_flag(
        "Tokens that the causal convolution of Mamba-2 sees, its own among them.", default=4, at_least=2, at_most=256
    )
    mamba_time_step_limits: tuple[float, float] | None = architecture_flag(
        "Lowest and highest time step of Mamba-2, after softplus; a highest one of 1e30 is none.",
        default=None,
        at_least=0,
    )
    mamba_chunk_size: int | None = flag(
        "Tokens that the scan of Mamba-2 computes at a time: speed and memory alone. Default: 64 on a CPU, 128 on a "
        "GPU.",
        default=None,
        at_least=1,
    )
    mamba_scan_backend: Literal["auto", "recurrent", "chunked", "mamba-ssm"] = flag(
        "How the scan of Mamba-2 is computed. recurrent: token by token, for comparison; chunked: matrix products; "
        "mamba-ssm: the kernels of that package, on a GPU.",
        default="auto",
    )
    mamba_cp_comm_type: Literal["a2a", "states"] = flag(
        "What Mamba-2 layers of context-parallel ranks send. a2a: slices of the sequence for heads; states: only what "
        "a rank's tokens do to the state, which suits long sequences and any number of heads.",
        default="a2a",
    )

    @override
    def resolved(self, model: ModelConfig, stacks: Sequence[int]) -> Self:
        """The group with the number of heads."""
        heads = self.mamba_num_heads or 2 * model.hidden_size // self.mamba_head_dim
        return dataclasses.replace(self, mamba_num_heads=heads)

    @property
    def num_heads(self) -> int:
        """Heads of a layer, once they are resolved."""
        assert self.mamba_num_heads is not None, "resolved() says how many heads there are"
        return self.mamba_num_heads

    @property
    def inner_size(self) -> int:
        """Channels of all heads of a layer."""
        return self.num_heads * self.mamba_head_dim

    @override
    def recompute_modules(self) -> Mapping[str, str]:
        """What layers compute between their projections."""
        return {"mamba": ""}
