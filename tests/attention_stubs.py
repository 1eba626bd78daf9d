"""Packages of attention kernels that compute in plain arithmetic on a CPU, with the signatures of real releases.

Signatures are data (tests/unit/ops/signatures), so that a call that a release would refuse is refused here. What a
function computes is written out from its documentation: scores of every query and key in fp64, a mask aligned bottom
right, a softmax. It shares no code with megatron.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

SIGNATURES = Path(__file__).parent / "unit" / "ops" / "signatures"
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Operator:
    """A function that a package has registered with torch: its signature is that of ``_init_fn``, not its own."""

    _init_fn: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._init_fn(*args, **kwargs)


def signatures(release: str) -> Iterator[tuple[str, inspect.Signature, bool]]:
    """Name, signature, and whether it is an operator, of each function in a file of signatures."""
    for line in (SIGNATURES / f"{release}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        text = line.removeprefix("operator ")
        (function,) = ast.parse(f"def {text}: ...").body
        assert isinstance(function, ast.FunctionDef)
        names, empty = [each.arg for each in function.args.args], inspect.Parameter.empty
        values = [ast.literal_eval(each) for each in function.args.defaults]
        defaults = [empty] * (len(names) - len(values)) + values
        parameters = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in zip(names, defaults)
        ]
        yield function.name, inspect.Signature(parameters), text != line


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which keys a query sees and what its scores are. ``left``, ``right``: keys beside its own place; -1: all."""

    scale: float
    left: int = -1
    right: int = -1
    soft_cap: float = 0.0
    slopes: Tensor | None = None

    def scores(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [n, sq, sk] of q [sq, n, d] and k [sk, g, d], and their derivative after those before the cap."""
        sq, n, _ = q.shape
        sk, g, _ = k.shape
        keys = k.double()[:, [head // (n // g) for head in range(n)]]
        scores = torch.einsum("inc,jnc->nij", q.double(), keys) * self.scale
        bend = torch.ones_like(scores)
        if self.soft_cap > 0.0:
            bent = torch.tanh(scores / self.soft_cap)
            scores, bend = bent * self.soft_cap, 1.0 - bent**2
        i, j = torch.meshgrid(torch.arange(sq), torch.arange(sk), indexing="ij")
        own = i + sk - sq  # bottom right: the last query is at the last key
        if self.slopes is not None:
            is_causal = self.left < 0 and self.right == 0
            away = -j if is_causal else (own - j).abs()  # flash-attn 2 leaves out what a row has in common
            scores = scores - self.slopes.double()[:, None, None] * away
        hidden = torch.zeros(sq, sk, dtype=torch.bool)
        if self.left >= 0:
            hidden |= j < own - self.left
        if self.right >= 0:
            hidden |= j > own + self.right
        return scores.masked_fill(hidden, -math.inf), bend


def forward_of_one(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, kept: Tensor | None, empty: float
) -> tuple[Tensor, Tensor]:
    """Result [sq, n, d] and log-sum-exp [n, sq] of one sequence; ``empty`` for a query without keys."""
    n, g = q.shape[1], k.shape[1]
    scores, _ = rule.scores(q, k)
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values.clamp(min=-1e300)) if scores.numel() else scores
    sums = weights.sum(-1, keepdim=True)
    lse = torch.logsumexp(scores, -1) if scores.numel() else scores.new_full(scores.shape[:2], -math.inf)
    weights = torch.where(sums > 0, weights / sums, 0.0)
    weights = weights if kept is None else weights * kept
    values = v.double()[:, [head // (n // g) for head in range(n)]]
    return torch.einsum("nij,jnc->inc", weights, values), lse.masked_fill(lse == -math.inf, empty)


def backward_of_one(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, for a result and a log-sum-exp [n, sq] that may be those over more keys than these."""
    n, g = q.shape[1], k.shape[1]
    heads = [head // (n // g) for head in range(n)]
    scores, bend = rule.scores(q, k)
    weights = torch.exp(scores - lse.double()[..., None])  # as the kernels do: a wrong infinity would be NaN here
    grad_weights = torch.einsum("inc,jnc->nij", grad.double(), v.double()[:, heads])
    dropped = weights if kept is None else weights * kept
    grad_weights = grad_weights if kept is None else grad_weights * kept
    means = (grad.double() * out.double()).sum(-1).T[..., None]
    grad_scores = weights * (grad_weights - means) * bend * rule.scale
    grad_q = torch.einsum("nij,jnc->inc", grad_scores, k.double()[:, heads])
    all_k = torch.einsum("nij,inc->jnc", grad_scores, q.double())
    all_v = torch.einsum("nij,inc->jnc", dropped, grad.double())
    grad_k, grad_v = (x.reshape(len(x), g, n // g, -1).sum(2) for x in (all_k, all_v))
    return grad_q, grad_k, grad_v


@dataclass
class Kernels:
    """A stub of flash-attn. ``dtypes``: what it accepts; tests that ask for 1e-9 add fp64. ``empty``: log-sum-exp of a
    query without keys. ``calls``: names and arguments of all calls so far.
    """

    empty: float
    dtypes: tuple[torch.dtype, ...] = HALF
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def module(self, title: str, release: str) -> ModuleType:
        """The module, whose functions accept what those of ``release`` accept."""
        module = ModuleType(title)
        for function, signature, is_operator in signatures(release):
            method = self._backward if "backward" in function else self._forward

            def call(*args: Any, _of: Any = (function, signature, method), **kwargs: Any) -> Any:
                name, accepted, computes = _of
                bound = accepted.bind(*args, **kwargs)
                bound.apply_defaults()
                self.calls.append((name, bound.arguments))
                return computes(dict(bound.arguments), is_old="window_size" in accepted.parameters)

            call.__signature__ = signature  # type: ignore[attr-defined]
            setattr(module, function, Operator(call) if is_operator else call)
        return module

    def _sides(self, given: dict[str, Any]) -> tuple[int, int]:
        left, right = given.get("window_size") or (given["window_size_left"], given["window_size_right"])
        assert isinstance(left, int) and isinstance(right, int) and min(left, right) >= -1, "no bound is -1"
        causal = given.get("causal", given.get("is_causal"))
        assert causal in (True, False), f"causal is {causal}"
        right = 0 if causal else right
        if given.get("cu_seqlens_q") is None:  # flash-attn drops bounds that are as wide as the keys
            left, right = (-1 if side >= given["k"].shape[1] else side for side in (left, right))
        return left, right

    def _check(self, given: dict[str, Any]) -> None:
        """What the C++ code of the packages checks."""
        q, k, v = (given[name] for name in "qkv")
        assert q.dtype in self.dtypes and q.dtype == k.dtype == v.dtype, f"no kernel for {q.dtype}"
        assert all(x.stride(-1) == 1 for x in (q, k, v)), "elements of a head lie apart"
        assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, f"heads of {q.shape[-1]}"
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and k.shape == v.shape
        assert q.shape[-2] % k.shape[-2] == 0, "a group has no whole number of heads"
        assert isinstance(given["softmax_scale"], float) and given["softcap"] >= 0.0
        assert not (given["softcap"] and given.get("dropout_p")), "a soft cap and dropout in one call"
        slopes = given.get("alibi_slopes")
        assert slopes is None or (slopes.dtype == torch.float32 and slopes.shape == q.shape[-2:-1])
        if given.get("cu_seqlens_q") is None:
            assert q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0]
            return
        assert q.dim() == k.dim() == 3
        for side, x in (("q", q), ("k", k)):
            ends, longest = given[f"cu_seqlens_{side}"], given[f"max_seqlen_{side}"]
            assert ends.dtype == torch.int32 and ends.dim() == 1 and ends.is_contiguous()
            lengths = ends.diff().tolist()
            assert ends[0] == 0 and ends[-1] == len(x) and min(lengths) >= 0 and longest >= max(lengths)

    def _pieces(self, given: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Index of the queries and of the keys of each sequence."""
        if given.get("cu_seqlens_q") is None:
            return [(sample, sample) for sample in range(len(given["q"]))]
        ends = [given[f"cu_seqlens_{side}"].tolist() for side in "qk"]
        slices = [[slice(*pair) for pair in itertools.pairwise(each)] for each in ends]
        return list(zip(*slices))

    def _rule(self, given: dict[str, Any]) -> Rule:
        left, right = self._sides(given)
        return Rule(
            scale=given["softmax_scale"],
            left=left,
            right=right,
            soft_cap=given["softcap"],
            slopes=given.get("alibi_slopes"),
        )

    def _kept(self, given: dict[str, Any], state: Tensor, number: int, rows: Any, keys: Any) -> Tensor | None:
        """Dropout of one sequence, as a function of the generator's state alone."""
        p = given.get("dropout_p", 0.0)
        if not p:
            return None
        generator = torch.Generator().manual_seed(int(state[0]) + number)
        shape = given["q"].shape[-2], len(given["q"][rows]), len(given["k"][keys])
        kept: Tensor = (torch.rand(shape, generator=generator) >= p).double() / (1.0 - p)
        return kept

    def _forward(self, given: dict[str, Any], *, is_old: bool) -> tuple[Any, ...]:
        self._check(given)
        assert not given.get("return_softmax")
        q, k, v = (given[name] for name in "qkv")
        state = torch.randint(0, 1 << 40, (2,))  # from torch's own generator, as the kernels draw
        out = torch.zeros(q.shape, dtype=q.dtype)
        exact = torch.float64 if q.dtype == torch.float64 else torch.float32
        is_packed = given.get("cu_seqlens_q") is not None
        lse = torch.zeros(q.shape[1::-1] if is_packed else (q.shape[0], q.shape[2], q.shape[1]), dtype=exact)
        for number, (rows, keys) in enumerate(self._pieces(given)):
            kept = self._kept(given, state, number, rows, keys)
            one, sums = forward_of_one(q[rows], k[keys], v[keys], self._rule(given), kept, self.empty)
            out[rows] = one.to(out.dtype)
            lse[(slice(None), rows) if is_packed else rows] = sums.to(exact)
        if "dropout_p" not in given:  # flash-attn 3
            return out, lse, None, None
        return (out, q, k, v, out, lse, None, state) if is_old else (out, lse, None, state)

    def _backward(self, given: dict[str, Any], *, is_old: bool) -> Any:
        self._check(given)
        q, k, v = (given[name] for name in "qkv")
        lse, targets = given["softmax_lse"], [given[f"d{name}"] for name in "qkv"]
        is_packed = given.get("cu_seqlens_q") is not None
        assert lse.shape == (q.shape[1::-1] if is_packed else (q.shape[0], q.shape[2], q.shape[1]))
        assert lse.is_contiguous() and lse.dtype in (torch.float32, torch.float64)
        assert given["dout"].shape == given["out"].shape == q.shape and given["deterministic"] in (True, False)
        assert all(target.shape == x.shape and target.dtype == x.dtype for target, x in zip(targets, (q, k, v)))
        state = given.get("rng_state")
        assert not given.get("dropout_p") or state is not None, "dropout would be drawn anew"
        for number, (rows, keys) in enumerate(self._pieces(given)):
            kept = None if state is None else self._kept(given, state, number, rows, keys)
            sums = lse[(slice(None), rows) if is_packed else rows]
            given_one = (given["dout"][rows], q[rows], k[keys], v[keys], given["out"][rows], sums)
            found = backward_of_one(*given_one, self._rule(given), kept)
            for target, each, at in zip(targets, found, (rows, keys, keys)):
                target[at] = each.to(target.dtype)
        unused = torch.zeros(1)
        return (*targets, unused) if is_old else unused


class TransformerEngine:
    """A stub of ``transformer_engine.pytorch``."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []

    def module(self, title: str, release: str) -> ModuleType:
        """The module, with its class ``DotProductAttention``."""
        module, stub = ModuleType(title), self
        accepted = {name: signature for name, signature, _ in signatures(release)}

        class DotProductAttention:
            def __init__(self, **settings: Any) -> None:
                bound = accepted["__init__"].bind(self, **settings)
                bound.apply_defaults()
                stub.made.append(settings)
                self._settings = bound.arguments

            def __call__(self, **given: Any) -> Tensor:
                bound = accepted["forward"].bind(self, **given)
                bound.apply_defaults()
                stub.calls.append(given)
                return attention_of_engine(self._settings, bound.arguments)

        module.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
        return module


def attention_of_engine(settings: dict[str, Any], given: dict[str, Any]) -> Tensor:
    """[s, b, n·d] of [s, b, n, d], or [tokens, n·d] of [tokens, n, d], as the class documents it."""
    q, k, v = (given[f"{name}_layer"] for name in ("query", "key", "value"))
    kind, layout = given["attn_mask_type"], given["qkv_format"]
    left, right = given["window_size"]
    width = settings["kv_channels"]
    assert (q.shape[-1], v.shape[-1]) == (width if isinstance(width, tuple) else (width, width))
    assert q.shape[-2:-1] == (settings["num_attention_heads"],) and k.shape[-2:-1] == (settings["num_gqa_groups"],)
    slopes = given["alibi_slopes"]
    assert (given["core_attention_bias_type"] == "alibi") == (slopes is not None)
    assert slopes is None or slopes.dtype == torch.float32
    assert right == 0 or "causal" not in kind, "a causal mask has no keys on the right"
    if layout == "thd":
        assert kind.startswith("padding") and q.dim() == 3
        ends = given["cu_seqlens_q"]
        assert ends.dtype == torch.int32 and ends[-1] == len(q) and given["max_seqlen_q"] >= max(ends.diff())
        pieces: list[tuple[Any, ...]] = [(slice(*pair),) for pair in itertools.pairwise(ends.tolist())]
    else:
        assert layout == "sbhd" and not kind.startswith("padding") and q.dim() == 4
        assert kind != "causal" or len(q) == len(k), "it is aligned top left"
        pieces = [(slice(None), sample) for sample in range(q.shape[1])]
    rule = Rule(scale=settings["softmax_scale"], left=left, right=right, slopes=slopes)
    p, found = settings["attention_dropout"], []
    for at in pieces:
        shape = q.shape[-2], len(q[at]), len(k[at])
        kept = (torch.rand(shape) >= p).double() / (1.0 - p) if p else None  # from torch's own generator
        found.append(forward_of_one(q[at], k[at], v[at], rule, kept, -math.inf)[0].to(q.dtype))
    out = torch.cat(found) if layout == "thd" else torch.stack(found, dim=1)
    return out.flatten(-2)


def torch_kernels(library: torch.library.Library) -> None:
    """Give torch's flash and cuDNN operators, which exist for GPUs only, a CPU implementation with their schemas."""

    def flash(*positional: Any, **named: Any) -> Any:
        given = _by_name(torch.ops.aten._flash_attention_forward.default, positional, named)
        assert not given["dropout_p"] and not given["is_causal"] and not given["return_debug_mask"]
        out, lse, *_ = stub._forward(_flash_names(given), is_old=False)
        state = torch.zeros(2, dtype=torch.uint64)
        return out, lse, state, state, torch.zeros(0)

    def flash_backward(*positional: Any, **named: Any) -> Any:
        given = _by_name(torch.ops.aten._flash_attention_backward.default, positional, named)
        found = {f"d{name}": torch.empty_like(given[full]) for name, full in _FULL.items()}
        lse = {"dout": given["grad_out"], "out": given["out"], "softmax_lse": given["logsumexp"]}
        stub._backward(_flash_names(given) | found | lse | {"deterministic": False}, is_old=False)
        return tuple(found.values())

    stub = Kernels(math.inf, dtypes=(*HALF, torch.float64))
    library.impl("_flash_attention_forward", flash)  # type: ignore[no-untyped-call]
    library.impl("_flash_attention_backward", flash_backward)  # type: ignore[no-untyped-call]

    def rule(given: dict[str, Any]) -> Rule:
        q, k = given["query"], given["key"]
        assert q.shape[2] == k.shape[2] or not given["is_causal"], "causal calls are aligned top left"
        assert not given["dropout_p"]
        return Rule(scale=given["scale"], right=0 if given["is_causal"] else -1)

    def cudnn(*positional: Any, **named: Any) -> Any:
        given = _by_name(torch.ops.aten._scaled_dot_product_cudnn_attention.default, positional, named)
        assert given["attn_bias"] is None and given["compute_log_sumexp"] and not given["return_debug_mask"]
        assert given["key"].shape[2] > 1, "cuDNN SDPA does not support key/value sequence length 1"
        samples = zip(*(given[full].transpose(1, 2) for full in _FULL.values()))
        found = [forward_of_one(q, k, v, rule(given), None, -math.inf) for q, k, v in samples]
        out = torch.stack([one for one, _ in found]).transpose(1, 2).to(given["query"].dtype)
        lse = torch.stack([sums for _, sums in found]).unsqueeze(-1)  # [b, n, s, 1], unlike the others
        seed = torch.zeros((), dtype=torch.int64)
        sizes = given["query"].shape[2], given["key"].shape[2]
        return out, lse, torch.zeros(0), torch.zeros(0), *sizes, seed, seed, torch.zeros(0)

    def cudnn_backward(*positional: Any, **named: Any) -> Any:
        given = _by_name(torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default, positional, named)
        q, lse = given["query"], given["logsumexp"]
        assert lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        assert (given["max_q"], given["max_k"]) == (q.shape[2], given["key"].shape[2])
        names = ("grad_out", *_FULL.values(), "out")
        samples = zip(*(given[name].transpose(1, 2) for name in names), lse.squeeze(-1))
        found = [backward_of_one(g, q, k, v, o, sums, rule(given), None) for g, q, k, v, o, sums in samples]
        return tuple(torch.stack(each).transpose(1, 2).to(q.dtype) for each in zip(*found))

    library.impl("_scaled_dot_product_cudnn_attention", cudnn)  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward)  # type: ignore[no-untyped-call]


_FULL = {"q": "query", "k": "key", "v": "value"}


def _by_name(operator: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator of torch, with the defaults of its schema."""
    arguments = operator._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return given | dict(zip((each.name for each in arguments), positional)) | named


def _flash_names(given: dict[str, Any]) -> dict[str, Any]:
    """Torch's arguments by the names that flash-attn has for them."""
    names = {"cum_seq_q": "cu_seqlens_q", "cum_seq_k": "cu_seqlens_k", "max_q": "max_seqlen_q", "max_k": "max_seqlen_k"}
    short = {short: given[full] for short, full in _FULL.items()}
    sides = {name: given[name] for name in ("window_size_left", "window_size_right")}
    renamed = {new: given[old] for old, new in names.items()}
    return short | sides | renamed | {"softmax_scale": given["scale"], "softcap": 0.0, "causal": given["is_causal"]}
