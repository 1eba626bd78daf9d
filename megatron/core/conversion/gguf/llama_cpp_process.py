"""The process in which llama.cpp answers: it ends the whole process on a file that it doesn't like.

Started as a script with the path of a JSON file: ``model``, ``context`` (positions), ``threads``, ``vocabulary``
(words), ``chosen`` (a token of plain text), ``prompts`` (lists of ids, or texts) and ``answers``, the file that gets
log-probabilities ``[prompts, words]`` in float32. With ``wanted`` they are those of one token after each prompt, and
with ``length`` texts of so many tokens, in JSON.
"""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from typing import Any

NEVER = -1e4
"""Log-probability of words that llama.cpp doesn't name: less than it ever gives."""


def main(job: dict[str, Any]) -> None:
    """Load the model once, and ask what follows each prompt."""
    import xllamacpp  # type: ignore[import-not-found, import-untyped, unused-ignore]

    settings = xllamacpp.CommonParams()
    settings.model.path = job["model"]
    settings.n_ctx = job["context"]
    settings.n_parallel = 1
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = job["threads"]
    settings.warmup = False
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(settings)
    if "length" in job:
        texts = [_text(server, prompt, length=job["length"]) for prompt in job["prompts"]]
        Path(job["answers"]).write_text(json.dumps(texts), encoding="utf-8")
        return
    if "wanted" in job:
        pairs = zip(job["prompts"], job["wanted"])
        found = [_log_probability(server, prompt, token=token) for prompt, token in pairs]
        Path(job["answers"]).write_text(json.dumps(found), encoding="utf-8")
        return
    with Path(job["answers"]).open("wb") as file:
        for prompt in job["prompts"]:
            array("f", _answer(server, prompt, words=job["vocabulary"], chosen=job["chosen"])).tofile(file)


def _text(server: Any, prompt: list[int] | str, *, length: int) -> str:
    """The likeliest text after a prompt, of at most ``length`` tokens."""
    text: str = _asked(server, {"prompt": prompt, "n_predict": length, "temperature": 0.0})["text"]
    return text


def _log_probability(server: Any, prompt: list[int] | str, *, token: int) -> float | None:
    """How likely a token is after a prompt; None for one that llama.cpp tells nothing of."""
    content = (_asked(server, _question(prompt, count=1, chosen=token))["logprobs"] or {}).get("content")
    return content[0]["logprob"] if content and content[0]["id"] == token else None


def _asked(server: Any, question: dict[str, Any]) -> dict[str, Any]:
    found = server.handle_completions(question)
    if isinstance(found, str):
        found = json.loads(found)
    if "choices" not in found:
        raise SystemExit(f"llama.cpp answers {json.dumps(found)[:300]}")
    choice: dict[str, Any] = found["choices"][0]
    return choice


def _question(prompt: list[int] | str, *, count: int, chosen: int) -> dict[str, Any]:
    """A request for the ``count`` likeliest tokens, at which ``chosen`` is taken: probabilities are those before that.

    llama.cpp tells nothing after a token that ends texts or is a part of a character.
    """
    question = {"prompt": prompt, "n_predict": 1, "n_probs": count, "temperature": 0.0, "cache_prompt": False}
    return {**question, "logit_bias": [[chosen, 1e6]]}


def _answer(server: Any, prompt: list[int] | str, *, words: int, chosen: int) -> list[float]:
    row = [NEVER] * words
    for each in _asked(server, _question(prompt, count=words, chosen=chosen))["logprobs"]["content"][0]["top_logprobs"]:
        row[each["id"]] = max(each["logprob"], NEVER)
    return row


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
