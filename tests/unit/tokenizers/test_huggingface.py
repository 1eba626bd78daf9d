"""HuggingFaceTokenizer reads what people download, applies it whole, and never downloads itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers.base import MaskingTokenizer, SpanTokenizer, Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.wordpiece import WordPieceTokenizer, words_pipeline
from megatron.errors import ConfigError, DataError
from tests.harness.data import shared_data
from tests.harness.sentences import expect_error
from tests.unit.tokenizers.conftest import TEXTS

GPT2_FINGERPRINT = "eab1e97bf80733f6b980e4d4ac5bad487fbcccd5925911531c09d61106b301f0"


def build(path: Path | str | None, *, extra_ids: int = 0) -> Tokenizer:
    model = None if path is None else str(path)
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model, vocab_extra_ids=extra_ids)
    return build_tokenizer(config)


def gpt2_type(folder: Path) -> Tokenizer:
    config = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )
    return build_tokenizer(config)


def words(tmp_path: Path, vocabulary: list[str], **settings: Any) -> Path:
    """A folder with a word-level tokenizer.json and a tokenizer_config.json."""
    pipeline = tokenizers.Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token=vocabulary[0])
    )
    pipeline.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pipeline.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_folder_and_file_are_the_same(bpe_folder: Path) -> None:
    assert build(bpe_folder).tokenize(TEXTS[0]) == build(bpe_folder / "tokenizer.json").tokenize(TEXTS[0])


def test_same_ids_and_fingerprint_as_vocab_and_merges(bpe_folder: Path) -> None:
    """Data made with tokenizer.json trains with the vocab.json and merges.txt of the same training."""
    ours, theirs = build(bpe_folder), gpt2_type(bpe_folder)
    assert ours.tokenize_batch(TEXTS) == theirs.tokenize_batch(TEXTS)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    assert ours.fingerprint == theirs.fingerprint


def test_fingerprint_ignores_what_decides_no_id(bpe_folder: Path, tmp_path: Path) -> None:
    """transformers saves the same GPT-2 with other offset settings and an idle template; its data must stay usable."""
    pipeline = tokenizers.Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    pipeline.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert build(tmp_path).fingerprint == build(bpe_folder).fingerprint


def test_fingerprint_sees_how_text_is_cut(bpe_folder: Path, tmp_path: Path) -> None:
    """The same vocabulary behind another pre-tokenizer gives other ids."""
    pipeline = tokenizers.Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert build(tmp_path).fingerprint != build(bpe_folder).fingerprint


def test_special_tokens_in_text_are_recognised(bpe_folder: Path) -> None:
    """As transformers does it, and unlike GPT2BPETokenizer."""
    tokenizer = build(bpe_folder)
    assert tokenizer.tokenize("a<|endoftext|>") == [*tokenizer.tokenize("a"), tokenizer.eod]


def test_truncation_and_padding_in_the_file_are_off(bpe_folder: Path, tmp_path: Path) -> None:
    """Published files often carry the settings of a fine-tuning run, which would silently cut every document."""
    pipeline = tokenizers.Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=50)
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert build(tmp_path).tokenize_batch(TEXTS) == build(bpe_folder).tokenize_batch(TEXTS)
    assert build(tmp_path).fingerprint == build(bpe_folder).fingerprint


def test_post_processor_adds_its_tokens(bpe_folder: Path, tmp_path: Path) -> None:
    """Llama's files put BOS before every text; data without it would not be what the model knows."""
    pipeline = tokenizers.Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    end = pipeline.token_to_id("<|endoftext|>")
    pipeline.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    pipeline.save(str(tmp_path / "tokenizer.json"))
    assert build(tmp_path).tokenize("the") == [end, *build(bpe_folder).tokenize("the")]
    assert build(tmp_path).fingerprint != build(bpe_folder).fingerprint


