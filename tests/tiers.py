"""Cases in two tiers, since all pairs of model and layout take longer than anybody waits for after a change."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from tests.selection import EVERY_EXAMPLE

if TYPE_CHECKING:
    from hypothesis import settings

WHOLE_TIER_ALONE = {
    "tests/end_to_end/test_accelerate.py": "real launchers of ranks; tests/unit/library has models from transformers",
    "tests/end_to_end/test_assistant_quickstart.py": "the default tier runs one quickstart, that of GPT",
    "tests/end_to_end/test_export_quickstart.py": "the default tier runs one quickstart, that of GPT",
    "tests/end_to_end/test_lost_workers.py": "launchers that wait for each other; test_diloco.py has workers",
    "tests/end_to_end/test_drills.py": "real launchers, a minute each; tests/unit/training/guards has each guard",
    "tests/end_to_end/test_experts_quickstart.py": "the default tier runs one quickstart, that of GPT",
    "tests/end_to_end/test_grpo_quickstart.py": "tests/unit/training/rollouts trains on rewards in the default tier",
    "tests/end_to_end/test_hybrid_quickstart.py": "the default tier runs one quickstart, that of GPT",
    "tests/end_to_end/test_masked_quickstarts.py": "the default tier runs one quickstart, that of GPT",
    "tests/end_to_end/test_preprocess_cluster.py": "a real Ray and Slurm; tests/unit/preprocessing has pieces",
    "tests/end_to_end/test_prune_quickstart.py": "the default tier runs one quickstart, that of GPT",
    "tests/end_to_end/test_vision_language_quickstart.py": "the default tier runs one quickstart, that of GPT",
    "tests/unit/tools/test_image_generation.py": "tests/unit/inference/test_images.py has the engine",
    "tests/unit/training/rollouts/test_trl_run.py": "two whole steps; tests/unit/objectives compares losses with trl's",
    "tests/parallel/test_node_copies.py": "runs of four ranks; tests/unit/checkpointing proves which copy is taken",
    "tests/parallel/test_fsdp2.py": "a second opinion on what tests/equivalence/test_sharding_stages.py proves",
    "tests/end_to_end/test_slurm.py": "Slurm takes its time to start jobs; test_slurm_job.py has a stand-in",
}
"""Modules without a test in the default tier, and why."""


def pairs(
    variants: Iterable[Any],
    layouts: Iterable[Any],
    *,
    rich: Collection[Any],
    more: Mapping[Any, Collection[Any]] | None = None,
    slow: Collection[Any] = (),
    light: Collection[Any] = (),
) -> list[Any]:
    """Every pair of variant and layout, for ``parametrize``; a covering array of them is in the default tier.

    In it is each variant at one layout of ``rich``, which the variants take in turn, each other layout with one
    variant, in turn too, and the pairs of ``more``. The other pairs are slow, and so is whatever is in ``slow``, since
    other tests have it. ``light``: variants that take the other layouts, where some cost much more than others.
    """
    variants, layouts, more = tuple(variants), tuple(layouts), more or {}
    assert {*rich} <= {*layouts} and {*more, *light} <= {*variants} and {*slow} <= {*variants, *layouts}
    first = {(variant, layout) for variant in more for layout in more[variant]}
    tried = [variant for variant in variants if variant not in slow]
    first |= set(zip(tried, itertools.cycle(rich)))
    left = [each for each in layouts if each not in slow and each not in {layout for _, layout in first}]
    first |= set(zip(itertools.cycle([each for each in tried if each in (light or tried)]), left))
    return [
        pytest.param(variant, layout, marks=[] if (variant, layout) in first else pytest.mark.slow)
        for variant in variants
        for layout in layouts
    ]


def tiers(cases: Iterable[Any], *, first: Collection[Any]) -> list[Any]:
    """Cases for ``parametrize``; those that aren't in ``first`` are slow."""
    cases = tuple(cases)
    assert {*first} <= {*cases}
    return [pytest.param(case, marks=[] if case in first else pytest.mark.slow) for case in cases]


def examples(count: int) -> settings:
    """How many examples a property test takes; a fifth of them in the default tier."""
    from hypothesis import settings  # here, since ranks import this module

    return settings(max_examples=many(count))


def many(count: int) -> int:
    """How often a test repeats something; a fifth as often in the default tier."""
    return count if os.environ.get(EVERY_EXAMPLE) else count // 5


def that_run(request: pytest.FixtureRequest, cases: Iterable[str]) -> list[str]:
    """Cases of a module whose tests are selected, for a fixture that computes all of them at once."""
    tests = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    chosen = {value for test in tests if test is not None for value in test.params.values() if isinstance(value, str)}
    return [case for case in cases if case in chosen]
