"""XLNet (Yang et al. 2019, arXiv:1906.08237) as a family outside the package."""

from __future__ import annotations

from megatron.core.models.registry import Family

FAMILY = Family("xlnet", "xlnet")
