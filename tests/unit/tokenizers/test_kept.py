"""Checkpoints hold the files of their tokenizer: a checkpoint folder copied alone is enough to use the model."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.save import begin_save
from megatron.core.conversion.kept_tokenizer import files_to_keep, kept_files, with_kept_files
from megatron.core.files.remote_path import AnyPath, RemotePath
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import CheckpointError, DataError
from tests.harness.bucket import empty_memory
from tests.harness.sentences import expect_error
from tests.unit.tokenizers.published_folders import forms


@pytest.fixture
def kinds(
    bpe_folder: Path, sentencepiece_model: Path, tiktoken_vocabulary: Path, tmp_path: Path
) -> dict[str, TokenizerConfig]:
    """A tokenizer of each kind, with its files in one folder under names that training happened to use."""
    folder = tmp_path / "mine"
    shutil.copytree(bpe_folder, folder / "hub")
    (folder / "hub/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "chat_template": "x"}')
    shutil.copy(bpe_folder / "vocab.json", folder / "gpt2-vocab.json")
    shutil.copy(bpe_folder / "merges.txt", folder / "gpt2-merges.txt")
    shutil.copy(sentencepiece_model, folder / "my.model")
    shutil.copy(tiktoken_vocabulary, folder / "my.json")
    (folder / "pieces.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox"]))
    return {
        "gpt2": TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(folder / "gpt2-vocab.json"),
            merge_file=str(folder / "gpt2-merges.txt"),
            vocab_extra_ids=3,
        ),
        "bert": TokenizerConfig(tokenizer_type="BertWordPieceCase", vocab_file=str(folder / "pieces.txt")),
        "folder": TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "hub")),
        "file": TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "hub/tokenizer.json")
        ),
        "sentencepiece": TokenizerConfig(
            tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=str(folder / "my.model")
        ),
        "llama": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(folder / "my.model")),
        "tiktoken": TokenizerConfig(
            tokenizer_type="TikTokenizer", tokenizer_model=str(folder / "my.json"), tiktoken_num_special_tokens=10
        ),
        "null": TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10),
    }


def save(root: AnyPath, iteration: int, config: TokenizerConfig) -> AnyPath:
    states = [ShardedState("model.w", torch.zeros(8), Sharding((8,)))]
    return begin_save(root, iteration, states, {}, Mesh.single(), files=files_to_keep(config)).finish()


def test_a_checkpoint_copied_alone_has_its_tokenizer(kinds: dict[str, TokenizerConfig], tmp_path: Path) -> None:
    """Evaluation from another folder failed about a ``--vocab-file`` that the user never typed."""
    before = {name: build_tokenizer(config).fingerprint for name, config in kinds.items()}
    for number, config in enumerate(kinds.values()):
        save(tmp_path / "runs", number, config)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "mine")
    for number, (name, config) in enumerate(kinds.items()):
        alone = shutil.copytree(tmp_path / f"elsewhere/iter_{number:07d}", tmp_path / "alone" / f"iter_{number:07d}")
        own = with_kept_files(config, find_checkpoint(alone).path)
        assert build_tokenizer(own).fingerprint == before[name]
        assert name == "null" or str(alone) in str(own)


def test_damage_to_the_tokenizer_is_damage_to_the_checkpoint(kinds: dict[str, TokenizerConfig], tmp_path: Path) -> None:
    """The manifest has its files as any other."""
    folder = save(tmp_path / "runs", 1, kinds["gpt2"])
    merges = Path(str(folder)) / "tokenizer/merges.txt"
    merges.write_bytes(merges.read_bytes().replace(b"t", b"T", 1))
    with expect_error(CheckpointError, "tokenizer/merges.txt"):
        find_checkpoint(tmp_path / "runs")
    merges.unlink()
    with expect_error(CheckpointError, "merges.txt"):
        find_checkpoint(tmp_path / "runs")


def test_checkpoints_in_object_storage_keep_it_too(
    kinds: dict[str, TokenizerConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizers read files, so those of a bucket come to the user's cache first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = RemotePath("memory://runs/tokenizers")
    for number, name in enumerate(("gpt2", "folder")):
        save(root, number, kinds[name])
        own = with_kept_files(kinds[name], find_checkpoint(root).path)
        assert str(tmp_path / "cache") in str(own)
        assert build_tokenizer(own).fingerprint == build_tokenizer(kinds[name]).fingerprint
    empty_memory()


def test_checkpoints_without_it_name_the_old_paths(
    kinds: dict[str, TokenizerConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those saved before, and those of a tokenizer too large to be kept."""
    assert with_kept_files(kinds["gpt2"], tmp_path) == kinds["gpt2"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/vocab.json").write_text("{}")  # one of two
    assert kept_files(dataclasses.asdict(kinds["gpt2"]), tmp_path) == {}
    with (tmp_path / "large.model").open("wb") as file:
        file.truncate(1 << 30)
    for name in ("large.model", "missing.model"):  # the first ended a conversion, where training only warned
        assert files_to_keep(dataclasses.replace(kinds["llama"], tokenizer_model=str(tmp_path / name))) == {}
    assert re.findall(r"(larger than 64 MiB|No such file)", caplog.text) == ["larger than 64 MiB", "No such file"]


def test_every_file_that_determines_a_folder_s_tokenizer_is_kept(tmp_path: Path) -> None:
    """Without tokenizer.json the vocabulary stayed behind, and without config.json the class of the tokenizer."""
    for number, published in enumerate(forms()):
        if not published.name.startswith(("model/", "merges/", "t5/", "xlmr/", "bert/vocab", "tiktoken/", "deberta/")):
            continue
        folder = tmp_path / f"folder{number}"
        published.write(folder)
        config = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
        try:
            before = build_tokenizer(config)
        except DataError:  # no token ends documents
            continue
        saved = save(tmp_path / "runs", number, config)
        shutil.rmtree(folder)
        after = build_tokenizer(with_kept_files(config, saved))
        asked = ["the dog</s> a<|im_end|> x  y", "<extra_id_0> [MASK]"]
        assert after.fingerprint == before.fingerprint, published.name
        assert after.tokenize_batch(asked) == before.tokenize_batch(asked), published.name
