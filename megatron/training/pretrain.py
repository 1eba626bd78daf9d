"""A pretraining command: check the settings, join the ranks, train."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron.config.flags import Settings, flag
from megatron.config.parse import parse_run, read_given
from megatron.config.run import RunConfig
from megatron.config.typed_spellings import errors_as_typed
from megatron.core.models.registry import FAMILIES, Family, family_titled, owner_of, register
from megatron.errors import run_command

if TYPE_CHECKING:
    from megatron.core.models.train_spec import TrainSpec
    from megatron.core.parallel.environment import LaunchEnvironment
    from megatron.training.run.preflight import Findings
    from megatron.training.run.run import Run

_TITLES = [family.title for family in FAMILIES.values()]


class ModelTypeConfig(Settings):
    """The family whose flags a tool for all families takes."""

    model_type: str = flag(
        f"Family of the model: {', '.join(_TITLES)}, or the name of an installed one.", default=_TITLES[0]
    )


# Torch is imported only after the settings have been checked: --help and flag errors take milliseconds.


def main(family: Family, *, model: str | None = None, defaults: Mapping[str, Any] | None = None) -> None:
    """Entry point of the ``pretrain_…`` scripts; ends the process.

    ``model``: what the script trains, for ``--help``; None: the family's title. ``defaults``: those of the script, by
    field.
    """
    run_command(lambda: pretrain(family, sys.argv[1:], model=model, defaults=defaults))


def pretrain(
    family: Family,
    argv: Sequence[str],
    *,
    prog: str | None = None,
    model: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Check the settings of ``argv``, then train a model of ``family``; the process's exit code.

    ``prog``, ``model``: the command's name in ``--help``, and what it trains; None: those of the script and the family.
    ``defaults``: those of the command, by field. Raises MegatronError for a user's mistake.
    """
    register(family)
    start(family, argv, prog=prog or os.path.basename(sys.argv[0]), model=model, defaults=defaults)
    return 0


def start(
    family: Family,
    argv: Sequence[str],
    *,
    prog: str,
    model: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    built: Callable[[Run], None] = lambda run: None,
) -> None:
    """Train a model of a known ``family``, or print what ``--dry-run`` finds.

    ``model``: what the command trains, for ``--help``; None: the family's title. ``defaults``: those of the command, by
    field. ``built``: called with the run before it starts.
    """
    started = time.monotonic()
    model = model or family.settings.title
    about = f"Pretrain a {model} on the ranks that torchrun or srun started, and on one without them."
    config = parse(argv, prog=prog, about=about, groups=family.groups, defaults=defaults)
    if config.command.dry_run:
        dry_run(config, family.train_spec)
        return

    import logging

    from megatron.core.parallel.environment import errors_once_per_node, launch_environment

    if config.checkpoint.load_hf is not None or config.checkpoint.save_hf is not None:
        from megatron.training.checkpoints.huggingface_folders import check_huggingface

        with errors_once_per_node(), errors_as_typed(config):
            check_huggingface(config)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    launch_on_ranks(family, config, launch_environment(), started=started, built=built)


def dry_run(config: RunConfig, train_spec: TrainSpec, *, more: Callable[[Findings], None] | None = None) -> None:
    """Check the files of a run, unless ``--no-check-files`` is given, and print its report.

    ``more``: further checks of a command. Raises one ConfigError that lists every bad file.
    """
    from megatron.config.vocabulary import vocabulary_size
    from megatron.core.objectives.choice import objective_of
    from megatron.planning.dry_run import dry_run_report
    from megatron.training.run.attention import check_backend

    train_spec, lines = objective_of(config, train_spec), tuple[str, ...]()
    if config.command.check_files:
        from megatron.core.tokenizers.build import build_tokenizer
        from megatron.training.run.preflight import Findings, check_files

        found = Findings()
        with errors_as_typed(config):
            config = check_files(config, found, model_name=train_spec.name, bodies=tuple(train_spec.starts_from))
            sized = config
            beside = found.check(lambda: train_spec.check_beside(sized, build_tokenizer(sized.tokenizer)))
            found.lines += beside or ()
            if more is not None:
                more(found)
            found.raise_errors()
        lines = tuple(found.lines)
    with errors_as_typed(config):
        config = _on_nodes_of_launch_file(config.with_vocab_size(vocabulary_size(config)))
        check_backend(config, train_spec)
        lines = (*lines, *_launch_lines(config, train_spec))
        report = dry_run_report(config, train_spec, files=lines)
    print(report)


