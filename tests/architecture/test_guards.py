"""The source keeps its rules; and each rule, shown a file that breaks it, says so."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from megatron.core.models.registry import FAMILIES
from tests.architecture import guards
from tests.architecture.guards import EVERYWHERE, LIBRARY_ONLY, Guard, violations
from tests.architecture.source_tree import Source, files, is_library, relative, sources

TEXT_SUFFIXES = (".py", ".sh", ".sbatch", ".md", ".toml", ".yml", ".yaml", ".txt", ".cfg", "run", ".gitignore")

RAISES = "from megatron.errors import DataError\nwith pytest.raises"
BAD: list[tuple[Guard, str, str, str]] = [
    (guards.long_file, "megatron/x.py", "x = 1\n" * 501, "501 lines"),
    (guards.long_function, "megatron/x.py", "def f() -> None:\n" + "    x = 1\n" * 80, "f: 81 lines"),
    (guards.untyped, "megatron/x.py", "def f(a: int, *rest) -> int: ...", "no type for rest"),
    (guards.untyped, "megatron/x.py", "class A:\n    def f(self, b, *, c=1): ...", "no type for b, c, the result"),
    (guards.untyped, "tools/x.py", "def f():\n    def g() -> None: ...", "f: no type for the result"),
    (guards.global_statement, "tests/x.py", "def f() -> None:\n    global a", ":2 global"),
    (guards.stub, "megatron/x.py", 'def f() -> None:\n    """Do."""\n    raise NotImplementedError', "f: a stub"),
    (guards.fragment_as_docstring, "megatron/x.py", '"""See what is here."""', ":1 begins with a fragment: See what"),
    (guards.fragment_as_docstring, "tools/x.py", 'def f() -> int:\n    """Of one rank.\n\n    More."""', ":2 begins"),
    (guards.fragment_as_docstring, "tasks/x.py", 'class A:\n    """``b``: a number."""', ":2 begins"),
    (guards.fragment_as_docstring, "examples/x.py", 'A = 1\n"""By name; sorted, too."""', ":2 begins"),
    (guards.broken_first_line, "megatron/x.py", '"""Offers of\nranks."""', ":1 breaks its first sentence: Offers of"),
    (guards.fragment_as_docstring, "pretrain_x.py", 'async def f() -> int:\n    """The same."""', ":2 begins"),
    (guards.vague_name, "megatron/core/utils.py", "", "utils names no idea"),
    (guards.shadows_the_standard_library, "tools/checkpoint/inspect.py", "", "inspect is a module of Python's"),
    (guards.cuda_outside_device_code, "megatron/core/models/gpt/model.py", "x = tensor.to('cuda:0')", "names cuda"),
    (guards.cuda_outside_device_code, "megatron/core/models/gpt/model.py", "torch.cuda.synchronize()", "names cuda"),
    (
        guards.cuda_outside_device_code,
        "megatron/core/models/gpt/model.py",
        "from torch.cuda import Stream",
        "names cuda",
    ),
    (
        guards.distributed_outside_parallel,
        "megatron/training/loop.py",
        "import torch.distributed as dist",
        "uses torch",
    ),
    (guards.distributed_outside_parallel, "megatron/training/loop.py", "from torch import distributed", "uses torch"),
    (guards.distributed_outside_parallel, "megatron/training/loop.py", "torch.distributed.barrier()", "uses torch"),
    (guards.gloo_alone, "megatron/core/parallel/x.py", "dist.monitored_barrier()", "calls monitored_barrier"),
    (guards.gloo_alone, "megatron/core/parallel/x.py", "dist.irecv(x)", "calls irecv"),
    (guards.bits_of_gpus, "tests/gpu/test_x.py", "assert torch.equal(x, y)", "compares bits"),
    (guards.prose_of_an_error, "tests/x.py", f"{RAISES}(DataError, match='no'):\n    f()", ":2 matches words"),
    (guards.prose_of_an_error, "tests/x.py", f"{RAISES}((OSError, DataError), match=x):\n    f()", ":2 matches words"),
    (guards.prose_of_an_error, "tests/x.py", f"{RAISES}(DataError) as e:\n    f()\nx in str(e.value)", ":4 looks for"),
    (guards.constant_that_a_test_sets, "tests/test_x.py", "ranks.GRACE = 3", "sets ranks.GRACE"),
    (guards.bits_of_gpus, "benchmarks/gpu_x.py", "assert_close(x, y, rtol=0, atol=0.0)", "compares bits"),
    (
        guards.distributed_outside_parallel,
        "megatron/core/checkpointing/save.py",
        "from torch.distributed import all_reduce",
        "uses torch.distributed.all_reduce",
    ),
    (
        guards.family_in_shared_code,
        "megatron/training/loop.py",
        "if run.train_spec.name == 'bert':\n    x = 1",
        "names bert",
    ),
    (
        guards.family_in_shared_code,
        "megatron/core/optimizer/x.py",
        "from megatron.core.models.t5.config import Layers",
        "names megatron.core.models.t5.config.Layers",
    ),
    (guards.family_in_shared_code, "megatron/core/transformer/x.py", "x = isinstance(y, GPTModel)", "names GPTModel"),
    (guards.family_in_shared_code, "megatron/core/conversion/x.py", "x = isinstance(y, T5Model)", "names T5Model"),
    (guards.fact_of_one_family, "megatron/training/x.py", "x = group.bert_binary_head", "uses bert_binary_head"),
    (guards.fact_of_one_family, "megatron/planning/x.py", "f(decoder_seq_length=3)", "uses decoder_seq_length"),
    (guards.fact_of_one_family, "megatron/core/datasets/x.py", "x = batch['is_random']", "uses is_random"),
    (
        guards.another_family,
        "megatron/core/models/t5/x.py",
        "from megatron.core.models.bert.data import parts",
        "imports megatron.core.models.bert.data.parts",
    ),
    (guards.optional_import_at_top, "megatron/core/x.py", "import tiktoken", "imports tiktoken at import time"),
    (
        guards.optional_import_at_top,
        "megatron/core/x.py",
        "class A:\n    try:\n        x = 1\n    except ImportError:\n        from transformers import AutoTokenizer",
        "imports transformers.AutoTokenizer",
    ),
]
GOOD: list[tuple[Guard, str, str]] = [
    (guards.untyped, "megatron/x.py", "class A:\n    def f(self, *, b: int = 1) -> int: ..."),
    (guards.fragment_as_docstring, "tests/x.py", '"""See above."""'),
    (guards.prose_of_an_error, "tests/x.py", f"{RAISES}(OSError, match='no'):\n    f()"),
    (guards.prose_of_an_error, "tests/x.py", f"{RAISES}(DataError) as e:\n    f()\n'a' not in str(e.value)"),
    (guards.broken_first_line, "megatron/x.py", '"""Offers of ranks.\n\nAnd more."""'),
    (guards.broken_first_line, "megatron/x.py", 'def f() -> int:\n    """Offers of\n    ranks."""'),
    (guards.fragment_as_docstring, "megatron/x.py", '"""Offers of ranks. Of one rank, the first."""'),
    (guards.fragment_as_docstring, "megatron/x.py", '"""With one rank, nothing is sent."""\nx = "See what is here."'),
    (guards.cuda_outside_device_code, "megatron/core/device.py", "torch.cuda.set_device(0)"),
    (guards.cuda_outside_device_code, "megatron/config/x.py", "advice = 'CUDA_DEVICE_MAX_CONNECTIONS must be cuda'"),
    (guards.distributed_outside_parallel, "megatron/core/parallel/mesh.py", "import torch.distributed as dist"),
    (guards.gloo_alone, "megatron/core/parallel/x.py", "dist.irecv(x, 1)"),
    (guards.bits_of_gpus, "tests/gpu/test_x.py", "assert_close(x, y, rtol=2e-2, atol=0.03)"),
    (
        guards.distributed_outside_parallel,
        "megatron/core/checkpointing/save.py",
        "import torch.distributed.checkpoint as dcp\nfrom torch.distributed.checkpoint.planner import SavePlan",
    ),
    (guards.family_in_shared_code, "megatron/training/loop.py", '"""As BERT does."""\n# and T5\nx = family.name'),
    (guards.family_in_shared_code, "megatron/core/models/bert/train_spec.py", "name = 'bert'"),
    (guards.fact_of_one_family, "megatron/core/models/bert/train_spec.py", "x = group.bert_binary_head"),
    (guards.another_family, "megatron/core/models/t5/x.py", "from megatron.core.models.t5.config import T5Config"),
    (
        guards.optional_import_at_top,
        "megatron/core/x.py",
        "if TYPE_CHECKING:\n    import tiktoken\ndef f() -> None:\n    import tiktoken",
    ),
    (guards.optional_import_at_top, "megatron/core/ops/attention/flash.py", "import flash_attn"),
    (guards.stub, "megatron/x.py", "def __torch_dispatch__() -> None:\n    raise NotImplementedError('no')"),
]


@dataclass
class Survey:
    """What is found in all files: problems by guard, files that know a family, and lengths of functions."""

    problems: dict[Guard, list[str]] = field(default_factory=lambda: {each: [] for each in EVERYWHERE + LIBRARY_ONLY})
    knowing: dict[str, list[str]] = field(default_factory=lambda: {family: [] for family in FAMILIES})
    functions: list[tuple[str, int]] = field(default_factory=list)


@pytest.fixture(scope="module")
def survey() -> Survey:
    """A file is parsed once for everything, and forgotten: all of them together would take much memory."""
    found = Survey()
    for source in sources():
        for guard, problems in found.problems.items():
            problems += violations(guard, [source])
        for family in guards.families_known(source):
            found.knowing[family].append(source.path)
        if is_library(source.path):
            found.functions += guards.lengths(source)
    return found


def test_source_keeps_the_rules(survey: Survey) -> None:
    """A rule's docstring says what it is for."""
    broken = (f"{guard.__doc__}\n" + "\n".join(each) for guard, each in survey.problems.items() if each)
    assert not any(survey.problems.values()), "\n\n".join(broken)


