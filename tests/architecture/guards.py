"""Rules about the source that no linter knows: each takes a file and returns its violations, ``path:line sentence``."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath

from megatron.config.family import PartConfig
from megatron.config.flags import flags_of
from megatron.core.models.registry import FAMILIES
from tests.architecture.source_tree import Function, Source, is_library

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
LONG_FUNCTION_LINES = 60
MAX_SHARE_OF_LONG_FUNCTIONS = 0.03

VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "stuff", "base_utils", "new", "v2"}
# Not installed with the package: each needs an extra, or a GPU.
OPTIONAL_LIBRARIES = {
    "apex",
    "awkward",
    "flash_attn",
    "fsspec",
    "gigatoken",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "lm_eval",
    "matplotlib",
    "pyarrow",
    "s3fs",
    "safetensors",
    "tiktoken",
    "transformer_engine",
    "transformers",
    "triton",
}
SERVER_LIBRARIES = {"prometheus_client", "starlette", "uvicorn"}  # megatron/serving is written around them
# Installed, but slow to load, and not every run needs them.
HEAVY_LIBRARIES = {"nltk", "sentencepiece", "tensorboard", "yaml", "zstandard"}
NOTE_TO_SELF = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
DOCUMENTED = ("megatron/", "tools/", "tasks/", "benchmarks/", "examples/", "pretrain_")
FRAGMENT = re.compile(r"(See|Of|Those|That|As|Its|Their|The same)\b|``[A-Za-z_]\w*``:\s")
# Sentences may begin so as well; in them a comma or a colon follows.
OPENING = "At|After|Also|Around|Back|Before|By|Called|Entered|For|From|In|Inside|Made|On|Over|To|Unless|With|Without"
LOOSE_FRAGMENT = re.compile(rf"({OPENING})\b[^,:;]*?([.;]\s|[.;]?\Z)")
MACHINE_PATH = re.compile(r"(?<![\w.~$}>])/(work|root|home|opt|Users)/")
_OTHER_BERTS = "(?!WordPiece|Tokenizer|Normalizer|Pre)"  # kinds of tokenizers
NAMES = {
    name: re.compile(rf"(?<![A-Za-z]){name}(?![a-z])|{name.capitalize()}{_OTHER_BERTS}|{family.title}")
    for name, family in FAMILIES.items()
}
NAMES["gpt"] = re.compile(r"(?<![A-Za-z])gpt(?![a-z0-9])|GPT(?!2|Q|Sentence)")  # of tokenizers, and quantized
SPEAKERS = ("megatron/core/tokenizers/records.py",)
"""Files about data whose conversations call the assistant gpt."""


# What one family alone has: its settings, and parts of its samples and of its output that no setting names.
def _fields(groups: Iterable[type]) -> set[str]:
    return {spec.field for group in groups for spec in flags_of(group)}


PARTS = {each.__name__: each for family in FAMILIES.values() for each in family.groups if issubclass(each, PartConfig)}
"""Settings of parts of models, which any family may have."""
FACTS = {
    name: _fields(family.groups).difference(
        _fields(PARTS.values()), *(_fields(other.groups) for other in FAMILIES.values() if other != family)
    )
    for name, family in FAMILIES.items()
}
FACTS |= {name: _fields([group]) for name, group in PARTS.items()}
FACTS["bert"] |= {"is_random", "sop", "nsp", "sop_loss", "binary_head", "pooler"}
FACTS["t5"] |= {"decoder_layers", "decoder_length", "encoder_num_layers", "relative_pos_emb"}
EVERY_FACT = set[str]().union(*FACTS.values())
BUILDS_ON = {"vlm": "gpt"}
"""Families whose models are those of another, which reads more than tokens."""
KNOWS_FAMILIES = (
    *(f"{family.package.replace('.', '/')}/" for family in FAMILIES.values()),
    "megatron/core/models/registry.py",
    "megatron/config/refused_flags.py",  # flags of Megatron-LM that no program here has
    "megatron/core/conversion/megatron_lm/known_arguments.py",  # arguments in Megatron-LM's checkpoints
    "megatron/core/conversion/gguf/tokenizer_kinds.py",  # llama.cpp's names, by the models that had them first
)
KNOWS_NOT_EVEN_GPT = (
    "megatron/core/parallel/",
    "megatron/core/ops/",
    "megatron/core/context_parallel/",
    "megatron/core/tensor_parallel/",
    "megatron/core/transformer/",
    "megatron/core/pipeline_parallel/",
    "megatron/core/distributed/",
    "megatron/core/optimizer/",
    "megatron/core/checkpointing/",
    "megatron/core/models/",
    "megatron/planning/",
    "megatron/training/",
)
KNOWS_FACTS = (
    *KNOWS_FAMILIES,
    "megatron/core/transformer/",  # parts of models are theirs
    "megatron/core/moe/",
    "megatron/core/ssm/",
    "megatron/core/vision/",
    "megatron/core/images/",
    "megatron/core/objectives/",  # what they train for is theirs
    "megatron/training/rollouts/",  # and answers are GRPO's
    *(f"{part.__module__.replace('.', '/')}.py" for part in PARTS.values()),  # their settings, for any family
    "megatron/config/expert_settings.py",
    "megatron/config/vision_kinds.py",
    "megatron/config/rules/moe.py",
    "megatron/training/reporting/hybrid_flops.py",  # a formula of Megatron-LM
    "megatron/config/computed_flags.py",  # what flags of other programs mean
    "megatron/core/conversion/peft/",  # PEFT's names of settings, which are also ours
    "megatron/config/model.py",  # names the other lengths that positions follow
)
CUDA_CODE = "megatron/core/device.py"

Guard = Callable[[Source], list[str]]


def length(function: Function) -> int:
    """Lines from ``def`` to the end, docstring included."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def long_file(source: Source) -> list[str]:
    """A file is one idea; 500 lines are more than one."""
    lines = source.text.count("\n")
    return [f"{source.path}: {lines} lines, more than {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def long_function(source: Source) -> list[str]:
    """A function fits on a screen."""
    return [
        f"{source.at(function)} {function.name}: {length(function)} lines, more than {MAX_FUNCTION_LINES}"
        for function in source.functions()
        if length(function) > MAX_FUNCTION_LINES
    ]


def too_many(functions: Iterable[tuple[str, int]]) -> list[str]:
    """The functions of more than 60 lines, if they are more than 3 % of these, which come with their lengths."""
    functions = list(functions)
    long = [f"{name}: {lines} lines" for name, lines in functions if lines > LONG_FUNCTION_LINES]
    return long if len(long) > MAX_SHARE_OF_LONG_FUNCTIONS * len(functions) else []


def lengths(source: Source) -> list[tuple[str, int]]:
    """Every function of a file with its place and length."""
    return [(f"{source.at(function)} {function.name}", length(function)) for function in source.functions()]


def untyped(source: Source) -> list[str]:
    """Every argument and every result has a type."""
    found = []
    for function in source.functions():
        arguments = function.args
        named = arguments.posonlyargs + arguments.args
        if named and named[0].arg in ("self", "cls"):
            named = named[1:]
        stars = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        missing = [a.arg for a in named + arguments.kwonlyargs + stars if a.annotation is None]
        if function.returns is None:
            missing.append("the result")
        if missing:
            found.append(f"{source.at(function)} {function.name}: no type for {', '.join(missing)}")
    return found


def global_statement(source: Source) -> list[str]:
    """State that anyone may change is state that nobody can follow."""
    return [f"{source.at(node)} global" for node in source.nodes if isinstance(node, ast.Global)]


def stub(source: Source) -> list[str]:
    """What isn't written isn't there: no body that only raises NotImplementedError (a special method may refuse)."""
    found = []
    for function in source.functions():
        if function.name.startswith("__"):
            continue
        body = [statement for statement in function.body if not isinstance(statement, ast.Expr)]
        if len(body) == 1 and isinstance(body[0], ast.Raise) and "NotImplemented" in ast.unparse(body[0]):
            found.append(f"{source.at(function)} {function.name}: a stub")
    return found


def fragment_as_docstring(source: Source) -> list[str]:
    """A docstring's first line is read alone, in a tooltip: it is a sentence or a noun phrase, and finishes no name."""
    if not source.path.startswith(DOCUMENTED):
        return []
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, *_ = node.value.value.strip().split("\n\n")
            if FRAGMENT.match(first) or LOOSE_FRAGMENT.match(first):
                found.append(f"{source.at(node)} begins with a fragment: {first.splitlines()[0][:60]}")
    return found


def broken_first_line(source: Source) -> list[str]:
    """Lists of modules show the first line of a module's docstring alone: it ends its sentence."""
    first = (ast.get_docstring(source.tree) or ".").splitlines()[0]
    return [] if first.endswith((".", "!", "?")) else [f"{source.path}:1 breaks its first sentence: {first[-50:]}"]


def vague_name(source: Source) -> list[str]:
    """A module is named after its idea."""
    stem = PurePosixPath(source.path).stem
    return [f"{source.path}: {stem} names no idea"] if stem.lower() in VAGUE_NAMES else []


def shadows_the_standard_library(source: Source) -> list[str]:
    """A program's folder comes first when modules are looked up, so its files must not be called like Python's."""
    stem = PurePosixPath(source.path).stem
    is_started = source.path.startswith(("tools/", "tasks/", "benchmarks/", "examples/")) or "/" not in source.path
    return [f"{source.path}: {stem} is a module of Python's"] if is_started and stem in sys.stdlib_module_names else []


def cuda_outside_device_code(source: Source) -> list[str]:
    """Everything runs on CPU; one module knows that there is another kind of device."""
    if not source.path.startswith("megatron/") or source.path.startswith(CUDA_CODE):
        return []
    found = []
    for node in source.nodes:
        literal = (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"cuda(:\d+)?", node.value)
        )
        attribute = isinstance(node, ast.Attribute) and node.attr == "cuda"
        if literal or attribute or any(name.startswith("torch.cuda") for name in _imported(node)):
            found.append(f"{source.at(node)} names cuda; ask core/device.py instead")
    return found


