"""Settings that only a decoder language model has: its experts."""

from megatron.config.moe import MoEConfig

GROUPS: tuple[type, ...] = (MoEConfig,)