@pytest.mark.parametrize("spelling", ["stop", {"content": "stop", "lstrip": False}])
def test_roles_come_from_the_config(tmp_path: Path, spelling: Any) -> None:
    """The end of a document is what the publisher says, written as text or as an object."""
    tokenizer = build(words(tmp_path, ["?", "</s>", "stop", "pad"], eos_token=spelling, pad_token="pad"))
    assert (tokenizer.eod, tokenizer.eos, tokenizer.pad, tokenizer.bos) == (2, 2, 3, None)


def test_special_tokens_map_is_read(tmp_path: Path) -> None:
    folder = words(tmp_path, ["?", "stop"])
    (folder / "special_tokens_map.json").write_text('{"eos_token": "stop"}')
    assert build(folder).eod == 1


def test_the_config_counts_where_the_map_says_something_else(tmp_path: Path) -> None:
    """Of fine-tuned models the map is often the old one: documents would end with a token that ends none there."""
    folder = words(tmp_path, ["?", "old", "new"], eos_token="new")
    (folder / "special_tokens_map.json").write_text('{"eos_token": "old"}')
    assert build(folder).eod == 2


def test_well_known_end_without_config(tmp_path: Path) -> None:
    """A bare tokenizer.json still has an end of document when it uses a usual name."""
    folder = words(tmp_path, ["?", "</s>"])
    (folder / "tokenizer_config.json").unlink()
    assert build(folder).eod == 1


def test_no_end_of_document_is_refused(tmp_path: Path) -> None:
    with expect_error(DataError, '"eos_token"'):
        build(words(tmp_path, ["?", "a"]))


def test_unknown_end_of_document_is_refused(tmp_path: Path) -> None:
    """Not replaced by some other token: the data would end its documents with a token the model never saw there."""
    with expect_error(DataError, "eos_token", "'halt'"):
        build(words(tmp_path, ["?", "</s>"], eos_token="halt"))


def test_extra_ids(bpe_folder: Path) -> None:
    plain, more = build(bpe_folder), build(bpe_folder, extra_ids=2)
    assert more.vocab_size == plain.vocab_size + 2
    assert more.tokenize("<extra_id_1>") == [plain.vocab_size + 1]
    assert more.detokenize([plain.vocab_size]) == "<extra_id_0>"


def test_hub_names_are_not_downloaded() -> None:
    with expect_error(DataError, "openai/gpt-9"):
        build("openai/gpt-9")


def test_flag_is_required() -> None:
    with expect_error(ConfigError, "--tokenizer-model"):
        build(None)


@pytest.mark.parametrize(
    "files",
    [
        ["vocab.txt"],
        ["spiece.model"],
        ["vocab.json", "merges.txt"],
        [],
    ],
)
def test_folder_without_tokenizer_json_gets_advice(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).touch()
    with expect_error(DataError):
        build(tmp_path)


def test_other_files_are_explained(tmp_path: Path, bpe_folder: Path) -> None:
    with expect_error(DataError, "tokenizer.json", "--tokenizer-type GPT2BPETokenizer"):
        build(bpe_folder / "merges.txt")
    shutil.copy(bpe_folder / "tokenizer.json", tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with expect_error(DataError, "tokenizer_config.json"):
            build(tmp_path)


def test_fingerprint_of_gpt2_is_stable() -> None:
    """Data made today must be accepted by tomorrow's version: this value may never change."""
    vocab, merges = shared_data("data", "gpt2", "gpt2-vocab.json"), shared_data("data", "gpt2", "gpt2-merges.txt")
    config = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab), merge_file=str(merges))
    assert build_tokenizer(config).fingerprint == GPT2_FINGERPRINT