def distributed_outside_parallel(source: Source) -> list[str]:
    """One package talks to other ranks, and a rehearsal listens; checkpoints may use torch.distributed.checkpoint."""
    if not source.path.startswith("megatron/") or source.path.startswith(
        ("megatron/core/parallel/", "megatron/rehearsal/")
    ):
        return []
    allowed = "torch.distributed.checkpoint" if source.path.startswith("megatron/core/checkpointing/") else None
    found = []
    for node in source.nodes:
        names = [f"{name}." for name in _imported(node)]
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and ast.unparse(node) == "torch.distributed":
            names.append("torch.distributed.")
        for name in names:
            if name.startswith("torch.distributed.") and not (allowed and name.startswith(f"{allowed}.")):
                found.append(f"{source.at(node)} uses {name[:-1]}; only megatron/core/parallel does")
    return found


def gloo_alone(source: Source) -> list[str]:
    """What NCCL doesn't have, or not in that form: uneven gathers and scatters, a receive from whoever sends."""
    if not source.path.startswith("megatron/core/parallel/"):
        return []
    banned = {"monitored_barrier", "gather", "scatter", "recv_any_source", "scatter_object_list", "split_group"}
    found = []
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("dist."):
            name = ast.unparse(node.func).removeprefix("dist.")
            from_anyone = (
                name in ("recv", "irecv") and len(node.args) < 2 and not any(k.arg == "src" for k in node.keywords)
            )
            if name in banned or from_anyone:
                found.append(f"{source.at(node)} calls {name}, which works with gloo alone")
    return found


