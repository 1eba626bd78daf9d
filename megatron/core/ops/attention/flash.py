"""What flash kernels of other packages share: each adds a table of capabilities and two calls.

Flash kernels take [b, s, n, d], or [tokens, n, d] with the ends of documents. Causal masks and windows are aligned
*bottom right*: the last query is at the last key. A call whose queries lie elsewhere is cut to the queries that see a
key and the keys that they see; then the bounds of its band, counted from the last query and the last key, aren't
negative, which to these kernels would mean that there is no bound. And none asks for a query without keys, whose
log-sum-exp is plus infinity in flash-attn 2 and minus infinity in flash-attn 3.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from megatron.core.device import seeded
from megatron.core.ops.attention.capabilities import Capabilities
from megatron.core.ops.attention.masks import document_lengths
from megatron.core.ops.attention.online_softmax import sinks_gradient, with_sinks
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult
from megatron.core.ops.dropout import seed_of

_known_ends = WeakIdKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class FlashCall:
    """What a flash kernel is asked beside its tensors.

    A query sees ``left`` keys before and ``right`` keys after its own place; -1 for all. ``soft_cap`` 0: none.
    ``slopes`` [n] fp32. ``ends`` [documents + 1] int32: where documents begin and end, of ``longest`` tokens at most;
    None for [b, s, n, d].
    """

    scale: float
    left: int = -1
    right: int = -1
    soft_cap: float = 0.0
    slopes: Tensor | None = None
    dropout: float = 0.0
    ends: Tensor | None = None
    longest: int = 0
    deterministic: bool = False

    @property
    def documents(self) -> dict[str, Any]:
        """Names and values of the arguments that tell flash-attn of documents; none for [b, s, n, d]."""
        if self.ends is None:
            return {}
        ends, longest = self.ends, self.longest
        return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}


class FlashKernel(Protocol):
    """The two calls of a package. ``lse``, of scaled scores, is [b, n, s], or [n, tokens] of documents."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor, Tensor | None]:
        """Result, log-sum-exp, and the state of the generator from which dropout was drawn."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        state: Tensor | None,
        call: FlashCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, where ``out`` and ``lse`` may be those over these and other keys."""
        ...


