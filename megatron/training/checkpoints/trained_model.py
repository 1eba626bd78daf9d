"""A trained model out of its checkpoint, for tools that use it: the checkpoint says what to build."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from megatron.config.parallel import ParallelConfig
from megatron.config.rules.sizes import divide
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint
from megatron.core.checkpointing.load import MODEL_NAME, load_checkpoint, read_run_state
from megatron.core.conversion.kept_tokenizer import with_kept_files
from megatron.core.models.registry import family_named, saved_run
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import LaunchEnvironment, told_once_a_node
from megatron.core.parallel.launch import parallel_context
from megatron.core.parallel.sharding import ShardedState, sharded_parameters, sharding_of
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.training.run.stages import build_stage


@dataclass(frozen=True)
class TrainedModel:
    """A whole model in evaluation mode, split over the ranks by tensor parallelism alone."""

    config: RunConfig
    model: nn.Module
    tokenizer: Tokenizer
    context: ParallelContext
    folder: CheckpointFolder


@contextmanager
def trained_model(
    choice: TrainedModelConfig, train_specs: Mapping[str, TrainSpec], launch: LaunchEnvironment
) -> Iterator[TrainedModel]:
    """The chosen model, for the length of a ``with`` block; every launched rank holds a tensor-parallel part.

    ``train_specs``: the families the tool can use, by name; those whose train spec inherits from one work, too. Raises
    CheckpointError when nothing usable is there, ConfigError and DataError for a tokenizer that can't be built.
    """
    with told_once_a_node():
        folder = find_checkpoint(choice.load, step=choice.ckpt_step)
        state = read_run_state(folder)
        train_spec = _usable(state[MODEL_NAME], train_specs, where=str(folder.path))
        if train_spec is None:
            raise CheckpointError(
                f"{folder.path} holds a {state[MODEL_NAME]} model; this tool works with {', '.join(train_specs)}"
            )
        saved = saved_run(state["config"], name=state[MODEL_NAME], where=str(folder.path))
        saved = dataclasses.replace(saved, tokenizer=with_kept_files(saved.tokenizer, folder.path))
        config = _for_inference(saved, choice, launch.world_size)
        tokenizer = build_tokenizer(config.tokenizer)
        check_same_tokenizer(state, folder, tokenizer)
        if config.model.vocab_size is not None and tokenizer.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"{tokenizer.name} has {tokenizer.vocab_size} tokens, and the model in {folder.path} knows "
                f"{config.model.vocab_size}: name the files of the tokenizer that it was trained with"
            )
    precision, seed = config.precision.params_dtype, config.training.seed
    with parallel_context(config.parallel, launch, params_dtype=precision, seed=seed) as context:
        (whole,) = train_spec.stages(config)
        model = build_stage(config, train_spec, whole, context).eval().requires_grad_(False)
        load_checkpoint(folder, model_state(model), context.mesh)
        yield TrainedModel(config, model, tokenizer, context, folder)


def _usable(name: str, train_specs: Mapping[str, TrainSpec], *, where: str) -> TrainSpec | None:
    """The train spec of this name, or of a family whose own inherits from one of them."""
    if name in train_specs:
        return train_specs[name]
    own = family_named(name, where=where).train_spec
    return own if isinstance(own, tuple(map(type, train_specs.values()))) else None


def check_same_tokenizer(state: Mapping[str, Any], folder: CheckpointFolder, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError unless the checkpoint's run had this tokenizer, or doesn't say which one it had."""
    saved = state["tokenizer"]
    if saved["fingerprint"] in (tokenizer.fingerprint, None):  # None: converted without the files of its tokenizer
        return
    raise CheckpointError(
        f"{folder.path} was trained with another tokenizer ({saved['name']}, fingerprint {saved['fingerprint'][:12]}) "
        f"than the one given ({tokenizer.name}, {tokenizer.fingerprint[:12]}): name the files it was trained with "
        "(--vocab-file and --merge-file, or --tokenizer-model)"
    )


def model_state(*models: nn.Module) -> Iterator[ShardedState]:
    """Every parameter of the parts of a model under its name in a checkpoint; tied copies share one."""
    for name, parameter in named_parameters(models):
        sharding = sharding_of(parameter)
        yield ShardedState(f"model.{sharding.tied or name}", parameter.detach(), sharding)


def named_parameters(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of a rank's parts of the model with its global name; one that parts share, once."""
    seen: set[nn.Parameter] = set()
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter


def share_tied_parameters(models: Iterable[nn.Module]) -> None:
    """Where parts on one rank hold copies of a tied parameter, let them hold the same one."""
    held: dict[str, nn.Parameter] = {}
    for model in models:
        for name, parameter, sharding in list(sharded_parameters(model)):
            if sharding.tied is not None and held.setdefault(sharding.tied, parameter) is not parameter:
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, held[sharding.tied])


def _for_inference(saved: RunConfig, choice: TrainedModelConfig, world_size: int) -> RunConfig:
    heads, groups = saved.model.num_attention_heads, saved.model.num_query_groups
    if heads % world_size or not divide(groups, world_size):
        raise ConfigError(
            f"{world_size} ranks were started, and each takes a part of every layer's heads; the model's {heads} heads "
            f"({groups} for keys and values) are not divisible by {world_size}: start 1 rank, or a divisor of both"
        )
    return dataclasses.replace(
        saved,
        world_size=world_size,
        parallel=ParallelConfig(tensor_model_parallel_size=world_size),
        tokenizer=_chosen_tokenizer(saved, choice),
    )


def _chosen_tokenizer(saved: RunConfig, choice: TrainedModelConfig) -> TokenizerConfig:
    """The checkpoint's tokenizer with the files that are given, or one of another kind that is given."""
    own, fields = saved.tokenizer, ("vocab_file", "merge_file", "tokenizer_model", "vocab_extra_ids")
    given = {field: getattr(choice, field) for field in fields if getattr(choice, field) is not None}
    if choice.tokenizer_type not in (None, own.tokenizer_type):
        return TokenizerConfig(tokenizer_type=choice.tokenizer_type, vocab_size=saved.model.vocab_size, **given)
    if own.tokenizer_type == "NullTokenizer" and given:
        raise ConfigError(
            f"the checkpoint in {choice.load} keeps no tokenizer: say its kind with --tokenizer-type, too"
        )
    for field in fields[:3]:
        path, flag = getattr(own, field), f"--{field.replace('_', '-')}"
        if path is not None and field not in given and not Path(path).exists():
            raise DataError(
                f"the checkpoint in {choice.load} keeps no tokenizer, and says that its file was {path}, which is not "
                f"there now: say where it is with {flag}"
            )
    return dataclasses.replace(own, **given)
