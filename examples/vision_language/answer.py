"""Ask models about pictures that were kept out of training: a table of right answers, and a picture of some of them.

An answer is right if all of it is that of the file. ``chance`` is the share of the most frequent answer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, whatever is installed

import numpy as np
import torch
from PIL import Image, ImageDraw

import megatron
from megatron.core.images.decoding import decoded
from megatron.core.images.tiles import tiles_of

START, END = "<|im_start|>", "<|im_end|>"
LENGTH = 8  # tokens of an answer
SHOWN, SCALE, COLUMNS = 24, 8, 6


def main(argv: Sequence[str]) -> int:
    """Print a row for each model, and draw the answers of the last one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=CHECKPOINT", help="what a row is called, and its model")
    parser.add_argument("--texts", metavar="NAME=CHECKPOINT", help="a model that is asked without the pictures")
    parser.add_argument("--questions", required=True, nargs="+", type=Path, help="files of questions, as JSON lines")
    parser.add_argument("--picture", required=True, type=Path, help="file for a picture of answers, .png")
    given = parser.parse_args(argv)
    asked = [
        {**json.loads(line), "folder": path.parent}
        for path in given.questions
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    kinds = list(dict.fromkeys(each["kind"] for each in asked))
    print("| model | " + " | ".join(kinds) + " |")
    print("|---|" + "--:|" * len(kinds))
    right = {kind: [each["conversations"][1]["value"] for each in asked if each["kind"] == kind] for kind in kinds}
    best = [Counter(answers).most_common(1)[0][1] / len(answers) for answers in right.values()]
    print(f"| chance | {' | '.join(f'{share:.0%}' for share in best)} |")
    answers = list[str]()
    for each in [*([given.texts] if given.texts else []), *given.models]:
        name, place = each.split("=", 1)
        answers = answers_of(megatron.load(place), asked, sees=each != given.texts)
        shares = []
        for kind in kinds:
            found = [answer for answer, question in zip(answers, asked) if question["kind"] == kind]
            shares.append(np.mean([answer == wanted for answer, wanted in zip(found, right[kind])]))
        print(f"| {name} | {' | '.join(f'{share:.0%}' for share in shares)} |", flush=True)
    draw(asked, answers, given.picture)
    print(f"\n{SHOWN} pictures with the last model's answers, wrong ones in red: {given.picture}")
    return 0


def answers_of(model: Any, asked: Sequence[dict[str, Any]], *, sees: bool) -> list[str]:
    """The most probable answer to each question, token by token, with its picture where the model ``sees``."""
    vision = model.model.vision
    groups = dict[int, list[int]]()
    questions = [each["conversations"][0]["value"] for each in asked]
    questions = questions if sees else [question.replace("<image>\n", "") for question in questions]
    ids = [prompt(question, model.tokenizer, vision.features_per_tile) for question in questions]
    for number, each in enumerate(ids):
        groups.setdefault(len(each), []).append(number)
    found = dict[int, str]()
    for numbers in groups.values():
        tokens = torch.tensor([ids[number] for number in numbers])
        files = [asked[number]["folder"] / asked[number]["image"] for number in numbers]
        tiles = np.concatenate([tiles_of(decoded(file.read_bytes()), vision) for file in files])
        images = torch.from_numpy(tiles if sees else tiles[:0])
        places = torch.where(tokens < 0, (tokens < 0).flatten().cumsum(0).view_as(tokens) - 1, -1)
        tokens, length = tokens.clamp(min=0), tokens.shape[1]
        with torch.no_grad():
            for _ in range(LENGTH):
                logits = model(tokens, images=images, image_places=places)
                tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), 1)
                places = torch.cat((places, places.new_full((len(places), 1), -1)), 1)
        for number, row in zip(numbers, tokens[:, length:].tolist()):
            found[number] = model.tokenizer.detokenize(row).partition(END)[0].strip()
    return [found[number] for number in range(len(asked))]


def prompt(question: str, tokenizer: Any, features: int) -> list[int]:
    """Ids up to where the answer begins, with -1 at places of features."""
    parts = f"{START}user\n{question}{END}\n{START}assistant\n".split("<image>")
    first, *rest = tokenizer.tokenize_parts(parts)
    return [*first, *(number for part in rest for number in (*[-1] * features, *part))]


def draw(asked: Sequence[dict[str, Any]], answers: Sequence[str], output: Path) -> None:
    """Some pictures, evenly spaced, with question and answer."""
    numbers = np.linspace(0, len(asked) - 1, SHOWN).astype(int).tolist()
    sizes = [Image.open(asked[number]["folder"] / asked[number]["image"]).size for number in numbers[:1]]
    width, height = sizes[0][0] * SCALE + 50, sizes[0][1] * SCALE + 40
    sheet = Image.new("RGB", (COLUMNS * width, -(-SHOWN // COLUMNS) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for place, number in enumerate(numbers):
        left, top = place % COLUMNS * width + 8, place // COLUMNS * height + 4
        image = Image.open(asked[number]["folder"] / asked[number]["image"])
        sheet.paste(image.resize((image.width * SCALE, image.height * SCALE), Image.Resampling.NEAREST), (left, top))
        question, wanted = (turn["value"] for turn in asked[number]["conversations"])
        pen.text((left, top + image.height * SCALE + 2), question.partition("\n")[2], fill="black")
        color = "green" if answers[number] == wanted else "red"
        pen.text((left, top + image.height * SCALE + 16), answers[number] or "(nothing)", fill=color)
    sheet.save(output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
