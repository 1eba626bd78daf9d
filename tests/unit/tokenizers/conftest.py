"""Tiny tokenizers, trained once a session: every kind of file that a user may bring."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, trainers

from megatron.core.tokenizers.gpt2_bpe import byte_level

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "Words, numbers like 12345 and 67, accents like café, 漢字 and emoji 🎉 too.",
    "for i in range(10):\n    print(i)\n\n\n# indented   code\t\twith tabs",
]


def train_bpe(vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of TEXTS with ``<|endoftext|>``."""
    pipeline = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    pipeline.train_from_iterator(TEXTS * 3, trainer)
    return pipeline


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer.json, vocab.json and merges.txt of one training."""
    folder = tmp_path_factory.mktemp("bpe")
    pipeline = train_bpe(330)
    pipeline.save(str(folder / "tokenizer.json"))
    pipeline.model.save(str(folder))
    return folder


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model whose ids 0, 1, 2 are unknown, begin and end; it has no pad."""
    path = tmp_path_factory.mktemp("sp") / "tiny.model"
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 5),
        model_writer=written,
        vocab_size=120,
        byte_fallback=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path.write_bytes(written.getvalue())
    return path


@pytest.fixture(scope="session")
def tiktoken_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """260 ranks in Megatron's JSON: the bytes, then four merges."""
    tokens = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the", b"12"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for rank, token in enumerate(tokens)
    ]
    path = tmp_path_factory.mktemp("tik") / "vocab.json"
    path.write_text(json.dumps(entries))
    return path
