"""Several adapters beside one trained model, for generation: checkpoints of adapters, and PEFT folders."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from megatron.config.lora import LoraConfig, is_adapter
from megatron.core.checkpointing.agreement import gather_from_all, run_on_all
from megatron.core.checkpointing.base import base_of, fingerprint_of
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint
from megatron.core.checkpointing.load import MODEL_NAME, load_checkpoint, read_run_state
from megatron.core.checkpointing.manifest import listed
from megatron.core.conversion.native import companions_of
from megatron.core.conversion.peft.reading import PeftAdapter, published_type, read_peft
from megatron.core.conversion.peft.settings import SETTINGS
from megatron.core.conversion.portable import LazyTensor, PortableModel, fill
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.inference.limits import NamedFolder
from megatron.core.models.registry import saved_run
from megatron.core.parallel.sharding import ShardedState, sharded_parameters
from megatron.core.tensor_parallel.layers import LinearBase
from megatron.core.tensor_parallel.low_rank import Adaptable, AdaptersOfTokens
from megatron.core.transformer.layer import TransformerLayer
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.trained_model import TrainedModel

FLAG = "--lora-modules"
MOST_ADAPTERS, MOST_RANK = 64, 512
"""How many adapters a model may have at once, and their largest rank: each takes memory on every rank."""
_NUMBER = re.compile(r"(.*\.lora)\.(\d+)\.(.*)")


@dataclass(frozen=True)
class _Adapter:
    """Where an adapter is, its settings, and what it was read from: a checkpoint, or a PEFT folder."""

    named: NamedFolder
    lora: LoraConfig
    source: CheckpointFolder | PeftAdapter


def named_folders(given: Sequence[str]) -> list[NamedFolder]:
    """The values of ``--lora-modules``; ConfigError for one that isn't NAME=FOLDER, and for a name given twice."""
    found = list[NamedFolder]()
    for each in given:
        name, equals, folder = each.partition("=")
        if not (name and equals and folder):
            raise ConfigError(f"{FLAG} {each!r}: write NAME=FOLDER")
        if any(name == other.name for other in found):
            raise ConfigError(f"{FLAG} names two adapters {name!r}: give each a name of its own")
        found.append(NamedFolder(name, folder))
    if len(found) > MOST_ADAPTERS:
        raise ConfigError(f"{FLAG} names {len(found)} adapters; at most {MOST_ADAPTERS} are served at once")
    return found


def load_adapters(trained: TrainedModel, named: Sequence[NamedFolder]) -> AdaptersOfTokens:
    """Give a trained model the adapters, which steps choose by their numbers, from 1 on. A collective.

    Raises CheckpointError for adapters of another base, and for what can't be beside other adapters.
    """
    if LoraConfig.among(trained.config.extra).is_on:
        raise CheckpointError(
            f"--load {trained.config.checkpoint.load} has adapters of its own: give the checkpoint with its base as "
            f"--load, and this one as {FLAG} NAME={trained.config.checkpoint.load}"
        )
    adapters = {number: _read(trained, each) for number, each in enumerate(named, start=1)}
    choice = AdaptersOfTokens()
    # A pipeline rank without experts would wait for ever for one that refuses them.
    run_on_all(lambda: _add(trained.models, adapters, choice), trained.context.mesh)
    for model in trained.models:
        _fill(trained, model, adapters)
    return choice


def _read(trained: TrainedModel, named: NamedFolder) -> _Adapter:
    place, said = path_of(named.folder), f"{FLAG} {named.name}={named.folder}"
    try:
        if isinstance(place, Path) and (place / SETTINGS).exists():
            companions = companions_of(trained.folder, trained.config.tokenizer)
            model, groups = trained.config.model, trained.config.extra
            model_type = published_type(model, groups, companions)
            peft = read_peft(place, model, groups, model_type, most_rank=MOST_RANK)
            if peft.saved:
                raise CheckpointError(
                    f"it holds parameters that were trained in full (modules_to_save, bias: "
                    f"{listed(sorted(peft.saved), most=1)}), so it can't share the base with other adapters: merge it "
                    "with convert.py --load-peft, and serve that"
                )
            found = _Adapter(named, peft.lora, peft)
        else:
            found = _of_checkpoint(trained, named, place)
    except CheckpointError as error:
        raise CheckpointError(f"{said}: {error}", exit_code=error.exit_code) from error
    if found.lora.rank > MOST_RANK:
        raise CheckpointError(f"{said}: its rank is {found.lora.rank}; at most {MOST_RANK} is served")
    return found


