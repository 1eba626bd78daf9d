"""Quantization layer by layer: each layer is measured on the outputs of the quantized ones before it.

Every rank has one layer in memory, whole, whatever the layout of training was. Ranks divide the samples, one sequence
at a time, and the matrices; statistics are exact sums, so all of them get the same bytes as one rank alone.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.quantization_training import without_rounding
from megatron.core.checkpointing.storage import ChecksummedFiles
from megatron.core.conversion.layer_by_layer import stage_of_layer
from megatron.core.conversion.portable import (
    LazyScales,
    LazyTensor,
    PortableModel,
    Quantization,
    layers_of,
)
from megatron.core.conversion.quantizing.folds import Fold, folds_of
from megatron.core.conversion.quantizing.matrices import Matrix, Observer, matrices_of
from megatron.core.conversion.quantizing.recipe import Recipe
from megatron.core.ops.quantize import E4M3, LARGEST
from megatron.core.parallel.collectives import all_reduce, broadcast
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import WORLD
from megatron.core.quantization.channel_scaling import (
    activation_aware_factors,
    clipped_scales,
    smoothing_factors,
)
from megatron.core.quantization.gptq import gptq
from megatron.core.quantization.grid import Scales, codes_of, scales_of, values_of_codes
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.layer import TransformerLayer


@torch.no_grad()
def calibrated(
    portable: PortableModel,
    recipe: Recipe,
    tokens: Tensor | None,
    *,
    calibration: Mapping[str, Any],
    context: ParallelContext,
    spool: Path,
    say: Callable[[str], None],
) -> PortableModel:
    """The model with weights on the grid of ``recipe``, measured on ``tokens`` [samples, length]. A collective.

    What is new of it lies in the folder ``spool`` until it is written, which rank 0 alone can do. ``calibration``:
    facts that are kept with it.
    """
    names = recipe.parameters(portable)
    walk = _Walk(portable, recipe, frozenset(names), context, spool, say)
    found = dict[str, LazyTensor]()
    if recipe.needs_texts:
        assert tokens is not None, "texts are read before"
        for layer in walk.layers(tokens):
            found |= layer
    else:
        for name in names:
            weight = portable.tensors[name].make().to(context.device, torch.float32, copy=True)
            found |= walk.put(name, walk.quantize({name: matrices_of(name, weight)}))
    scales = {
        name: LazyScales(found[f"{name}.factors"], found.get(f"{name}.zeros"), inputs=found.get(f"{name}.inputs"))
        for name in names
    }
    cache = {name: tensor for name, tensor in found.items() if name.endswith((".k_scale", ".v_scale"))}
    tensors = {name: found.get(name, tensor) for name, tensor in portable.tensors.items()}
    quantization = Quantization(recipe.scheme, scales, recipe.method, calibration, cache)
    groups = without_rounding(portable.groups)  # who loads the model would round its weights again, to other numbers
    return dataclasses.replace(portable, tensors=tensors, groups=groups, quantization=quantization)


@dataclass(frozen=True)
class _Walk:
    """The way through a model, one layer in memory at a time. ``names``: of the parameters that are quantized."""

    portable: PortableModel
    recipe: Recipe
    names: frozenset[str]
    context: ParallelContext
    spool: Path
    say: Callable[[str], None]

    def layers(self, tokens: Tensor) -> Iterator[dict[str, LazyTensor]]:
        """The new tensors and scales of each layer, which has read the outputs of those before it."""
        mesh, count = self.context.mesh, layers_of(self.portable.model, self.portable.groups)
        mine = torch.split(tokens.to(self.context.device)[mesh.world_rank :: mesh.world_size], 1)
        handed: list[Tensor | None] = [None] * len(mine)
        for number in range(count):
            observer = Observer()
            stage = stage_of_layer(self.portable, number, device=self.context.device, operands=observer)
            layer = next(each for each in stage.modules() if isinstance(each, TransformerLayer))
            observer.matrices = {
                weight: matrices_of(name, weight.data)
                for name, weight in stage.named_parameters()
                if name in self.names
            }
            by_name = {each[0].name: each for each in observer.matrices.values()}

            def run(stage: nn.Module = stage, handed: Sequence[Tensor | None] = handed) -> Iterator[Tensor | None]:
                for text, hidden in zip(mine, handed, strict=True):
                    yield stage(text, hidden=hidden)

            with self._peaks_of_cache(stage) as peaks:
                self._measure(run, observer)
            self._fold(layer, observer)
            changed = self.quantize(by_name)
            if number < count - 1:
                handed = [*run()]
            own = {name: tensor for name, tensor in stage.state_dict().items() if ".layers." in name}
            yield self.put(f"layer {number}", {**own, **changed, **peaks})
            self.say(f"layer {number + 1} of {count} is quantized")

    def _measure(self, run: Callable[[], Iterator[Tensor | None]], observer: Observer) -> None:
        """Pass the samples for the largest magnitudes and, where they are needed, for the sums. A collective."""
        matrices = [matrix for each in observer.matrices.values() for matrix in each]
        deque(run(), maxlen=0)
        for matrix in matrices:
            matrix.statistics.agree_on_largest(self._highest, self._total)
            matrix.peak = self._highest(matrix.peak)
        if self.recipe.needs_sums:
            observer.measured = True
            for matrix in matrices:
                matrix.statistics.begin_sums()
            deque(run(), maxlen=0)
            for matrix in matrices:
                matrix.statistics.agree_on_sums(self._total)
        observer.is_done = True

    @contextmanager
    def _peaks_of_cache(self, stage: nn.Module) -> Iterator[dict[str, Tensor]]:
        """Scales of keys and values of the attention in ``stage``, filled in when the block has ended."""
        found, scales, zero = dict[str, Tensor](), dict[str, Tensor](), torch.zeros(1, device=self.context.device)
        if self.recipe.cache:
            for name, module in stage.named_modules():
                if isinstance(module, Attention):
                    found |= {f"{name}.k_scale": zero, f"{name}.v_scale": zero}
                    module.sees_keys_and_values = partial(_note_peaks, found, name)
        yield scales
        for name in sorted(found):
            peak = self._highest(found[name])
            scales[name] = torch.where(peak > 0, peak / LARGEST[E4M3], torch.ones_like(peak))

    def _fold(self, layer: TransformerLayer, observer: Observer) -> None:
        """Scale input channels as the method says, each fold by the factors that one rank finds. A collective."""
        if self.recipe.method not in ("awq", "smoothquant"):
            return
        for number, fold in enumerate(folds_of(layer, self.portable.model, observer.matrices)):
            width = fold.matrices[0].weight.shape[1]
            mesh = self.context.mesh
            factors = torch.ones(width, device=self.context.device)
            if number % mesh.world_size == mesh.world_rank:
                factors = self._factors(fold)
            fold.apply(broadcast(factors.contiguous(), mesh, *WORLD, src=number % mesh.world_size))

    def _factors(self, fold: Fold) -> Tensor:
        measured = [matrix for matrix in fold.matrices if matrix.statistics.is_enough()]
        if self.recipe.method == "smoothquant":
            largest = torch.stack([matrix.statistics.largest for matrix in fold.matrices]).amax(0)
            return smoothing_factors(largest, [matrix.weight for matrix in measured], exponent=self.recipe.exponent)
        tokens = sum(matrix.statistics.tokens for matrix in measured)
        mean = sum(matrix.statistics.mean_magnitudes() * matrix.statistics.tokens for matrix in measured) / tokens
        assert isinstance(mean, Tensor), "a fold has matrices with enough tokens"
        pairs = [(matrix.weight, matrix.statistics.hessian() * matrix.statistics.tokens) for matrix in measured]
        return activation_aware_factors(
            pairs, mean, self.recipe.scheme.weights, dtype=self._scales_dtype(measured[0].name)
        )

    def quantize(self, by_name: Mapping[str, Sequence[Matrix]]) -> dict[str, Tensor]:
        """Put matrices on the grid, each by one rank, and give all ranks their scales: the weights by parameter, and
        their scales beside them. A collective.
        """
        mesh, grid, found = self.context.mesh, self.recipe.scheme.weights, dict[str, Tensor]()
        matrices = [matrix for each in by_name.values() for matrix in each]
        made = dict[int, list[Tensor]]()
        for number, matrix in enumerate(matrices):
            owner, (rows, columns) = number % mesh.world_size, grid.scales_shape(_shape(matrix.weight))
            factors = torch.empty(rows, columns, device=self.context.device)
            zeros = torch.zeros(rows, columns, dtype=torch.int8, device=self.context.device)
            if owner == mesh.world_rank:
                codes, scales = self._codes(matrix)
                matrix.weight.copy_(values_of_codes(codes, scales, grid))
                factors.copy_(scales.factors)
                zeros = zeros if scales.zeros is None else scales.zeros.contiguous()
            for tensor in (matrix.weight, factors, *(() if grid.symmetric else (zeros,))):
                broadcast(tensor, mesh, *WORLD, src=owner)
            made[id(matrix)] = [factors, zeros]
        for name, each in by_name.items():
            shape = self.portable.tensors[name].shape
            found[name] = torch.stack([matrix.weight for matrix in each]).view(shape)
            by_output = [[part.expand(len(matrix.weight), -1) for part in made[id(matrix)]] for matrix in each]
            spread = [torch.stack(parts).view(*shape[:-1], -1) for parts in zip(*by_output, strict=True)]
            found[f"{name}.factors"] = spread[0]
            if not grid.symmetric:
                found[f"{name}.zeros"] = spread[1]
            if self.recipe.scheme.activations == "tensor":
                peak = torch.stack([matrix.peak for matrix in each]).amax(0)
                found[f"{name}.inputs"] = torch.where(peak > 0, peak / LARGEST[E4M3], torch.ones_like(peak))
        self._say_what_saw_little(by_name)
        return found

    def _codes(self, matrix: Matrix) -> tuple[Tensor, Scales]:
        """The codes and scales of a matrix by the method, or by rounding where it saw too few tokens."""
        grid, dtype, method = self.recipe.scheme.weights, self._scales_dtype(matrix.name), self.recipe.method
        if method == "gptq" and matrix.statistics.is_enough():
            return gptq(matrix.weight, matrix.statistics.hessian(), grid, dtype=dtype, orders=self.recipe.orders)
        if method == "awq" and matrix.statistics.is_enough():
            scales = clipped_scales(matrix.weight, matrix.statistics.hessian(), grid, dtype=dtype)
        else:
            scales = scales_of(matrix.weight, grid, dtype)
        return codes_of(matrix.weight, scales, grid), scales

    def _say_what_saw_little(self, by_name: Mapping[str, Sequence[Matrix]]) -> None:
        if not self.recipe.needs_sums:
            return
        for name, each in by_name.items():
            few = [matrix for matrix in each if not matrix.statistics.is_enough()]
            if few:
                which = f"{len(few)} of {len(each)} experts of {name}" if few[0].expert is not None else name
                least = min(matrix.statistics.tokens for matrix in few)
                self.say(
                    f"note: {which} saw fewer tokens ({least:,} at least) than inputs ({few[0].weight.shape[1]:,}), "
                    "and are rounded to the nearest: give more --samples"
                )

    def put(self, title: str, tensors: Mapping[str, Tensor]) -> dict[str, LazyTensor]:
        """Write tensors to the spool on rank 0, weights and scales in the type of the model's; lazy ones that read."""
        path = self.spool / f"{title}.pt"
        kept = {name: self._as_stored(name, tensor) for name, tensor in tensors.items()}
        if self.context.mesh.world_rank == 0:
            self.spool.mkdir(parents=True, exist_ok=True)
            with ChecksummedFiles().create_stream(path, "wb") as stream:
                torch.save(kept, stream)  # type: ignore[arg-type]
        return {
            name: LazyTensor(tuple(tensor.shape), tensor.dtype, partial(_read, path, name))
            for name, tensor in kept.items()
        }

    def _as_stored(self, name: str, tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if name in self.portable.tensors:
            dtype = self.portable.tensors[name].dtype
        elif name.endswith(".factors"):
            dtype = self._scales_dtype(name.removesuffix(".factors"))
        return tensor.to("cpu", dtype, copy=True).contiguous()

    def _scales_dtype(self, name: str) -> torch.dtype:
        return self.recipe.scheme.weights.scales_dtype(self.portable.tensors[name].dtype)

    def _total(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.context.mesh, *WORLD)

    def _highest(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.context.mesh, *WORLD, op="max")


def _note_peaks(found: dict[str, Tensor], name: str, key: Tensor, value: Tensor) -> None:
    for kind, tensor in (("k_scale", key), ("v_scale", value)):
        peak = tensor.abs().amax().float().view(1)
        found[f"{name}.{kind}"] = torch.maximum(found[f"{name}.{kind}"], peak)


def _shape(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def _read(path: Path, name: str) -> Tensor:
    tensors: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return tensors[name]
