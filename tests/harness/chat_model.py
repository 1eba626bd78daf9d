"""A tiny published chat model that always says one token, with a tokenizer that has marks of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tools import train_tokenizer

END, TURN, TURN_END, TURN_OVER = range(4)
"""Ids of the special tokens: the end of a document, the beginning of a turn, and two of its ends."""
NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTER = 72
"""Id of the token "e"."""


def chat_folder(folder: Path, *, says: int = TURN_END, template: str | None = TEMPLATE, **settings: Any) -> Path:
    """A model in Hugging Face's format whose likeliest token is always ``says``.

    ``settings``: of generation_config.json; those whose names begin with ``config_`` of config.json.
    """
    import transformers

    folder.mkdir(parents=True)
    corpus = folder.parent / f"{folder.name}.jsonl"
    corpus.write_text(json.dumps({"text": "the quick brown fox " * 200}) + "\n")
    words = ["--input", str(corpus), "--output-dir", str(folder), "--vocab-size", "275"]
    train_tokenizer.main([*words, "--special-tokens", *NAMES[1:]])
    config = transformers.GPT2Config(
        vocab_size=275, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=END, eos_token_id=END
    )
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():  # whatever was read, the last norm gives ones, and they are the embedding of what it says
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[says] = 1.0
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    of_config = {name.removeprefix("config_"): value for name, value in settings.items() if name.startswith("config_")}
    of_generation = {name: value for name, value in settings.items() if not name.startswith("config_")}
    if of_generation:
        (folder / "generation_config.json").write_text(json.dumps(of_generation))
    change_json(folder / "config.json", **of_config)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def change_json(path: Path, **settings: Any) -> None:
    """Give a file of settings other values."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