@pytest.mark.parametrize(("guard", "path", "text", "expected"), BAD)
def test_guard_sees_the_violation(guard: Guard, path: str, text: str, expected: str) -> None:
    """A guard that can't fail guards nothing."""
    found = violations(guard, [Source(path, text)])
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(("guard", "path", "text"), GOOD)
def test_guard_lets_the_allowed_pass(guard: Guard, path: str, text: str) -> None:
    """A guard that cries wolf gets switched off."""
    assert violations(guard, [Source(path, text)]) == []


def test_every_guard_has_a_bad_example() -> None:
    """A new guard brings the file that breaks it."""
    assert {guard for guard, *_ in BAD} == set(EVERYWHERE + LIBRARY_ONLY)


def test_few_files_know_one_family(survey: Survey) -> None:
    """T5 was named, or what it alone has was used, in 29 files outside its folder: a new family edited 42 files."""
    assert survey.knowing["bert"]
    assert not {family: paths for family, paths in survey.knowing.items() if len(paths) > 3}


def test_every_folder_of_models_is_in_the_registry() -> None:
    """A family that isn't listed is one that no tool finds and no guard watches."""
    folders = {path.parent.name for path in files("train_spec.py") if "models" in path.parts} - {"models"}
    assert folders == set(FAMILIES)


