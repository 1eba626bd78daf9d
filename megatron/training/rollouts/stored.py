"""Answers that are being learned as a file of a checkpoint, so that a run goes on in the middle of them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.datasets.answers import Answer
from megatron.core.files.remote_path import AnyPath
from megatron.errors import CheckpointError

FILE_NAME = "answers.npz"
_NUMBERS = ("reward", "spread", "advantage", "loss_share", "loss_count")
_SCORES = ("old", "reference")


def to_bytes(answers: Sequence[Answer]) -> bytes:
    """The file's content."""
    arrays: dict[str, Any] = {
        "lengths": np.array([(len(each.tokens), each.prompt_length) for each in answers], np.int64),
        "tokens": np.concatenate([each.tokens for each in answers]),
        "numbers": np.array([[getattr(each, name) for name in _NUMBERS] for each in answers]),
    }
    for name in _SCORES:
        values = [getattr(each, name) for each in answers]
        if values[0] is not None:
            arrays[name] = np.concatenate(values)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def read(path: AnyPath) -> list[Answer]:
    """The answers in a file; raises CheckpointError for one that can't be read."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        lengths = arrays["lengths"]
        ends, starts = lengths[:, 0].cumsum(), (lengths[:, 0] - lengths[:, 1]).cumsum()
        tokens = np.split(arrays["tokens"], ends[:-1])
        scores = {name: np.split(arrays[name], starts[:-1]) for name in _SCORES if name in arrays}
        found = list[Answer]()
        for number, (_, prompt_length) in enumerate(lengths.tolist()):
            known: dict[str, Any] = dict(zip(_NUMBERS, arrays["numbers"][number].tolist()))
            known |= {name: each[number] for name, each in scores.items()}
            found.append(Answer(tokens=tokens[number], prompt_length=prompt_length, **known))
        return found
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile):
        raise CheckpointError(
            f"{path} is damaged, and holds the answers that the run was learning from: give an earlier checkpoint with "
            "--ckpt-step"
        ) from None