def _launch_lines(config: RunConfig, train_spec: TrainSpec) -> list[str]:
    """What ``--launch-file`` says, in a line. Raises one ConfigError for all that disagrees with the settings."""
    from megatron.config.rules import listed
    from megatron.errors import ConfigError
    from megatron.planning.estimate import memory_estimate
    from megatron.planning.launch.disagreements import described, disagreements
    from megatron.planning.launch.read import read_launch_file
    from megatron.planning.stages import with_stages

    if config.command.launch_file is None:
        return []
    file, planned = read_launch_file(config.command.launch_file), with_stages(config, train_spec)
    if found := disagreements(planned, file, memory_estimate(planned, train_spec)):
        raise ConfigError(listed(found, of="launch file"))
    return [f"--launch-file: {described(planned, file)}"]


def _on_nodes_of_launch_file(config: RunConfig) -> RunConfig:
    """The run with ``--ranks-per-node`` of ``--launch-file``, unless the ranks were given beside it."""
    from megatron.planning.launch.read import read_launch_file

    command = config.command
    if command.launch_file is None or command.world_size is not None:
        return config
    said = read_launch_file(command.launch_file).ranks_per_node
    return replace(config, command=replace(command, ranks_per_node=said[0].value)) if said else config


def _ranks_in(launch_file: str) -> int | None:
    from megatron.planning.launch.read import read_launch_file

    return read_launch_file(launch_file).world_size


def parse(
    argv: Sequence[str],
    *,
    prog: str,
    about: str = "",
    groups: Sequence[type] = (),
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The run that ``argv`` describes, on the ranks that a launcher started; see ``parse_run``."""
    from megatron.core.parallel.environment import errors_once_per_node, launched_world_size

    with errors_once_per_node():
        return parse_run(
            argv,
            prog=prog,
            about=about,
            world_size=launched_world_size(),
            extra_groups=groups,
            owner_of=owner_of,
            checkpoint_config=_saved_config,
            published_config=_published_config,
            defaults=defaults,
            ranks_in=_ranks_in,
        )


def parse_any_family(argv: Sequence[str], *groups: type, prog: str, about: str = "") -> RunConfig:
    """Parse the command line of a tool: a run of the family that ``--model-type`` names, on the command line or in a
    file.

    ``groups``: the tool's settings. Raises ConfigError for a family that isn't known.
    """
    family = family_titled(read_given(argv, ModelTypeConfig).value("model_type"))
    return parse(argv, prog=prog, about=about, groups=(ModelTypeConfig, *family.groups, *groups))


def _saved_config(load: str, step: int | None) -> Mapping[str, Any] | None:
    from megatron.training.checkpoints.loading import saved_config

    return saved_config(load, step)


def _published_config(folder: str, groups: Sequence[type], adapter: str | None) -> Mapping[str, Any]:
    from megatron.training.checkpoints.published import published_config

    return published_config(folder, groups, adapter)


def launch_on_ranks(
    family: Family,
    config: RunConfig,
    launch: LaunchEnvironment,
    *,
    started: float,
    built: Callable[[Run], None] = lambda run: None,
) -> None:
    """Join the other ranks and train. Of errors on several ranks, the first is reported."""
    from megatron.core.objectives.choice import objective_of
    from megatron.core.parallel.launch import parallel_context
    from megatron.training.loop import train_from_start_to_end
    from megatron.training.reporting.memory import sized_allocations

    precision, seed = config.precision.params_dtype, config.training.seed
    deterministic = config.training.deterministic_mode
    joined = parallel_context(config.parallel, launch, params_dtype=precision, seed=seed, deterministic=deterministic)
    train_spec = objective_of(config, family.train_spec)
    with errors_as_typed(config), joined as context, sized_allocations(config, train_spec, context):
        train_from_start_to_end(config, train_spec, context, started=started, built=built)
