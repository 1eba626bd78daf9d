"""Models named as repositories of the Hugging Face Hub, which a server of its protocol plays."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.core.conversion.huggingface.hub import model_folder as found_at
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError
from megatron.training.checkpoints.published import folder_of
from tests.harness.data import REPOSITORY
from tests.harness.hub import COMMIT, Hub, running_hub
from tests.harness.sentences import check_line, expect_error
from tests.unit.conversion.test_families import assert_same_bytes
from tests.unit.conversion.test_starting import started
from tools.checkpoint import convert as tool

Folder = Callable[[str], Path]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and a cache of its own in an empty folder, which is the working directory."""
    from huggingface_hub import constants

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with running_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield running


def place_of(load: str) -> Path:
    """The folder of ``load``, silently."""
    found = found_at(Path(load), flag="--load", say=lambda line: None)
    assert isinstance(found, Path)
    return found


def publish(hub: Hub, folder: Path) -> Path:
    """A copy of ``folder`` that is the repository ``org/model``."""
    repository = Path(shutil.copytree(folder, Path.cwd().parent / "published"))
    hub.repositories["org/model"] = repository
    return repository


def test_a_repository_converts_by_its_name(
    hub: Hub, model_folder: Folder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As its folder would, to the byte; its code and other forms of its weights are not even downloaded."""
    repository = publish(hub, model_folder("llama"))
    for name in ("modeling_x.py", "pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (repository / name).write_text("not needed")
    (repository / "tokenizer_config.json").write_text("{}")
    tool.main(["--from", "hf", "--load", "org/model", "--to", "megatron", "--save", "ours"])
    said = capfd.readouterr()
    check_line(said.out, "org/model", COMMIT, f"{tmp_path}/cache/models--org--model/snapshots/{COMMIT}")
    assert "No files matched" not in said.err
    expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"]
    assert sorted(hub.asked) == expected
    tool.main(["--from", "megatron", "--load", "ours", "--to", "hf", "--save", "back"])
    assert_same_bytes(model_folder("llama"), Path("back"))
    assert place_of("org/model@v1") == place_of("org/model")
    assert sorted(hub.asked) == expected  # a file is downloaded once


def test_training_starts_from_a_repository(
    hub: Hub, model_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--load-hf looks the name up once: a revision that is published meanwhile would give other weights."""
    publish(hub, model_folder("llama"))
    folder_of.cache_clear()
    run = started(ParallelContext.single(), "gpt", "--load-hf org/model --load-hf-proof off")
    at = f"{tmp_path}/cache/models--org--model/snapshots/{COMMIT}"
    check_line(capsys.readouterr().out, "org/model", COMMIT, at, "65,328")
    assert run.config.provenance["num_layers"] == "org/model/config.json"
    with expect_error(CheckpointError, "--load-hf org/missing"):
        started(ParallelContext.single(), "gpt", "--load-hf org/missing")


def test_weights_in_parts(hub: Hub, model_folder: Folder) -> None:
    """The index says which files; pickles where there is nothing else."""
    repository = publish(hub, model_folder("llama"))
    (repository / "model.safetensors").rename(repository / "first.safetensors")
    (repository / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "first.safetensors"}}))
    (repository / "pytorch_model.bin").write_text("not needed")
    assert (place_of("org/model") / "first.safetensors").exists()
    assert "pytorch_model.bin" not in hub.asked


def test_pickles_where_there_is_nothing_else(hub: Hub, model_folder: Folder) -> None:
    repository = publish(hub, model_folder("llama"))
    (repository / "model.safetensors").rename(repository / "pytorch_model.bin")
    assert (place_of("org/model") / "pytorch_model.bin").exists()


def test_no_weights_that_are_read(hub: Hub, model_folder: Folder) -> None:
    """Such as a repository of GGUF files, which would be gigabytes for nothing."""
    repository = publish(hub, model_folder("llama"))
    (repository / "model.safetensors").rename(repository / "model.gguf")
    with expect_error(CheckpointError, "org/model", "model.safetensors", "pytorch_model.bin"):
        place_of("org/model")
    (repository / "config.json").unlink()
    hub.repositories["org/text"] = repository
    with expect_error(CheckpointError, "config.json"):
        place_of("org/text")


def test_a_folder_of_the_same_name_comes_first(hub: Hub, model_folder: Folder) -> None:
    """Whoever downloaded it by hand means what lies there."""
    publish(hub, model_folder("llama"))
    shutil.copytree(model_folder("gpt2"), "org/model")
    assert place_of("org/model") == Path("org/model")
    assert not hub.asked
    for words in ("nowhere", "a/b/c", "../model", "/org/model", "-x/model"):
        assert place_of(words) == Path(words)


def test_repositories_that_cannot_be_had(hub: Hub, model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each, and what to do; 1 is the exit code where the same command may work later."""
    from huggingface_hub import constants

    hub.repositories["org/gated"] = publish(hub, model_folder("llama"))
    hub.gated = ("org/gated",)
    cases = {
        "models/lama": [hub.url],
        "org/gated": [f"{hub.url}/org/gated", "`hf auth login`"],
        "org/model@v9": [f"{hub.url}/org/model", "v9"],
        "org/mo--del": [],
    }
    for load, facts in cases.items():
        with expect_error(CheckpointError, load, *facts) as caught:
            place_of(load)
        assert "\n" not in str(caught.value)
    hub.fails = 503
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with expect_error(CheckpointError, "503", exit_code=1):
        place_of("org/model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with expect_error(CheckpointError, "http://127.0.0.1:9", exit_code=1) as caught:
        place_of("org/model")
    assert "\n" not in str(caught.value)


def test_without_the_network(hub: Hub, model_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is enough; what it lacks is said as the command that fetches it."""
    from huggingface_hub import constants

    publish(hub, model_folder("llama"))
    whole = place_of("org/model@v1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert place_of("org/model@v1") == whole
    (whole / "model.safetensors").unlink()
    command = "hf download org/model --revision v1 --local-dir org/model"
    with expect_error(CheckpointError, "HF_HUB_OFFLINE", command):
        place_of("org/model@v1")
    with expect_error(CheckpointError, "--local-dir org/other"):
        place_of("org/other")


def test_a_cache_that_cannot_be_written(hub: Hub, model_folder: Folder, tmp_path: Path) -> None:
    publish(hub, model_folder("llama"))
    (tmp_path / "cache").write_text("not a folder")
    with expect_error(CheckpointError, "--load org/model") as caught:
        place_of("org/model")
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_the_librarys_variables(hub: Hub, model_folder: Folder, tmp_path: Path) -> None:
    """Server and cache come from the environment, as wherever the library is used."""
    publish(hub, model_folder("llama"))
    words = [sys.executable, str(REPOSITORY / "tools/checkpoint/convert.py"), "--from", "hf", "--load", "org/model"]
    environ = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*words, "--to", "megatron", "--save", "ours"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home/hub/models--org--model").is_dir()
    check_line(done.stdout, "difference")
