"""A named pipe, socket or device wherever a user names a file or a folder's file is read: refused at once."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megatron.config.data import DataConfig
from megatron.config.files import read_settings, words_of
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.lease import held
from megatron.core.checkpointing.storage import CheckpointReader
from megatron.core.checkpointing.torch_files import load_torch_file
from megatron.core.conversion.companions import tokenizer_in
from megatron.core.conversion.huggingface.reading import read_config, tensors_in
from megatron.core.conversion.megatron_lm.files import find_folder, open_checkpoint
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.datasets.splits import read_sources
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.conversations import own_template
from megatron.core.tokenizers.input_files import find_inputs
from megatron.core.tokenizers.text_files import read_batches
from megatron.errors import DataError, MegatronError
from megatron.small_files import read_json, read_text
from megatron.training.evaluation.zero_shot import files as evaluation
from tasks.fine_tuning.files import read_labelled
from tests.harness.sentences import expect_error
from tools import merge_datasets, plot_loss, preprocess_data, text_generation_cli, train_tokenizer
from tools.generation.batch import answer_file
from tools.generation.questions import _records
from tools.generation.settings import GenerateConfig

Use = Callable[[Path], object]


def tokenizer(kind: str, field: str, **others: str) -> Use:
    """Build a tokenizer of a kind whose ``field`` names the path; the other files it needs are text."""

    def build(path: Path) -> object:
        files = {name: str(path.parent / each) for name, each in others.items()}
        for each in files.values():
            Path(each).write_text("{}")
        values: dict[str, Any] = {"tokenizer_type": kind, field: str(path), **files}
        return build_tokenizer(TokenizerConfig(**values))

    return build


def with_index(path: Path) -> object:
    """Read a folder whose index of weights names the path."""
    (path.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": path.name}}))
    return tensors_in(path.parent)


def beside(name: str, content: str, use: Use) -> Use:
    """Use the path after its neighbour ``name`` was written."""

    def run(path: Path) -> object:
        (path.parent / name).write_text(content)
        return use(path)

    return run


def task_flags(path: Path) -> object:
    """Read labelled rows as fine-tuning does."""
    return read_labelled("MNLI", str(path))


def found(path: Path) -> object:
    """Look for a checkpoint in the folder of the path, where a damaged one is."""
    (path.parent / "iter_0000001").mkdir()
    return find_checkpoint(path.parent)


USES: dict[str, tuple[str, Use]] = {
    "@file": ("words", lambda path: list(words_of([f"@{path}"]))),
    "--config": ("x.yaml", lambda path: read_settings(str(path))),
    "--deepspeed_config": ("x.json", lambda path: read_settings(str(path), flag="--deepspeed_config")),
    "--vocab-file": ("vocab.json", tokenizer("GPT2BPETokenizer", "vocab_file", merge_file="merges.txt")),
    "--merge-file": ("merges.txt", tokenizer("GPT2BPETokenizer", "merge_file", vocab_file="vocab.json")),
    "vocab.txt": ("vocab.txt", tokenizer("BertWordPieceCase", "vocab_file")),
    "--tokenizer-model": ("x.json", tokenizer("HuggingFaceTokenizer", "tokenizer_model")),
    "SentencePiece": ("x.model", tokenizer("SentencePieceTokenizer", "tokenizer_model")),
    "tiktoken": ("x.json", tokenizer("TikTokenizer", "tokenizer_model")),
    **{
        name: (name, lambda path: tokenizer("HuggingFaceTokenizer", "tokenizer_model")(path.parent))
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    },
    "model's tokenizer": ("tokenizer.model", lambda path: tokenizer_in(path.parent, rows=10)),
    "chat_template.jinja": ("chat_template.jinja", lambda path: own_template(str(path.parent))),
    "--input": ("x.jsonl", lambda path: find_inputs([str(path)])),
    "--input FOLDER": ("x.jsonl.gz", lambda path: find_inputs([str(path.parent)])),
    "--input GLOB": ("x.jsonl", lambda path: find_inputs([f"{path.parent}/*.jsonl"])),
    "preprocess_data.py": (
        "x.jsonl",
        lambda path: preprocess_data.main(
            f"--input {path} --output-prefix {path.parent}/o --tokenizer-type NullTokenizer --vocab-size 9".split()
        ),
    ),
    "train_tokenizer.py": (
        "x.jsonl",
        lambda path: train_tokenizer.main(f"--input {path} --output-dir {path.parent}/o --vocab-size 300".split()),
    ),
    "PREFIX.bin": ("d.bin", beside("d.idx", "", lambda path: IndexedDataset(str(path.with_suffix(""))))),
    "PREFIX.idx": ("d.idx", beside("d.bin", "", lambda path: IndexedDataset(str(path.with_suffix(""))))),
    "PREFIX.meta.json": ("d.meta.json", lambda path: DatasetMetadata.read(str(path.parent / "d"))),
    "merge_datasets.py": (
        "d.idx",
        beside("d.bin", "", lambda path: merge_datasets.find_prefixes(path.parent, output_prefix="o")),
    ),
    "--data-args-path": ("blend", lambda path: read_sources(DataConfig(seq_length=8, data_args_path=str(path)))),
    "--per-split-data-args-path": (
        "blend",
        lambda path: read_sources(DataConfig(seq_length=8, per_split_data_args_path=str(path))),
    ),
    "--prompt-file": ("prompts", lambda path: text_generation_cli.prompts_of(GenerateConfig(prompt_file=str(path)))),
    "--input-jsonl": ("x.jsonl", lambda path: list(_records(path))),
    "--output-jsonl": ("x.jsonl", lambda path: answer_file(None, path.parent / "q", path)),  # type: ignore[arg-type]
    "--valid-data": ("x.txt", lambda path: list(evaluation.read_documents(path, key="text"))),
    "--train-data": ("train.tsv", task_flags),
    "RACE": ("x.txt", lambda path: read_labelled("RACE", str(path.parent))),
    "plot_loss.py": ("log.txt", plot_loss.read_losses),
    "config.json": ("config.json", lambda path: read_config(path.parent)),
    "model.safetensors": ("model.safetensors", lambda path: tensors_in(path.parent)),
    "pytorch_model.bin": ("pytorch_model.bin", lambda path: tensors_in(path.parent)),
    "shard": ("model-1.safetensors", with_index),
    "torch's": ("x.pt", load_torch_file),
    "tracker": ("latest_checkpointed_iteration.txt", lambda path: find_folder(path.parent)),
    "our tracker": ("latest_checkpointed_iteration.txt", found),
    "manifest.json": ("manifest.json", lambda path: find_checkpoint(path.parent)),
    ".metadata": (".metadata", lambda path: CheckpointReader(path.parent, foreign=True).read_metadata()),
    "torch_dist": (".metadata", lambda path: open_checkpoint(path.parent)),
    "a box": ("__0_0.distcp", lambda path: CheckpointReader(path.parent, foreign=True).open(path.name)),
    ".in_use.json": (".in_use.json", lambda path: held(path.parent).__enter__()),
}


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """What waits for a pipe's writer is interrupted."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it waits for somebody to write into the pipe")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("place", USES)
def test_a_pipe_is_refused(place: str, tmp_path: Path) -> None:
    """The command waited for ever, or passed over the file as if it weren't there."""
    name, use = USES[place]
    os.mkfifo(tmp_path / name)
    with expect_error(MegatronError, name, exit_code=2) as caught:
        use(tmp_path / name)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_sockets_and_endless_devices(tmp_path: Path) -> None:
    """Standard library calls read /dev/zero until the memory was full."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "x"))
        with expect_error(DataError):
            find_inputs([str(tmp_path / "x")])
    for path in (Path("/dev/zero"), tmp_path / "zero"):
        if path.parent == tmp_path:
            path.symlink_to("/dev/zero")
        with expect_error(DataError):
            evaluation.read_text(path)


def test_what_a_shell_gives_is_read(tmp_path: Path) -> None:
    """``<(zcat x.gz)`` and ``/dev/stdin`` go on working, also by another name; /dev/null is an empty file."""
    assert read_text(Path("/dev/null"), where="x", error=DataError) == ""
    for link in (False, True):
        reading, writing = os.pipe()
        path = Path(f"/dev/fd/{reading}")
        if link:
            path = tmp_path / "x.jsonl"
            path.symlink_to(f"/dev/fd/{reading}")
        os.write(writing, b'{"text": "a"}\n')
        os.close(writing)
        if link:
            assert [batch.data for batch in read_batches(find_inputs([str(path)]))] == [b'{"text": "a"}\n']
        else:
            assert read_json(path, error=DataError) == {"text": "a"}
        os.close(reading)


def test_a_pipe_in_shared_memory(tmp_path: Path) -> None:
    """/dev/shm is a folder like any other, below /dev though it is."""
    path = Path("/dev/shm") / f"{tmp_path.name}-{os.getpid()}"
    os.mkfifo(path)
    try:
        with expect_error(MegatronError, f"@{path}", exit_code=2, hide=[path.name]):
            list(words_of([f"@{path}"]))
    finally:
        path.unlink()
