"""Whether a training command could load a checkpoint, found out without ranks, devices or data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.parse import parse_run, read_given
from megatron.config.run import RunConfig
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint
from megatron.core.checkpointing.load import MODEL_NAME, read_run_state
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.portable import check_shapes, parameters_of
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import family_named, find_family, owner_of
from megatron.core.optimizer.update_rules import UPDATE_RULES
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.loading import (
    check_has_optimizer,
    check_same_model,
    check_same_update_rules,
    checkpoint_to_load,
    loads_optimizer,
    saved_config,
    schedule_to_follow,
)
from megatron.training.run.run import build_schedule

_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def check_loadable(
    path: AnyPath | None, flags: Sequence[str], *, step: int | None = None
) -> tuple[CheckpointFolder, RunConfig]:
    """The checkpoint that would be loaded, and the settings it would be loaded into by its family's command.

    ``path``: where it is, unless ``flags`` name it with ``--load``. Raises ConfigError for flags that can't work, and
    CheckpointError with the reason when the checkpoint doesn't fit them; on which layout it was saved never matters.
    Without ``--world-size`` among ``flags`` there are as many ranks as one copy of the model needs.
    """
    asked = [*flags, *(["--load", str(path)] if path is not None and "--load" not in flags else [])]
    if step is not None and "--ckpt-step" not in flags:
        asked += ["--ckpt-step", str(step)]
    resolver = read_given(asked)
    if resolver.value("load") is None:
        raise ConfigError(
            "name the checkpoint: inspect_checkpoint.py DIR --can-load FLAGS, or --load DIR among the flags"
        )
    if resolver.value("world_size") is not None:
        asked += ["--dry-run"]  # which alone may say how many ranks there are
    flag = "" if path is not None else "--load"
    folder = find_checkpoint(resolver.value("load"), step=resolver.value("ckpt_step"), verify=False, flag=flag)
    state = read_run_state(folder)
    family = family_named(state[MODEL_NAME], where=str(folder.path))
    config = parse_run(
        asked,
        prog=f"pretrain_{family.name}.py",
        world_size=math.prod(int(resolver.value(size)) for size in _MODEL_PARALLEL),
        extra_groups=family.groups,
        owner_of=owner_of,
        checkpoint_config=saved_config,
    )
    tokenizer = build_tokenizer(config.tokenizer)
    config = config.with_vocab_size(tokenizer.vocab_size)
    check_same_model(state, folder, model_name=family.name, config=config, tokenizer=tokenizer)
    is_known = resolver.value("world_size") is not None
    check_continues(state, folder, config, weights_only=config.checkpoint.finetune, ranks_known=is_known)
    return folder, config


def check_continues(
    state: Mapping[str, Any], folder: CheckpointFolder, config: RunConfig, *, weights_only: bool, ranks_known: bool
) -> None:
    """Raise CheckpointError or ConfigError unless the checkpoint's tensors, optimizer and schedule are the run's.

    ``ranks_known``: whether the number of ranks was given.
    """
    stored = StoredTensors(folder.path)
    found = {name: entry.shape for name, entry in stored.model.items()}
    wanted = {name: sharding.shape for name, sharding in parameters_of(config.model, config.extra).items()}
    check_shapes(found, wanted, where=str(folder.path))
    if loads_optimizer(config, weights_only=weights_only):
        check_has_optimizer(state, folder)
        kept = {name.split(".")[1] for name in stored.entries if name.startswith("optimizer.")}
        rule = UPDATE_RULES[config.optimizer.optimizer](config.optimizer)
        lacking = [name for name in rule.state_names if name not in kept]
        if lacking:
            raise CheckpointError(
                f"{folder.path} lacks {', '.join(f'optimizer.{name}' for name in lacking)}, which --optimizer "
                f"{config.optimizer.optimizer} continues from: give the optimizer that saved it, or load the weights "
                "alone with --no-load-optim or --finetune"
            )
        check_same_update_rules(state, folder, config.optimizer)
    if not weights_only and state["schedule"] is not None:
        _check_schedule(config, state["schedule"], is_known=ranks_known)


def describe_start(config: RunConfig, tokenizer: Tokenizer | None, *, model_name: str, bodies: Sequence[str]) -> str:
    """What a run would start from, in a line. Raises as loading does for a checkpoint that can't be used.

    Checksums are left to the start itself. ``tokenizer``: None where it can't be built; nothing is compared then.
    ``model_name``, ``bodies``: see ``check_files``.
    """
    settings = config.checkpoint
    folder, weights_only = checkpoint_to_load(settings, verify=False), settings.finetune
    if folder is None and settings.pretrained_checkpoint is not None:
        folder = find_checkpoint(settings.pretrained_checkpoint, verify=False, flag="--pretrained-checkpoint")
        weights_only = True
    if folder is None:
        return f"none in {settings.load} yet, a new run"
    state = read_run_state(folder)
    model = state[MODEL_NAME] if weights_only and state[MODEL_NAME] in bodies else model_name
    if tokenizer is not None:
        check_same_model(state, folder, model_name=model, config=config, tokenizer=tokenizer)
        if model == model_name and find_family(model_name) is not None:
            check_continues(state, folder, config, weights_only=weights_only, ranks_known=True)
    return f"{folder.path}, of iteration {folder.iteration}"


def _check_schedule(config: RunConfig, saved: Mapping[str, Any], *, is_known: bool) -> None:
    """Raise ConfigError for a schedule that isn't the checkpoint's. ``is_known``: the number of ranks was given."""
    schedule = build_schedule(config)
    if schedule is None:
        return
    try:
        schedule_to_follow(config, schedule, saved)
    except ConfigError as error:
        ranks = f"{config.world_size} rank{'' if config.world_size == 1 else 's'}"
        basis = (
            f"\n(for {ranks} and batches of {config.training.global_batch_size}; --world-size says how many there are)"
        )
        raise ConfigError(f"{error}{'' if is_known else basis}") from None
