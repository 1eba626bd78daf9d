"""Which checkpoint a run starts from, and what each loading flag takes from it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from megatron.config.checkpoint import CheckpointConfig, keeps_meaning
from megatron.config.flags import flags_of, group_name
from megatron.config.lora import LoraConfig, is_adapter
from megatron.config.objective import is_of_objective
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import RunConfig, group_from_json
from megatron.config.update_rules import STATE_FLAGS
from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.checkpointing.base import base_of
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint, is_unused
from megatron.core.checkpointing.load import MODEL_NAME, SPEC_STATE, load_checkpoint, read_run_state
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.chat_files import chat_of_checkpoint
from megatron.core.conversion.kept_tokenizer import kept_files
from megatron.core.diloco.workers import of_worker, where_to_find_worker
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.optimizer.schedule import Schedule, resumed_schedule
from megatron.core.optimizer.weight_average import AVERAGES, lacks_average
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import CheckpointError, ConfigError
from megatron.planning.parameter_patterns import FreezingChange
from megatron.small_files import check_kinds
from megatron.training.checkpoints.published import load_published
from megatron.training.checkpoints.tiers import copy_to_load
from megatron.training.guards.spikes import GuardState
from megatron.training.run.quantized_base import hold_in_few_bits
from megatron.training.run.run import Progress, Run


def load(run: Run) -> None:
    """Load the run's checkpoint, if there is one, see ``_load``, and what runs beside its model.

    Workers that meet in outer steps share what that gives, unless the checkpoint says what they shared.
    """
    _load(run)
    if run.outer is not None and not run.outer.is_resumed:
        run.outer.start_anew()
    if words := run.train_spec.load_beside(run.models, run.context.mesh):
        run.reporter.say(f"  {words}")


def _load(run: Run) -> None:
    """Load the checkpoint of ``--load``, or else what ``--load-hf`` or ``--pretrained-checkpoint`` names, into the
    run, or leave it as a new one.

    Raises CheckpointError when there is nothing usable, when the checkpoint is of another model, and when nothing is
    named for a model that is made of a trained one.
    """
    settings = run.config.checkpoint
    folder = copy_to_load(run)
    run.recovered = folder is not None
    if folder is None:
        folder = checkpoint_to_load(settings, run.context.mesh)
    if folder is None and settings.load_hf is not None:
        load_published(run)
        return
    if folder is None and settings.load is not None:
        run.reporter.say(f"no checkpoint in {settings.load} yet: starting a new run, which will save there")
    if folder is not None:
        _load_from(run, folder, weights_only=settings.finetune)
    elif settings.pretrained_checkpoint is not None:
        named, mesh = settings.pretrained_checkpoint, run.context.mesh
        pretrained = find_checkpoint(named, mesh=mesh, flag="--pretrained-checkpoint")
        is_body = read_run_state(pretrained)[MODEL_NAME] in run.train_spec.starts_from
        if is_body and not run.config.training.skip_train:  # evaluating a fresh head is pointless
            load_body(run, pretrained)
        else:
            _load_from(run, pretrained, weights_only=True)
    elif run.train_spec.starts_from:
        raise CheckpointError(
            f"a {run.train_spec.name} model starts from a trained {' or '.join(run.train_spec.starts_from)} model: "
            "give --pretrained-checkpoint"
        )


def checkpoint_to_load(
    settings: CheckpointConfig, mesh: Mesh | None = None, *, verify: bool = True
) -> CheckpointFolder | None:
    """The checkpoint that ``--load`` means; None when the run starts anew: without the flag, or because ``--load`` is
    the same folder as ``--save`` and no run has saved there yet. ``mesh``, ``verify``: see ``find_checkpoint``.
    """
    if settings.load is None:
        return None
    if settings.may_be_new and run_on_first(lambda: is_unused(settings.load or ""), mesh or Mesh.single()):
        return None
    return find_checkpoint(settings.load, step=settings.ckpt_step, mesh=mesh, verify=verify)


def _load_from(run: Run, folder: CheckpointFolder, *, weights_only: bool) -> None:
    settings, state = run.config.checkpoint, read_run_state(folder)
    starts_adapters = run.config.part(LoraConfig).is_on and not LoraConfig.is_in(state["config"])
    if starts_adapters and not weights_only:
        raise CheckpointError(
            f"{folder.path} has no adapters, and --lora-rank is {run.config.part(LoraConfig).rank}: to train "
            "adapters beside its weights, give it as --pretrained-checkpoint, or add --finetune"
        )
    check_same_model(state, folder, model_name=run.train_spec.name, config=run.config, tokenizer=run.tokenizer)
    with_optimizer = loads_optimizer(run.config, weights_only=weights_only)
    if with_optimizer:
        check_has_optimizer(state, folder)
        check_same_update_rules(state, folder, run.config.optimizer)
        change = FreezingChange.since(state["config"], run.config, run.train_spec)
        had_average, has_average = "averaged_since" in state["optimizer"], run.config.optimizer.ema_decay is not None
        optimizer_state = run.optimizer.entries(fresh=change.trained, with_average=had_average)
        if had_average and not has_average:
            run.reporter.say("  the moving average of the weights is left behind: --ema-decay is not given")
        elif has_average and not had_average:
            run.reporter.say("  there is no moving average of the weights yet: it begins with the next step")
    else:
        optimizer_state = run.optimizer.master_entries()
    own = [*run.model_state(), *run.buffer_state(), *optimizer_state, *stored_scales(run, folder)]
    if starts_adapters:
        own = [entry for entry in own if not is_adapter(entry.name)]
    if weights_only:  # what an objective trains beside the model begins with it
        own = [entry for entry in own if not is_of_objective(entry.name)]
    shared, mesh = list[ShardedState](), run.context.mesh
    if run.outer is not None and with_optimizer and state.get("diloco") is not None:
        run.outer.resume(state["diloco"])
        shared = [*run.outer.entries(fresh=change.trained)]
    names = where_to_find_weights(run.model_state(), averaged_in=folder if settings.load_ema else None)
    load_checkpoint(
        folder,
        [*of_worker(own, mesh), *shared],
        mesh,
        alternatives=where_to_find_worker(own, mesh, names, has_own=bool(shared)),
    )
    if with_optimizer:
        run.optimizer.load_state_dict(state["optimizer"], fresh=change.trained)
        if run.outer is not None and shared:
            run.outer.start_anew(change.trained)
        for remark in change.remarks():
            run.reporter.say(remark)
    run.chat_before = chat_of_checkpoint(folder, state, run.config.tokenizer)
    if not weights_only:
        run.progress = Progress(**state["progress"])
        run.guards = GuardState.from_json(state.get("guards"))
        run.data.resume(state.get("data_phases", ()), run.progress.consumed_samples)
        run.spec_state = state.get(SPEC_STATE, {})
    if not weights_only and run.schedule is not None and state["schedule"] is not None:
        run.schedule = schedule_to_follow(run.config, run.schedule, state["schedule"])
        if settings.load_rng and state["random_seed"] is not None:
            run.context.rng.seed = state["random_seed"]
    run.loaded_from = str(folder.path)
    run.base = base_for(run, folder.path, is_base=starts_adapters)
    hold_in_few_bits(run, folder)
    run.reporter.say(f"  successfully loaded checkpoint from {folder.path} at iteration {run.progress.iteration}")


def reload(run: Run) -> None:
    """Make the run, which has trained on, that of the newest checkpoint in ``--save`` again. A collective.

    Raises CheckpointError when that can't be read.
    """
    folder = find_checkpoint(run.config.checkpoint.save or "", mesh=run.context.mesh, flag="--save")
    state = read_run_state(folder)
    check_has_optimizer(state, folder)
    run.optimizer.gather.finish()
    own = [*run.model_state(), *run.buffer_state(), *stored_scales(run, folder)]
    own += run.optimizer.entries(with_average="averaged_since" in state["optimizer"])
    load_checkpoint(folder, own, run.context.mesh, alternatives=where_to_find_weights(run.model_state()))
    run.optimizer.load_state_dict(state["optimizer"])
    run.progress = Progress(**state["progress"])
    run.guards = GuardState.from_json(state.get("guards"))
    run.reporter.say(f"  successfully loaded checkpoint from {folder.path} at iteration {run.progress.iteration}")


def base_for(run: Run, loaded: AnyPath, *, is_base: bool) -> AnyPath | None:
    """The checkpoint that those of the run may refer to, after it has loaded the one in ``loaded``, which may be that
    base itself. None where they hold all weights: without adapters, and in the folder of the base, which may be deleted
    when newer ones are saved.
    """
    base = loaded if is_base else base_of(loaded)
    save = run.config.checkpoint.save
    if base is None or not run.config.part(LoraConfig).is_on or (save is not None and path_of(save) == base.parent):
        return None
    return base


def stored_scales(run: Run, folder: CheckpointFolder) -> list[ShardedState]:
    """The scales and largest values of --fp8-recipe delayed that the checkpoint has; the log says when it lacks any,
    which then start anew. A collective.
    """
    if not run.config.fp8.is_on or run.config.fp8.fp8_recipe != "delayed":
        return []
    wanted = [] if run.scaling is None else [*run.scaling.state()]
    stored = StoredTensors(folder.path).entries
    found = [each for each in wanted if each.name in stored and stored[each.name].shape == each.sharding.shape]
    lacking = sum(gather_objects(len(wanted) - len(found), run.context.mesh))
    if lacking:
        run.reporter.say(
            "  the checkpoint lacks scales of --fp8-recipe delayed, or has other --fp8-amax-history-len: what it lacks "
            "starts from 1"
        )
    return found


def load_body(run: Run, folder: CheckpointFolder) -> None:
    """Take what the run's model shares with the model in ``folder``; the log names what stays fresh.

    A collective. Raises CheckpointError when more is missing than the train spec allows.
    """
    train_spec, state = run.train_spec, read_run_state(folder)
    theirs = state[MODEL_NAME]
    check_same_model(state, folder, model_name=theirs, config=run.config, tokenizer=run.tokenizer)
    stored, names = set(StoredTensors(folder.path).entries), where_to_find_weights(run.model_state())
    wanted = [*run.model_state(), *run.optimizer.master_entries()]
    shared = [entry for entry in wanted if stored.intersection(names.get(entry.name, (entry.name,)))]
    mine = {entry.name.removeprefix("model.") for entry in run.model_state()}
    held = {entry.name.removeprefix("model.") for entry in shared}
    everyone = gather_objects((mine, mine - held), run.context.mesh)
    asked, fresh = (sorted(set().union(*(each[kind] for each in everyone))) for kind in (0, 1))
    may_lack = train_spec.starts_from[theirs]
    lacking = [name for name in fresh if not (name.startswith(may_lack) or is_adapter(name))]
    if lacking:
        raise CheckpointError(f"{folder.path} lacks {', '.join(lacking)}, which every {theirs} model has")
    load_checkpoint(folder, shared, run.context.mesh, exhaust=(), alternatives=names)
    left = {name.removeprefix("model.") for name in stored if name.startswith("model.")}.difference(asked)
    run.loaded_from = str(folder.path)
    run.chat_before = chat_of_checkpoint(folder, state, run.config.tokenizer)
    run.reporter.say(
        f"  took the body of the {theirs} model in {folder.path}; with fresh weights: {', '.join(fresh)}; left there: "
        f"{', '.join(sorted({name.partition('.')[0] for name in left})) or 'nothing'}"
    )


def where_to_find_weights(
    weights: Iterable[ShardedState], *, averaged_in: CheckpointFolder | None = None
) -> dict[str, tuple[str, ...]]:
    """Names to look for, best first: fp32 masters are more exact than 16-bit weights, whichever of them a file has.

    ``averaged_in``: a checkpoint whose moving average of the weights is wanted in their place; parameters that it
    didn't train have none. Raises CheckpointError where there is no average.
    """
    if averaged_in is not None:
        stored = StoredTensors(averaged_in.path).entries
        if not any(each.startswith(AVERAGES) for each in stored):
            raise CheckpointError(lacks_average(str(averaged_in.path)))
    found: dict[str, tuple[str, ...]] = {}
    for entry in weights:
        name = entry.name.removeprefix("model.")
        master = f"optimizer.fp32_param.{name}"
        averages = () if averaged_in is None else (AVERAGES + name,)
        found[master] = (*averages, master, entry.name)
        if averages or entry.tensor.dtype.itemsize >= 4:
            found[entry.name] = (*averages, master, entry.name)
    return found


def loads_optimizer(config: RunConfig, *, weights_only: bool) -> bool:
    """Whether a run takes optimizer state from the checkpoint, too."""
    return config.checkpoint.load_optim and not weights_only and not config.training.skip_train


def schedule_to_follow(config: RunConfig, schedule: Schedule, saved: Mapping[str, Any]) -> Schedule:
    """The flags' ``schedule`` or the ``saved`` one; ConfigError where they differ and no flag chooses one, with the
    command that trains on.
    """
    optimizer = config.optimizer
    try:
        return resumed_schedule(
            schedule,
            saved,
            override=optimizer.override_opt_param_scheduler,
            use_checkpoint=optimizer.use_checkpoint_opt_param_scheduler,
        )
    except ConfigError as error:
        again, behind = shlex.join([*sys.argv, "--override-opt_param-scheduler"]), ""
        if config.world_size > 1:
            behind = ", behind the launcher and its flags"
        elif sys.argv[0].endswith(".py"):
            again = f"python {again}"
        raise ConfigError(
            f"{error}\nto train on with these flags, as for a longer run, give the command{behind}:\n  {again}"
        ) from None


def check_has_optimizer(state: Mapping[str, Any], folder: CheckpointFolder) -> None:
    """Raise CheckpointError when the checkpoint holds weights only."""
    if state["optimizer"] is None:
        raise CheckpointError(
            f"{folder.path} holds no optimizer state (it was converted, or saved with --no-save-optim): "
            "pass --no-load-optim to go on with a fresh optimizer, or --finetune to start anew from its weights"
        )


def check_same_update_rules(state: Mapping[str, Any], folder: CheckpointFolder, config: OptimizerConfig) -> None:
    """Raise CheckpointError when other update rules, or with other matrices, made the checkpoint's optimizer state.

    A run saved before a flag existed had its default.
    """
    then, names = state["config"].get("optimizer") or {}, ("optimizer", *STATE_FLAGS)
    kept = {name: then[name] for name in names if name in then}
    kinds = get_type_hints(OptimizerConfig)
    check_kinds(kept, {name: kinds[name] for name in names}, where="the checkpoint's settings", error=CheckpointError)
    there, here = OptimizerConfig(**kept).state_flags, config.state_flags
    if there != here and config.optimizer != "sgd":  # which has no state, or one of its own
        raise CheckpointError(
            f"{folder.path} was trained with {there}, whose optimizer state {here} can't continue: give the "
            "checkpoint's flags, or load the weights alone with --no-load-optim or --finetune"
        )


def check_same_model(
    state: Mapping[str, Any], folder: CheckpointFolder, *, model_name: str, config: RunConfig, tokenizer: Tokenizer
) -> None:
    """Raise CheckpointError that lists every difference between the checkpoint's model and the run's."""
    if state[MODEL_NAME] != model_name:
        raise CheckpointError(
            f"{folder.path} holds a {state[MODEL_NAME]} model, where a {model_name} model is wanted; name another "
            "folder"
        )
    differences, then = [], _saved_values(config, state["config"], where=f"{folder.path}: the saved settings")
    for spec in config.flags():
        asked = config.value(spec)
        saved = then.get((spec.group, spec.field), asked)
        may_change = config.checkpoint.finetune and keeps_meaning(spec.field, saved, asked)
        starts_adapters = spec.group == group_name(LoraConfig) and not LoraConfig.is_in(state["config"])
        if spec.options.architecture and saved != asked and not may_change and not starts_adapters:
            there, here = ("not set" if value is None else value for value in (saved, asked))
            differences.append(f"{spec.positive} is {there} in the checkpoint and {here} here")
    if differences:
        advice = (
            "Leave those settings out: --use-checkpoint-args takes what neither flags nor files give"
            if config.checkpoint.use_checkpoint_args
            else "Give the checkpoint's values, or --use-checkpoint-args to take them from it"
        )
        raise CheckpointError(f"{folder.path} is of another architecture: {'; '.join(differences)}. {advice}")
    check_same_tokenizer(state, folder, tokenizer)


def _saved_values(config: RunConfig, saved: Mapping[str, Any], *, where: str) -> dict[tuple[str, str], Any]:
    """The values of a saved run in the groups of an architecture that this run and that one have, by group and field.

    A run saved before a flag existed had its default, or what followed from its other settings. Raises CheckpointError,
    which begins with ``where``, for a value that the flag would not accept.
    """
    found: dict[tuple[str, str], Any] = {}
    for group in config.groups():
        title, specs = group_name(type(group)), flags_of(type(group))
        if title not in saved or not any(spec.options.architecture for spec in specs):
            continue
        try:
            then = group_from_json(type(group), saved[title], where=where, others=True)
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        found |= {(title, spec.field): getattr(then, spec.field) for spec in specs}
    return found


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


def saved_config(load: str, step: int | None) -> Mapping[str, Any] | None:
    """The settings stored in the checkpoint that ``load`` and ``step`` name, for ``--use-checkpoint-args``; None when
    nothing has been saved there yet. Its tokenizer is the one that the checkpoint keeps, where it does.
    """
    if is_unused(load):
        return None
    # Loading verifies every file; reading the settings needs no more than to know which checkpoint it will be.
    folder = find_checkpoint(load, step=step, verify=False)
    config: Mapping[str, Any] = read_run_state(folder)["config"]
    tokenizer = config.get("tokenizer") or {}
    return {**config, "tokenizer": {**tokenizer, **kept_files(tokenizer, folder.path)}}
