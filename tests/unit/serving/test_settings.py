"""Flags of the server that decide whom it answers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.serving.settings import ServerConfig, api_keys, check_access
from tests.harness.sentences import expect_error


@pytest.mark.parametrize(
    "settings",
    [
        {"host": ""},
        {"allowed_origins": ("https://a.example/",)},
        {"allowed_origins": ("*", "a.example")},
        {"allowed_origins": ("https://A.example",)},
    ],
)
def test_an_address_or_page_that_nobody_has_is_refused(settings: dict[str, Any]) -> None:
    """An empty host, as of an unset variable, listened on every address; an origin with a slash allowed nobody."""
    with expect_error(ConfigError):
        check_access(ServerConfig(**settings))


def test_addresses_and_pages_of_browsers_are_taken() -> None:
    """As browsers send them."""
    origins = ("https://a.example", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc", "null", "*")
    check_access(ServerConfig(host="::", allowed_origins=origins))


def test_keys_come_from_flag_and_environment() -> None:
    """Spaces around commas belonged to a key, which no request could bring then."""
    assert api_keys(ServerConfig(api_key=("a", "b")), "c, d,") == ["a", "b", "c", "d"]
    assert api_keys(ServerConfig(), "") == []


@pytest.mark.parametrize(
    ("keys", "variable"),
    [
        (("",), ""),
        (("a b",), ""),
        ((), "schlüssel"),
        ((), " ,"),
    ],
)
def test_a_key_that_keeps_out_nobody_or_everybody_is_refused(keys: tuple[str, ...], variable: str) -> None:
    """--api-key "$KEY" of an unset variable admitted whoever sent "Authorization: Bearer"."""
    with expect_error(ConfigError):
        api_keys(ServerConfig(api_key=keys), variable)
