"""The process in which llama.cpp answers as an encoder-decoder: it may end the whole process on a file it doesn't like.

llama.cpp's server, which the wheel offers to Python, doesn't run models with an encoder. The wheel's library has the
functions of ``llama.h`` as well, which are called here; settings, whose fields differ between releases, are taken from
llama.cpp's own defaults, and found among them by these.

Started as a script with the path of a JSON file: ``model``, ``context`` (positions), ``threads``, ``vocabulary``
(words), ``prompts`` (pairs of lists of ids: what the encoder reads, and the decoder's text) and ``answers``, the file
that gets log-probabilities ``[prompts, words]`` of what follows in float32. With ``texts`` it gets the ids of these, in
JSON.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOM = 1024  # bytes, more than settings have
_UNSET = -1  # of four settings in a row, the last of which is fast attention
_HALF = 1  # the type of keys and values unless told otherwise, fp16, twice in a row
_BEGINNING = 64  # bytes of settings before those types
_SPECIAL, _NO_SPECIAL = True, False


class _Settings(ctypes.Structure):
    """Settings of a model or of its context, whose fields only llama.cpp knows."""

    _fields_ = (("content", ctypes.c_ubyte * _ROOM),)


class _Batch(ctypes.Structure):
    """Tokens, their positions and sequences, and of which logits are wanted: ``llama_batch``."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("embeddings", ctypes.POINTER(ctypes.c_float)),
        ("positions", ctypes.POINTER(ctypes.c_int32)),
        ("sequence_counts", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    )


def _library() -> ctypes.CDLL:
    import xllamacpp  # type: ignore[import-not-found, import-untyped, unused-ignore]

    (path,) = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
    lib = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    types: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "llama_backend_init": (None, ()),
        "llama_model_default_params": (_Settings, ()),
        "llama_context_default_params": (_Settings, ()),
        "llama_model_load_from_file": (pointer, (ctypes.c_char_p, _Settings)),
        "llama_init_from_model": (pointer, (pointer, _Settings)),
        "llama_set_n_threads": (None, (pointer, ctypes.c_int32, ctypes.c_int32)),
        "llama_free": (None, (pointer,)),
        "llama_n_ctx": (ctypes.c_uint32, (pointer,)),
        "llama_batch_init": (_Batch, (ctypes.c_int32,) * 3),
        "llama_encode": (ctypes.c_int32, (pointer, _Batch)),
        "llama_decode": (ctypes.c_int32, (pointer, _Batch)),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (pointer, ctypes.c_int32)),
        "llama_model_get_vocab": (pointer, (pointer,)),
        "llama_tokenize": (
            ctypes.c_int32,
            (pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
        ),
    }
    for name, (result, arguments) in types.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, list(arguments)
    return lib


def _of_context(lib: ctypes.CDLL, positions: int) -> _Settings:
    """Settings of a context: room for so many tokens at once, plain attention, keys and values in fp32."""
    settings: _Settings = lib.llama_context_default_params()
    numbers = (ctypes.c_int32 * (_ROOM // 4)).from_buffer(settings)
    for number in range(3):  # of the context, a batch, and a part of it
        numbers[number] = positions
    runs = [at for at in range(4, 24) if numbers[at : at + 4] == [_UNSET] * 4]
    types = [at for at in range(_BEGINNING // 4, 48) if numbers[at : at + 2] == [_HALF] * 2]
    if len(runs) == 1 and len(types) == 1:
        numbers[runs[0] + 3] = numbers[types[0]] = numbers[types[0] + 1] = 0
    return settings


def _batch(lib: ctypes.CDLL, ids: Sequence[int]) -> _Batch:
    batch: _Batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.count = len(ids)
    for place, number in enumerate(ids):
        batch.tokens[place], batch.positions[place] = number, place
        batch.sequence_counts[place], batch.sequences[place][0] = 1, 0
        batch.wanted[place] = place == len(ids) - 1
    return batch


def _answer(lib: ctypes.CDLL, model: int, read: Sequence[int], text: Sequence[int], job: dict[str, Any]) -> list[float]:
    """Log-probabilities of what follows ``text`` where the encoder reads ``read``."""
    context = lib.llama_init_from_model(model, _of_context(lib, job["context"]))
    if not context or lib.llama_n_ctx(context) < job["context"]:
        raise SystemExit("error: llama.cpp makes no context of the size that was asked for")
    lib.llama_set_n_threads(context, job["threads"], job["threads"])
    for function, ids in ((lib.llama_encode, read), (lib.llama_decode, text)):
        if (code := function(context, _batch(lib, ids))) != 0:
            raise SystemExit(f"error: llama.cpp answers {code}")
    logits = lib.llama_get_logits_ith(context, len(text) - 1)[: job["vocabulary"]]
    lib.llama_free(context)
    largest = max(logits)
    total = largest + math.log(math.fsum(math.exp(each - largest) for each in logits))
    return [each - total for each in logits]


def _ids(lib: ctypes.CDLL, model: int, text: str) -> list[int]:
    """The tokens of a text, with those that end it."""
    content = text.encode()
    found = (ctypes.c_int32 * (len(content) + 8))()
    vocabulary = lib.llama_model_get_vocab(model)
    count = lib.llama_tokenize(vocabulary, content, len(content), found, len(found), _SPECIAL, _NO_SPECIAL)
    return found[:count]


def main(job: dict[str, Any]) -> None:
    """Load the model once, and ask what follows each pair."""
    lib = _library()
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(job["model"].encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit("error: llama.cpp doesn't load the file")
    if "texts" in job:
        Path(job["answers"]).write_text(json.dumps([_ids(lib, model, text) for text in job["texts"]]), encoding="utf-8")
        return
    with Path(job["answers"]).open("wb") as file:
        for read, text in job["prompts"]:
            array("f", _answer(lib, model, read, text, job)).tofile(file)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