def test_few_functions_are_long(survey: Survey) -> None:
    """Well-made libraries keep 97 % of their functions within 60 lines; so do we."""
    found = guards.too_many(survey.functions)
    assert not found, "more than 3 % of the functions take more than 60 lines:\n" + "\n".join(found)


def test_many_long_functions_are_seen() -> None:
    """Two of sixty functions are too many, one is not."""
    short, long = "def f() -> None: ...\n", "def g() -> None:\n" + "    x = 1\n" * 60
    assert guards.too_many(guards.lengths(Source("a.py", short * 58 + long * 2)))
    assert not guards.too_many(guards.lengths(Source("a.py", short * 59 + long)))


def test_no_notes_to_self_and_no_machine_paths() -> None:
    """Both are promises to one person on one day."""
    found = []
    for path in files(*TEXT_SUFFIXES):
        text = path.read_text(encoding="utf-8")
        found += guards.note_to_self(relative(path), text) + guards.machine_path(relative(path), text)
    assert not found, "\n".join(found)


def test_notes_to_self_and_machine_paths_are_seen() -> None:
    """Both patterns match what they are meant for, and not what is like it."""
    assert guards.note_to_self("a.py", "# " + "todo".upper())
    assert guards.machine_path("a.sh", "cd /" + "home/me")
    assert not guards.machine_path("a.md", "results land in ../work/x, $ROOT/home/y and https://example.org/opt/z")


def test_every_package_is_importable() -> None:
    """A folder without __init__.py is left out of an installed copy, and works only in the checkout."""
    packages = {path.parent for path in files(".py") if relative(path).startswith("megatron/")}
    missing = [relative(package) for package in packages if not (package / "__init__.py").is_file()]
    assert not missing, f"no __init__.py in {missing}"
