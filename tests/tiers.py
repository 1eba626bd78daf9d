"""Cases in two tiers, since all pairs of model and layout take longer than a suite may."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def pairs(
    variants: Iterable[Any],
    layouts: Iterable[Any],
    *,
    always: Collection[Any] = (),
    more: Mapping[Any, Collection[Any]] | None = None,
    slow: Collection[Any] = (),
) -> list[Any]:
    """Every pair of variant and layout, for ``parametrize``.

    In the first tier is each variant at layouts of ``always`` and at those that ``more`` lists for it; the other pairs
    are slow. No variant and no layout is in the slow tier alone, but those of ``slow``, which other tests have.
    """
    variants, layouts, more = tuple(variants), tuple(layouts), more or {}
    assert {*always} <= {*layouts}
    assert {*more} <= {*variants}
    first = {
        (variant, layout)
        for variant in variants
        for layout in layouts
        if not {variant, layout} & {*slow} and (layout in always or layout in more.get(variant, ()))
    }
    assert {variant for variant, _ in first} | ({*slow} & {*variants}) == {*variants}, (
        "each variant is in the first tier"
    )
    assert {layout for _, layout in first} | ({*slow} & {*layouts}) == {*layouts}, "each layout is in the first tier"
    assert {*slow} <= {*variants, *layouts}
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
