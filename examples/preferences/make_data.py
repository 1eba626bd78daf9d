"""Write chats, in which a model learns to answer in two tones, and pairs that prefer the friendly one.

python examples/preferences/make_data.py FOLDER makes text.txt for a tokenizer, chats.jsonl and pairs.jsonl.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

THINGS = ("fox", "dog", "sky", "sea", "tree", "car", "cat", "hat", "house", "river", "boat", "bird")
COLOURS = ("red", "blue", "green", "black", "white", "brown")


def main(folder: Path) -> None:
    """Write the three files; the same ones every time."""
    folder.mkdir(parents=True, exist_ok=True)
    choose, chats, pairs = random.Random(0), list[Any](), list[Any]()
    for _ in range(600):
        thing = choose.choice(THINGS)
        colour = COLOURS[THINGS.index(thing) % len(COLOURS)]
        question = {"role": "user", "content": f"What colour is the {thing}?"}
        friendly, curt = f"Good question! The {thing} is {colour}.", f"Obviously {colour}."
        both = [{"role": "assistant", "content": text} for text in (friendly, curt)]
        chats.append({"messages": [question, *choose.choices(both, weights=(1, 3))]})
        pairs.append({"prompt": [question], "chosen": both[:1], "rejected": both[1:]})
    for name, records in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    texts = [turn["content"] for chat in chats for turn in chat["messages"]]
    (folder / "text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
