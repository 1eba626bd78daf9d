"""A URL behaves as a path does: names, listings, contents, and one kind of error."""

from __future__ import annotations

import io
import re
import socket
import ssl
import sys
from pathlib import Path

import pytest
from fsspec.registry import _registry

from megatron.core.files.remote_path import AnyPath, RemotePath, path_of
from megatron.errors import RESTART_CANNOT_HELP, RESTART_MAY_HELP, ConfigError, exit_code_of, may_pass
from tests.harness.bucket import ServiceError, failing, url
from tests.harness.sentences import expect_error


def test_flags_name_paths_and_urls() -> None:
    """file:// is this machine; a slash at the end means nothing."""
    assert path_of("runs/a") == Path("runs/a")
    assert path_of("file:///runs/a") == Path("/runs/a")
    assert path_of("s3://bucket/run/") == RemotePath("s3://bucket/run")
    assert path_of(RemotePath("s3://bucket/run")) == RemotePath("s3://bucket/run")
    assert str(path_of("memory://") / "run") == "memory://run"
    assert path_of("s3://bucket/run") != path_of("s3://bucket/other")


def fill(root: AnyPath) -> list[object]:
    """What one sees of a small tree that is made and looked at by the methods that a Path has, too."""
    (root / "below").mkdir(parents=True)
    (root / "a.txt").write_text("é", encoding="utf-8")
    with (root / "below" / "b.bin").open("wb") as file:
        file.write(b"0123456789")
        file.write(b"abc")
    buffer = bytearray(4)
    with (root / "below" / "b.bin").open("rb", buffering=0) as raw:
        raw.seek(3)
        assert raw.readinto(buffer) == 4
    with (root / "below" / "b.bin").open("rb") as buffered:
        buffered.seek(-2, io.SEEK_END)
        tail = buffered.read()
    listing: list[AnyPath] = [*root.iterdir()]
    deep: list[AnyPath] = [*root.glob("*/b.*")]
    return [
        sorted(path.name for path in listing),
        [path.parent.name for path in deep],
        (root / "a.txt").read_text(encoding="utf-8"),
        (root / "below" / "b.bin").stat().st_size,
        (root / "below" / "b.bin").read_bytes(),
        bytes(buffer),
        tail,
        [path.is_dir() for path in (root, root / "below", root / "a.txt", root / "c")],
        [path.is_file() for path in (root, root / "below", root / "a.txt", root / "c")],
        [path.exists() for path in (root, root / "below", root / "a.txt", root / "c")],
        (root / "below").parent == root,
    ]


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_a_url_does_what_a_path_does(kind: str, tmp_path: Path) -> None:
    """Checkpoints are written for both by the same code."""
    root = path_of(f"memory://{tmp_path.name}" if kind == "memory" else url(tmp_path / "bucket"))
    assert fill(root) == fill(tmp_path / "local")
    assert isinstance(root, RemotePath)
    assert root.sizes_below() == {"a.txt": 2}
    before = (root / "a.txt").version()
    (root / "a.txt").write_text("other", encoding="utf-8")
    assert (root / "a.txt").version() != before
    assert (root / "a.txt").read_range(1, 3) == b"th"
    (root / "a.txt").copy_to(tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "other"
    (root / "a.txt").unlink()
    assert not (root / "a.txt").exists()
    (root / "below").remove_tree()
    assert not (root / "below").exists()


def test_any_error_of_a_library_is_an_oserror_that_names_the_place(tmp_path: Path) -> None:
    """A traceback of a storage library in place of a sentence; or a rank that dies of what others call a full disk."""

    def down(name: str, path: str) -> None:
        raise ServiceError("503 slow down")

    place = path_of(url(tmp_path / "file"))
    with failing(down), pytest.raises(OSError, match="503 slow down") as caught:
        place.read_text(encoding="utf-8")
    assert caught.value.filename == str(place)
    with failing(down), pytest.raises(OSError, match="503 slow down"), place.open("wb") as file:
        file.write(b"x")
    with expect_error(FileNotFoundError):
        place.read_text(encoding="utf-8")


def test_answers_of_azure_and_google_are_one_sentence(tmp_path: Path) -> None:
    """A missing bucket was ten lines of XML (Azure), or "no such file" about the file to be written (Google).

    Without credentials at S3 or Google's a job was started again and again.
    """
    place, answer = path_of(url(tmp_path / "file")), "\nRequestId:1\nErrorCode:{}\nContent: <?xml?>"
    for error, sentence in {
        ServiceError("No container." + answer.format("ContainerNotFound")): "the bucket does not exist; make it first",
        FileNotFoundError(f"{place}"): "the bucket does not exist; make it first",
        ServiceError(
            "Bad key." + answer.format("AuthenticationFailed")
        ): "Bad key; the credentials must be valid and allow this",
        ServiceError("Busy." + answer.format("ServerBusy")): "Busy",
        PermissionError(
            "The token has expired."
        ): "The token has expired; the credentials must be valid and allow this",
        ServiceError(
            "Unable to locate credentials"
        ): "Unable to locate credentials; the credentials must be valid and allow this",
        OSError(
            "Forbidden: b/bucket/o\nNo access."
        ): "Forbidden: b/bucket/o; the credentials must be valid and allow this",
    }.items():

        def fail(name: str, path: str, error: Exception = error) -> None:
            raise error

        with failing(fail), pytest.raises(OSError, match=re.escape(sentence)) as caught:
            place.write_text("x", encoding="utf-8")
        assert (caught.value.strerror, caught.value.filename) == (sentence, str(place))
        assert exit_code_of(caught.value) == (RESTART_MAY_HELP if sentence == "Busy" else RESTART_CANNOT_HELP)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which package to install, or that there is no such kind of URL."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # it may have been imported before
    with expect_error(ConfigError, "s3://bucket/run", "s3fs", "S3"):
        path_of("s3://bucket/run").exists()
    with expect_error(ConfigError):
        path_of("nowhere://x").exists()
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with expect_error(ConfigError, "s3://bucket/run"):
        path_of("s3://bucket/run").exists()


@pytest.mark.parametrize(
    "error", [ssl.SSLError(1, "handshake failed"), socket.gaierror(-3, "Temporary failure in name resolution")]
)
def test_failures_of_tls_and_of_names_may_pass(error: OSError, tmp_path: Path) -> None:
    """Their numbers were read as an errno, by which a handshake that fails is a missing permission."""

    def fail(name: str, path: str) -> None:
        raise error

    with failing(fail), pytest.raises(OSError, match=str(error.strerror)) as caught:
        path_of(url(tmp_path / "file")).write_text("x", encoding="utf-8")
    assert may_pass(caught.value)
