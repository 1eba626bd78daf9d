"""A server that speaks Google Cloud Storage's protocol, for the real client library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness.ports import free_ports


@contextmanager
def gcs_server(*, bucket: str) -> Iterator[dict[str, str]]:
    """Environment variables by which clients reach a server with an empty ``bucket``, and nothing else; skips the test
    where the emulator or gcsfs is not installed.
    """
    for package in ("gcp_storage_emulator", "gcsfs"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[dev-all]'")
    from gcp_storage_emulator.server import create_server

    port = free_ports(1)[0]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=bucket)
    server.start()
    try:
        yield {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which would ask Google itself
        }
    finally:
        server.stop()