def test_gpt2_as_transformers_saves_it(tmp_path: Path) -> None:
    """Two ways to name GPT-2's tokenizer: one fingerprint, so data of one trains with the other; transformers' ids."""
    transformers = pytest.importorskip("transformers")
    vocab, merges = shared_data("data", "gpt2", "gpt2-vocab.json"), shared_data("data", "gpt2", "gpt2-merges.txt")
    (tmp_path / "from").mkdir()
    shutil.copy(vocab, tmp_path / "from" / "vocab.json")
    shutil.copy(merges, tmp_path / "from" / "merges.txt")
    reference = transformers.GPT2TokenizerFast.from_pretrained(tmp_path / "from")
    reference.save_pretrained(tmp_path / "to")
    tokenizer = build(tmp_path / "to")
    texts = [*TEXTS, "a<|endoftext|>b"]
    assert tokenizer.tokenize_batch(texts) == [reference(text).input_ids for text in texts]
    assert (tokenizer.eod, tokenizer.vocab_size) == (50256, 50257)
    assert tokenizer.fingerprint == GPT2_FINGERPRINT


def t5_folder(tmp_path: Path, *, mark: str = "") -> Path:
    """A tokenizer as T5's: spaces spelled in pieces, an end behind every text, sentinels from the last id down, which
    begin with ``mark``.
    """
    pieces = ["<pad>", "</s>", "<unk>", "\u2581the", "\u2581cat", "s", "\u2581dog", "\u2581"]
    pipeline = tokenizers.Tokenizer(models.WordLevel({piece: n for n, piece in enumerate(pieces)}, unk_token="<unk>"))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Split("s", "isolated")]
    )
    pipeline.add_special_tokens([*pieces[:3], *(f"{mark}<extra_id_{number}>" for number in (2, 1, 0))])
    pipeline.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    pipeline.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_vocabulary_of_a_t5(tmp_path: Path) -> None:
    """A converted T5 that goes on training would learn other sentinels than it knows, or ends inside its texts."""
    tokenizer = cast("SpanTokenizer", build(t5_folder(tmp_path)))
    assert tokenizer.sentinels == (10, 9, 8)
    assert tokenizer.decoder_start == tokenizer.pad == 0
    assert tokenizer.tokenize("the cats") == [3, 4, 5, 1]
    assert tokenizer.tokenize_parts(["the cats", "dog"]) == [[3, 4, 5], [6]]
    assert [n for n, continues in enumerate(tokenizer.continuations()) if continues] == [5]
    assert not hasattr(tokenizer, "mask")


def test_sentinels_of_an_mt5(tmp_path: Path) -> None:
    """They are spelled with a space before, so pretraining an mT5 further asked for --vocab-extra-ids."""
    tokenizer = cast("SpanTokenizer", build(t5_folder(tmp_path, mark="\u2581")))
    assert tokenizer.sentinels == (10, 9, 8)


def test_vocabulary_of_a_bert(tmp_path: Path) -> None:
    """The tokenizer.json that people publish with a BERT serves like its vocab.txt."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    pipeline = words_pipeline(
        models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"), lower_case=True
    )
    pipeline.add_special_tokens(pieces[:5])
    pipeline.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    pipeline.save(str(tmp_path / "tokenizer.json"))
    settings = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = cast("MaskingTokenizer", build(tmp_path))
    ours = WordPieceTokenizer(
        str(tmp_path / "vocab.txt"), name="BertWordPieceLowerCase", extra_ids=0, vocab_size=len(pieces)
    )
    for name in ("vocab_size", "eod", "pad", "cls", "sep", "mask"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.continuations() == ours.continuations()
    assert theirs.tokenize("Cats") == [2, 5, 6, 3]
    assert theirs.tokenize_parts(["Cats"]) == ours.tokenize_batch(["Cats"]) == [[5, 6]]


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer"])
def test_tokenizers_are_not_in_storage(kind: Any) -> None:
    """A checkpoint that was converted into storage has its tokenizer's files beside it, where no library opens them."""
    config = TokenizerConfig(tokenizer_type=kind, tokenizer_model="s3://bucket/run/tokenizer")
    with expect_error(DataError, "s3://bucket/run/tokenizer", "URL"):
        build_tokenizer(config)
