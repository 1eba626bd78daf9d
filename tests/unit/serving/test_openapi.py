"""/openapi.json describes the server: schemathesis asks what the document allows, and what it doesn't."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.serving import Running, ask


def test_the_document_is_one(running: Running) -> None:
    """Every page of it is there, and every field has words."""
    found = ask(running.url, "/openapi.json").json
    assert found["openapi"] == "3.1.0"
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            assert ask(running.url, path.replace("{model}", "table"), method=method.upper()).status != 404, path
            body = operation.get("requestBody")
            properties = body["content"]["application/json"]["schema"]["properties"] if body else {}
            assert all(each["description"] for each in properties.values())


def asks(checks: tuple[Any, ...]) -> Callable[[Any], None]:
    """What sends a case, and checks the answer."""

    def ask_case(case: Any) -> None:
        case.call_and_validate(checks=checks)

    return ask_case


@pytest.mark.slow
def test_what_the_document_allows_and_what_it_does_not(running: Running) -> None:
    """No 5xx, documented statuses and content types alone, and a refusal of what the schemas exclude."""
    schemathesis = pytest.importorskip("schemathesis", reason="it makes requests of the document")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import checks

    document = ask(running.url, "/openapi.json").json
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=running.url)
    wanted = (
        checks.not_a_server_error,
        schemathesis.checks.CHECKS.get_one("status_code_conformance"),
        schemathesis.checks.CHECKS.get_one("content_type_conformance"),
        schemathesis.checks.CHECKS.get_one("response_schema_conformance"),
    )
    quick = settings(
        max_examples=12,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    refused = schemathesis.checks.CHECKS.get_one("negative_data_rejection")
    for found in schema.get_all_operations():
        operation = found.ok()
        modes = [schemathesis.GenerationMode.POSITIVE]
        modes += (
            [schemathesis.GenerationMode.NEGATIVE] if operation.body else []
        )  # nothing else of a request can be wrong
        for mode in modes:
            more = (refused,) if mode is schemathesis.GenerationMode.NEGATIVE else ()
            strategy = operation.as_strategy(generation_mode=mode)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                quick(given(case=strategy)(asks((*wanted, *more))))()
    running.wait_until_idle()
