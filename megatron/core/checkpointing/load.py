"""Loading: compare names and shapes first, then fill tensors in place, each rank reading just the boxes it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import override

from megatron.config.saved_settings import in_current_names
from megatron.core.checkpointing.agreement import gather_from_all, run_on_all
from megatron.core.checkpointing.find import CheckpointFolder
from megatron.core.checkpointing.manifest import RUN_FILE, listed
from megatron.core.checkpointing.save import RUN_FORMAT
from megatron.core.checkpointing.sharded_view import ShardedView, sharded_views
from megatron.core.checkpointing.storage import CheckpointReader, tensors_in
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import CheckpointError
from megatron.small_files import Between, check_kinds, read_json

MODEL_NAME = "model"
SPEC_STATE = "train_spec"
"""What the train spec keeps for the run that goes on."""
"""Key of the run's state under which it names its family, or what its model was fine-tuned for."""

_OLD_MODEL_NAME = "recipe"  # its key in older checkpoints

CHAT = "chat"
"""Key of the run's state for the chat template and the end tokens that its model has learned."""

_Count = Annotated[int, Between(0, 2**63 - 1)]
# What run.json holds, and what runs keep in its state.
_OF_THE_FILE = {
    "format": int,
    "iteration": int,
    "layout": dict[str, int],
    "versions": dict[str, str],
    "state": dict[str, Any],
}
_OF_THE_STATE = {
    MODEL_NAME: str,
    "config": dict[str, Any],
    "progress": dict[str, _Count],
    "schedule": dict[str, Any],
    "optimizer": dict[str, Any],
    "random_seed": int,
    "tokenizer": dict[str, str | None],
    "diloco": dict[str, _Count],
    "data_phases": list[dict[str, Any]],
    CHAT: ChatSettings,
    SPEC_STATE: dict[str, Any],
}
_OF_THE_OPTIMIZER = {
    **dict.fromkeys(("step", "averaged_since"), _Count),
    "trained_since": dict[str, _Count],
    "loss_scaler": dict[str, float],
}
_OF_A_DYNAMIC_SCALE = {"scale", "growth_tracker", "hysteresis_tracker"}
# Names that must be there; of the state's, some may be null: a conversion has no schedule, for example.
_NEEDED = ("format", "iteration", "layout", "versions", "state")
_NEEDED_OF_STATE = (MODEL_NAME, "config", "progress", "schedule", "optimizer", "random_seed", "tokenizer")
_MAY_BE_NULL = ("schedule", "optimizer", "random_seed")
_NEEDED_INSIDE = {
    "config": ("model", "tokenizer", "precision"),
    "progress": ("iteration", "consumed_samples", "scheduled_samples"),
    "tokenizer": ("name", "fingerprint"),
    "optimizer": ("step", "loss_scaler"),
    "schedule": ("max_lr", "lr_decay_style"),
}


def read_run_state(folder: CheckpointFolder | AnyPath) -> dict[str, Any]:
    """The state of the training run that saved a checkpoint, complete; raises CheckpointError when ``run.json`` is
    unusable, or lacks something that every run writes.
    """
    state, where = dict(read_run_document(folder)["state"]), f"{_path(folder) / RUN_FILE}: state"
    for name in _NEEDED_OF_STATE:
        if name not in state or (state[name] is None and name not in _MAY_BE_NULL):
            raise _lacking(where, name)
    for name, needed in _NEEDED_INSIDE.items():
        for each in needed if state[name] is not None else ():
            if each not in state[name] or (state[name][each] is None and name != "tokenizer"):
                raise _lacking(f"{where}: {name}", each)
    if state["optimizer"] is not None:
        check_kinds(state["optimizer"], _OF_THE_OPTIMIZER, where=f"{where}: optimizer", error=CheckpointError)
        scale = state["optimizer"]["loss_scaler"]
        if scale and (missing := sorted(_OF_A_DYNAMIC_SCALE - scale.keys())):
            raise _lacking(f"{where}: optimizer: loss_scaler", missing[0])
    return state


def _lacking(where: str, name: str) -> CheckpointError:
    return CheckpointError(f"{where} lacks {name}, so it is damaged: give another checkpoint with --ckpt-step")


def read_run_document(folder: CheckpointFolder | AnyPath) -> dict[str, Any]:
    """All of ``run.json``: the state, the layout and versions that saved it; CheckpointError when it is unusable."""
    path = _path(folder) / RUN_FILE
    try:
        document: dict[str, Any] = read_json(path, dict[str, Any], error=CheckpointError)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    for name in _NEEDED:
        if document.get(name) is None:
            raise _lacking(str(path), name)
    check_kinds(document, _OF_THE_FILE, where=str(path), error=CheckpointError)
    if _OLD_MODEL_NAME in document["state"]:
        document["state"].setdefault(MODEL_NAME, document["state"].pop(_OLD_MODEL_NAME))
    check_kinds(document["state"], _OF_THE_STATE, where=f"{path}: state", error=CheckpointError)
    if config := document["state"].get("config"):
        where = f"{path}: state: config"
        if nulls := [name for name, group in config.items() if group is None]:
            raise _lacking(where, nulls[0])
        kinds = {name: int if name == "world_size" else dict[str, Any] for name in config}
        check_kinds(config, kinds, where=where, error=CheckpointError)
        document["state"]["config"] = in_current_names(config, where=where, error=CheckpointError)
    if document["format"] > RUN_FORMAT:
        raise CheckpointError(
            f"{path} is of format {document['format']}; this version reads up to {RUN_FORMAT}: use a newer version"
        )
    return document