@dataclass(frozen=True)
class FlashBackend:
    """A ``Backend`` made of a package's kernel. ``module``: what must be importable; ``package``: its name to users."""

    capabilities: Capabilities
    kernel: FlashKernel
    module: str
    package: str

    takes_sinks = True

    def missing(self) -> str | None:
        """None, or what isn't installed."""
        return None if imported(self.module) is not None else f"the package {self.package} is not installed"

    def supports(self, request: AttentionRequest) -> str | None:
        """None, or why this backend cannot compute the call."""
        return self.capabilities.refusal(request)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """The result of ``attention`` by the package's kernel."""
        alone = dataclasses.replace(options, sinks=None)
        out: Tensor = _Flash.apply(q, k, v, options.sinks, alone, self)  # type: ignore[no-untyped-call]
        return out.flatten(2)

    def attend_partly(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
        """The result of ``partial_attention`` by the package's kernel."""
        return self.run(q, k, v, options)[0]

    def gradients_of_part(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: PartialResult,
        options: AttentionOptions,
        state: Tensor | None = None,
    ) -> Gradients:
        """The result of ``partial_attention_gradients``; ``state`` is what ``run`` returned."""
        band = _band(options, queries=q.shape[0], keys=k.shape[0])
        grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        if band is not None:
            given = [x[band.rows] for x in (grad, q, whole.out)]
            width = _width(q, v)
            upstream, query, out = (_packed(x, width, options) for x in given)
            key, value = (_packed(x[band.keys], width, options) for x in (k, v))
            lse = whole.lse[band.rows]
            sums = lse.permute(1, 2, 0) if options.document_ids is None else lse.permute(2, 1, 0).flatten(1)
            call = _call(q, options, band)
            found = self.kernel.backward(upstream, query, key, value, out, sums.contiguous(), state, call)
            for total, each, at in zip(grads, found, (band.rows, band.keys, band.keys)):
                like = total[at]
                total[at] = _unpacked(each, like)
        return Gradients(*grads)

    def run(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[PartialResult, Tensor | None]:
        """Result and log-sum-exp over these keys, and the state from which dropout was drawn."""
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        band = _band(options, queries=q.shape[0], keys=k.shape[0])
        if band is None:
            return PartialResult(out, lse), None
        width = _width(q, v)
        query = _packed(q[band.rows], width, options)
        key, value = (_packed(x[band.keys], width, options) for x in (k, v))
        with seeded(q.device, seed_of(options.dropout, options.generator)):
            found, sums, state = self.kernel.forward(query, key, value, _call(q, options, band))
        out[band.rows] = _unpacked(found, out[band.rows])
        if options.document_ids is None:
            sums = sums.permute(2, 0, 1)
        else:
            sums = sums.unflatten(1, (q.shape[1], -1)).permute(2, 1, 0)  # type: ignore[no-untyped-call]
        lse[band.rows] = sums
        return PartialResult(out, lse), state


class _Flash(torch.autograd.Function):
    """Keeps q, k, v, the sinks, the result and its log-sum-exp."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        options: AttentionOptions,
        backend: FlashBackend,
    ) -> Tensor:
        whole, state = backend.run(q, k, v, options)
        if sinks is not None:
            whole = with_sinks(whole, sinks)
        ctx.save_for_backward(q, k, v, sinks, whole.out, whole.lse, state if options.dropout else None)
        ctx.call = dataclasses.replace(options, generator=None), backend
        return whole.out

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, state = ctx.saved_tensors
        options, backend = ctx.call
        whole = PartialResult(out, lse)
        found = backend.gradients_of_part(grad, q, k, v, whole, options, state)
        grad_sinks = sinks_gradient(grad, whole, sinks) if ctx.needs_input_grad[3] else None
        return found.q, found.k, found.v, grad_sinks, None, None


@dataclass(frozen=True)
class _Band:
    """The queries that see a key, the keys that they see, and how many keys each sees on either side; see FlashCall."""

    rows: slice
    keys: slice
    left: int
    right: int


def _band(options: AttentionOptions, *, queries: int, keys: int) -> _Band | None:
    """None when no query sees a key."""
    offset = keys - queries if options.offset is None else options.offset
    before, after = options.sides
    start = 0 if after is None else max(0, -(offset + after))
    stop = queries if before is None else min(queries, keys + before - offset)
    if start >= stop or keys == 0:
        return None
    rows = slice(start, stop)
    seen = options.visible(rows, queries=queries, keys=keys)
    ahead = (offset + start - seen.start) - ((seen.stop - seen.start) - (stop - start))
    return _Band(rows, seen, -1 if before is None else before - ahead, -1 if after is None else after + ahead)


def _call(q: Tensor, options: AttentionOptions, band: _Band) -> FlashCall:
    ends, longest = None, 0
    if options.document_ids is not None:
        ends, longest = document_ends(options.document_ids, q.device)
    return FlashCall(
        scale=options.scale,
        left=band.left,
        right=band.right,
        soft_cap=options.soft_cap or 0.0,
        slopes=None if options.slopes is None else options.slopes.float(),
        dropout=options.dropout,
        ends=ends,
        longest=longest,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def document_ends(document_ids: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Where documents begin and end, [documents + 1] int32, samples one after the other; tokens of the longest.

    All layers of a microbatch share ``document_ids``, and so this copy to a GPU.
    """
    known: tuple[Tensor, int] | None = _known_ends.get(document_ids)  # type: ignore[no-untyped-call]
    if known is None:
        lengths = list(itertools.chain(*document_lengths(document_ids)))
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        known = _known_ends[document_ids] = ends.to(device, non_blocking=True), max(lengths)
    return known


def _width(q: Tensor, v: Tensor) -> int:
    """Width of the heads for kernels that have one for queries, keys and values, a multiple of 8."""
    return -(-max(q.shape[3], v.shape[3]) // 8) * 8


def _packed(x: Tensor, width: int, options: AttentionOptions) -> Tensor:
    """[s, b, n, d] -> [b, s, n, width], a view where possible; for documents [b·s, n, width]."""
    x = x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))
    x = x.transpose(0, 1)
    x = x if options.document_ids is None else x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def _unpacked(x: Tensor, like: Tensor) -> Tensor:
    """The inverse, for the shape of ``like`` [s, b, n, d]."""
    return x.reshape(like.shape[1], like.shape[0], like.shape[2], -1).transpose(0, 1)[..., : like.shape[3]]


@functools.cache
def imported(name: str) -> ModuleType | None:
    """The module ``name``; None where it isn't installed or doesn't fit the installed libraries."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return None


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameters and defaults of a package's function, also of one that it has made an operator of torch."""
    named = inspect.signature(getattr(function, "_init_fn", function)).parameters
    return {name: each.default for name, each in named.items()}


def by_keyword(function: Callable[..., Any], *, left: int, right: int, **given: Any) -> Any:
    """Call a package's function, whose releases differ in the order of parameters, in whether those without use have
    defaults, and in whether the two sides of a window are one parameter or two.
    """
    parameters = _parameters(function)
    unused = {name: None for name, default in parameters.items() if default is inspect.Parameter.empty}
    for name in ("causal", "is_causal"):
        if name in parameters:
            given[name] = False  # kernels take causality from the window: no bound on the left, 0 on the right
    sides = (
        {"window_size": (left, right)}
        if "window_size" in parameters
        else {"window_size_left": left, "window_size_right": right}
    )
    return function(**unused | sides | given)