def bits_of_gpus(source: Source) -> list[str]:
    """A GPU sums in another order than a CPU, and than itself with another kernel: its results are compared within
    tolerances.
    """
    if not source.path.startswith(("tests/gpu/", "benchmarks/gpu")):
        return []
    exact = re.compile(r"(^|\.)equal$")
    return [
        f"{source.at(node)} compares bits of a GPU"
        for node in source.nodes
        if isinstance(node, ast.Call)
        and (
            exact.search(ast.unparse(node.func))
            or any(each.arg in ("rtol", "atol") and ast.unparse(each.value) in ("0", "0.0") for each in node.keywords)
        )
    ]


def prose_of_an_error(source: Source) -> list[str]:
    """What our errors say is in the snapshot of sentences: a test names facts to ``expect_error``, not words."""
    if not source.path.startswith("tests/"):
        return []
    imports = [node for node in source.nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
    ours = {
        each.asname or each.name
        for node in imports
        if str(node.module).startswith(("megatron", "tasks", "tools"))
        for each in node.names
        if each.name.endswith("Error")
    }
    raises = [
        (node, item)
        for node in source.nodes
        if isinstance(node, ast.With | ast.AsyncWith)
        for item in node.items
        if isinstance(call := item.context_expr, ast.Call)
        and call.args
        and ast.unparse(call.func) in ("pytest.raises", "expect_error")
        and any(isinstance(each, ast.Name) and each.id in ours for each in ast.walk(call.args[0]))
    ]
    matched = [
        f"{source.at(node)} matches words of an error; name its facts to expect_error"
        for node, item in raises
        if isinstance(item.context_expr, ast.Call) and any(each.arg == "match" for each in item.context_expr.keywords)
    ]
    said = {f"str({ast.unparse(item.optional_vars)}.value)" for _, item in raises if item.optional_vars is not None}
    return matched + [
        f"{source.at(node)} looks for words in an error; name its facts to expect_error"
        for node in source.nodes
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.In)
        and ast.unparse(node.comparators[0]) in said
    ]