def load_checkpoint(
    folder: CheckpointFolder | AnyPath,
    state: Iterable[ShardedState],
    mesh: Mesh,
    *,
    exhaust: tuple[str, ...] = ("model.",),
    alternatives: Mapping[str, Sequence[str]] | None = None,
    advice: str = "give the flags of the model that was saved, or take them from the file with --use-checkpoint-args",
) -> None:
    """Fill the tensors of ``state`` from a checkpoint of any layout, converting dtypes. A collective.

    ``exhaust``: prefixes under which every name of the file must be asked for by some rank: weights that no rank
    loads mean another architecture. ``alternatives``: names of the file to look for in place of a tensor's own, the
    first that is there counts (a master weight that a file of fp32 training has only as the weight itself).
    ``advice``: what to do where the file is of another model, for the message.
    Raises CheckpointError on all ranks, listing missing, surplus and mismatched names, before anything is changed.
    """
    path = _path(folder)
    reader = folder.reader() if isinstance(folder, CheckpointFolder) else CheckpointReader(path)
    state = list(state)
    views = sharded_views(state, mesh)
    metadata = run_on_all(reader.read_metadata, mesh)
    stored = tensors_in(metadata)
    choices = {name: (alternatives or {}).get(name, (name,)) for name in views}
    sources = {name: next((choice for choice in choices[name] if choice in stored), name) for name in views}
    compared = gather_from_all(lambda: _compare(views, sources, stored), mesh)
    found = {kind: sorted(set().union(*(each[kind] for each in compared))) for kind in compared[0]}
    surplus = sorted(name for name in stored.keys() - set(found["asked"]) if name.startswith(exhaust))
    if found["missing"] or found["mismatched"] or surplus:
        raise CheckpointError(_explain(path, found["missing"], found["mismatched"], surplus, advice=advice))
    planner = _LoadPlanner(sources, stored)

    def read() -> None:
        planner.set_up_planner(dict(views), metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        reader.read_data(planner.create_local_plan(), planner).wait()

    run_on_all(read, mesh)
    for part in state:
        if part.after_load is not None:
            part.after_load()


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for flat state dicts, where a tensor may be read from another name of the file."""

    def __init__(self, sources: Mapping[str, str], stored: Mapping[str, TensorStorageMetadata]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._sources = sources
        self._stored = stored

    @override
    def create_local_plan(self) -> LoadPlan:
        """Requests for the stored boxes that overlap this rank's boxes."""
        items = []
        for name, view in self.state_dict.items():
            source = self._sources[name]
            for item in create_read_items_for_chunk_list(source, self._stored[source], view.__create_chunk_list__()):
                items.append(replace(item, dest_index=replace(item.dest_index, fqn=name)))
        return LoadPlan(items)


def _compare(
    views: Mapping[str, ShardedView], sources: Mapping[str, str], stored: Mapping[str, TensorStorageMetadata]
) -> dict[str, set[str]]:
    """The names that this rank asks for, those of them that are missing, and what is mismatched."""
    missing, mismatched = set(), set()
    for name, view in views.items():
        entry = stored.get(sources[name])
        if entry is None:
            missing.add(name)
        elif entry.size != view.shape:
            mismatched.add(f"{name} is {list(entry.size)} in the file and {list(view.shape)} in this run")
        elif _kind(entry.properties.dtype) != _kind(view.dtype):
            mismatched.add(f"{name} is {entry.properties.dtype} in the file and {view.dtype} in this run")
    return {"asked": {*sources, *sources.values()}, "missing": missing, "mismatched": mismatched}


def _kind(dtype: torch.dtype) -> str:
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _explain(path: AnyPath, missing: list[str], mismatched: list[str], surplus: list[str], *, advice: str) -> str:
    parts = []
    if mismatched:
        parts.append(listed(mismatched, "; ", most=8))
    if missing:
        parts.append(f"missing in the file: {listed(missing, most=8)}")
    if surplus:
        parts.append(f"in the file but not in this model: {listed(surplus, most=8)}")
    only_optimizer = not surplus and not mismatched and all(name.startswith("optimizer.") for name in missing)
    if only_optimizer:
        advice = "load the weights alone with --no-load-optim or --finetune"
    return f"checkpoint {path} does not fit this run: {'; '.join(parts)}; {advice}"


def _path(folder: CheckpointFolder | AnyPath) -> AnyPath:
    return folder.path if isinstance(folder, CheckpointFolder) else path_of(folder)
