"""The table's pairs of variant and layout in two tiers, since all of them take longer than a suite may."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def pairs(
    variants: Iterable[str], layouts: Iterable[str], *, every: Collection[str] = (), always: Collection[str] = ()
) -> list[Any]:
    """Every pair, for ``parametrize``. Slow are those of a variant that isn't in ``every``, at a layout that isn't in
    ``always``.
    """
    layouts = tuple(layouts)
    assert {*always} <= {*layouts}
    return [
        pytest.param(variant, layout, marks=[] if variant in every or layout in always else pytest.mark.slow)
        for variant in variants
        for layout in layouts
    ]
