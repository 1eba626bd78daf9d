"""Time of a Mamba-2 mixer, forward and backward, beside transformers' at its best chunk length; memory by length.

    python -m benchmarks.state_space [--dtype bf16] [--rounds N] [--no-memory]

Both have the same weights. The ratio with the goal is of what lies between the two projections, which are the same
matrix products in both: convolution, scan, gate and norm. The whole mixer's is watched. Memory is what a forward pass
keeps for its backward pass, of a mixer and of attention as wide.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import results
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.ssm.mamba import MambaMixer, mamba_branch
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import StackConfig

CHUNKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Shape:
    """Sizes of a mixer and of what it is given."""

    length: int
    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def projected(self) -> int:
        """Width of z, x, B, C and dt."""
        return 2 * self.heads * self.head_dim + 2 * self.groups * self.state + self.heads


SHAPES = {
    "16 heads of 32, 1 group": Shape(512, 256, 16, 32, 1, 64),
    "16 heads of 64, 1 group": Shape(1024, 512, 16, 64, 1, 128),
    "32 heads of 64, 8 groups": Shape(1024, 1024, 32, 64, 8, 128),
}
QUICK = {"2 heads of 8, 1 group": Shape(32, 8, 2, 8, 1, 4)}


def place_of(shape: Shape, dtype: torch.dtype) -> tuple[BranchPlace, MambaConfig]:
    """The place of a layer, and the settings of a mixer there."""
    model = ModelConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=max(shape.hidden // 64, 1),
        position_embedding_type="none",
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
    )
    config = MambaConfig(
        mamba_state_dim=shape.state,
        mamba_head_dim=shape.head_dim,
        mamba_num_groups=shape.groups,
        mamba_num_heads=shape.heads,
    )
    stack = StackConfig(model, causal=True, pattern=((mamba_branch(config),),))
    return BranchPlace(stack, ModelContext.single(dtype=dtype), 0), config


def mixer(shape: Shape, dtype: torch.dtype) -> MambaMixer:
    """Our mixer."""
    place, config = place_of(shape, dtype)
    made = MambaMixer(place, config=config)
    initialize(made, place.context.mesh, seed=1)
    return made


def attention(shape: Shape, dtype: torch.dtype) -> SelfAttention:
    """Attention of the same width."""
    place, _ = place_of(shape, dtype)
    made = SelfAttention(place)
    initialize(made, place.context.mesh, seed=1)
    return made


def reference(shape: Shape, chunk: int, weights: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """transformers' mixer with these weights."""
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        num_heads=shape.heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden,
        expand=shape.heads * shape.head_dim // shape.hidden,
        state_size=shape.state,
        n_groups=shape.groups,
        chunk_size=chunk,
    )
    made: nn.Module = Mamba2Mixer(config, layer_idx=0).to(dtype)
    made.load_state_dict(weights)
    return made.eval()  # in training it asks for a kernel first, and then computes the same


def call(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Our layer as a function of [s, b, h]."""
    return lambda x: layer(x, LayerInputs(rng_key=StreamKey(0), side_losses=SideLosses()))


def transposed(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """transformers' layer as a function of [s, b, h]."""
    return lambda x: layer(x.transpose(0, 1)).transpose(0, 1)


def milliseconds(layers: dict[str, Callable[[Tensor], Tensor]], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """CPU time of a forward and a backward pass of each, in turn, in every round; the first is not counted."""
    found: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(rounds + 1):
        for name, layer in layers.items():
            start = time.process_time()
            out = layer(x)
            torch.autograd.backward(out, torch.ones_like(out))
            found[name].append(1000 * (time.process_time() - start))
    return {name: times[1:] for name, times in found.items()}


def compare(shape: Shape, dtype: torch.dtype, rounds: int, *, whole: bool) -> tuple[float, str]:
    """transformers' time over ours, the median of all rounds at its best chunk length, and a line of times."""
    ours = mixer(shape, dtype)
    weights = {name: each.detach() for name, each in ours.named_parameters()}
    peers = {f"chunks of {chunk}": reference(shape, chunk, weights, dtype) for chunk in CHUNKS}
    x = torch.randn(shape.length, 1, shape.hidden if whole else shape.projected, dtype=dtype, requires_grad=True)
    if not whole:
        for module in (ours, *peers.values()):
            module.in_proj, module.out_proj = nn.Identity(), nn.Identity()
    layers = {"ours": call(ours), **{name: transposed(each) for name, each in peers.items()}}
    times = milliseconds(layers, x, rounds)
    best = min(peers, key=lambda name: statistics.median(times[name]))
    ratio = statistics.median(theirs / mine for theirs, mine in zip(times[best], times["ours"], strict=True))
    each = ", ".join(f"{name} {statistics.median(spent):.1f} ms" for name, spent in times.items())
    return ratio, each


def kept_by(layer: nn.Module, x: Tensor) -> int:
    """Bytes that a forward pass leaves for the backward pass, parameters aside."""
    parameters = {each.untyped_storage().data_ptr() for each in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = call(layer)(x)
    total = sum(kept.values())
    del out
    return total


def print_memory(shape: Shape, dtype: torch.dtype, lengths: tuple[int, ...]) -> dict[str, float]:
    """Print a table of bytes that are kept of a token. Returns those at the last length over those at the first."""
    layers: dict[str, nn.Module] = {"mixer": mixer(shape, dtype), "attention": attention(shape, dtype)}
    found: dict[str, list[float]] = {name: [] for name in layers}
    print(f"{'tokens':>8}{'mixer':>10}{'attention':>11}{'over it':>9}   bytes kept of a token")
    for length in lengths:
        x = torch.randn(length, 1, shape.hidden, dtype=dtype, requires_grad=True)
        for name, layer in layers.items():
            found[name].append(kept_by(layer, x) / length)
        own, theirs = found["mixer"][-1], found["attention"][-1]
        print(f"{length:8,}{own:10,.0f}{theirs:11,.0f}{own / theirs:9.2f}")
    return {
        f"{name}: bytes of a token at {lengths[-1]:,} tokens over those at {lengths[0]:,}": each[-1] / each[0]
        for name, each in found.items()
    }


def main() -> None:
    """Print a line for each shape, and one for each length."""
    parser = results.parser_of(__doc__)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave out memory by length")
    options = results.parse(parser, rounds=1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    ratios, watched = {}, []
    shapes = QUICK if options.quick else SHAPES
    for name, shape in shapes.items():
        for whole in (False, True):
            ratio, line = compare(shape, dtype, options.rounds, whole=whole)
            what = f"{options.dtype}, {name}, {'whole mixer' if whole else 'between projections'}"
            print(f"{what}: {line}; {ratio:.2f} x transformers' speed", flush=True)
            ratios[what] = ratio
            watched += [what] * whole
    if options.memory:
        lengths = (16, 32) if options.quick else (512, 1024, 2048, 4096, 8192, 16384)
        growth = print_memory(next(iter(shapes.values())), dtype, lengths)
        ratios |= growth
        watched += growth
    results.save(options, ratios, watched=watched)


if __name__ == "__main__":
    main()
