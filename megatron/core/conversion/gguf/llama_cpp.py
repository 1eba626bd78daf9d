"""What llama.cpp and transformers make of a GGUF file: log-probabilities of the next token."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.conversion.gguf.files import open_gguf
from megatron.errors import CheckpointError

_SCRIPT = Path(__file__).with_name("llama_cpp_process.py")
_WITH_ENCODER = Path(__file__).with_name("llama_cpp_encoder_process.py")
_TELLING = ("error", "assert", "missing", "wrong", "unknown", "unsupported", "invalid", "answers")
_MOST_SHOWN = 300  # characters of what llama.cpp says


def llama_cpp_version() -> str | None:
    """The release of the wheel that holds llama.cpp; None where it is not installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        return None
    return importlib.metadata.version("xllamacpp")


def llama_cpp_rows(file: Path, prompts: Sequence[Sequence[int] | str], *, words: int, context: int) -> Tensor:
    """Log-probabilities ``[prompts, words]`` of what follows each prompt, token ids or a text, by llama.cpp.

    ``context``: positions that it makes room for. It runs in a process of its own, since it ends its process on files
    that it refuses; CheckpointError then.
    """
    job = {"prompts": prompts, "vocabulary": words, "context": context, "chosen": _plain_token(file)}
    found = torch.frombuffer(bytearray(_done(file, job)), dtype=torch.float32)
    return found.view(len(prompts), words)


def llama_cpp_losses(file: Path, windows: Sequence[Sequence[int]]) -> list[float]:
    """Minus the log-probability of each token of ``windows`` after those before it, by llama.cpp; without the first of
    each. CheckpointError as above.
    """
    places = [(window, at) for window in windows for at in range(1, len(window))]
    job: dict[str, Any] = {
        "prompts": [window[:at] for window, at in places],
        "wanted": [window[at] for window, at in places],
    }
    found = json.loads(_done(file, {**job, "context": max(map(len, windows)) + 8}))
    untold = [number for number, each in enumerate(found) if each is None]  # parts of characters, and ends of texts
    if untold:
        words = len(open_gguf(file).keys["tokenizer.ggml.tokens"])
        prompts = [job["prompts"][number] for number in untold]
        rows = llama_cpp_rows(file, prompts, words=words, context=max(map(len, windows)) + 8)
        for number, row in zip(untold, rows):
            found[number] = row[job["wanted"][number]].item()
    return [-each for each in found]


def llama_cpp_texts(file: Path, prompts: Sequence[str], *, length: int) -> list[str]:
    """The likeliest text of ``length`` tokens after each prompt, by llama.cpp; CheckpointError as above."""
    context = length + max(len(prompt.encode()) for prompt in prompts) + 8
    texts: list[str] = json.loads(_done(file, {"prompts": prompts, "length": length, "context": context}))
    return texts


def llama_cpp_pairs(
    file: Path, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, words: int, context: int
) -> Tensor:
    """Log-probabilities ``[pairs, words]`` of what follows the second of each pair where a model with an encoder reads
    the first, by llama.cpp. CheckpointError as above.
    """
    job = {"prompts": pairs, "vocabulary": words, "context": context}
    found = torch.frombuffer(bytearray(_done(file, job, script=_WITH_ENCODER)), dtype=torch.float32)
    return found.view(len(pairs), words)


def llama_cpp_tokens(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """The tokens that llama.cpp cuts texts into, for a model with an encoder. CheckpointError as above."""
    found: list[list[int]] = json.loads(_done(file, {"texts": texts}, script=_WITH_ENCODER))
    return found


def _done(file: Path, job: Mapping[str, Any], *, script: Path = _SCRIPT) -> bytes:
    """What llama.cpp's process answers."""
    with tempfile.TemporaryDirectory(prefix="megatron-llama-cpp-") as folder:
        answers, asked = Path(folder, "answers"), Path(folder, "job.json")
        whole = {**job, "model": str(file.resolve()), "answers": str(answers), "threads": torch.get_num_threads()}
        asked.write_text(json.dumps(whole, default=list), encoding="utf-8")
        command = [sys.executable, str(script), str(asked)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=folder)
        if done.returncode:
            raise CheckpointError(f"llama.cpp cannot run {file.name}: {_reason(done)}")
        return answers.read_bytes()


def _plain_token(file: Path) -> int:
    """The id of a token that is a text of letters; the first one where there is none."""
    tokens = open_gguf(file).keys.get("tokenizer.ggml.tokens", ())
    return next((number for number, text in enumerate(tokens) if text.isascii() and text.isalpha()), 0)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The first line that tells what is wrong."""
    lines = [line for line in (*done.stdout.splitlines(), *done.stderr.splitlines()) if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in _TELLING) and "build_info" not in line]
    return (telling or lines[-1:] or [f"its process ended with {done.returncode}"])[0].strip()[:_MOST_SHOWN]
