"""GPT-2's byte-level BPE, read from its vocab.json and merges.txt."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.core.tokenizers.base import required_file
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import DataError
from megatron.small_files import VOCABULARY_BYTES, read_json

KIND = "GPT2BPETokenizer"
END_OF_TEXT = "<|endoftext|>"


def load(vocab_file: str | None, merge_file: str | None, *, extra_ids: int) -> RustTokenizer:
    """Ids as GPT-2 computes them: ``<|endoftext|>`` ends documents, but inside a text it is ordinary characters.

    Raises ConfigError when a flag is missing, DataError when a file is missing or is something else.
    """
    vocab = required_file(vocab_file, flag="--vocab-file", kind=KIND, holds="a vocab.json")
    merges = required_file(merge_file, flag="--merge-file", kind=KIND, holds="a merges.txt")
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises nothing narrower
        raise DataError(
            f"--vocab-file {vocab} and --merge-file {merges} are not a vocab.json and merges.txt of one BPE: {error}."
        ) from None
    # The library ignores entries whose ids are no numbers or those of other entries.
    where, tokens = f"--vocab-file {vocab}", dict[int, str]()
    ids = read_json(vocab, dict[str, int], where=where, error=DataError, most_bytes=VOCABULARY_BYTES)
    for token, number in ids.items():
        if (other := tokens.setdefault(number, token)) != token:
            raise DataError(f"{where}: {other!r} and {token!r} both have the id {number}, so it cannot be decoded.")
    pipeline = byte_level(model)
    eod = pipeline.token_to_id(END_OF_TEXT)
    if eod is None:
        raise DataError(
            f"--vocab-file {vocab} has no {END_OF_TEXT}, which {KIND} needs to end documents: where its folder says "
            f"what does, use --tokenizer-type HuggingFaceTokenizer --tokenizer-model {vocab.parent}"
        )
    return RustTokenizer(pipeline, name=KIND, eod=eod, pad=None, bos=eod, eos=eod, extra_ids=extra_ids)


def byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    """A BPE model behind GPT-2's way to cut text and to write bytes as characters."""
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    return pipeline
