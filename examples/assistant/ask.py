"""Ask models the questions of heldout.jsonl: one table of what each has right, how brief it is, and its perplexity.

A model is a checkpoint, or a GGUF file that llama.cpp runs. An answer is right if its last words are those of the file,
and brief if nothing comes before them. Perplexity is that of documents that were kept out of training.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import torch

import megatron
from megatron.core.conversion.gguf.llama_cpp import llama_cpp_texts

START, END = "<|im_start|>", "<|im_end|>"
KINDS = ("module", "repeat", "order")
LENGTH = 32  # tokens of an answer
WINDOW, WINDOWS = 128, 64  # tokens of a piece of text, and pieces


def main(argv: Sequence[str]) -> int:
    """Print a row for each model, and an answer of each to the first question of each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="+", metavar="NAME=MODEL", help="what a row is called, and its checkpoint or GGUF file"
    )
    parser.add_argument("--questions", required=True, type=Path, help="questions and answers, as JSON lines")
    parser.add_argument("--text", required=True, type=Path, help="documents for the perplexity, as JSON lines")
    given = parser.parse_args(argv)
    asked = [json.loads(line) for line in given.questions.read_text(encoding="utf-8").splitlines()]
    shown = [next(number for number, each in enumerate(asked) if each["kind"] == kind) for kind in KINDS]
    print("| model | " + " | ".join(f"{kind} right" for kind in KINDS) + " | brief | perplexity |")
    print("|---|" + "--:|" * (len(KINDS) + 2))
    examples = list[str]()
    prompts = [f"{START}user\n{each['messages'][0]['content']}{END}\n{START}assistant\n" for each in asked]
    for name, place in (each.split("=", 1) for each in given.models):
        model = None if place.endswith(".gguf") else megatron.load(place)
        if model is None:
            found, of_text = llama_cpp_texts(Path(place), prompts, length=LENGTH), "-"
        else:
            found = model.generate(prompts, max_new_tokens=LENGTH, temperature=0, stop=[END])
            of_text = f"{perplexity(model, given.text):.1f}"
        answers = [answer.partition(END)[0].strip() for answer in found]
        print(f"| {name} | {' | '.join(scores(asked, answers))} | {of_text} |", flush=True)
        examples += [f"{name}: {asked[at]['messages'][0]['content']}  {answers[at]!r}" for at in shown]
    print("", *examples, sep="\n")
    return 0


def scores(asked: Sequence[Mapping[str, object]], answers: Sequence[str]) -> list[str]:
    """The share of right answers of each kind, and of brief ones among those that are right, in percent."""
    right, brief = dict[str, list[bool]](), list[bool]()
    for each, answer in zip(asked, answers):
        assert isinstance(each["messages"], list)
        wanted = each["messages"][1]["content"]
        right.setdefault(str(each["kind"]), []).append(answer.endswith(wanted))
        if answer.endswith(wanted):
            brief.append(answer == wanted)
    return [percent(right[kind]) for kind in KINDS] + [percent(brief)]


def percent(found: Sequence[bool]) -> str:
    """The share that is true."""
    return f"{sum(found) / len(found):.0%}" if found else "-"


def perplexity(model: megatron.LanguageModel, file: Path) -> float:
    """Perplexity of pieces of text, each token predicted from those before it in its piece."""
    tokenizer, pieces = model.tokenizer, list[list[int]]()
    assert tokenizer is not None, "the checkpoint has one"
    for line in file.read_text(encoding="utf-8").splitlines():
        ids = tokenizer.tokenize(json.loads(line)["text"])
        pieces += [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)][:4]
    chosen = torch.tensor(pieces[:WINDOWS])
    with torch.no_grad():
        logs = torch.log_softmax(torch.cat([model(piece[None]) for piece in chosen]).double(), -1)
    return math.exp(-logs[:, :-1].gather(-1, chosen[:, 1:, None]).mean().item())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
