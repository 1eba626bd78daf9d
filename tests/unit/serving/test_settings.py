"""Flags of the server that decide whom it answers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.serving.settings import ServerConfig, api_keys, check_access


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": ""}, "--host is empty; give an address: 127.0.0.1 serves this machine alone"),
        ({"allowed_origins": ("https://a.example/",)}, "'https://a.example/' is no page that a browser names"),
        ({"allowed_origins": ("*", "a.example")}, "'a.example' is no page that a browser names: give https://host or"),
        ({"allowed_origins": ("https://A.example",)}, "in small letters and without a path, or \\* for all"),
    ],
)
def test_an_address_or_page_that_nobody_has_is_refused(settings: dict[str, Any], message: str) -> None:
    """An empty host, as of an unset variable, listened on every address; an origin with a slash allowed nobody."""
    with pytest.raises(ConfigError, match=message):
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
    ("keys", "variable", "message"),
    [
        (("",), "", "an API key .* is empty: give another"),
        (("a b",), "", "is no word of printable ASCII characters"),
        ((), "schlüssel", "is no word of printable ASCII characters"),
        ((), " ,", "MEGATRON_API_KEY is ' ,' and holds no key: give one, or unset it"),
    ],
)
def test_a_key_that_keeps_out_nobody_or_everybody_is_refused(
    keys: tuple[str, ...], variable: str, message: str
) -> None:
    """--api-key "$KEY" of an unset variable admitted whoever sent "Authorization: Bearer"."""
    with pytest.raises(ConfigError, match=message):
        api_keys(ServerConfig(api_key=keys), variable)
