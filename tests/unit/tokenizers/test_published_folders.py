"""A tokenizer is what its folder says: ids and texts of transformers' AutoTokenizer, over forms of published models.

The reference is an extra, and only tests import it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megatron.config.tokenizer import TokenizerConfig
from megatron.config.vocabulary import vocabulary_size
from megatron.core.conversion.companions import tokenizer_files, tokenizer_in
from megatron.core.inference.detokenizer import token_texts
from megatron.core.tokenizers.build import build_tokenizer, built_size
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.published.vocabularies import VOCABULARY_FILES
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import CheckpointError, ConfigError, DataError
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse
from tests.unit.tokenizers import published_folders
from tests.unit.tokenizers.published_folders import Form, decoder, form, forms, llama_model, token

transformers = pytest.importorskip("transformers", minversion="5.0", reason="the reference is transformers 5")

FORMS = forms()
ASKED = [
    *published_folders.TEXTS,
    "",
    " ",
    "  two  spaces  ",
    "\n\n a \n",
    "\tx\r\ny",
    "the dog</s> the<s>dog <s> the",
    "a<|im_start|>user\nhi<|im_end|> b <|im_end|> c",
    "x<pad>y <mask> z<unk>",
    "漢字🎉 \U0001f9ff ñ",
    "dogs dog foxes fox <x> a  <x>  b",
    "<extra_id_0> the <extra_id_1>x<extra_id_4>",
    "[CLS] hello , world . [SEP]it ' s n't [MASK] [E1]",
    "<|endoftext|>a <|endoftext|> b",
    "<bos>a<start_of_turn>user\n x<end_of_turn>",
    "<|user|> [INST]x[/INST] <image> <a><b> <p> <m>",
    "``x'' 123 1234",
    "<|begin_of_text|> the dog<|end_of_text|>",
]


def build(folder: Path) -> HuggingFaceTokenizer:
    config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    tokenizer = build_tokenizer(config)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


def reference_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What transformers reads from the folder, and nothing from anywhere else."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_the_forms_are_many() -> None:
    assert len({each.name for each in FORMS}) == len(FORMS) > 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("published", FORMS, ids=lambda published: published.name)
def test_ids_and_texts_are_those_of_transformers(
    published: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tokenizer.model the settings and added tokens beside it were ignored; with a tokenizer.json the tokens
    that only other files name, and what the class of the tokenizer says.
    """
    published.write(tmp_path)
    reference, tokenizer = reference_of(tmp_path, monkeypatch), build(tmp_path)
    assert tokenizer.tokenize_batch(ASKED) == [reference(text).input_ids for text in ASKED]
    plain = [reference(text, add_special_tokens=False).input_ids for text in ASKED]
    assert tokenizer.tokenize_parts(ASKED) == plain
    for text in ASKED:
        ids = reference(text).input_ids
        assert tokenizer.detokenize(ids) == reference.decode(ids), text
    assert tokenizer.vocab_size == max(reference.get_vocab().values()) + 1
    for role in ("bos", "eos", "pad"):
        expected = getattr(reference, f"{role}_token_id")
        assert expected is None or getattr(tokenizer, role) == expected, role


def test_a_file_of_the_vocabulary_names_its_folder(tmp_path: Path) -> None:
    """tiktoken.model and merges.txt were read as a tokenizer.json, and called damaged."""
    found = set[str]()
    for number, published in enumerate(FORMS):
        folder = tmp_path / str(number)
        names = published.files.keys() & set(VOCABULARY_FILES)
        if names <= found or "tokenizer.json" in published.files:
            continue
        published.write(folder)
        for name in names:
            assert build(folder / name).fingerprint == build(folder).fingerprint, name
        found |= names
    assert found == set(VOCABULARY_FILES)


