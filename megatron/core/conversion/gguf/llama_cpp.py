"""What llama.cpp and transformers make of a GGUF file: log-probabilities of the next token."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.conversion.gguf.files import open_gguf
from megatron.errors import CheckpointError

_SCRIPT = Path(__file__).with_name("llama_cpp_process.py")
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
    with tempfile.TemporaryDirectory(prefix="megatron-llama-cpp-") as folder:
        answers, asked = Path(folder, "answers"), Path(folder, "job.json")
        job: dict[str, Any] = {"model": str(file), "vocabulary": words, "context": context, "answers": str(answers)}
        job["chosen"] = _plain_token(file)
        asked.write_text(
            json.dumps({**job, "prompts": [each if isinstance(each, str) else list(each) for each in prompts]})
        )
        command = [sys.executable, str(_SCRIPT), str(asked)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, cwd=folder)
        if done.returncode:
            raise CheckpointError(f"llama.cpp cannot run {file.name}: {_reason(done)}")
        found = torch.frombuffer(bytearray(answers.read_bytes()), dtype=torch.float32)
    return found.view(len(prompts), words)


def _plain_token(file: Path) -> int:
    """The id of a token that is a text of letters; the first one where there is none."""
    tokens = open_gguf(file).keys.get("tokenizer.ggml.tokens", ())
    return next((number for number, text in enumerate(tokens) if text.isascii() and text.isalpha()), 0)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """The first line that tells what is wrong."""
    lines = [line for line in (*done.stdout.splitlines(), *done.stderr.splitlines()) if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in _TELLING) and "build_info" not in line]
    return (telling or lines[-1:] or [f"its process ended with {done.returncode}"])[0].strip()[:_MOST_SHOWN]
