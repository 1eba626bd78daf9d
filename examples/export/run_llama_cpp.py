"""Run GGUF files by llama.cpp: a text of each, and its perplexity on the same tokens as the checkpoint's.

Perplexity is over windows of 64 tokens; each token is predicted from those before it in its window.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch
from torch import Tensor

import megatron
from megatron.core.conversion.gguf.llama_cpp import llama_cpp_losses, llama_cpp_texts

_WINDOW = 64


def main(argv: Sequence[str]) -> int:
    """Print a text and a perplexity of the checkpoint and of each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="GGUF files of the checkpoint")
    parser.add_argument("--checkpoint", required=True, help="folder of the checkpoint that they were made of")
    parser.add_argument("--text", required=True, type=Path, help="documents as JSON lines, each with a text")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens to predict")
    parser.add_argument("--prompt", default="Return a new", help="beginning of a text")
    given = parser.parse_args(argv)
    model = megatron.load(given.checkpoint)
    windows = _windows(model, given.text, given.tokens)
    with torch.no_grad():
        logs = torch.log_softmax(torch.cat([model(window[None]) for window in windows]).double(), -1)
    ours = -logs[:, :-1].gather(-1, windows[:, 1:, None]).mean().item()
    print(f"{len(windows) * (_WINDOW - 1):,} tokens of {given.text} are predicted, in windows of {_WINDOW}")
    print(f"\n{given.checkpoint} (this project)\n  perplexity {math.exp(ours):.2f}")
    print(f"  {given.prompt!r} goes on: {model.generate(given.prompt, max_new_tokens=24, temperature=0)!r}")
    for file in given.files:
        losses = llama_cpp_losses(file, windows.tolist())
        (text,) = llama_cpp_texts(file, [given.prompt], length=24)
        print(f"\n{file}, {file.stat().st_size / 1e6:.2f} MB (llama.cpp)")
        print(f"  perplexity {math.exp(sum(losses) / len(losses)):.2f}")
        print(f"  {given.prompt!r} goes on: {text!r}")
    return 0


def _windows(model: megatron.LanguageModel, text: Path, tokens: int) -> Tensor:
    """Token ids ``[windows, 64]`` of the first documents that are long enough."""
    tokenizer = model.tokenizer
    assert tokenizer is not None, "the quickstart's checkpoint has one"
    found: list[list[int]] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids = tokenizer.tokenize(json.loads(line)["text"])
        found += [ids[at : at + _WINDOW] for at in range(0, len(ids) - _WINDOW + 1, _WINDOW)][:2]
        if len(found) * (_WINDOW - 1) >= tokens:
            break
    return torch.tensor(found[: max(tokens // (_WINDOW - 1), 1)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
