"""A server that speaks S3's protocol, for the real client library; it can be told to fail as the real service does.

The server is moto's, with a layer in front of it that answers, delays or cuts off requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
from typing_extensions import override

_ERRORS = {
    "throttled": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "denied": ("403 Forbidden", "AccessDenied", "Access Denied"),
    "expired": ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
}

Fault = Callable[[str, str], str | None]
"""What happens to a request, by method and path: ``throttled``, ``denied``, ``expired``, ``cut``, ``slow`` or None."""


class S3Server:
    """A running server at ``endpoint``; ``requests`` lists what was asked of it, as ``GET /bucket/key``."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self.fault: Fault | None = None
        self.slow_seconds = 5.0
        self.requests: list[str] = []
        self.endpoint = ""
        self.stopped: Callable[[], AbstractContextManager[None]] = nullcontext
        """Refuses connections for the length of a block."""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """Answer one request (the interface is WSGI's)."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(f"{method} {path}")
        kind = self.fault(method, path) if self.fault is not None else None
        if kind in _ERRORS:
            status, code, message = _ERRORS[kind]
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = (
                b"" if method == "HEAD" else f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            )
            start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        if kind == "slow":
            time.sleep(self.slow_seconds)
        answer = self._service(environ, start_response)
        if kind == "cut":
            content = b"".join(answer)
            return [content[: len(content) // 2]]  # the header promised all
        return answer

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        """Consult ``fault`` about each request inside this block."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that runs in a thread; skips the test where moto or s3fs is not installed."""
    for package in ("moto", "s3fs", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[dev-all]'")
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        @override
        def log(self, *arguments: Any) -> None: ...

    app = S3Server(DomainDispatcherApplication(create_backend_app))

    @contextmanager
    def serving(port: int) -> Iterator[int]:
        server = make_server("127.0.0.1", port, app, threaded=True, request_handler=Quiet)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    with ExitStack() as running:
        port = running.enter_context(serving(0))
        app.endpoint = f"http://127.0.0.1:{port}"

        @contextmanager
        def stopped() -> Iterator[None]:
            running.close()
            yield
            running.enter_context(serving(port))

        app.stopped = stopped
        yield app


def credentials(server: S3Server) -> dict[str, str]:
    """Environment variables by which clients reach the server and nothing else."""
    return {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
