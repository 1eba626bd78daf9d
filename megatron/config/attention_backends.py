"""Names of attention kernels, and what Megatron-LM calls them."""

from __future__ import annotations

from typing import Literal

AttentionBackend = Literal[
    "auto",
    "flash_attn_3",
    "flash_attn_2",
    "cudnn",
    "efficient",
    "transformer_engine",
    "varlen",
    "sdpa",
    "chunked",
    "eager",
]
# They draw no dropout, or from a generator that cannot be replayed.
WITHOUT_DROPOUT: tuple[AttentionBackend, ...] = ("flash_attn_3", "cudnn", "efficient", "varlen", "sdpa")

_FLASH = "auto takes the fastest flash kernel that is installed and supports the call; name one to insist on it"
_FUSED = "auto takes cuDNN's fused kernel where it is the fastest; --attention-backend cudnn insists on it"
_UNFUSED = "the unfused attention is called eager here"
# What else is accepted, what it means, and the remark.
OTHER_NAMES = {
    "flash": ("auto", _FLASH),
    "fused": ("auto", _FUSED),
    "unfused": ("eager", _UNFUSED),
    "local": ("eager", _UNFUSED),
    "reference": ("eager", "its former name"),
    "blocked": ("chunked", "its former name"),
}
