"""What users are asked to install exists: ours from a checkout with extras that setup.py has, others by their names."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
import setuptools

from tests.architecture.source_tree import ROOT, files, relative

# What setup.py doesn't name: an optional service, fsspec's libraries for kinds of storage, and a peer to compare with.
OTHERS = {"wandb", "s3fs", "gcsfs", "adlfs", "megatron-core"}
OPTIONS_WITH_VALUE = {"--target", "-c", "-r"}
NAME = re.compile(r"[A-Za-z][\w.-]*")


def setup_arguments() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: found.update(arguments))
        runpy.run_path(str(ROOT / "setup.py"))
    return found


def bad_installs(text: str, setup: dict[str, Any]) -> list[str]:
    """Each ``pip install`` in ``text`` whose first requirement is neither this checkout nor a library we know."""
    required = [each for every in (setup["install_requires"], *setup["extras_require"].values()) for each in every]
    known = {match[0] for each in required if (match := NAME.match(each))} | OTHERS
    found = []
    for match in re.finditer(r"pip3? install\s+(.*(?:\n.*)?)", text):
        words = [word.strip("\"'`,;:()\\") for word in match[1].split()]
        while words and words[0].startswith("-"):
            words = words[2 if words[0] in OPTIONS_WITH_VALUE else 1 :]
        wanted = words[0].rstrip(".") if words and words[0] != "." else "."
        name = NAME.match(wanted)
        extras = re.fullmatch(r"\.\[([\w,-]+)\]?", wanted)
        is_ours = wanted.startswith(".") and (
            extras is None or set(extras[1].split(",")) <= set(setup["extras_require"])
        )
        is_ours = is_ours or (ROOT / wanted / "pyproject.toml").is_file()
        if not (is_ours or (name and name[0] in known and "[" not in wanted)):
            found.append(" ".join(match[0].split())[:80])
    return found


def test_nobody_is_asked_to_install_somebody_elses_package() -> None:
    """A message and a document said pip install 'megatron[lm-eval]': another project's package of that name came."""
    setup, this = setup_arguments(), "tests/architecture/test_installing.py"
    texts = files(".py", ".sh", ".sbatch", ".md", ".txt", ".toml", ".yml", ".yaml", ".cfg", "run")
    found = [
        f"{relative(path)}: {line}"
        for path in texts
        if relative(path) != this
        for line in bad_installs(path.read_text(encoding="utf-8"), setup)
    ]
    assert not found, "pip install of what isn't ours or isn't known:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        ("pip install 'megatron[lm-eval]'", True),
        ("`pip install megatron` first", True),
        ("pip install -e '.[lm_eval]'", True),
        ("pip install pretrain-megatron", True),  # ours, but on no index
        ("pip install -e '.[huggingface,plot]'", False),
        ("pip install -e .", False),
        ("pip install --no-deps -e examples/own_model", False),
        ("pip install -e examples/other", True),
        ("needs PyYAML: pip install pyyaml, or write the settings as JSON", False),
        ('pip install --no-deps --target FOLDER\n"megatron-core==0.12.*"', False),
    ],
)
def test_bad_installs_are_seen(text: str, is_bad: bool) -> None:
    """Names of others, extras that don't exist, and our own name, which no index has."""
    assert bool(bad_installs(text, setup_arguments())) == is_bad


def test_a_plain_install_reads_what_preprocessing_reads() -> None:
    """.jsonl.zst failed after a plain install with a library to install by hand, though it has wheels everywhere."""
    setup = setup_arguments()
    assert setup["name"] == "pretrain-megatron"
    assert "zstandard" in setup["install_requires"]


def test_a_plain_install_has_the_fast_engine_where_it_has_wheels() -> None:
    """Preprocessing took twenty times as long for whoever did not find the extra; elsewhere pip would want Rust."""
    from packaging.requirements import Requirement

    required = [Requirement(each) for each in setup_arguments()["install_requires"]]
    (engine,) = [each for each in required if each.name == "gigatoken"]
    assert engine.marker is not None
    for platform, machine, expected in (
        *(("linux", "x86_64", True), ("linux", "aarch64", True), ("darwin", "arm64", True), ("win32", "AMD64", True)),
        *(("linux", "ppc64le", False), ("freebsd14", "x86_64", False)),
    ):
        found = engine.marker.evaluate({"sys_platform": platform, "platform_machine": machine})
        assert found == expected, (platform, machine)


def test_the_readme_lists_every_extra() -> None:
    """An extra that is named only when something fails comes too late."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| extra | for |")[2].partition("\n\n")[0]
    named = {
        name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([\w-]+)`", row)
    }
    assert named == set(setup_arguments()["extras_require"])
