"""A family of one's own: a language model whose layers have a gated recurrence in place of attention."""

from __future__ import annotations

from megatron.core.models.registry import Family

FAMILY = Family("recurrent", "recurrent")
