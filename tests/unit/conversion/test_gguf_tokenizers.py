"""Tokenizers in GGUF files: llama.cpp and this project cut texts into the same tokens as the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

pytest.importorskip("gguf", reason="GGUF files are written with the extra gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp proves GGUF files; it is in the extra dev-all")

from megatron.core.conversion.companions import tokenizer_in, tokenizer_of
from megatron.core.conversion.gguf.cuts import NAMES, cut_name, pre_tokenizer
from megatron.core.conversion.gguf.files import open_gguf
from megatron.core.conversion.gguf.reading import read_gguf
from megatron.core.conversion.gguf.tokenizer_files import write_tokenizer
from megatron.core.conversion.gguf.vocabulary import vocabulary_keys
from megatron.core.conversion.proof import ProofError
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.core.tokenizers.conversations import own_template
from megatron.errors import CheckpointError
from tests.harness.published import random_model
from tests.harness.sentences import expect_error
from tests.published.sizes import SIZES
from tests.tiers import tiers
from tests.unit.conversion.test_families import do
from tests.unit.tokenizers.published_folders import TEXTS, gemma_model, llama_model

_LLAMA3 = next(cuts[0] for cuts, name in NAMES.items() if name == "dbrx")
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|pad|>")


@cache
def byte_level(name: str, *, begins: bool = False) -> str:
    """tokenizer.json of a byte-level BPE that cuts texts as llama.cpp's ``name``."""
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE())
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340, show_progress=False, initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    )
    pipeline.train_from_iterator(TEXTS * 3, trainer)
    pipeline.add_special_tokens(list(SPECIAL))
    pipeline.add_tokens([" sum"])
    spec = json.loads(pipeline.to_str())
    spec["pre_tokenizer"] = pre_tokenizer(name)
    if begins:
        end = pipeline.token_to_id(SPECIAL[0])
        word = {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}}
        letters = [{"Sequence": {"id": letter, "type_id": 0}} for letter in "AB"]
        known = {SPECIAL[0]: {"id": SPECIAL[0], "ids": [end], "tokens": [SPECIAL[0]]}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [word, letters[0]],
            "pair": [word, *letters],
            "special_tokens": known,
        }
    return json.dumps(spec)


