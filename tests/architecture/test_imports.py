"""What importing costs: settings need the standard library alone, and nothing optional is loaded before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.architecture.guards import HEAVY_LIBRARIES, OPTIONAL_LIBRARIES, SERVER_LIBRARIES
from tests.architecture.source_tree import ROOT, files, relative

TORCH = "torch.distributed.checkpoint"  # what torch itself takes along is its own affair
ENTRY_POINTS = ["megatron.training.pretrain", "megatron.core.models.gpt.train_spec", "megatron.core.tokenizers"]
BLOCK_AND_IMPORT = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} was imported by merely importing")

BLOCKED, modules, first = (argument.split(",") for argument in sys.argv[1:4])
for name in filter(None, first):
    importlib.import_module(name)
for name in [name for name in sys.modules if name.split(".")[0] in BLOCKED]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocker())
for name in modules:
    try:
        importlib.import_module(name)
    except ImportError as error:
        sys.exit(f"{name}: {error}")
print(*sorted(sys.modules))
"""


def import_without(blocked: set[str], modules: list[str], *, first: str = "") -> subprocess.CompletedProcess[str]:
    """Import ``modules`` in a new process in which ``blocked`` libraries can't be imported, once ``first`` has been."""
    command = [sys.executable, "-c", BLOCK_AND_IMPORT, ",".join(sorted(blocked)), ",".join(modules), first]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def modules_below(folder: str) -> list[str]:
    """Names of the modules below a folder of the repository."""
    paths = [relative(path) for path in files(".py") if relative(path).startswith(f"{folder}/")]
    return [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]


def test_settings_need_the_standard_library_alone() -> None:
    """``--help`` and flag errors answer in milliseconds, on a laptop without torch."""
    third_party = OPTIONAL_LIBRARIES | HEAVY_LIBRARIES | {"torch", "numpy", "tokenizers"}
    models = modules_below("megatron/core/models")
    of_families = [name for name in models if name.rpartition(".")[2] in ("config", "registry")]
    assert len(of_families) >= 4
    commands = ["pretrain_gpt", "pretrain_bert", "pretrain_t5", "tasks.settings", "megatron.core.models.sentences"]
    done = import_without(third_party, ["megatron", *modules_below("megatron/config"), *of_families, *commands])
    assert done.returncode == 0, done.stderr


def test_nothing_optional_is_needed_to_import_anything() -> None:
    """A plain install, without extras, a GPU or a compiler, imports every module but those of the server."""
    modules = [name for name in modules_below("megatron") if not name.startswith("megatron.serving")]
    done = import_without(OPTIONAL_LIBRARIES | SERVER_LIBRARIES, modules, first=TORCH)
    assert done.returncode == 0, done.stderr


def test_training_loads_no_heavy_library_before_it_is_used() -> None:
    """TensorBoard, NLTK and SentencePiece cost a second or two; a run that doesn't use them shouldn't pay."""
    done = import_without(OPTIONAL_LIBRARIES | HEAVY_LIBRARIES, ENTRY_POINTS, first=TORCH)
    assert done.returncode == 0, done.stderr


def test_scripts_answer_help_without_torch() -> None:
    """A mistyped flag of a tool is answered at once, not after torch has loaded."""
    started = [path for path in files(".py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    scripts = [relative(path).removesuffix(".py") for path in started if relative(path).startswith("tools/")]
    scripts = [script.replace("/", ".") for script in scripts if not script.endswith("__init__")]
    done = import_without({"torch"}, ["pretrain_gpt", *scripts])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["wave", "colorsys"])
def test_the_blocker_blocks(name: str) -> None:
    """Without it the tests above would pass whatever is imported."""
    done = import_without({name}, [name])
    assert done.returncode == 1
    assert f"{name}: {name} was imported by merely importing" in done.stderr


def test_file_systems_are_called_by_keyword() -> None:
    """s3fs has a version id where others have the start of a range: data came without their first 100 bytes."""
    required = {"open": 2, "pipe_file": 2, "get_file": 2, "put_file": 2}  # path and mode, value or target
    users = [
        path for path in files(".py") if "import fsspec" in path.read_text() and not relative(path).startswith("tests/")
    ]
    assert [relative(path) for path in users] == ["megatron/core/files/remote_path.py"]
    calls = [node for node in ast.walk(ast.parse(users[0].read_text())) if isinstance(node, ast.Call)]
    methods = [(call.func, call) for call in calls if isinstance(call.func, ast.Attribute)]
    made = [(func.attr, len(call.args)) for func, call in methods if ast.unparse(func.value) == "files"]
    assert len(made) >= 10
    assert [name for name, positional in made if positional > required.get(name, 1)] == []
