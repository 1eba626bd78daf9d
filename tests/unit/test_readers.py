"""Files of settings and vocabularies that somebody else wrote: whatever is in them, no reader gives a traceback."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron.config.data import DataConfig
from megatron.config.vocabulary import _hugging_face_size
from megatron.core.conversion.companions import _is_lower_case, _wordpiece_file
from megatron.core.datasets.journal import Journal
from megatron.core.datasets.splits import read_sources
from megatron.core.tokenizers.conversations import load_template
from megatron.core.tokenizers.tiktoken import _read_ranks
from megatron.core.tokenizers.wordpiece import read_pieces
from megatron.errors import MegatronError

HOSTILE = [
    b"[" * 100_000,
    b'{"model": [1]}',
    b'{"model": {"type": "WordPiece", "vocab": {"a": "b"}}}',
    b'{"model": {"type": "WordPiece", "vocab": [1]}}',
    b'{"model": {"vocab": {"a": 1}}, "added_tokens": [1]}',
    b'{"model": {"vocab": 1}}',
    b'{"normalizer": 3, "do_lower_case": "no"}',
    b'{"chat_template": [1, {"name": "default"}]}',
    b'{"train": 5}',
    b'{"train": [{"a": 1}]}',
    b'{"position": {"file": "x"}, "settings": [], "inputs": []}',
    b'{"position": 1}',
    b"[1]",
    b"null",
    b"9" * 5000,
    b"\xff\xfe",
    b"{",
]


def test_no_reader_gives_a_traceback(tmp_path: Path) -> None:
    """Wrong types and texts in another encoding ended in an AttributeError, a TypeError or a UnicodeDecodeError."""
    path = tmp_path / "tokenizer.json"
    readers: list[Callable[[], object]] = [
        lambda: _hugging_face_size(str(path)),
        lambda: _wordpiece_file(tmp_path),
        lambda: _is_lower_case(tmp_path),
        lambda: _read_ranks(path),
        lambda: read_pieces(path),
        lambda: read_sources(DataConfig(seq_length=1, per_split_data_args_path=str(path))),
        lambda: load_template("tokenizer", str(tmp_path), learned="assistant"),
        lambda: load_template(str(path), str(tmp_path), learned="user"),
        lambda: Journal(path, settings={}, inputs=[]).read(),
    ]
    for content in HOSTILE:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes(content)
        for read in readers:
            with suppress(MegatronError):
                read()
