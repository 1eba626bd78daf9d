"""A server that speaks the protocol of Azure's Blob Storage, for the real client library."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.ports import free_ports

# The account that every Azurite has; its key is public.
_NAME = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def azure_server(folder: Path, *, bucket: str) -> Iterator[dict[str, str]]:
    """Environment variables by which clients reach a server with an empty container ``bucket``, and nothing else; skips
    the test where adlfs or Microsoft's emulator is not installed.

    ``folder``: where the server keeps its files.
    """
    adlfs = pytest.importorskip("adlfs", reason="adlfs is not installed: pip install adlfs")
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the PATH: npm install -g azurite")
    port = free_ports(1)[0]
    command = [program, "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort", str(port)]
    server = subprocess.Popen(
        [*command, "--location", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    place = f"http://127.0.0.1:{port}/{_NAME}"
    account = f"DefaultEndpointsProtocol=http;AccountName={_NAME};AccountKey={_KEY};BlobEndpoint={place};"
    try:
        _wait_for(port, server)
        adlfs.AzureBlobFileSystem(connection_string=account, skip_instance_cache=True).mkdir(bucket)
        yield {"AZURE_STORAGE_CONNECTION_STRING": account}
    finally:
        server.terminate()
        server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until the server takes connections."""
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the emulator has ended"
        assert time.monotonic() < deadline, "the emulator takes no connections"
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
