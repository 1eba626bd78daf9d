"""What is settled before the first document is encoded: tokenizer, engine, rules of sentences."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.indexed_format import token_dtype
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.encode import Encoding, shared_tokenizer
from megatron.core.tokenizers.engine import GIGATOKEN, OWN, PROBE_BYTES, EngineChoice, choose_engine
from megatron.core.tokenizers.input_files import InputFile
from megatron.core.tokenizers.line_batches import LineBatch
from megatron.core.tokenizers.sentences import (
    LEARNED_FROM_BYTES,
    SentenceRules,
    installed_rules,
    learned_rules,
    needs_leading_space,
)
from megatron.core.tokenizers.text_files import read_batches, read_documents
from megatron.errors import ConfigError
from megatron.preprocessing.settings import PreprocessConfig


@dataclass(frozen=True)
class Preparation:
    """Everything that decides about the output before the first document is encoded.

    ``batches``: all of the input, with what was read of it for this. ``remarks``: what a user should know.
    """

    files: Sequence[InputFile]
    stamp: TokenizerStamp
    encoding: Encoding
    engine: EngineChoice
    batches: Iterator[LineBatch]
    remarks: tuple[str, ...]

    def settings(self, config: PreprocessConfig) -> dict[str, Any]:
        """The settings that must be the same for another run to continue this one."""
        rules = self.encoding.sentences
        return {
            "keys": config.json_keys,
            "append_eod": config.append_eod,
            "on_bad_line": config.on_bad_line,
            "tokenizer": self.stamp.fingerprint,
            "sentences": rules and hashlib.sha256(repr(rules).encode()).hexdigest(),
        }


def prepare(config: PreprocessConfig, tokenizer_config: TokenizerConfig, files: Sequence[InputFile]) -> Preparation:
    """Build the tokenizer, and choose by the first text of ``files`` how to encode.

    Raises ConfigError for settings that cannot work, DataError for input that fails.
    """
    tokenizer = shared_tokenizer(tokenizer_config)
    dtype = token_dtype(tokenizer.vocab_size)
    head, batches = _head(read_batches([each.path for each in files], keys=config.json_keys), config)
    rules = sentence_rules(config, head, tokenizer) if config.split_sentences else None
    with ThreadPoolExecutor(1) as pool:  # encoding the probe and computing the fingerprint take about equally long
        probe = list(itertools.islice(_texts(head, config.json_keys), 1000))
        choosing = pool.submit(_engine, config, tokenizer, probe, dtype.name)
        stamp, engine = TokenizerStamp.of(tokenizer), choosing.result()
    encoding = Encoding(tokenizer_config, config.json_keys, config.append_eod, dtype.name, rules, engine.name)
    return Preparation(files, stamp, encoding, engine, batches, tuple(_remarks(config, tokenizer, probe)))


def _remarks(config: PreprocessConfig, tokenizer: Tokenizer, probe: Sequence[str]) -> Iterator[str]:
    """What a user should know about the documents: a tokenizer that other files describe, and ends that come twice."""
    yield from getattr(tokenizer, "remarks", ())
    if config.split_sentences or tokenizer.name == "NullTokenizer":
        return
    around = tokenizer.tokenize_batch([""])[0]
    is_twice = config.append_eod and around[-1:] == [tokenizer.eod]
    if is_twice or (around and "" in probe):
        end = tokenizer.detokenize([tokenizer.eod])
        empty = tokenizer.detokenize([*around, *([tokenizer.eod] if config.append_eod else [])])
        twice = f"documents end with {end} twice, the tokenizer's own and that of --append-eod (leave it out for one); "
        yield f"{twice if is_twice else ''}an empty text becomes a document of {empty} alone"


def _engine(config: PreprocessConfig, tokenizer: Tokenizer, probe: Sequence[str], dtype: str) -> EngineChoice:
    """The engine that ``--tokenizer-engine`` asks for; ConfigError when it is not available."""
    if config.tokenizer_engine == "own":
        return EngineChoice(OWN, "as --tokenizer-engine says")
    found = choose_engine(tokenizer, probe, dtype, parts=config.split_sentences)
    if config.tokenizer_engine == "gigatoken" and found.name != GIGATOKEN:
        raise ConfigError(f"--tokenizer-engine gigatoken: {found.reason}; use auto or own")
    return found


def _head(batches: Iterator[LineBatch], config: PreprocessConfig) -> tuple[list[LineBatch], Iterator[LineBatch]]:
    """The first batches, for the probe and the sentence rules, and all batches: a pipe can be read only once."""
    head, size = list[LineBatch](), 0
    for batch in batches:
        head.append(batch)
        size += len(batch.data)
        if size >= (LEARNED_FROM_BYTES if config.split_sentences else PROBE_BYTES):
            break
    return head, itertools.chain(head, batches)


def _texts(batches: Sequence[LineBatch], keys: Sequence[str]) -> Iterator[str]:
    """Texts of all keys in some batches, without bad lines, which are reported when they are encoded."""
    for batch in batches:
        for texts in read_documents(batch, keys).texts.values():
            yield from (text for text in texts if text.isascii() or _is_unicode(text))


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def sentence_rules(config: PreprocessConfig, head: Sequence[LineBatch], tokenizer: Tokenizer) -> SentenceRules:
    """NLTK's rules of the language if they are installed, else rules that punkt learns from the first batches."""
    texts, keep_whitespace = _texts(head, config.json_keys), config.keep_newlines
    installed = installed_rules(config.lang, keep_whitespace=keep_whitespace)
    rules = installed or learned_rules(texts, language=config.lang, keep_whitespace=keep_whitespace)
    return dataclasses.replace(rules, leading_space=not keep_whitespace and needs_leading_space(tokenizer))
