"""A user's mistakes, through the real command: one sentence that says what would work, non-zero exit, nothing lost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.models.registry import FAMILIES
from megatron.errors import CheckpointError, ConfigError, DataError, MegatronError
from megatron.training.pretrain import pretrain
from tests.end_to_end.commands import TINY, launch, run
from tests.harness.scripts import run_script
from tests.harness.sentences import expect_error

NO_DATA = TINY.replace("--mock-data ", "")


def train(flags: str, *more: str) -> int:
    """``pretrain_gpt.py`` in this process."""
    return pretrain(FAMILIES["gpt"], [*flags.split(), *more], prog="pretrain_gpt.py")


def dataset(prefix: Path, *, largest: int = 299, documents: int = 50) -> Path:
    """Token files with ids up to ``largest``."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(documents):
            writer.add_document(np.full(40, min(number, largest - 1)))
        writer.add_document(np.full(40, largest))
    return prefix


def data_flags(prefix: Path) -> list[str]:
    """Flags that train on token files alone."""
    return ["--train-iters=2", "--tokenizer-type=NullTokenizer", f"--train-data-path={prefix}"]


def tokenizer_files(folder: Path) -> list[str]:
    """Flags of a GPT-2 tokenizer of 300 words."""
    vocabulary = {f"{number}": number for number in range(299)} | {"<|endoftext|>": 299}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return [f"--vocab-file={folder}/vocab.json", f"--merge-file={folder}/merges.txt"]


def test_good_input_trains(tmp_path: Path) -> None:
    """The cases below fail for the reason they are about."""
    assert train(NO_DATA, *data_flags(dataset(tmp_path / "data"))) == 0


@pytest.mark.parametrize("name", ["data.bin", "data.idx"])
def test_missing_file(name: str, tmp_path: Path) -> None:
    prefix = dataset(tmp_path / "data")
    (tmp_path / name).unlink()
    with expect_error(DataError, tmp_path / name):
        train(NO_DATA, *data_flags(prefix))


@pytest.mark.parametrize("name", ["data.bin", "data.idx"])
def test_truncated_file(name: str, tmp_path: Path) -> None:
    prefix = dataset(tmp_path / "data")
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with expect_error(DataError, tmp_path / name):
        train(NO_DATA, *data_flags(prefix))


def test_swapped_files(tmp_path: Path) -> None:
    prefix = dataset(tmp_path / "data")
    (tmp_path / "data.bin").rename(tmp_path / "x")
    (tmp_path / "data.idx").rename(tmp_path / "data.bin")
    (tmp_path / "x").rename(tmp_path / "data.idx")
    with expect_error(DataError, tmp_path / "data.bin", "data.idx"):
        train(NO_DATA, *data_flags(prefix))


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    """They would index outside of the embedding, on a GPU with an error that names nothing."""
    with expect_error(DataError, "900", tmp_path / "data"):
        train(NO_DATA, *data_flags(dataset(tmp_path / "data", largest=900)))


def test_data_of_another_tokenizer(tmp_path: Path) -> None:
    """Training on ids of another vocabulary looks like training, and teaches nothing."""
    prefix = dataset(tmp_path / "data")
    facts_file = tmp_path / "data.meta.json"
    facts = json.loads(facts_file.read_text())
    facts["tokenizer"] = {"type": "GPT2BPETokenizer", "vocab_size": 300, "eod": 0, "fingerprint": "0" * 64}
    facts_file.write_text(json.dumps(facts))
    flags = data_flags(prefix) + tokenizer_files(tmp_path)
    with expect_error(DataError, "000000000000"):
        train(NO_DATA, *(flag.replace("NullTokenizer", "GPT2BPETokenizer") for flag in flags))


