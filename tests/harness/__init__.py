"""Multi-rank tests on CPU in about a tenth of a second: see ``run_ranks``."""

from __future__ import annotations

from tests.harness.ranks import RankFailure, RanksError, run_ranks

__all__ = ["RankFailure", "RanksError", "run_ranks"]
