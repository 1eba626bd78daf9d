"""Exit codes: 2 for what the next start would meet as well, 1 for what may pass."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron.core.checkpointing.agreement import run_on_all
from megatron.core.files.durable import write_errors
from megatron.core.parallel.mesh import Mesh
from megatron.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MegatronError,
    ParallelError,
    exit_code_of,
    kept_on_interrupt,
    run_command,
)
from megatron.training.run.stop import NonFiniteError
from tests.harness.data import REPOSITORY
from tests.harness.sentences import check_sentence


def test_a_users_mistake_is_2_and_a_machines_failure_1() -> None:
    """A job with a mistyped --data-path was started three times by its scheduler, as its exit code was 1."""
    codes = {kind: kind("").exit_code for kind in (ConfigError, DataError, CheckpointError, ParallelError)}
    assert codes == {ConfigError: 2, DataError: 2, CheckpointError: 2, ParallelError: 1}
    assert NonFiniteError("loss is nan").exit_code == 1


def test_files_that_may_come_back_are_worth_another_start() -> None:
    """A full disk and a broken connection pass; a missing file and a forbidden folder don't."""
    assert {exit_code_of(OSError(number, "")) for number in (errno.ENOENT, errno.EACCES, errno.EROFS)} == {2}
    assert {exit_code_of(OSError(number, "")) for number in (errno.ENOSPC, errno.EIO, errno.ESTALE)} == {1}
    assert exit_code_of(ConnectionResetError("reset by peer")) == 1


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EACCES, 2)])
def test_the_reason_decides_wherever_files_are_written(number: int, code: int) -> None:
    """A full disk in the middle of a run is no mistake of its settings, though the same class of error says so."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(DataError) as caught, write_errors(Path("x"), remedy="free some space"):
        fail()
    assert caught.value.exit_code == code
    with pytest.raises(CheckpointError) as failed:
        run_on_all(fail, Mesh.single())
    assert failed.value.exit_code == code


def test_errors_keep_their_code_between_processes() -> None:
    """Worker processes hand theirs over pickled."""
    error: MegatronError = pickle.loads(pickle.dumps(DataError("gone", exit_code=1)))
    assert (str(error), error.exit_code) == ("gone", 1)


def test_a_files_content_is_not_shown_whole() -> None:
    """--data-args-path of a file without spaces put all of its 200 kB into the message, twice."""
    message = str(DataError(f"neither {'[' * 100_000}.bin nor {'/x' * 2000}.idx exists"))
    check_sentence(message, f"{'[' * 200}…", f"{'/x' * 2000}.idx")


def test_ctrl_c_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """After "interrupted" nobody knew how many hours of a run were lost. The inner block knows best."""

    def main() -> int:
        with kept_on_interrupt(lambda: "no score is written"), kept_on_interrupt(lambda: "iteration 50 is kept"):
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert ended.value.code == 130
    check_sentence(capsys.readouterr().err, "50")


def test_ctrl_c_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rank of a run is interrupted; those that have nothing to tell say nothing, and leave with the same code."""

    def main() -> int:
        with kept_on_interrupt(lambda: ""):
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_command(main)
    assert (ended.value.code, capsys.readouterr().err) == (130, "")


def test_a_closed_pipe_changes_neither_message_nor_exit_code() -> None:
    """Ctrl-C ends ``| tee run.log``, too: the run then left with 120 and a BrokenPipeError, or, by ``2>&1``, with 1."""
    program = "import sys\nfrom megatron.errors import run_command\ndef main(): print('a line'); {}\nrun_command(main)"
    reader, writer = os.pipe()
    os.close(reader)
    for end, code, said in (
        ("raise KeyboardInterrupt('kept')", 130, "interrupted: kept\n"),
        ("raise PermissionError('no')", 2, "error: no\n"),
        ("return 0", 141, ""),
    ):
        for stderr in (subprocess.PIPE, writer):
            command = [sys.executable, "-E", "-c", program.format(end)]  # -E: stdout has a buffer
            done = subprocess.run(command, stdout=writer, stderr=stderr, text=True, cwd=REPOSITORY, check=False)
            assert (done.returncode, done.stderr or said) == (code, said)
    os.close(writer)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
def test_output_on_a_full_disk_hides_no_error() -> None:
    """What was printed before could not be written at the end, and its traceback came in place of the error."""
    program = "import sys\nfrom megatron.errors import run_command\ndef main(): print('a line'); {}\nrun_command(main)"
    for end, code, said in (("raise PermissionError('no')", 2, "error: no\n"), ("return 0", 1, "")):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-E", "-c", program.format(end)]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY, check=False)
        assert (done.returncode, done.stderr) == (code, said)


def test_a_forbidden_file_is_one_sentence_in_any_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that the user may not read ended commands in a traceback, wherever they opened it."""

    def forbidden() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "runs/mine/manifest.json")

    with pytest.raises(SystemExit) as ended:
        run_command(forbidden)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: runs/mine/manifest.json: Permission denied; ")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("there is no flag --wrong"), "there is no flag --wrong"),
        (PermissionError("the folder is another user's"), "the folder is another user's"),
    ],
)
def test_torchruns_report_ends_with_the_sentence(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused run ended in some fifteen lines of torchrun, below the one sentence that mattered."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def refuse() -> None:
        raise error

    with pytest.raises(SystemExit):
        run_command(refuse)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    report = str(ChildFailedError("pretrain_gpt.py", {0: failure}))
    assert report.rstrip("= \n").endswith(f"traceback : error: {words}")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "error: too many open files: raise the limit with ulimit -n"),
        (
            RuntimeError("unable to write to file </torch_1_2_3>: No space left on device (28)"),
            "error: /dev/shm is full",
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), "error: /dev/shm is full"),
    ],
)
def test_limits_of_the_machine_are_a_sentence(error: Exception, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """64 descriptors, or a full /dev/shm under the readers of data, ended a run in a traceback of torch's."""

    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command(fail)
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith(words)


def test_other_errors_keep_their_traceback() -> None:
    """A defect of ours must stay one."""

    def fail() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        run_command(fail)


def test_a_semaphore_that_has_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    """The system's error for a full /dev/shm names no file: only where it was raised tells what is full."""
    source = "raise OSError(28, 'No space left on device')"
    code = compile(source, "lib/multiprocessing/synchronize.py", "exec")
    with pytest.raises(SystemExit):
        run_command(lambda: exec(code))
    assert capsys.readouterr().err.startswith("error: /dev/shm is full")
