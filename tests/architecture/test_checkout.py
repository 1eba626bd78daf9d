"""Programs of a checkout use that checkout's packages, beside whatever else is called megatron."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, files, relative, sources

PROGRAMS = [source for source in sources() if "__main__" in source.text and source.path.count("/") in (1, 2)]
PROGRAMS = [source for source in PROGRAMS if source.path.startswith(("tools/", "tasks/", "benchmarks/"))]

COMMENTED = (
    "if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed"
)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder as site-packages of NeMo's containers: megatron without __init__.py, with a core of somebody else."""
    core = tmp_path / "site" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise ImportError('megatron-core was imported')\n")
    return tmp_path / "site"


def run(script: Path, *, path: Path, more: tuple[str, ...] = ("--help",)) -> subprocess.CompletedProcess[str]:
    """A program as started beside those packages, from another folder; -S keeps an editable install out."""
    beside = f"{path}{os.pathsep}{os.pathsep.join(entry for entry in sys.path if 'site-packages' in entry)}"
    environment = {"PYTHONPATH": beside, "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", str(script), *more]
    return subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "program",
    ["tools/preprocess_data.py", "tools/checkpoint/inspect_checkpoint.py", "tasks/main.py", "pretrain_gpt.py"],
)
def test_programs_take_their_own_checkout(program: str, elsewhere: Path) -> None:
    """In containers that hold megatron-core, tools ended with "No module named 'megatron.core.datasets.files'"."""
    link = elsewhere / "link.py"
    link.symlink_to(ROOT / program)
    for script in (ROOT / program, link):
        done = run(script, path=elsewhere)
        assert done.returncode == 0, done.stderr
        assert "usage: " in done.stdout


def test_every_program_finds_its_checkout_in_the_same_way() -> None:
    """A new one that didn't would work until somebody installs megatron-core."""
    assert len(PROGRAMS) > 20
    for source in PROGRAMS:
        root = "os.path.dirname(" * (source.path.count("/") + 1) + "os.path.realpath(__file__)"
        line = f"{COMMENTED}\n    sys.path[0] = {root}"
        assert line in source.text, source.path
        before = source.text.partition(line)[0]
        assert "megatron." not in before.partition('"""\n\nfrom __future__')[2], source.path


def test_an_installed_package_says_whom_it_met(tmp_path: Path) -> None:
    """Two distributions in one folder overwrite each other's modules; what fails then is some import far away."""
    package = tmp_path / "megatron"
    (package / "core").mkdir(parents=True)
    for name in ("__init__.py", "version.py"):
        (package / name).write_text((ROOT / "megatron" / name).read_text(encoding="utf-8"))
    (package / "core" / "package_info.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", "import megatron"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: {package} holds both pretrain-megatron and megatron-core")
    assert not files("package_info.py"), relative(ROOT)


def test_the_top_level_holds_programs_and_papers_alone() -> None:
    """Results of a benchmark that was run there were committed once, 1,800 lines of them."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds = {Path(name).suffix for name in listed.splitlines() if "/" not in name}
    assert kinds == {"", ".md", ".in", ".txt", ".py", ".toml", ".yaml"}  # the first: LICENSE and .gitignore
