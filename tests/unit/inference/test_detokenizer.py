"""A streamed text must be the text: whole characters, every space, whatever tokens it is cut into."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.core.inference.detokenizer import IncrementalDetokenizer, token_texts
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.null import NullTokenizer
from megatron.core.tokenizers.sentencepiece import PlainSentencePiece, SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken import TikTokenizer
from megatron.core.tokenizers.wordpiece import SPECIAL_TOKENS, WordPieceTokenizer
from tests.unit.tokenizers.conftest import TEXTS, train_bpe

HARD = [*TEXTS, "Ünï \ufffd  many   spaces\n\n\n and\ttabs 👩‍👩‍👧 ሰላም ልዑል", "  both ends  "]


def sentencepiece_file(folder: Path, *, byte_fallback: bool) -> str:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 5),
        model_writer=written,
        vocab_size=380 if byte_fallback else 120,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = folder / f"{byte_fallback}.model"
    path.write_bytes(written.getvalue())
    return str(path)


def byte_level(folder: Path) -> Tokenizer:
    pipeline = train_bpe(330)
    pipeline.add_special_tokens(["<｜end▁of｜>"])
    pipeline.add_tokens(["a b", "é", "日本"])
    return HuggingFaceTokenizer(pipeline, roles={}, eod=0, bos=None, extra_ids=3)


def like_llama(folder: Path, decoder: decoders.Decoder) -> Tokenizer:
    model = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_file(folder, byte_fallback=True))
    pieces = [(model.id_to_piece(each), model.get_score(each)) for each in range(model.get_piece_size())]
    pipeline = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pipeline.decoder = decoder
    pipeline.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    return HuggingFaceTokenizer(pipeline, roles={}, eod=2, bos=1, extra_ids=0)


def llama(folder: Path) -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return like_llama(folder, decoders.Sequence(steps))


def word_suffixes(folder: Path) -> Tokenizer:
    vocabulary = {"<unk>": 0, "the</w>": 1, "dog": 2, "s</w>": 3, "s": 4, ",</w>": 5}
    pipeline = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.decoder = decoders.BPEDecoder(suffix="</w>")
    return HuggingFaceTokenizer(pipeline, roles={}, eod=0, bos=None, extra_ids=0)


def word_pieces(folder: Path) -> Tokenizer:
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "the", "quick", "##s", ".", ",", "dog", "'", "t"]))
    return WordPieceTokenizer(str(folder / "vocab.txt"), name="BertWordPieceLowerCase", extra_ids=2)


def tiktoken(folder: Path) -> Tokenizer:
    tokens = [*(bytes([value]) for value in range(256)), b"th", b" the", b"\xe2\x82", b"\x82\xac."]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]
    (folder / "tik.json").write_text(json.dumps(entries))
    return TikTokenizer(str(folder / "tik.json"), pattern="v2", vocab_size=None, num_special=10, special=[])


def plain(folder: Path, *, byte_fallback: bool, begin: bool) -> Tokenizer:
    return PlainSentencePiece(sentencepiece_file(folder, byte_fallback=byte_fallback), name="SP", begin=begin)


KINDS: dict[str, Callable[[Path], Tokenizer]] = {
    "byte-level BPE": byte_level,
    "Llama in Hugging Face's form": llama,
    "Metaspace": lambda folder: like_llama(folder, decoders.Metaspace()),
    "word suffixes": word_suffixes,
    "WordPiece": word_pieces,
    "SentencePiece": lambda folder: plain(folder, byte_fallback=False, begin=False),
    "SentencePiece with bytes and BOS": lambda folder: plain(folder, byte_fallback=True, begin=True),
    "SentencePiece with special tokens": lambda folder: SentencePieceTokenizer(
        sentencepiece_file(folder, byte_fallback=True), extra_ids=5
    ),
    "tiktoken": tiktoken,
    "Null": lambda folder: NullTokenizer(1000),
}


def check(tokenizer: Tokenizer, ids: list[int], *, cut: int) -> None:
    """Text of ``ids[:cut]``, then what continues it, equal the text of all, as do the texts of single tokens."""
    whole = tokenizer.detokenize(ids)
    is_llama = isinstance(tokenizer, HuggingFaceTokenizer) and "ByteFallback" in str(tokenizer.pipeline.decoder)
    if is_llama and "\ufffd" in whole:  # it replaces valid characters beside broken ones
        return
    assert "".join(token_texts(tokenizer, ids)) == whole, ids
    first = IncrementalDetokenizer(tokenizer)
    before = "".join(map(first.add, ids[:cut]))
    if not first.finish():  # the prompt ends with a whole character
        stream = IncrementalDetokenizer(tokenizer, ids[:cut])
        assert before + "".join(map(stream.add, ids[cut:])) + stream.finish() == whole, (ids, cut)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_text_are_the_text(kind: str, tmp_path: Path) -> None:
    """Real text, and random ids with broken characters; from every place in it, as the text of a prompt goes on."""
    tokenizer = KINDS[kind](tmp_path)
    texts = [] if kind == "Null" else [tokenizer.tokenize(text) for text in HARD]
    draw = random.Random(0)
    for ids in texts:
        for cut in range(0, len(ids), 5):
            check(tokenizer, ids, cut=cut)
    for _ in range(60):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 25))]
        check(tokenizer, ids, cut=draw.randrange(len(ids) + 1))


@pytest.mark.parametrize("kind", ["byte-level BPE", "Llama in Hugging Face's form", "tiktoken"])
def test_every_delta_is_whole_characters(kind: str, tmp_path: Path) -> None:
    """U+FFFD in the middle of a stream stays on the reader's screen."""
    tokenizer = KINDS[kind](tmp_path)
    ids = tokenizer.tokenize("ሰላም 👩‍👩‍👧 漢ህ")
    texts = list(map(IncrementalDetokenizer(tokenizer).add, ids))
    assert "" in texts and not any("\ufffd" in text for text in texts)
    stream = IncrementalDetokenizer(tokenizer)
    assert all(map(tokenizer.token_bytes, ids))
    assert "".join(map(stream.add, ids[:-1])) == "ሰላም 👩‍👩‍👧 漢" and stream.finish() != ""


