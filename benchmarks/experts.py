"""Time of a layer of experts, forward and backward, beside transformers' with its grouped products.

    python -m benchmarks.experts [--dtype bf16] [--tokens N]

Beside both stands a dense layer with as many products for each token.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import results
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.moe.layer import MoELayer
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import StackConfig


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer: hidden states, experts, their width, and how many a token chooses."""

    hidden: int
    experts: int
    width: int
    chosen: int


SHAPES = {"8 experts, 2 chosen": Shape(256, 8, 512, 2), "64 experts, 8 chosen": Shape(256, 64, 128, 8)}


def ours(shape: Shape, dtype: torch.dtype, *, is_dense: bool = False) -> Callable[[Tensor], Tensor]:
    """Our layer; ``is_dense``: a dense one with as many products for each token."""
    width = shape.width * shape.chosen if is_dense else shape.width
    model = ModelConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=1,
        ffn_hidden_size=width,
        activation="swiglu",
        add_bias_linear=False,
    )
    context = ModelContext.single(dtype=dtype)
    moe = MoEConfig(num_experts=shape.experts, moe_router_topk=shape.chosen, moe_ffn_hidden_size=shape.width)
    place = BranchPlace(StackConfig(model, causal=True), context, 0)
    built: nn.Module = MLP(place) if is_dense else MoELayer(moe, place)
    initialize(built, context.mesh, seed=1)
    return lambda x: built(x, LayerInputs(rng_key=StreamKey(0), side_losses=SideLosses()))


def theirs(shape: Shape, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """transformers' Mixtral block, whose experts are grouped products."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.chosen,
    )
    config._experts_implementation = "grouped_mm"
    block: nn.Module = MixtralSparseMoeBlock(config).to(dtype)  # type: ignore[no-untyped-call]
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)

    def forward(x: Tensor) -> Tensor:
        out: Tensor = block(x.transpose(0, 1))
        return out

    return forward


def milliseconds(layers: dict[str, Callable[[Tensor], Tensor]], x: Tensor, *, rounds: int) -> dict[str, float]:
    """CPU time of a forward and a backward pass of each, in turn, the fastest of ``rounds``."""
    found = dict.fromkeys(layers, float("inf"))
    for _ in range(rounds):
        for name, layer in layers.items():
            start = time.process_time()
            out = layer(x)
            torch.autograd.backward(out, torch.ones_like(out))
            found[name] = min(found[name], 1000 * (time.process_time() - start))
    return found


def main() -> None:
    """Print a line for each shape."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    options = results.parse(parser, tokens=64, rounds=1)
    ratios = {}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    for name, shape in SHAPES.items():
        x = torch.randn(options.tokens, 1, shape.hidden, dtype=dtype, requires_grad=True)
        layers = {"transformers": theirs(shape, dtype), "ours": ours(shape, dtype)}
        layers["dense"] = ours(shape, dtype, is_dense=True)
        times = milliseconds(layers, x, rounds=options.rounds)
        each = ", ".join(f"{layer} {spent:.1f} ms" for layer, spent in times.items())
        ratio, share = times["transformers"] / times["ours"], times["dense"] / times["ours"]
        print(f"{options.dtype}, {name}: {each}; {ratio:.2f} x transformers' speed, {share:.0%} of the dense layer's")
        ratios[f"{options.dtype}, {name}"] = ratio
    results.save(options, ratios)


if __name__ == "__main__":
    main()
