"""The client of a text-generation server, Megatron-LM's or this project's: PUT /api."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from megatron.errors import ConfigError, DataError, MegatronError
from tools.generation.settings import GenerateConfig

API_KEY_VARIABLE = "MEGATRON_API_KEY"


class Client:
    """Asks the server at ``address`` (HOST:PORT) for continuations."""

    def __init__(self, address: str, config: GenerateConfig) -> None:
        self._url, self._config = f"http://{address}/api", config

    def answer(self, prompts: Sequence[str]) -> None:
        """Print each prompt with its continuation."""
        texts = self._texts(prompts, self._config.tokens_to_generate)
        for number, text in enumerate(texts, start=1):
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

    def _texts(self, prompts: Sequence[str], tokens: int) -> list[str]:
        """Prompts with their continuations. Raises ConfigError without a server, DataError for what it refuses."""
        defaults = GenerateConfig().sampling()
        changed = {name: value for name, value in self._config.sampling().items() if value != defaults[name]}
        if changed.get("temperature") == 0:  # which /api spells so
            changed = {"top_k": 1}
        asked: dict[str, Any] = {"prompts": list(prompts), "tokens_to_generate": tokens, **changed}
        if self._config.seed is not None:
            asked["random_seed"] = self._config.seed
        headers = {"Content-Type": "application/json; charset=UTF-8"}
        if key := os.environ.get(API_KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key.split(',')[0]}"
        request = urllib.request.Request(self._url, json.dumps(asked).encode(), headers, method="PUT")
        try:
            with urllib.request.urlopen(request) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise DataError(f"{self._url} answers {error.code}: {_message(error.read())}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"{self._url}: {reason}; is a server running there (tools/run_text_generation_server.py)?"
            ) from None
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), list):  # Megatron-LM refuses with 200
            raise DataError(f"{self._url} answers: {answer if isinstance(answer, str) else json.dumps(answer)[:200]}")
        return [str(text) for text in answer["text"]]


def _message(body: bytes) -> str:
    """The sentence in the body of a refusal: an object with ``message``, a bare JSON string, or plain text."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:200]
    return str(found["message"] if isinstance(found, dict) and "message" in found else found)