def test_bytes_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    """Clients put a character together from ``bytes`` of chat's log-probabilities."""
    for kind in ("byte-level BPE", "Llama in Hugging Face's form", "SentencePiece with bytes and BOS", "tiktoken"):
        tokenizer = KINDS[kind](tmp_path)
        ids = tokenizer.tokenize(HARD[3])
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert joined.removeprefix(" ") == tokenizer.detokenize(ids), kind


def test_hidden_tokens_have_no_text(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    end, dog = tokenizer.tokenize("<｜end▁of｜>")[0], tokenizer.tokenize(" dog")
    assert end in tokenizer.special_ids and not tokenizer.special_ids & set(dog)
    for hidden, text in ((tokenizer.special_ids, " dog dog"), (frozenset[int](), " dog<｜end▁of｜> dog")):
        stream = IncrementalDetokenizer(tokenizer, [end], hidden=hidden)
        assert "".join(map(stream.add, [*dog, end, *dog])) == text


def test_time_of_a_token_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding all tokens for each new one makes long answers quadratic."""
    for kind in KINDS:
        tokenizer = KINDS[kind](tmp_path)
        ids = tokenizer.tokenize("1 22 333 4 55" if kind == "Null" else HARD[0]) * 8
        decoded: list[int] = []

        def detokenize(
            some: list[int], original: Callable[[list[int]], str] = tokenizer.detokenize, sizes: list[int] = decoded
        ) -> str:
            sizes.append(len(some))
            return original(some)

        monkeypatch.setattr(tokenizer, "detokenize", detokenize)
        stream = IncrementalDetokenizer(tokenizer, ids)
        for token in ids:
            stream.add(token)
        assert max(decoded) <= 16, kind


@pytest.mark.parametrize("kind", ["byte-level BPE", "Llama in Hugging Face's form", "SentencePiece with bytes and BOS"])
def test_spaces_without_an_end_cost_no_more_than_words(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of a text of spaces decoded all tokens before it, also those of a prompt of spaces."""
    tokenizer, longest = KINDS[kind](tmp_path), 0
    space = tokenizer.tokenize(" ")[-1]
    text, prompt = [space] * 500 + tokenizer.tokenize("dog") + [space] * 300, [space] * 1000
    whole, start = tokenizer.detokenize([*prompt, *text]), tokenizer.detokenize(prompt)
    decode = tokenizer.detokenize

    def counted(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "detokenize", counted)
    stream = IncrementalDetokenizer(tokenizer, prompt)
    assert start + "".join(stream.add(token) for token in text) + stream.finish() == whole
    assert longest <= 200
