"""The client of a text-generation server, Megatron-LM's or this project's: PUT /api."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from megatron.errors import ConfigError, DataError, MegatronError
from megatron.serving.fields import MOST_PROMPTS
from megatron.serving.settings import API_KEY_VARIABLE
from tools.generation.settings import ClientConfig, GenerateConfig

_ADDRESS = re.compile(r"(?:(https?)://)?((?:[\w.\-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?)(?:/api)?/?", re.IGNORECASE)


def api_of(address: str) -> str:
    """The URL of /api on the server at HOST:PORT, with or without http:// or https://. Raises ConfigError."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not (found[1] or found[3]) or not 0 < int(found[3] or 80) < 1 << 16:
        raise ConfigError(
            f"{address} is no address of a server: give HOST:PORT, such as localhost:5000; flags begin with --"
        )
    return f"{(found[1] or 'http').lower()}://{found[2]}/api"


class Client:
    """Asks the server at ``url`` for continuations."""

    def __init__(self, url: str, config: GenerateConfig, settings: ClientConfig) -> None:
        self._url, self._config, self._seconds = url, config, settings.request_timeout

    def answer(self, prompts: Sequence[str]) -> None:
        """Print each prompt with its continuation; a request asks for as many as /api takes."""
        for first in range(0, len(prompts), MOST_PROMPTS):
            part = prompts[first : first + MOST_PROMPTS]
            texts = self._texts(part, self._config.tokens_to_generate, first=first)
            for number, text in enumerate(texts, start=first + 1):
                print(f"-- {number}\n{text}" if len(prompts) > 1 else text, flush=True)

    def converse(self) -> None:
        """Ask for prompts and numbers of tokens until the input ends."""
        while True:
            try:
                prompt = input("Enter prompt: ")
                number = int(asked) if (asked := input("Enter number of tokens to generate: ")) else None
            except EOFError:
                return
            except ValueError:
                print("error: give a whole number of tokens, such as 64", file=sys.stderr)
                continue
            try:
                (text,) = self._texts([prompt], number or self._config.tokens_to_generate)
                print(f"Megatron Response: \n{text}", flush=True)
            except MegatronError as error:  # a prompt that is refused ends nothing
                print(f"error: {error}", file=sys.stderr)

    def _texts(self, prompts: Sequence[str], tokens: int, *, first: int = 0) -> list[str]:
        """Prompts, of which the first has the number ``first``, with their continuations.

        Raises ConfigError without a server, DataError for what it refuses.
        """
        defaults = GenerateConfig().sampling()
        changed = {name: value for name, value in self._config.sampling().items() if value != defaults[name]}
        if changed.get("temperature") == 0:  # which /api spells so
            changed = {"top_k": 1}
        asked: dict[str, Any] = {"prompts": list(prompts), "tokens_to_generate": tokens, **changed}
        if self._config.seed is not None:
            asked["random_seed"] = self._config.seed + first
        headers = {"Content-Type": "application/json; charset=UTF-8"}
        if key := os.environ.get(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key.split(',')[0].strip()}"
        request = urllib.request.Request(self._url, json.dumps(asked).encode(), headers, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise DataError(f"{self._url} answers {error.code}: {_message(error.read())}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise DataError(
                    f"{self._url} has not answered in {self._seconds:g} s: give it more with --request-timeout, or ask "
                    "for less with --tokens-to-generate"
                ) from None
            said = getattr(reason, "strerror", None) or reason
            raise ConfigError(
                f"{self._url}: {said}; is a server running there (tools/run_text_generation_server.py)?"
            ) from None
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), list):  # Megatron-LM refuses with 200
            raise DataError(f"{self._url} answers: {answer if isinstance(answer, str) else json.dumps(answer)[:200]}")
        return [str(text) for text in answer["text"]]


def _message(body: bytes) -> str:
    """The sentence in the body of a refusal: under ``message`` or ``error``, a JSON string, or plain text."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:200]
    for name in ("error", "message"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return str(found)