def test_checkpoint_of_another_architecture(tmp_path: Path) -> None:
    train(f"{TINY} --train-iters 1 --save-interval 1", f"--save={tmp_path}")
    with expect_error(CheckpointError, "--hidden-size", "32", "64"):
        train(TINY.replace("--hidden-size 32", "--hidden-size 64") + " --train-iters 2", f"--load={tmp_path}")
    with expect_error(CheckpointError, "--activation", "gelu_tanh", "squared_relu"):
        train(f"{TINY} --train-iters 2 --finetune --squared-relu", f"--load={tmp_path}")
    with expect_error(CheckpointError, "--use-checkpoint-args"):
        train(f"{TINY} --train-iters 2 --use-checkpoint-args --num-layers 3", f"--load={tmp_path}")
    smaller = TINY.replace("--num-layers 2 --hidden-size 32 --num-attention-heads 4", "")
    assert train(f"{smaller} --train-iters 1 --use-checkpoint-args", f"--load={tmp_path}") == 0


def test_checkpoint_of_another_tokenizer(tmp_path: Path) -> None:
    """Of a model as large, whose ids mean other words."""
    train(f"{TINY} --train-iters 1 --save-interval 1", f"--save={tmp_path}")
    flags = TINY.replace("--vocab-size 300", "--vocab-size 301 --tokenizer-type GPT2BPETokenizer --train-iters 2")
    with expect_error(CheckpointError, "--vocab-file"):
        train(flags, f"--load={tmp_path}", *tokenizer_files(tmp_path))


def test_load_that_finds_nothing(tmp_path: Path) -> None:
    """Training would start from random weights, and nobody would notice for days."""
    with expect_error(CheckpointError):
        train(f"{TINY} --train-iters 1", f"--load={tmp_path}/missing")
    with expect_error(CheckpointError):
        train(f"{TINY} --train-iters 1", f"--load={tmp_path}")
    same = [f"--save={tmp_path}/new", f"--load={tmp_path}/new", "--save-interval=1"]
    with expect_error(CheckpointError, f"--load {tmp_path / 'new'}"):
        train(f"{TINY} --train-iters 1 --exit-on-missing-checkpoint", *same)
    assert train(f"{TINY} --train-iters 1", *same) == 0


def test_unwritable_save_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found before an hour of training is lost, with the folder named."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        with expect_error(MegatronError, f"--save {folder}", exit_code=2):
            train(f"{TINY} --train-iters 3 --save-interval 2", f"--save={folder}")
    assert "iteration " not in capsys.readouterr().out


def test_flags_are_checked_all_at_once() -> None:
    """One run of the command shows everything that is wrong."""
    with expect_error(ConfigError, "--num-attention-heads 5", "--global-batch-size 7", "--hidden-dropout"):
        train(TINY + " --train-iters 1 --num-attention-heads 5 --global-batch-size 7 --hiden-dropout 0.1")


def test_message_and_exit_code_of_the_real_command(tmp_path: Path) -> None:
    """No traceback; 2 for wrong settings and files alike; on two ranks the sentence is printed once."""
    log = launch("pretrain_gpt.py", TINY + " --train-iters 1 --micro-batch-size 3", expect=2)
    assert log.startswith("error: ") and "--micro-batch-size 3" in log and "Traceback" not in log
    missing = f"--load={tmp_path}"
    log = run("pretrain_gpt.py", f"{TINY} --train-iters 1", missing, expect=2)
    assert log.count("error: ") == 1 and str(tmp_path) in log and "Traceback" not in log
    for number, when in enumerate(("", "--use-checkpoint-args")):  # found when ranks have met, and before
        words = [*TINY.split(), "--train-iters", "1", *when.split(), missing]
        ended = run_script("pretrain_gpt.py", words, ranks=2, log=tmp_path.with_suffix(f".{number}"))
        assert ended.codes == [2, 2], ended.output
        assert ended.output.count("error: ") == 1 and "Traceback" not in ended.output


@pytest.mark.slow  # the ranks' codes and words are those of the test above; a real torchrun is in test_failing_ranks.py
def test_torchrun_prints_the_exit_code_of_a_mistake(tmp_path: Path) -> None:
    """It ends with 1 whatever its processes end with, and shows their code and the sentence in its summary."""
    log = launch("pretrain_gpt.py", f"{TINY} --train-iters 1", f"--load={tmp_path}", ranks=2, expect=1)
    assert [line.split("error: ")[0].strip() for line in log.splitlines() if "error: " in line] == ["", "traceback :"]
    assert re.search(r"exitcode  : (2|-15) ", log), log  # it sends SIGTERM to a rank that is about to end with 2
