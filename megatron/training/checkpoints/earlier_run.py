"""What a --save folder holds before a run saves there: two runs are never mixed in one folder.

A run that starts elsewhere is refused beside checkpoints that are further on. With ``--overwrite-run`` they are
deleted, once the first checkpoint of the new run is durable: until then nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run import RunConfig
from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.checkpointing.find import is_unused, whole_checkpoints
from megatron.core.checkpointing.folders import iteration_of, remove
from megatron.core.checkpointing.foreign import foreign_format
from megatron.core.checkpointing.manifest import MANIFEST
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.parallel.mesh import Mesh
from megatron.errors import CheckpointError
from megatron.training.checkpoints.loading import checkpoint_to_load


def check_save_folder(run: RunConfig) -> str:
    """Raise CheckpointError where the run would mix its checkpoints with those of another one in ``--save``.

    Returns a remark about checkpoints that stay beside the run's own, or are deleted; empty without any. Reads the
    folders, and changes nothing.
    """
    settings = run.checkpoint
    if settings.save is None or run.training.skip_train or is_unused(settings.save):
        return ""
    if settings.resumes_own and not settings.finetune:
        return ""
    root = path_of(settings.save)
    if (root / MANIFEST).exists():
        raise CheckpointError(f"--save {root} is one checkpoint of a run; name the folder that holds it, or a new one")
    held = max(whole_checkpoints(root), default=None)
    if settings.overwrite_run:
        return _overwriting(root, held)
    start, origin = _start(settings)
    if held is not None and held <= start:
        return f"--save {root} holds older checkpoints, up to iteration {held}, which stay there"
    what = "checkpoints that are damaged or another program's" if held is None else f"a run at iteration {held}"
    resume = f"add --load {root} to go on with it"
    if settings.resumes_own:
        resume = "leave --finetune out to go on with it"
    elif settings.load is not None:
        resume = f"give --load {root} to go on with it"
    ways = ([resume] if held is not None else []) + ["give another --save"]
    raise CheckpointError(
        f"--save {root} holds {what}, and this run starts at iteration {start}{origin}: {', '.join(ways)}, or add "
        "--overwrite-run, which deletes it once the first checkpoint of this run is complete"
    )


def _start(settings: CheckpointConfig) -> tuple[int, str]:
    """The iteration that the run starts at, and from what, in words."""
    if settings.load is None or settings.finetune:
        return 0, " (--finetune)" if settings.finetune else ""
    folder = checkpoint_to_load(settings, verify=False)
    return (0, "") if folder is None else (folder.iteration, f" of --load {settings.load}")


def _overwriting(root: AnyPath, held: int | None) -> str:
    foreign = [path.name for path in root.iterdir() if path.is_dir() and foreign_format(path)]
    if foreign or foreign_format(root):
        raise CheckpointError(
            f"--save {root} holds checkpoints of another program ({', '.join(foreign) or root.name}), which "
            "--overwrite-run does not delete: give another --save"
        )
    what = "damaged checkpoints" if held is None else f"a run at iteration {held}"
    return f"--overwrite-run: --save {root} holds {what}; deleted once the first checkpoint of this run is complete"


def earlier_checkpoints(settings: CheckpointConfig) -> dict[int, list[AnyPath]]:
    """Folders of checkpoints in ``--save``, damaged ones included, by iteration, which ``--overwrite-run`` deletes."""
    root, found = path_of(settings.save or ""), dict[int, list[AnyPath]]()
    if not settings.overwrite_run or not root.exists():
        return found
    for path in root.iterdir():
        iteration = iteration_of(path)
        if iteration is not None and path.is_dir():
            found.setdefault(iteration, []).append(path)
    return found


def delete_earlier(found: Mapping[int, list[AnyPath]], *, saved: int, mesh: Mesh) -> dict[int, list[AnyPath]]:
    """Delete ``earlier_checkpoints`` when the one of iteration ``saved`` is durable, which has replaced its namesake.

    A collective: rank 0 deletes. Returns what could not be deleted, which a warning has named.
    """

    def delete() -> dict[int, list[AnyPath]]:
        left = {
            iteration: [path for path in paths if not remove(path)]
            for iteration, paths in found.items()
            if iteration != saved
        }
        return {iteration: paths for iteration, paths in left.items() if paths}

    return run_on_first(delete, mesh)