REFUSED = [
    form("class", {"tokenizer.json": published_folders.byte_level("<|endoftext|>")},
         {"tokenizer_class": "XLNetTokenizer"}),
    form("program", {"tokenizer.model": llama_model()},
          {"tokenizer_class": "BaichuanTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_baichuan.X", None]}}),
    form("other model", {"tokenizer.json": published_folders.json_of_words("WordPiece")},
         {"tokenizer_class": "GPT2Tokenizer"}),
    form("no vocabulary", {}, {"tokenizer_class": "T5Tokenizer"}),
    form("empty", {"tokenizer.model": b""}),
    form("noise", {"tokenizer.model": b"\xff" * 99}),
    form("words", {"tokenizer.model": published_folders.sentencepiece_model("word", vocab_size=60)}),
    form("no mark", {"vocab.txt": "a\nb\n[UNK]\n"}, {"tokenizer_class": "BertTokenizer"}),
    form("no end", {"tokenizer.model": published_folders.ranks()}),
    form("no merges", {"vocab.json": {"a": 0}}, {"tokenizer_class": "GPT2Tokenizer"}),
    form("list", {"tokenizer.model": llama_model()}, {"added_tokens_decoder": []}),
    form("token", {"tokenizer.model": llama_model()}, {"added_tokens_decoder": {"900": {"content": 3}}}),
    form("far id", {"tokenizer.model": llama_model()}, {"added_tokens_decoder": decoder(token("x"),
         first=1 << 40)}),
    form("far rank", {"tokenizer.model": published_folders.ranks()},
          {"eos_token": "<e>", "added_tokens_decoder": decoder(token("<e>"), first=2_000_000_000)}),
    form("long rank", {"tokenizer.model": base64.b64encode(b"a" * 30_000) + b" 0\n"}),
    form("list of the map", {"tokenizer.model": llama_model()}, map={"extra_special_tokens": 3}),
    form("half a pair", {"tokenizer.model": llama_model(), "added_tokens.json": '{"\\ud800": 420}'}),
    form("no file of it", {"spiece.model": llama_model()}, {"tokenizer_class": "GPTSw3Tokenizer"}),
    form("switch", {"tokenizer.model": llama_model()}, {"add_bos_token": "yes"}),
    form("role", {"tokenizer.model": llama_model()}, {"eos_token": 3}),
]  # fmt: skip


@pytest.mark.parametrize("published", REFUSED, ids=lambda each: each.name)
def test_other_folders_are_refused_by_name(published: Form, tmp_path: Path) -> None:
    """Never some other tokenizer than the folder's, and never a traceback."""
    published.write(tmp_path)
    with expect_error(DataError, tmp_path.name):
        build(tmp_path)


def described(**parts: Any) -> Form:
    """A tokenizer.json of words with other parts."""
    pipeline = json.loads(published_folders.json_of_words("WordLevel"))
    return form("", {"tokenizer.json": {**pipeline, **parts}}, {"eos_token": "[SEP]"})


def charsmap(content: bytes) -> dict[str, Any]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}}


@pytest.mark.parametrize(
    ("parts", "fact"),
    [
        (charsmap(b""), "precompiled_charsmap"),
        (charsmap(b"abc"), "precompiled_charsmap"),
        (charsmap(b"\xff" * 40), "precompiled_charsmap"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "%"}}, "base64"),
        (charsmap(b"\0\4\0\0" + b"\xff" * 1024), "library"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "library"),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {},
                }
            },
            "library",
        ),
        ({"model": {"type": "Unigram", "vocab": [], "unk_id": 0}}, "tokenizer.json"),
        ({"model": 3}, "tokenizer.json"),
    ],
)
def test_descriptions_that_the_library_panics_on(parts: Mapping[str, Any], fact: str, tmp_path: Path) -> None:
    """A panic is no Exception: it ended every command in a traceback, whatever it caught."""
    described(**parts).write(tmp_path)
    with expect_error(DataError, tmp_path / "tokenizer.json", fact):
        build(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["bpe/fast", "bpe/GPT-2", "bpe/begins", "json/Llama new", "json/Llama legacy", "words/as written", "bpe/Bloom"],
)
def test_data_made_before_can_be_used(name: str, tmp_path: Path) -> None:
    """A tokenizer whose class cuts text as its tokenizer.json does keeps the fingerprint of the file."""
    published = next(each for each in FORMS if each.name == name)
    published.write(tmp_path)
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    before = RustTokenizer(file, name="", eod=0, pad=None, bos=None, eos=None)
    assert build(tmp_path).fingerprint == before.fingerprint
    assert build(tmp_path).remarks == ()