def bpe(name: str, **settings: bool) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "tokenizer.json").write_text(byte_level(name, **settings))
        roles = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[0], "pad_token": SPECIAL[2]}
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles})
        )
        (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|im_end|>")
        pipeline = tokenizers.Tokenizer.from_str(byte_level(name, **settings))
        ends = [pipeline.token_to_id(each) for each in (SPECIAL[1], SPECIAL[0])]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    return write


def pieces(model: Callable[[], bytes], settings: dict[str, Any] | None = None) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(model())
        if settings is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    return write


KINDS: dict[str, Callable[[Path], None]] = {
    "gpt-2": bpe("gpt-2"),
    "dbrx, begins": bpe("dbrx", begins=True),
    "qwen2": bpe("qwen2"),
    "starcoder": bpe("starcoder"),
    "falcon": bpe("falcon"),
    "gpt-4o": bpe("gpt-4o"),
    "tekken": bpe("tekken"),
    "deepseek-v3": bpe("deepseek-v3"),
    "bloom": bpe("bloom"),
    "llama": pieces(llama_model),
    "llama, published": pieces(llama_model, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
    "gemma": pieces(gemma_model, {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}),
}


def model_with(write: Callable[[Path], None], folder: Path) -> Path:
    """A random Llama with a tokenizer of this kind, and rows beyond it."""
    random_model("llama", {**SIZES, "vocab_size": 460, "max_position_embeddings": 256}).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write(folder)
    return folder


@pytest.mark.parametrize("kind", tiers(KINDS, first=("falcon", "llama, published", "gemma")))
def test_the_same_tokens_there_and_back(kind: str, tmp_path: Path) -> None:
    """Another way to cut texts costs a model most of what it knows, and looks like bad weights."""
    source = model_with(KINDS[kind], tmp_path / "source")
    said = do("hf", source, "gguf", tmp_path / "model", gguf_type="f32")
    assert not [line for line in said if "other tokens" in line]
    before = tokenizer_of(tokenizer_in(source, rows=460))
    back = read_gguf(tmp_path / "model", scratch=tmp_path / "scratch")
    after = tokenizer_of(back.tokenizer)
    assert before is not None and after is not None
    for text in (*TEXTS, "It's 12345 lines:\n\n  don't  sum"):
        assert after.tokenize(text) == before.tokenize(text)
        (ids,) = before.tokenize_parts([text])
        assert after.detokenize(ids) == before.detokenize(ids)
    assert (after.eod, after.bos) == (before.eod, before.bos)
    if kind in NAMES.values():
        assert back.chat == ChatSettings(template=None, end_tokens=(before.eod + 1,))
        assert own_template(str(tmp_path / "scratch")) == "{{ messages[0]['content'] }}<|im_end|>"


def test_files_that_do_not_say_how_texts_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most files of Llama 3 lack the key, and llama.cpp begins their texts with a token: read here they had none."""
    silent = ("add_bos_token", "add_eos_token")
    monkeypatch.setattr(
        "megatron.core.conversion.gguf.writing.vocabulary_keys",
        lambda *of, **more: {
            key: value for key, value in vocabulary_keys(*of, **more).items() if not key.endswith(silent)
        },
    )
    source = model_with(bpe("tekken", begins=True), tmp_path / "source")
    said = do("hf", source, "gguf", tmp_path / "model", gguf_type="f32")  # llama.cpp's tokens are those of the source
    assert not [line for line in said if "other tokens" in line]
    before = tokenizer_of(tokenizer_in(source, rows=460))
    after = tokenizer_of(read_gguf(tmp_path / "model", scratch=tmp_path / "scratch").tokenizer)
    assert before is not None and after is not None
    assert after.tokenize("It's") == before.tokenize("It's") and before.tokenize("It's")[0] == before.bos


@pytest.mark.parametrize(
    ("keys", "ends"),
    [
        ({"model": "t5"}, True),
        ({"model": "t5", "add_eos_token": False}, False),
        ({"model": "llama"}, False),
        ({"model": "gpt2", "pre": "qwen2", "add_eos_token": True}, True),
        ({"model": "gpt2", "pre": "qwen2"}, False),
    ],
)
def test_ends_of_texts(keys: dict[str, Any], ends: bool, tmp_path: Path) -> None:
    """llama.cpp ends texts of unigrams with a token unless a file denies it, and others where a file says so."""
    words = {"tokens": ["<unk>", "</s>", "a"], "token_type": [2, 3, 1], "eos_token_id": 1, **keys}
    write_tokenizer({f"tokenizer.ggml.{name}": value for name, value in words.items()}, tmp_path / "files")
    if keys["model"] == "gpt2":
        found = tokenizers.Tokenizer.from_file(str(tmp_path / "files/tokenizer.json")).encode("a").ids
        assert found == ([2, 1] if ends else [2])
    else:
        found = json.loads((tmp_path / "files/tokenizer_config.json").read_text())
        assert found["add_eos_token"] is ends


def test_keys_name_kinds_of_tokens(tmp_path: Path) -> None:
    """Readers skip control tokens in texts, and never cut the others that were added."""
    do("hf", model_with(KINDS["gpt-2"], tmp_path / "source"), "gguf", tmp_path / "model", skip_proof=True)
    keys = open_gguf(tmp_path / "model").keys
    kinds = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]))
    assert [kinds[each] for each in (*SPECIAL, " sum", "a", "[PAD459]")] == [3, 3, 3, 4, 1, 5]
    assert len(keys["tokenizer.ggml.tokens"]) == 460
    names = ("eos", "eot", "padding")
    assert [keys["tokenizer.ggml.tokens"][keys[f"tokenizer.ggml.{each}_token_id"]] for each in names] == [*SPECIAL]
    assert keys["tokenizer.ggml.add_bos_token"] is False


def test_other_cuts_are_refused() -> None:
    """A tokenizer whose cuts llama.cpp lacks would be given those of GPT-2."""
    spec = json.loads(byte_level("gpt-2"))
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, pre_tokenizer("gpt-2")]}
    with expect_error(CheckpointError, "WhitespaceSplit"):
        cut_name(spec)
    spec["pre_tokenizer"] = pre_tokenizer("llama-bpe")
    assert cut_name(spec) == "dbrx"
    spec["model"]["ignore_merges"] = True
    assert cut_name(spec) == "llama-bpe"
    with expect_error(CheckpointError, "'klingon'"):
        pre_tokenizer("klingon")


def test_llama_cpp_tells_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares tokens, too: a wrong name of the cuts is no matter of weights."""
    source = model_with(KINDS["qwen2"], tmp_path / "source")
    monkeypatch.setattr("megatron.core.conversion.gguf.vocabulary.cut_name", lambda spec: "falcon")
    with expect_error(ProofError, "llama.cpp", "other tokens"):
        do("hf", source, "gguf", tmp_path / "model")


def test_more_ends_than_a_file_names(tmp_path: Path) -> None:
    """A dropped end lets answers run on."""
    source = model_with(KINDS["gpt-2"], tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 9, 10]}))
    with expect_error(CheckpointError, "eos_token_id", "7, 8, 9, 10"):
        do("hf", source, "gguf", tmp_path / "model")
