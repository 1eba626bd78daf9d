"""Show what is in a checkpoint, whether it is whole, how two differ, and whether a run could load it.

Looks at one checkpoint or at a folder of them, in one process; numbers are read only to be compared or checked.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from megatron.core.checkpointing.folders import iteration_of
from megatron.core.checkpointing.manifest import MANIFEST, Manifest
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.errors import CheckpointError, ConfigError, MegatronError, run_command

if TYPE_CHECKING:  # torch is imported when the command line is known to be right
    from megatron.core.checkpointing.find import CheckpointFolder
    from megatron.core.checkpointing.summary import Comparison, Summary


def main(argv: Sequence[str]) -> int:
    """Do what was asked; the exit code is 1 when something is damaged, different, or can't be loaded."""
    words, flags = list(argv), None
    if "--can-load" in words:
        at = words.index("--can-load")
        words, flags = words[:at], words[at + 1 :]
    options = _parser().parse_args(words)
    _check_together(options, can_load=flags is not None)
    if flags is not None:
        return can_load(options.path, flags, step=options.ckpt_step)
    from megatron.core.checkpointing.load import read_run_state
    from megatron.core.checkpointing.summary import compare, summarize

    if options.diff:
        return print_comparison(compare(*(_find(path, None) for path in options.diff)), options.diff)
    if options.verify:
        return verify(_required(options.path), step=options.ckpt_step)
    found = _find(_required(options.path), options.ckpt_step)
    read_run_state(found)  # names what a damaged one lacks
    summary = summarize(found)
    print(json.dumps(summary.to_json(), indent=1) if options.json else describe(summary))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inspect_checkpoint.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "path", type=path_of, nargs="?", metavar="DIR", help="a checkpoint, or a folder of them, or URL"
    )
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration, instead of the newest")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--verify", action="store_true", help="read every file and compare sizes and checksums")
    parser.add_argument("--diff", type=path_of, nargs=2, metavar=("A", "B"), help="compare settings and tensors of two")
    parser.add_argument(
        "--can-load",
        metavar="FLAGS ...",
        help=(
            "must come last, followed by the flags of a training command; reports whether that command can load "
            "DIR, and why not"
        ),
    )
    return parser


def _check_together(options: argparse.Namespace, *, can_load: bool) -> None:
    """Raise ConfigError for what would have no effect on the one thing that is asked."""
    asked = [f"--{name}" for name in ("json", "verify", "diff") if getattr(options, name)]
    asked += ["--can-load"] if can_load else []
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} cannot be combined: give one at a time")
    if options.diff and (options.path or options.ckpt_step is not None):
        what = options.path or f"--ckpt-step {options.ckpt_step}"
        raise ConfigError(
            f"--diff A B compares two checkpoints, but {what} is not one: name two folders of checkpoints"
        )


def _required(path: AnyPath | None) -> AnyPath:
    if path is None:
        raise ConfigError("name a checkpoint, or a folder of them: inspect_checkpoint.py DIR")
    return path


def _find(path: AnyPath, step: int | None) -> CheckpointFolder:
    from megatron.core.checkpointing.find import find_checkpoint

    return find_checkpoint(path, step=step, verify=False, flag="")


def describe(summary: Summary) -> str:
    """The summary as a page of text."""
    return "\n".join([*_head(summary), "", *_settings(summary), "", *_tensors(summary)])


def _head(summary: Summary) -> Iterator[str]:
    from megatron.core.checkpointing.load import CHAT, MODEL_NAME

    state, progress = summary.state, summary.state.get("progress") or {}
    axes = {axis: size for axis, size in summary.layout.items() if size > 1 and axis != "world_size"}
    places = ", ".join(f"{axis} {size}" for axis, size in axes.items()) or "nothing split"
    types = ", ".join(f"{count:,} {kind}" for kind, count in summary.dtypes.items())
    tokenizer = state.get("tokenizer") or {}
    states = ", ".join(
        f"{kind} ({elements:,} in {count} tensors)" for kind, (count, elements) in summary.optimizer.items()
    )
    yield str(summary.path)
    yield f"  saved       {datetime.fromtimestamp(summary.saved_at):%Y-%m-%d %H:%M:%S}"
    yield f"  progress    iteration {summary.iteration}, {progress.get('consumed_samples', 0):,} samples consumed"
    size = f"{summary.num_parameters:,} parameters in {len(summary.model)} tensors"
    yield f"  model       {state.get(MODEL_NAME)}, {size}"
    yield f"  types       {types}"
    yield f"  optimizer   {states or 'no state'}"
    ranks = summary.layout.get("world_size", 1)
    yield f"  layout      saved by {ranks} rank{'' if ranks == 1 else 's'} ({places}); loads at any layout"
    yield f"  versions    {', '.join(f'{name} {version}' for name, version in summary.versions.items())}"
    yield f"  tokenizer   {tokenizer.get('name')}, fingerprint {str(tokenizer.get('fingerprint') or 'unknown')[:12]}"
    if chat := state.get(CHAT):
        ends = ", ".join(map(str, chat["end_tokens"])) or "none"
        yield f"  chat        end tokens {ends}{', with its chat template' if chat['template'] else ''}"
    yield f"  files       {summary.num_files}, {summary.num_bytes:,} bytes"


