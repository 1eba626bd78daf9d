"""Llama as one would write it in plain PyTorch, the peer of benchmarks/gpu.py, and the sizes that are compared.

Weights are in fp32, and each product casts its own to the type it computes in, as autocast does, so that the optimizer
is torch's fused AdamW on fp32 weights; over several ranks ``fully_shard`` (FSDP2) casts them and splits everything.
Attention is flash-attn's where it is installed, else torch's scaled dot product attention.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override


@dataclass(frozen=True)
class Size:
    """A model like Llama 3, and the length of its samples. ``tied``: the output matrix is that of the words."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int = 128256
    tied: bool = True
    sequence: int = 4096
    base: float = 500000.0
    eps: float = 1e-5

    @property
    def flags(self) -> list[str]:
        """Command line of a run with this model. The tokenizer adds an id."""
        words = (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn} "
            f"--num-attention-heads {self.heads} --group-query-attention --num-query-groups {self.groups} "
            f"--seq-length {self.sequence} --max-position-embeddings {self.sequence} "
            f"--rotary-base {self.base:.0f} --norm-epsilon {self.eps} --vocab-size {self.vocabulary - 1} "
            "--make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --mock-data --num-workers 0 "
            "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
            "--attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --lr-decay-style constant --weight-decay 0.1 "
            "--clip-grad 1.0 --adam-beta2 0.95 --eval-iters 0 --train-iters 1000"
        )
        return [*words.split(), *([] if self.tied else ["--untie-embeddings-and-output-weights"])]


SIZES = {
    "tiny": Size(layers=2, hidden=64, ffn=160, heads=4, groups=2, vocabulary=256, sequence=64),
    "1B": Size(layers=16, hidden=2048, ffn=8192, heads=32, groups=8),
    "3B": Size(layers=28, hidden=3072, ffn=8192, heads=24, groups=8),
    "8B": Size(layers=32, hidden=4096, ffn=14336, heads=32, groups=8, tied=False),
}


class CastLinear(nn.Linear):
    """A linear layer without bias that multiplies in the type of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size.hidden)), size.eps

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotation(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [s, 1, d/2] in fp64."""
    width = size.hidden // size.heads
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    angles = torch.arange(size.sequence, dtype=torch.float64, device=device)[:, None, None] * size.base**-exponents
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [b, s, n, d], whose pairs are (i, i + d/2)."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[b, s, n, d], fewer heads of keys and values."""
    if q.is_cuda and q.dtype == torch.bfloat16 and importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_func

        found: Tensor = flash_attn_func(q, k, v, causal=True)
        return found
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, width = size, size.hidden // size.heads
        self.norm_1, self.norm_2 = Norm(size), Norm(size)
        self.qkv = CastLinear(size.hidden, (size.heads + 2 * size.groups) * width)
        self.out = CastLinear(size.hidden, size.hidden)
        self.gate_up, self.down = CastLinear(size.hidden, 2 * size.ffn), CastLinear(size.ffn, size.hidden)

    @override
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, h = x.shape
        heads, groups = self.size.heads, self.size.groups
        q, k, v = self.qkv(self.norm_1(x)).view(b, s, -1, h // heads).split((heads, groups, groups), dim=2)
        mixed = causal_attention(rotated(q, cos, sin), rotated(k, cos, sin), v)
        x = x + self.out(mixed.reshape(b, s, h))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


class PlainLlama(nn.Module):
    """The model, which computes in ``dtype``. ``recomputes``: layers keep their input alone for the backward pass."""

    def __init__(self, size: Size, device: torch.device, *, dtype: torch.dtype, recomputes: bool = False) -> None:
        super().__init__()
        self.dtype, self.recomputes = dtype, recomputes
        with torch.device(device):
            self.words = nn.Embedding(size.vocabulary, size.hidden)
            self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
            self.norm, self.head = Norm(size), CastLinear(size.hidden, size.vocabulary)
        if size.tied:
            self.head.weight = self.words.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
        angles_dtype = torch.promote_types(dtype, torch.float32)
        self.cos, self.sin = (each.to(angles_dtype) for each in rotation(size, device))

    @override
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens).to(self.dtype)
        for block in self.blocks:
            args = (x, self.cos, self.sin)
            x = checkpoint(block, *args, use_reentrant=False) if self.recomputes else block(*args)
        logits = self.head(self.norm(x)).to(self.cos.dtype)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
