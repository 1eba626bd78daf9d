"""What a dry run approves can start: it opens the run's files with the start's own functions, and writes none."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.indexed_format import idx_path
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.files.writable import why_not_writable
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import RESTART_MAY_HELP, ConfigError, MegatronError
from megatron.training.checkpoints.saving import Saver
from megatron.training.pretrain import pretrain
from megatron.training.run.preflight import Findings
from tasks import main as tasks
from tests.harness.bucket import url
from tests.harness.runs import TINY_RUN, tiny_run
from tests.harness.sentences import check_line, expect_error

ROOT = Path(__file__).parents[3]
TINY = f"{TINY_RUN} --tokenizer-type NullTokenizer"
Check = Callable[..., str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of 50 ids, data of 80, and a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("files")
    for name, size in {"data": 50, "other": 80}.items():
        stamp = TokenizerStamp.of(build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=size)))
        with IndexedDatasetWriter(folder / name, dtype=np.uint16, tokenizer=stamp) as writer:
            writer.add_document(np.arange(1000) % size)
    run = tiny_run(ParallelContext.single(), f"--mock-data --save {folder / 'run'} --save-interval 1")
    run.progress.iteration = 1
    Saver(run).save()
    return folder


@pytest.fixture
def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """A dry run; what it prints, or the sentence that it ends with."""

    def dry_run(flags: str) -> str:
        argv = f"{TINY} {flags} --dry-run".format(folder).split()
        try:
            pretrain(FAMILIES["gpt"], argv, prog="pretrain_gpt.py")
        except ConfigError as error:
            return str(error)
        return capsys.readouterr().out.partition("== files\n")[2].partition("\n\n")[0]

    return dry_run


DATA = "--data-path {0}/data --train-iters 3"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--data-path {0}/none --train-iters 3", "neither {0}/none.bin nor {0}/none.idx exists"),
        ("--data-path {0}/data {0}/none {0}/nil --train-iters 3", "2. neither {0}/nil.bin"),
        ("--data-args-path {0}/none --train-iters 3", "--data-args-path {0}/none cannot be read"),
        ("--data-path {0}/data.idx --train-iters 3", "give {0}/data, without the ending .idx"),
        (f"{DATA} --save {{0}}/data.idx --save-interval 1", "--save {0}/data.idx cannot be written"),
        (f"{DATA} --save /proc/x --save-interval 1", "--save /proc/x cannot be written"),
        (f"{DATA} --tensorboard-dir {{0}}/data.idx", "--tensorboard-dir {0}/data.idx cannot be written"),
        (
            f"{DATA} --wandb-project p --wandb-save-dir {{0}}/data.idx",
            "--wandb-save-dir {0}/data.idx cannot be written",
        ),
        (
            f"{DATA} --record-memory-history --memory-snapshot-path {{0}}/data.idx/a",
            "--memory-snapshot-path {0}/data.idx cannot be written",
        ),
        (f"{DATA} --load {{0}}/none", "--load {0}/none: there is no such folder"),
        (f"{DATA} --load {{0}}/run --ckpt-step 7", "no usable checkpoint of --ckpt-step 7"),
        (f"{DATA} --pretrained-checkpoint {{0}}/none", "--pretrained-checkpoint {0}/none: there is no such folder"),
        (f"{DATA} --load {{0}}/new --save {{0}}/new --save-interval 1 --ckpt-step 0", "--load {0}/new: there is no"),
        (f"{DATA} --load {{0}}/run --swiglu", "is of another architecture"),
        (f"{DATA} --load {{0}}/run --optimizer sgd", "lacks optimizer."),
        (f"{DATA} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {{0}}/none", "--tokenizer-model {0}/none"),
        (f"{DATA} --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m", "--vocab-file v does not exist"),
        ("--data-path {0}/other {0}/data --train-iters 3", "{0}/other holds token id 79"),
    ],
)
def test_what_cannot_start_is_refused(check: Check, folder: Path, flags: str, words: str) -> None:
    """A job was approved, waited a day for its place, and ended in its first second over a mistyped path."""
    assert words.format(folder) in check(flags)


@pytest.mark.parametrize(
    ("tokenizer", "fact"),
    [
        ("--tokenizer-type GPT2BPETokenizer --vocab-file none.json --merge-file none.txt", "--vocab-file none.json"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model none", "--tokenizer-model none"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model none", "Llama2Tokenizer"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "unfused", "cudnn", "flash_attn_3"])
def test_a_vocabulary_that_is_not_here_is_named(tokenizer: str, fact: str, backend: str) -> None:
    """With --no-check-files and an attention backend by name, a missing vocabulary ended in an AssertionError."""
    flags = f"--data-path x --train-iters 3 --attention-dropout 0 {tokenizer} --attention-backend {backend}"
    argv = f"{TINY_RUN.replace('--vocab-size 50 ', '')} {flags} --dry-run --no-check-files".split()
    with expect_error(ConfigError, fact, "--vocab-size"):
        pretrain(FAMILIES["gpt"], argv, prog="pretrain_gpt.py")


def test_what_can_start_is_described(check: Check, folder: Path, tmp_path: Path) -> None:
    """One line for each file; and a new folder is not made, nor anything else written."""
    before = sorted(folder.rglob("*"))
    flags = f"{DATA} --save {tmp_path}/new --load {tmp_path}/new --save-interval 1 --tensorboard-dir {folder}/tb"
    lines = check(flags).splitlines()
    assert [line.strip().partition(":")[0] for line in lines] == [
        "tokenizer",
        "data",
        "checkpoint",
        "--save",
        "--tensorboard-dir",
    ]
    assert lines[1].endswith(f"{folder}/data, 1,000 tokens in 1 sequences")
    assert not (tmp_path / "new").exists()
    assert sorted(folder.rglob("*")) == before
    check_line(check(f"{DATA} --load {{0}}/run"), f"{folder}/run/iter_0000001", "iteration 1")
    assert check(f"{DATA} --data-path none --load none --no-check-files") == ""


def test_urls_are_said_not_to_be_checked(check: Check, tmp_path: Path) -> None:
    """A dry run said nothing of a --save in object storage, as if all were well."""
    said = check(f"{DATA} --save {url(tmp_path)} --save-interval 1")
    check_line(said, "--save", url(tmp_path))


def test_folders_that_may_not_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--save below another user's private folder ended a dry run in a traceback."""

    def forbidden(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_symlink", forbidden)
    assert why_not_writable(tmp_path / "x") == f"{tmp_path}/x: Permission denied"


def test_reads_that_fail_are_sentences() -> None:
    """A damaged disk ended a dry run in a traceback, and hid what else was wrong."""
    found = Findings()

    def look() -> None:
        raise OSError(errno.EIO, "Input/output error", "a/b.idx")

    found.check(look)
    assert [(str(error), error.exit_code) for error in found.errors] == [
        ("a/b.idx cannot be read: Input/output error", RESTART_MAY_HELP)
    ]


def test_splits_that_nothing_is_read_of_may_be_missing(check: Check, folder: Path) -> None:
    """As in the run itself: a test set counts only where something is evaluated."""
    paths = "--train-data-path {0}/data --valid-data-path {0}/none --train-iters 3"
    check_line(check(f"{paths} --eval-iters 1"), f"{folder}/none.bin")
    assert "data: " in check(f"{paths} --eval-iters 0")


def test_an_error_of_the_tokenizer_is_not_followed_by_what_follows_from_it(check: Check) -> None:
    """Data and checkpoints of every tokenizer would seem to be another one's."""
    said = check(f"{DATA} --load {{0}}/run --tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m")
    assert said.startswith("--vocab-file v does not exist")
    assert said.count("\n") == 1


def test_the_start_raises_the_same(folder: Path, tmp_path: Path) -> None:
    """A truncated index, told by the dry run in the start's own words."""
    for ending in ("bin", "idx", "meta.json"):
        shutil.copy(folder / f"data.{ending}", tmp_path / f"data.{ending}")
    idx_path(str(tmp_path / "data")).write_bytes(idx_path(str(folder / "data")).read_bytes()[:-3])
    argv = f"{TINY} --train-iters 3 --data-path {tmp_path}/data".split()
    said = []
    for more in ([], ["--dry-run"]):
        with expect_error(MegatronError, tmp_path / "data.idx", exit_code=2) as caught:
            pretrain(FAMILIES["gpt"], [*argv, *more], prog="pretrain_gpt.py")
        said.append(str(caught.value).partition("\n")[0])
    assert said[0] == said[1]


def test_all_bytes_are_compared_where_it_is_asked_for(check: Check, folder: Path) -> None:
    """--verify-data had no effect in a dry run, which approved data that the run then refused."""
    flags = f"{DATA} --verify-data"
    check_line(check(flags), "1,000 tokens", "1 sequences", "--verify-data")
    sound = (folder / "data.bin").read_bytes()
    (folder / "data.bin").write_bytes(bytes([sound[0] ^ 1]) + sound[1:])
    try:
        check_line(check(flags), "data.bin")
    finally:
        (folder / "data.bin").write_bytes(sound)


def test_tasks_check_what_they_alone_read_and_write(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A held-out text that isn't there ended an evaluation after its model had been loaded on every rank."""
    text = folder / "text.jsonl"
    text.write_text('{"text": "1 2 3"}\n{"text": "4"}\n')
    argv = f"--task LM --load {folder}/run --dry-run --valid-data".split()
    assert tasks.main([*argv, str(text), "--result-file", f"{folder}/new/result.json"]) == 0
    assert f"data: {text}, 2 documents" in capsys.readouterr().out
    assert not (folder / "new").exists()
    with pytest.raises(ConfigError) as caught:
        tasks.main([*argv, f"{folder}/none.txt", "--result-file", f"{text}/result.json"])
    check_line(str(caught.value), "1.", f"--result-file {text}/result.json")
    check_line(str(caught.value), "2.", f"--valid-data {folder}/none.txt")