def _settings(summary: Summary) -> Iterator[str]:
    from megatron.config.run import RunConfig
    from megatron.core.checkpointing.load import MODEL_NAME
    from megatron.core.models.registry import find_family

    yield "settings that are not the default"
    family = find_family(summary.state[MODEL_NAME])
    run = RunConfig.from_json(
        summary.state["config"],
        groups=() if family is None else family.groups,
        where=f"{summary.path}: the saved settings",
    )
    for field, value in run.diff_from_defaults().items():
        yield f"  {field:<34} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _tensors(summary: Summary) -> Iterator[str]:
    from megatron.core.checkpointing.summary import short

    width = max((len(name) for name in summary.model), default=0)
    yield "tensors of the model"
    for name, entry in summary.model.items():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        yield f"  {name:<{width}}  {short(entry.dtype)}  {shape}  ({math.prod(entry.shape):,})"


def verify(path: AnyPath, *, step: int | None) -> int:
    """Check the files of every checkpoint in ``path``, or of iteration ``step`` alone; names those that are damaged."""
    is_one = (path / MANIFEST).exists() or iteration_of(path) is not None
    if step is not None or not is_one:
        _find(path, step)  # says what is there when none is usable
    damaged = 0
    for folder in [path] if is_one else _checkpoints_in(path, step):
        problems = problems_of(folder)
        damaged += bool(problems)
        print(f"{folder}: {'; '.join(problems) if problems else 'whole'}")
    return 1 if damaged else 0


def _checkpoints_in(root: AnyPath, step: int | None) -> list[AnyPath]:
    folders = [path for path in root.iterdir() if path.is_dir() and iteration_of(path) is not None]
    return sorted((path for path in folders if step in (None, iteration_of(path))), key=str)


def problems_of(folder: AnyPath) -> list[str]:
    """Files that are missing, of another size or content than when they were written, or that tensors need unlisted."""
    from megatron.core.checkpointing.find import content_problems

    try:
        return Manifest.read(folder).size_problems(folder) or content_problems(folder)
    except CheckpointError as error:
        return [str(error)]


def print_comparison(found: Comparison, paths: Sequence[AnyPath]) -> int:
    """Differences of two checkpoints, as text."""
    for name, (mine, theirs) in found.settings.items():
        print(f"setting {name}: {mine} and {theirs}")
    for path, names in zip(paths, found.only_in):
        for name in names:
            print(f"only in {path}: {name}")
    for name, words in found.differences.items():
        print(f"tensor {name}: {words}")
    print(f"{found.num_equal} tensors are equal, {len(found.differences)} differ")
    return 0 if found.is_empty else 1


def can_load(path: AnyPath | None, flags: Sequence[str], *, step: int | None) -> int:
    """Whether a training command with ``flags`` could load the checkpoint; the reason when not."""
    from megatron.training.checkpoints.compatibility import check_loadable

    try:
        folder, config = check_loadable(path, flags, step=step)
    except MegatronError as error:
        print(f"no: {error}")
        return 1
    print(f"yes: {folder.path} (iteration {folder.iteration}) loads at {layout_words(config.to_json()['parallel'])}")
    return 0


def layout_words(parallel: Mapping[str, Any]) -> str:
    """The model-parallel sizes of a run."""
    names = {"tensor_model_parallel_size": "tensor", "pipeline_model_parallel_size": "pipeline"}
    names["context_parallel_size"] = "context"
    return ", ".join(f"{title} parallel size {parallel[name]}" for name, title in names.items())


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
