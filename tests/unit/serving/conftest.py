"""A server for the tests of a module, and a client without manners."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.serving import Running, served


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server around a table."""
    with served() as server:
        yield server