@pytest.mark.parametrize("name", ["bpe/fast, decoder tokens", "t5/json", "bpe/prefix space, GPT-2", "bert/json"])
def test_other_ids_are_another_tokenizer(name: str, tmp_path: Path) -> None:
    """Where the folder means something else than its tokenizer.json alone, data made with that is refused."""
    next(each for each in FORMS if each.name == name).write(tmp_path)
    file = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    before = RustTokenizer(file, name="", eod=0, pad=None, bos=None, eos=None)
    tokenizer = build(tmp_path)
    assert tokenizer.fingerprint != before.fingerprint
    if name != "bpe/fast, decoder tokens":
        assert '"tokenizer_class": "TokenizersBackend"' in tokenizer.remarks[0]


def test_the_dry_run_counts_what_is_built(tmp_path: Path) -> None:
    """It counted tokenizer.json alone, without the tokens that other files add, and no SentencePiece model at all."""
    for number, published in enumerate(FORMS):
        folder = tmp_path / str(number)
        published.write(folder)
        run = parse(f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}", without="--vocab-size")
        with suppress(ConfigError):  # no token ends documents
            assert vocabulary_size(run, built_size) == build(folder).vocab_size, published.name
    run = parse("--tokenizer-type Llama2Tokenizer --tokenizer-model nowhere", without="--vocab-size")
    with expect_error(ConfigError, "--vocab-size"):
        vocabulary_size(run, built_size)


def test_a_converted_model_takes_the_tokenizer_of_its_folder(tmp_path: Path) -> None:
    """With a tokenizer.model it was Llama2Tokenizer, whatever settings and chat template lay beside it."""
    kinds = {
        "model/bare": "Llama2Tokenizer",
        "model/Llama, chat": "HuggingFaceTokenizer",
        "model/Gemma by model": "HuggingFaceTokenizer",
        "merges/OPT": "HuggingFaceTokenizer",
        "merges/Qwen 1.5": "HuggingFaceTokenizer",
        "t5/mT5": "HuggingFaceTokenizer",
        "merges/GPT-2 by model": "GPT2BPETokenizer",
        "bert/vocab.txt": "BertWordPieceLowerCase",
    }
    for number, (name, kind) in enumerate(kinds.items()):
        folder = tmp_path / str(number)
        next(each for each in FORMS if each.name == name).write(folder)
        config = tokenizer_in(folder, rows=1000)
        assert config.tokenizer_type == kind, name
        if kind == "HuggingFaceTokenizer":
            assert set(tokenizer_files(config)) >= {path.name for path in folder.iterdir()} - {"config.json"}, name


def test_a_model_says_how_its_weights_convert_without_the_tokenizer(tmp_path: Path) -> None:
    """A GPT-SW3, whose weights are those of a GPT-2, was refused for its tokenizer, without a way on."""
    published = form("", {"spiece.model": llama_model()}, {"tokenizer_class": "GPTSw3Tokenizer"})
    published.write(tmp_path)
    with expect_error(CheckpointError, "GPTSw3Tokenizer"):
        tokenizer_in(tmp_path, rows=1000)


def test_an_opt_without_settings_converts(tmp_path: Path) -> None:
    """Its vocabulary has no ``<|endoftext|>``, which ended the conversion; its documents end with ``</s>``."""
    next(each for each in FORMS if each.name == "merges/OPT, roles off").write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = build_tokenizer(tokenizer_in(tmp_path, rows=1000))
    assert tokenizer.detokenize([tokenizer.eod]) == "</s>"
    vocab, merges = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    gpt2 = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    with expect_error(DataError, f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"):
        build_tokenizer(gpt2)


@pytest.mark.parametrize("name", ["t5/cleanup", "bert/json, cased", "bpe/cleanup is ignored", "model/Llama, chat"])
def test_streams_lose_nothing(name: str, tmp_path: Path) -> None:
    """Where texts lose spaces before signs, the text of a stream became shorter than what was shown, and lost signs."""
    next(each for each in FORMS if each.name == name).write(tmp_path)
    tokenizer = build(tmp_path)
    for text in ASKED:
        ids = tokenizer.tokenize(text)
        shown = "".join(token_texts(tokenizer, ids))
        assert shown == tokenizer.detokenize_part(ids)
        assert shown.replace(" ", "") == tokenizer.detokenize(ids).replace(" ", "")