def constant_that_a_test_sets(source: Source) -> list[str]:
    """A rank takes further calls, and what one sets in a module is there for the next: a run would differ from another
    of the same flags. ``mock.patch.object`` sets it back.
    """
    if not source.path.startswith("tests/") or not PurePosixPath(source.path).name.startswith("test_"):
        return []
    return [
        f"{source.at(node)} sets {ast.unparse(target)}"
        for node in source.nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.attr.isupper()
    ]


def family_in_shared_code(source: Source) -> list[str]:
    """Engines serve every family; a family is a folder in megatron/core/models, and the registry there lists them."""
    if not source.path.startswith("megatron/") or source.path.startswith(KNOWS_FAMILIES):
        return []
    also_gpt = source.path.startswith(KNOWS_NOT_EVEN_GPT)
    prose = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
    return [
        f"{source.at(node)} names {word}"
        for node in source.nodes
        if id(node) not in prose
        for word in _words(node)
        if (_named_by(word) if also_gpt else _named_by(word) - {"gpt"})
    ]


@functools.cache
def _named_by(word: str) -> frozenset[str]:
    """Families that a name or a text in the code names; most words occur often."""
    return frozenset(name for name, pattern in NAMES.items() if pattern.search(word))


def fact_of_one_family(source: Source) -> list[str]:
    """Engines ask every family the same; what one family alone has, a setting or an output, stays in its folder."""
    if not source.path.startswith("megatron/") or source.path.startswith(KNOWS_FACTS):
        return []
    return [f"{source.at(node)} uses {word}" for node in source.nodes for word in _words(node) if word in EVERY_FACT]


