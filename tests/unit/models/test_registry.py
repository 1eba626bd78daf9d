"""Families of users: installed ones are found by an entry point, a script's own by ``register``, others named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.core.conversion.huggingface.formats import format_for, format_of
from megatron.core.conversion.megatron_lm.format import format_for as megatron_lm_format_for
from megatron.core.models import registry
from megatron.core.models.registry import Family, family_named, family_of, find_family, owner_of, register, saved_run
from megatron.errors import CheckpointError, ConfigError
from megatron.training.pretrain import parse_any_family
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import run_of, words

FAMILY = 'from megatron.core.models.registry import Family\nFAMILY = Family("toy", "toy_package")\n'
CONFIG = """
from megatron.config.flags import flag
from megatron.config.family import FamilyConfig

class ToyConfig(FamilyConfig):
    name = "toy"
    toy_width: int = flag("Width.", default=7, architecture=True)

GROUPS = (ToyConfig,)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the package ``toy_package``, which nothing installs, registers or imports yet."""
    (tmp_path / "toy_package").mkdir()
    (tmp_path / "toy_package/__init__.py").write_text(FAMILY)
    (tmp_path / "toy_package/config.py").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_REGISTERED", {})
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_package"]:
        del sys.modules[name]


def install(folder: Path, value: str = "toy_package:FAMILY", name: str = "toy") -> None:
    """What pip writes of an entry point."""
    (folder / "toy-1.dist-info").mkdir()
    (folder / "toy-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (folder / "toy-1.dist-info/entry_points.txt").write_text(f"[megatron.families]\n{name} = {value}\n")


def test_messages_call_a_family_by_its_own_title(folder: Path) -> None:
    """A family whose settings gave no title was called GPT, and a registry with another title contradicted them."""
    toy = Family("toy", "toy_package")
    register(toy)
    assert toy.title == "toy"
    assert [family.title for family in registry.FAMILIES.values()] == ["GPT", "BERT", "T5", "VLM"]
    with expect_error(ConfigError, "--position-embedding-type relative"):
        parse_any_family(words("--model-type toy --position-embedding-type relative"), prog="x")


def test_an_installed_family_is_known_to_tools_and_checkpoints(folder: Path) -> None:
    """Tools knew the families of this project alone: what a user's script had trained, no tool could read."""
    with expect_error(ConfigError, "--model-type", "'toy'", "GPT", "BERT", "T5"):
        parse_any_family(words("--model-type toy --toy-width 3"), prog="x")
    install(folder)
    config = parse_any_family(words("--model-type toy --toy-width 3"), prog="x")
    assert family_of(config.extra) == family_named("toy", where="x") == Family("toy", "toy_package")
    saved = saved_run(config.to_json(), name="toy", where="x")
    assert saved.extra[0] == config.extra[1]


def test_a_registered_family_is_known_to_the_process(folder: Path) -> None:
    """A script that passes its family needs nothing installed."""
    assert find_family("toy") is None
    toy = Family("toy", "toy_package")
    register(toy)
    register(toy)  # by the script, and by pretrain
    (kind,) = toy.groups
    assert family_of((kind(),)) is toy
    assert parse_any_family(words("--model-type toy"), prog="x").extra[1] == kind()
    for taken in (Family("toy", "other"), Family("gpt", "toy_package")):
        with expect_error(ConfigError, taken.name, taken.package):
            register(taken)


def test_settings_must_name_their_family(folder: Path) -> None:
    """A family without settings of its own was silently taken for a GPT, and its checkpoints were, too."""
    toy = Family("toy", "toy_package")
    unnamed, others = CONFIG.replace("name =", "kind ="), CONFIG.replace('"toy"', '"gpt"')
    for text, found in (("GROUPS = ()", "none"), (unnamed, "none"), (others, "'gpt'")):
        sys.modules.pop("toy_package.config", None)
        (folder / "toy_package/config.py").write_text(text + f"# {found}")
        with expect_error(ConfigError, "FamilyConfig", "'toy'", found):
            assert toy.groups


def test_settings_of_a_family_that_is_not_known(folder: Path) -> None:
    """Nothing is guessed: a run of a family that nobody installed or registered is refused."""
    (kind,) = Family("toy", "toy_package").groups
    with expect_error(ConfigError, "'toy'"):
        family_of((kind(),))


def test_a_checkpoint_names_no_code(folder: Path) -> None:
    """A name of an importable module is looked up among installed families, and nothing is imported."""
    for name in ("toy_package", "toy_package:FAMILY", "antigravity", "../toy_package", ""):
        with expect_error(CheckpointError):
            saved_run(run_of().to_json(), name=name, where="x")
    assert "toy_package" not in sys.modules
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ("no_such_package:FAMILY", "no_such_package"),
        ("toy_package:OTHER", "toy_package"),
        ("toy_package", "'toy'"),
    ],
)
def test_a_broken_installation_is_named(folder: Path, value: str, fact: str) -> None:
    """Where it is asked for; a built-in family and a mistyped flag don't meet it."""
    install(folder, value)
    with expect_error(ConfigError, fact):
        find_family("toy")
    assert find_family("gpt") is registry.FAMILIES["gpt"]
    assert owner_of("--toy-width") is None


def test_parts_of_a_family_that_it_may_lack(folder: Path) -> None:
    """A family without a format of other programs ended a conversion with a traceback."""
    install(folder)
    family = find_family("toy")
    assert family is not None
    groups = (family.groups[0](),)
    with expect_error(CheckpointError, "toy_package"):
        format_for(groups)
    with expect_error(CheckpointError, "toy_package", "megatron_lm"):
        megatron_lm_format_for(groups)
    assert format_of("toy") is None


def test_a_format_of_an_installed_family_is_found(folder: Path) -> None:
    """By the model_type in config.json, once no family that is built in has it."""
    install(folder)
    (folder / "toy_package/huggingface.py").write_text(
        "from types import SimpleNamespace\nFORMAT = SimpleNamespace(types={'toy': None})\n"
    )
    assert isinstance(format_of("toy"), SimpleNamespace)
