"""Whether a device computes what it should: each kernel that can run there, against the same in fp64 or by another way.

A bound is for the distance of two tensors, relative to the norm of the one that is right. A wrong mask, scale or stride
exceeds it by far; rounding in the kernel's type stays below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.core.device import without_tf32
from megatron.core.ops import fp8_matmul, grouped_matmul
from megatron.core.ops.activation import activation, gated_activation
from megatron.core.ops.attention import attention
from megatron.core.ops.attention.registry import BACKENDS, KERNELS
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest
from megatron.core.ops.compiled import compile_bodies
from megatron.core.ops.norm import layer_norm, rms_norm
from megatron.core.ops.quantize import E4M3, E5M2, blockwise, mxfp8, tensorwise
from megatron.core.ops.rotary import Rotary, apply_rotary
from megatron.core.optimizer.element_rules import AdamW
from megatron.core.optimizer.update_rule import Step
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import LaunchEnvironment
from megatron.core.parallel.launch import choose_device
from megatron.core.tensor_parallel.cross_entropy import VocabularyPart, linear_cross_entropy

BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}
TYPES = (torch.bfloat16, torch.float32)

DOCUMENTS = torch.tensor([[0] * 70 + [1] * 129 + [2], [4] * 200]).int()
ATTENTION: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "causal": ({}, {}),
    "bidirectional": ({"g": 2}, {"causal": False}),
    "cached keys": ({"sq": 77, "g": 2}, {}),
    "window": ({}, {"window": (63, 0)}),
    "soft cap": ({}, {"soft_cap": 5.0}),
    "ALiBi": ({}, {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}),
    "sinks": ({"g": 1}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}),
    "documents": ({"g": 2}, {"document_ids": DOCUMENTS}),
}


@dataclass(frozen=True)
class Found:
    """A check and what came of it: ``error`` of at most ``bound``, or why it isn't run (``skipped``) or has failed."""

    name: str
    error: float | None = None
    bound: float = 0.0
    skipped: str = ""
    failed: str = ""

    @property
    def is_wrong(self) -> bool:
        return bool(self.failed) or (self.error is not None and not self.error <= self.bound)


Results = list[Tensor]


def distance(found: Results, wanted: Results) -> float:
    """The largest of the tensors' distances; infinity for what isn't finite."""
    largest = 0.0
    for a, b in zip(found, wanted):
        a, b = a.detach().double().cpu(), b.detach().double().cpu()
        error = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
        largest = max(largest, error if a.isfinite().all() else float("inf"))
    return largest


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refusal_of_attention(name: str, case: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend can't compute a case here; None if it can."""
    missing = KERNELS[name].missing() if name in KERNELS else None
    q, k, _ = attention_inputs(case, device, dtype)
    return missing or BACKENDS[name].supports(AttentionRequest.of(q, k, attention_options(case, device)))


def attention_inputs(case: str, device: torch.device, dtype: torch.dtype) -> Results:
    """Queries, keys and values [s, b, n, d], the same for each type but for its rounding."""
    shape, generator = ATTENTION[case][0], torch.Generator().manual_seed(0)
    heads = ((shape.get("sq", 200), 4), (200, shape.get("g", 4)), (200, shape.get("g", 4)))
    made = [torch.randn(length, 2, n, 64, generator=generator) for length, n in heads]
    return [x.to(torch.bfloat16).to(device, dtype).requires_grad_() for x in made]


def attention_options(case: str, device: torch.device) -> AttentionOptions:
    moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in ATTENTION[case][1].items()}
    facts: dict[str, Any] = {"causal": True, "scale": 0.125} | moved
    return AttentionOptions(**facts)


def attention_error(name: str, case: str, device: torch.device, dtype: torch.dtype) -> float:
    """Distance of a backend's result and gradients from those of explicit scores in fp64."""
    results = []
    for backend, own in ((name, dtype), ("eager", torch.float64)):
        inputs = attention_inputs(case, device, own)
        q, k, v = inputs
        out = attention(q, k, v, attention_options(case, device), backend=backend)
        upstream = torch.linspace(-1, 1, out.numel(), device=device, dtype=torch.float64).view_as(out).to(own)
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])
    return distance(*results)


def check_attention(name: str, device: torch.device) -> Iterator[Found]:
    """A backend: every case that it supports, in the types of the device."""
    for dtype in TYPES:
        for case in ATTENTION:
            about = f"{case}, {_name(dtype)}"
            if reason := refusal_of_attention(name, case, device, dtype):
                yield Found(about, skipped=reason)
            else:
                yield Found(about, attention_error(name, case, device, dtype), BOUNDS[dtype])


def check_fp8(recipe: str, device: torch.device) -> Iterator[Found]:
    """Products in 8 bits by the device, or by emulation, of the numbers that the codes stand for."""
    if reason := fp8_matmul.refusal(recipe, device):
        yield Found(recipe, skipped=reason)
        return
    by = fp8_matmul.implementation_on(device)
    for m, n, k in ((256, 384, 512), (48, 64, 256), (7, 16, 48)):
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(rows, k, generator=generator).to(device) for rows in (m, n))
        pairs = {
            "tensorwise": [(tensorwise(x, fmt), tensorwise(w, E4M3)) for fmt in (E4M3, E5M2)],
            "blockwise": [(blockwise(x, E4M3), blockwise(w, E4M3, rows=rows)) for rows in (1, 128)],
            "mxfp8": [(mxfp8(x), mxfp8(w))],
        }[recipe]
        for a, b in pairs:
            kinds = f"{_name(a.data.dtype)} by {_name(b.data.dtype)}{', squares' * (b.block == (128, 128))}"
            found = fp8_matmul.multiply(a, b, torch.bfloat16, by=by)
            wanted = a.dequantized(torch.float64) @ b.dequantized(torch.float64).t()
            yield Found(f"{m}x{k} by {n}x{k}, {kinds}, {by}", distance([found], [wanted]), 5e-3)