def another_family(source: Source) -> list[str]:
    """A family builds on parts and engines, not on another family: either can be changed or removed alone. One whose
    models are another's with more in front of them builds on that one, and says so in ``BUILDS_ON``.
    """
    packages = {family.package for family in FAMILIES.values()}
    own = next((each for each in packages if source.path.startswith(f"{each.replace('.', '/')}/")), None)
    packages -= {FAMILIES[BUILDS_ON[name]].package for name in BUILDS_ON if own == FAMILIES[name].package}
    return [
        f"{source.at(node)} imports {name}"
        for node in source.nodes
        for name in _imported(node)
        if own is not None and name.startswith(tuple(f"{each}." for each in packages - {own}))
    ]


def families_known(source: Source) -> set[str]:
    """Families whose name, or what they alone have, a file of the library outside their folder uses in its code."""
    if not source.path.startswith("megatron/") or source.path in SPEAKERS:
        return set()
    words = {*_code_words(source)}
    named = set[str]().union(*map(_named_by, words))
    return {family for family in FAMILIES if not _is_own(source, family) and (family in named or words & FACTS[family])}


def _is_own(source: Source, family: str) -> bool:
    """Whether a file is of a family, or of one that builds on it."""
    those = (name for name in FAMILIES if family in (name, BUILDS_ON.get(name)))
    return source.path.startswith(tuple(f"{FAMILIES[name].package.replace('.', '/')}/" for name in those))


def _code_words(source: Source) -> Iterable[str]:
    prose = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
    return (word for node in source.nodes if id(node) not in prose for word in _words(node))


def _words(node: ast.AST) -> list[str]:
    """Names and texts of one node alone."""
    texts = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
    return [*texts, *_imported(node), *(name for name in names if isinstance(name, str))]


def optional_import_at_top(source: Source) -> list[str]:
    """A library that may be absent is imported by the function that needs it, or by the file named after it."""
    if not source.path.startswith("megatron/"):
        return []
    is_server = source.path.startswith("megatron/serving/")
    absent = OPTIONAL_LIBRARIES if is_server else OPTIONAL_LIBRARIES | SERVER_LIBRARIES
    found = []
    for node in _run_at_import(source.tree.body):
        for name in _imported(node):
            library = name.split(".")[0]
            named_after = PurePosixPath(source.path).stem in (library, library.split("_")[0])
            if library in absent and not named_after:
                found.append(f"{source.at(node)} imports {name} at import time")
    return found


def _imported(node: ast.AST) -> list[str]:
    """Full names that an import statement binds, ``from a import b`` as ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _run_at_import(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Statements that run when a module is imported: not those in functions or under ``if TYPE_CHECKING``."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            continue
        yield statement
        for inner in ("body", "orelse", "finalbody"):
            yield from _run_at_import(getattr(statement, inner, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _run_at_import(handler.body)


def note_to_self(path: str, text: str) -> list[str]:
    """Work that is left goes into an issue, not into a comment."""
    return [f"{path}:{number} {line.strip()[:80]}" for number, line in _lines(text) if NOTE_TO_SELF.search(line)]


def machine_path(path: str, text: str) -> list[str]:
    """A path of one machine works on that machine."""
    return [f"{path}:{number} {line.strip()[:80]}" for number, line in _lines(text) if MACHINE_PATH.search(line)]


def _lines(text: str) -> Iterable[tuple[int, str]]:
    return enumerate(text.splitlines(), 1)


EVERYWHERE: tuple[Guard, ...] = (
    long_file,
    long_function,
    untyped,
    global_statement,
    fragment_as_docstring,
    broken_first_line,
    vague_name,
    shadows_the_standard_library,
    cuda_outside_device_code,
    distributed_outside_parallel,
    gloo_alone,
    bits_of_gpus,
    prose_of_an_error,
    constant_that_a_test_sets,
    family_in_shared_code,
    fact_of_one_family,
    another_family,
    optional_import_at_top,
)
LIBRARY_ONLY: tuple[Guard, ...] = (stub,)


def violations(guard: Guard, checked: Iterable[Source]) -> list[str]:
    """What ``guard`` finds in all files it applies to."""
    applies = [source for source in checked if guard not in LIBRARY_ONLY or is_library(source.path)]
    return [violation for source in applies for violation in guard(source)]
