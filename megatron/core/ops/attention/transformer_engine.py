"""Attention by Transformer Engine's ``DotProductAttention``, which chooses between cuDNN and flash-attn."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from megatron.core.device import seeded
from megatron.core.ops.attention.capabilities import Capabilities
from megatron.core.ops.attention.flash import document_ends, imported
from megatron.core.ops.attention.request import AttentionOptions, AttentionRequest, Gradients, PartialResult
from megatron.core.ops.dropout import seed_of

_MODULE = "transformer_engine.pytorch"

CAPABILITIES = Capabilities(
    subject="Transformer Engine",
    features=frozenset(("dropout", "windows", "ALiBi", "documents", "cached keys", "determinism")),
)


class _Backend:
    """Transformer Engine's attention. Partial results and sinks are internal: its module keeps the log-sum-exp, and
    owns its sinks.
    """

    capabilities = CAPABILITIES
    takes_sinks = False

    def missing(self) -> str | None:
        """None, or what isn't installed."""
        return None if imported(_MODULE) is not None else "the package transformer-engine is not installed"

    def supports(self, request: AttentionRequest) -> str | None:
        """None, or why this backend cannot compute the call."""
        return self.capabilities.refusal(request)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """The result of ``attention`` by Transformer Engine's module."""
        module = _module(
            num_attention_heads=q.shape[2],
            kv_channels=q.shape[3] if q.shape[3] == v.shape[3] else (q.shape[3], v.shape[3]),
            num_gqa_groups=k.shape[2],
            attention_dropout=options.dropout,
            softmax_scale=options.scale,
            attention_type="self" if q.shape[0] == k.shape[0] else "cross",
        )
        before, after = options.sides
        sides = (-1 if before is None else before, -1 if after is None else after)
        given: dict[str, Any] = {"window_size": sides, "attn_mask_type": "no_mask", "qkv_format": "sbhd"}
        if options.causal:
            given["attn_mask_type"] = "causal" if q.shape[0] == k.shape[0] else "causal_bottom_right"
        if options.slopes is not None:
            given |= {"core_attention_bias_type": "alibi", "alibi_slopes": options.slopes.float()}
        samples = q.shape[1]
        if options.document_ids is not None:
            ends, longest = document_ends(options.document_ids, q.device)
            given |= {
                "qkv_format": "thd",
                "attn_mask_type": "padding_causal" if options.causal else "padding",
                "cu_seqlens_q": ends,
                "cu_seqlens_kv": ends,
                "max_seqlen_q": longest,
                "max_seqlen_kv": longest,
            }
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
        with seeded(q.device, seed_of(options.dropout, options.generator)):
            out: Tensor = module(query_layer=q, key_layer=k, value_layer=v, **given)
        if options.document_ids is None:
            return out
        return out.unflatten(0, (samples, -1)).transpose(0, 1)  # type: ignore[no-untyped-call, no-any-return]

    def attend_partly(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PartialResult:
        """Never called: ``capabilities`` refuses partial results."""
        raise AssertionError("Transformer Engine gives no log-sum-exp")

    def gradients_of_part(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: PartialResult, options: AttentionOptions
    ) -> Gradients:
        """Never called: ``capabilities`` refuses partial results."""
        raise AssertionError("Transformer Engine gives no log-sum-exp")


@functools.cache
def _module(**settings: Any) -> Any:
    """A module without parameters, which all layers with these ``settings`` share."""
    engine = imported(_MODULE)
    assert engine is not None, "the registry asks first"
    return engine.DotProductAttention(**settings)


BACKEND = _Backend()