def check_grouped(device: torch.device) -> Iterator[Found]:
    """Products of groups by torch's kernel against one product for each group, forward, backward, and into sums."""
    kernel, loop = grouped_matmul.BACKENDS["grouped_mm"], grouped_matmul.BACKENDS["loop"]
    for dtype in TYPES:
        if reason := kernel.supports(dtype, device, (64, 96)):
            yield Found(_name(dtype), skipped=reason)
            continue
        groups = grouped_matmul.Groups(torch.tensor([5, 0, 130, 17], device=device))
        generator = torch.Generator().manual_seed(0)
        rows, matrices, grads = (
            torch.randn(shape, generator=generator).to(device, dtype) for shape in ((152, 64), (4, 64, 96), (152, 96))
        )
        sums = [torch.ones(4, 96, 64, device=device) for _ in range(2)]
        kernel.add_outer(sums[0], grads, rows, groups)
        loop.add_outer(sums[1], grads, rows, groups)
        compared: list[tuple[str, Tensor, Tensor]] = [
            ("rows by matrices", kernel.multiply(rows, matrices, groups), loop.multiply(rows, matrices, groups)),
            ("gradients by rows", kernel.outer(grads, rows, groups), loop.outer(grads, rows, groups)),
            ("added to fp32", sums[0], sums[1]),
        ]
        for name, a, b in compared:
            yield Found(f"{name}, {_name(dtype)}", distance([a], [b]), BOUNDS[dtype])


def _loss(hidden: Tensor, weight: Tensor) -> Tensor:
    rows, ids = hidden.shape[0], weight.shape[0]
    labels = torch.arange(rows, device=hidden.device) * 7 % ids
    shares = torch.full((rows,), 1 / rows, device=hidden.device)
    part = VocabularyPart(mesh=ParallelContext.single().mesh, start=0, valid=ids)
    return linear_cross_entropy(hidden, weight, labels, shares, vocabulary=part)


def _rotate(x: Tensor) -> Tensor:
    return apply_rotary(x, Rotary(width=32).table(torch.arange(len(x), device=x.device), length=len(x)))


X = (40, 2, 64)
OPERATIONS: Mapping[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "RMSNorm": (partial(rms_norm, eps=1e-5), [X, (64,)]),
    "LayerNorm": (partial(layer_norm, eps=1e-5), [X, (64,), (64,)]),
    "SwiGLU": (partial(gated_activation, kind="silu"), [X]),
    "GEGLU": (partial(gated_activation, kind="gelu"), [X]),
    "GELU": (partial(activation, kind="gelu"), [X]),
    "squared ReLU": (partial(activation, kind="squared_relu"), [X]),
    "rotary": (_rotate, [(40, 2, 4, 32)]),
    "output layer and cross entropy": (_loss, [(80, 64), (250, 64)]),
}


def _with_gradients(name: str, device: torch.device, dtype: torch.dtype) -> Results:
    function, shapes = OPERATIONS[name]
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    inputs = [x.to(device, dtype).requires_grad_() for x in made]
    out = function(*inputs)
    upstream = torch.linspace(0.1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


def check_operations(device: torch.device, *, compiled: bool = False) -> Iterator[Found]:
    """Operations around the products against fp64 on the CPU. ``compiled``: as --compile has them."""
    for name in OPERATIONS:
        compile_bodies(False, torch.device("cpu"))
        wanted = _with_gradients(name, torch.device("cpu"), torch.float64)
        compile_bodies(compiled, device)
        for dtype in TYPES:
            found = _with_gradients(name, device, dtype)
            yield Found(f"{name}, {_name(dtype)}", distance(found, wanted), BOUNDS[dtype])
    compile_bodies(False, torch.device("cpu"))


def check_optimizer(device: torch.device) -> Iterator[Found]:
    """Three steps of the fused AdamW, with a factor of its gradients, against fp64 on the CPU."""
    results = []
    for on, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
        generator = torch.Generator().manual_seed(0)
        weights, grads = (torch.randn(5000, generator=generator).to(on, dtype) for _ in range(2))
        state = [torch.zeros_like(weights) for _ in range(2)]
        for number in range(1, 4):
            scale = torch.full((), 4.0, device=on)
            AdamW(OptimizerConfig(lr=1e-2)).apply(weights, grads.clone(), state, Step(number, 1e-2, 0.1, scale))
        results.append([weights, *state])
    yield Found("AdamW, three steps", distance(*results), BOUNDS[torch.float32])


CHECKS: dict[str, Callable[[torch.device], Iterator[Found]]] = {
    **{f"attention: {name}": partial(check_attention, name) for name in BACKENDS if name != "eager"},
    **{f"fp8: {recipe}": partial(check_fp8, recipe) for recipe in ("tensorwise", "blockwise", "mxfp8")},
    "grouped products": check_grouped,
    "operations": check_operations,
    "operations, compiled": partial(check_operations, compiled=True),
    "optimizer": check_optimizer,
}


def check(name: str, backend: str | None) -> list[Found]:
    """Run one of CHECKS in this process, on the GPU or, with gloo, on the CPU. What raises ends it as failed."""
    found = list[Found]()
    try:
        device = choose_device(backend, LaunchEnvironment())
        without_tf32()
        for each in CHECKS[name](device):
            found.append(each)
    except Exception as error:  # a kernel's, or that of a driver
        line, *_ = str(error).strip().splitlines() or [""]
        found.append(Found("next", failed=f"{type(error).__name__}: {line}"))
    return found