def _of_checkpoint(trained: TrainedModel, named: NamedFolder, place: AnyPath) -> _Adapter:
    folder = find_checkpoint(place, mesh=trained.context.mesh, flag="")
    state = read_run_state(folder)
    run = saved_run(state["config"], name=state[MODEL_NAME], where=str(folder.path))
    lora = LoraConfig.among(run.extra)
    if not lora.is_on:
        raise CheckpointError("the checkpoint has no adapters, and is a model of its own: serve it with --load")
    base = base_of(folder.path)
    if base is None:
        raise CheckpointError(
            "the checkpoint holds all weights beside its adapters, so their base can't be compared with --load: write "
            "the adapters alone, with convert.py --to peft, and give that folder"
        )
    if fingerprint_of(base) != fingerprint_of(trained.folder.path):
        raise CheckpointError(
            f"its adapters belong to the base in {base}, and --load has other weights ({trained.folder.path}): give "
            "that base as --load"
        )
    names, mesh = run.optimizer.trained, trained.context.mesh
    here = [name for name, _, _ in _parameters(trained.models) if name in names and not is_adapter(name)]
    others = list(dict.fromkeys(name for of_rank in gather_from_all(lambda: here, mesh) for name in of_rank))
    if others:
        raise CheckpointError(
            f"it was trained with parameters beside its adapters (--train-only: {listed(others, most=1)}), so it can't "
            "share the base with other adapters: serve it alone with --load"
        )
    return _Adapter(named, lora, folder)


def _parameters(models: Iterable[nn.Module]) -> Iterable[tuple[str, nn.Parameter, object]]:
    return (each for model in models for each in sharded_parameters(model))


def _add(models: Iterable[nn.Module], adapters: dict[int, _Adapter], choice: AdaptersOfTokens) -> None:
    """Add the adapters to the linear layers that their settings name."""
    for layer in (each for model in models for each in model.modules() if isinstance(each, TransformerLayer)):
        for name, module in list(layer.named_modules()):
            if not isinstance(module, Adaptable):
                continue
            last = name.rpartition(".")[2]
            chosen = {
                number: (each.lora, parts)
                for number, each in adapters.items()
                if (parts := each.lora.parts_of(last)) is not None
            }
            if not chosen:
                continue
            if not isinstance(module, LinearBase):
                named = adapters[next(iter(chosen))].named
                raise CheckpointError(
                    f"{FLAG} {named.name}={named.folder}: it has adapters of experts ({last}), which can't share the "
                    "base with other adapters: serve it alone with --load, or merge it with convert.py --to hf"
                )
            module.adapt_tokens(chosen, choice)


def _fill(trained: TrainedModel, model: nn.Module, adapters: dict[int, _Adapter]) -> None:
    """Load this rank's part of every adapter."""
    own: dict[int, list[ShardedState]] = {number: [] for number in adapters}
    for name, parameter, sharding in sharded_parameters(model):
        if (found := _NUMBER.fullmatch(name)) is not None:
            parameter.requires_grad_(False)
            logical = f"model.{found[1]}.{found[3]}"
            own[int(found[2])].append(ShardedState(logical, parameter.detach(), sharding))
    mesh = trained.context.mesh
    for number, adapter in adapters.items():
        if isinstance(adapter.source, CheckpointFolder):
            load_checkpoint(adapter.source, own[number], mesh, exhaust=())
        else:
            fill(own[number], _portable(trained, adapter.source), mesh)


def _portable(trained: TrainedModel, peft: PeftAdapter) -> PortableModel:
    """The tensors of a PEFT folder, as what fills models reads them."""
    tensors = {name: LazyTensor(tuple(each.shape), each.dtype, each.clone) for name, each in peft.tensors.items()}
    config = trained.config
    return PortableModel(config.model, tensors, config.tokenizer, config.data.seq_length, groups=config.extra)
