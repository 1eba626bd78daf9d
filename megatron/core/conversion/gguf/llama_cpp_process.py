"""The process in which llama.cpp answers: it ends the whole process on a file that it doesn't like.

Started as a script with the path of a JSON file: ``model``, ``context`` (positions), ``vocabulary`` (words),
``chosen`` (a token of plain text), ``prompts`` (lists of ids, or texts) and ``answers``, the file that gets
log-probabilities ``[prompts, words]`` in float32.
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
    settings.warmup = False
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(settings)
    with Path(job["answers"]).open("wb") as file:
        for prompt in job["prompts"]:
            array("f", _answer(server, prompt, words=job["vocabulary"], chosen=job["chosen"])).tofile(file)


def _answer(server: Any, prompt: list[int] | str, *, words: int, chosen: int) -> list[float]:
    question: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": 1,
        "n_probs": words,
        "temperature": 0.0,
        "cache_prompt": False,
    }
    # It tells nothing after a token that ends texts or is a part of a character: another one is chosen. Probabilities
    # are those before that.
    question["logit_bias"] = [[chosen, 1e6]]
    found = server.handle_completions(question)
    if isinstance(found, str):
        found = json.loads(found)
    if "choices" not in found:
        raise SystemExit(f"llama.cpp answers {json.dumps(found)[:300]}")
    row = [NEVER] * words
    for each in found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        row[each["id"]] = max(each["logprob"], NEVER)
    return row


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
