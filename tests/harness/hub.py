"""A server of the Hugging Face Hub's protocol: answers as the Hub gives them, for folders on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/(\w+/[\w.-]+)/(revision|tree)/([^?]+)(?:\?.*)?")
_RESOLVE = re.compile(r"/(\w+/[\w.-]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """The state of a server. ``url``: for ``HF_ENDPOINT``. ``repositories``: folders by name, all at ``COMMIT``.

    ``gated``: names of those whose files need a login. ``asked``: the files that were downloaded. ``fails``: the
    status that every request gets, or None.
    """

    url: str = ""
    repositories: dict[str, Path] = field(default_factory=dict)
    gated: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)
    fails: int | None = None


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without repositories, while the block runs."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        api, resolve = _API.fullmatch(self.path), _RESOLVE.fullmatch(self.path)
        asked = api or resolve
        folder = self.state.repositories.get(asked[1]) if asked else None
        if self.state.fails is not None:
            self._refuse(self.state.fails, None)
        elif asked is None or folder is None:
            self._refuse(401, "RepoNotFound")
        elif asked[3 if api else 2] not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif api:
            self._json(_info(asked[1], folder) if api[2] == "revision" else _tree(folder))
        elif asked[1] in self.state.gated:
            self._refuse(401, "GatedRepo")
        elif not (folder / asked[3]).is_file():
            self._refuse(404, "EntryNotFound")
        else:
            self._file((folder / asked[3]).read_bytes(), asked[3], with_body=with_body)

    def _refuse(self, status: int, code: str | None) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, content: bytes, name: str, *, with_body: bool) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(content)}"', "Content-Length": str(len(content))}
        if with_body:
            self.state.asked.append(name)
        self._send(200, content if with_body else b"", headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _info(name: str, folder: Path) -> dict[str, Any]:
    siblings = [{"rfilename": str(path.relative_to(folder))} for path in _files(folder)]
    return {"id": name, "modelId": name, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}


def _tree(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": str(path.relative_to(folder)),
            "size": path.stat().st_size,
            "oid": _digest(path.read_bytes()),
        }
        for path in _files(folder)
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
