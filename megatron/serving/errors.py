"""Refusals of a request: a status, a sentence, and the field that is wrong, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.errors import MegatronError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(MegatronError):
    """A refused or failed request.

    ``param``: the field that is wrong. ``code``: a word for programs. ``headers``: of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        """``{"error": {…}}`` as OpenAI's clients read it."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
