"""Ids beyond a tokenizer's vocabulary, which models with more rows than pieces sample, have no text."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.inference.detokenizer import IncrementalDetokenizer, token_texts
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.serving.token_texts import TokenTexts
from tests.unit.tokenizers.conftest import TEXTS, train_bpe


@pytest.fixture(scope="module")
def every_kind(
    bpe_folder: Path, sentencepiece_model: Path, tiktoken_vocabulary: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Tokenizer]:
    """One tokenizer of each ``--tokenizer-type``, and a Hugging Face one with a hole in its ids."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "dog", "##s"]))
    holed = train_bpe(330).to_str().replace('"<|endoftext|>":0', '"<|endoftext|>":900')
    (folder / "tokenizer.json").write_text(holed.replace('"id":0', '"id":900'))
    vocab, merges, model = str(bpe_folder / "vocab.json"), str(bpe_folder / "merges.txt"), str(sentencepiece_model)
    configs = [
        TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges),
        TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(folder / "vocab.txt")),
        TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(folder / "vocab.txt")),
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(bpe_folder)),
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json")),
        TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model, vocab_extra_ids=3),
        TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=model),
        TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model),
        TokenizerConfig(
            tokenizer_type="TikTokenizer", tokenizer_model=str(tiktoken_vocabulary), tiktoken_num_special_tokens=10
        ),
        TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100),
    ]
    return [build_tokenizer(config) for config in configs]


def missing(tokenizer: Tokenizer) -> list[int]:
    """Ids without a piece: beyond the vocabulary, far beyond it, below it, and in its holes."""
    size = tokenizer.vocab_size
    return [size, size + 1000, 2**40, -1, *([500] if size == 901 else [])]


def test_they_have_no_text(every_kind: list[Tokenizer]) -> None:
    """The server of a model with more rows than the SentencePiece model has pieces ended at the first such id."""
    for tokenizer in every_kind:
        text = "1 2 3" if tokenizer.name == "NullTokenizer" else TEXTS[0]
        ids = tokenizer.tokenize(text)
        for absent in missing(tokenizer):
            assert tokenizer.detokenize([absent]) == "", (tokenizer.name, absent)
            assert tokenizer.token_bytes(absent) == b"", (tokenizer.name, absent)
            assert tokenizer.detokenize([absent, *ids, absent]) == tokenizer.detokenize(ids), (tokenizer.name, absent)


def test_streams_and_logprobs_go_on(every_kind: list[Tokenizer]) -> None:
    """In the prompt and in the answer; the pieces of a stream are still the text of the whole."""
    for tokenizer in every_kind:
        ids = tokenizer.tokenize("1 2 3" if tokenizer.name == "NullTokenizer" else TEXTS[0])
        for absent in missing(tokenizer):
            mixed = [*ids[:2], absent, *ids[2:], absent]
            assert "".join(token_texts(tokenizer, mixed)) == tokenizer.detokenize(ids), (tokenizer.name, absent)
            stream = IncrementalDetokenizer(tokenizer, [absent])
            assert stream.add(absent) + stream.finish() == "", (tokenizer.name, absent)
            assert TokenTexts(tokenizer).spelled(absent) == ""
