"""Parsing of a command line to a checked run: every failure is collected, so that a user sees all of them at once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron.config.command import CommandConfig
from megatron.config.flag_resolver import FlagResolver
from megatron.config.flags import flags_of, group_name
from megatron.config.legacy_flags import LegacyFlag
from megatron.config.rules import failures, listed, remarks
from megatron.config.rules.remarking import without_effect
from megatron.config.run import CORE_GROUPS, CheckpointReader, FlagOwner, PublishedReader, RunConfig, nobody
from megatron.config.typed_spellings import as_typed
from megatron.errors import ConfigError


def parse_run(
    argv: Sequence[str],
    *,
    prog: str = "pretrain",
    about: str = "",
    world_size: int = 1,
    extra_groups: Sequence[type] = (),
    owner_of: FlagOwner = nobody,
    checkpoint_config: CheckpointReader | None = None,
    published_config: PublishedReader | None = None,
    defaults: Mapping[str, Any] | None = None,
    ranks_in: Callable[[str], int | None] = lambda launch_file: None,
) -> RunConfig:
    """The run that a command line describes; precedence: flag > file > checkpoint > default.

    ``prog``, ``about``: the command's name and what it does, for ``--help``.
    ``world_size``: ranks that were started; ``--world-size`` of a dry run goes before it.
    ``extra_groups``: settings of the family, of the parts of its models, and of the command.
    ``owner_of(spelling)`` names the kind of run that has a flag which this one lacks, or returns None.
    ``checkpoint_config(load, step)`` reads the ``to_json()`` stored in a checkpoint, or returns None when there is
    none; it is called only with ``--use-checkpoint-args`` or ``--load-hf``.
    ``published_config(folder, groups, adapter)`` gives those of the Hugging Face model of ``--load-hf``, whose family
    must have these ``groups`` of settings, with adapters of the PEFT folder ``adapter``.
    ``defaults``: the command's own defaults by field, which replace those of its flags.
    ``ranks_in(launch_file)`` gives the ranks that ``--launch-file`` of a dry run starts, None where it doesn't say.
    Raises ConfigError with every failure at once. ``--help`` prints and exits with code 0.
    """
    defaults = defaults or {}
    groups = (*CORE_GROUPS, *extra_groups, CommandConfig)
    _answer_help(argv, groups, prog, about, defaults=defaults)
    resolver = FlagResolver(groups, owner_of=owner_of)
    resolver.read_command_line(argv)
    resolver.read_defaults(defaults, prog)
    resolver.read_checkpoint(checkpoint_config, published_config)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "diloco_workers")
    started = None
    if resolver.value("dry_run"):
        launch_file = resolver.value("launch_file")
        started = resolver.value("world_size") or (None if launch_file is None else ranks_in(launch_file))
    resolver.replicas = (started or world_size) // max(math.prod(resolver.value(size) or 1 for size in sizes), 1)
    resolver.finish()
    command: CommandConfig = resolver.build(CommandConfig)
    out_of_bounds = dict(_out_of_bounds(command))
    problems = [*resolver.problems, *out_of_bounds.values()]
    run = RunConfig(
        **{group_name(group): resolver.build(group) for group in CORE_GROUPS},
        extra=tuple(resolver.build(group) for group in extra_groups),
        world_size=world_size if started is None else max(started, 1),
        command=command,
    )
    object.__setattr__(run, "provenance", {spec.field: resolver.source(spec, run.value(spec)) for spec in run.flags()})
    object.__setattr__(run, "inherited", resolver.inherited)
    problems += [as_typed(run, sentence) for sentence in failures(run, faulted={*resolver.faulted, *out_of_bounds})]
    if problems:
        raise ConfigError(listed(problems))
    unused = [resolver.renamed.get(flag) for flags, _ in without_effect(run) for flag in flags]
    object.__setattr__(run, "notes", tuple(note for note in resolver.notes if note not in unused))
    object.__setattr__(run, "notes", (*run.notes, *remarks(run)))
    return run


def read_given(argv: Sequence[str], *groups: type) -> FlagResolver:
    """What flags and files give of a run with ``groups``, unchecked: for a command whose groups depend on it."""
    resolver = FlagResolver((*CORE_GROUPS, *groups, CommandConfig))
    resolver.read_command_line(argv)
    return resolver


def parse_groups(
    argv: Sequence[str], *groups: type, prog: str, about: str = "", legacy: Mapping[str, LegacyFlag] | None = None
) -> tuple[Any, ...]:
    """The groups of a tool from its command line, in the order asked; ``--help`` prints and exits with code 0.

    ``legacy``: what becomes of flags of other programs' tools. Remarks go to standard error.
    Raises ConfigError with every failure at once.
    """
    _answer_help(argv, groups, prog, about)
    resolver = FlagResolver(groups, legacy)
    resolver.read_command_line(argv)
    resolver.finish()
    built = tuple(resolver.build(group) for group in groups)
    problems = [*resolver.problems, *(sentence for group in built for _, sentence in _out_of_bounds(group))]
    if problems:
        raise ConfigError(listed(problems))
    for note in resolver.notes:
        print(note, file=sys.stderr)  # noqa: T201  (a tool has no start-up report)
    return built


def _out_of_bounds(group: Any) -> Iterator[tuple[str, str]]:
    """Flags whose numbers are out of bounds, with a sentence for each."""
    for spec in flags_of(type(group)):
        sentence = spec.out_of_bounds(getattr(group, spec.field))
        if sentence:
            yield spec.positive, sentence


def _answer_help(
    argv: Sequence[str],
    groups: Sequence[type],
    prog: str,
    about: str,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    if {"-h", "--help"} & set(argv):
        from megatron.config.help import format_help

        shared = {*CORE_GROUPS, CommandConfig}
        shown = sorted(groups, key=shared.__contains__)  # the command's own groups first
        print(format_help(shown, prog=prog, about=about, defaults=defaults), end="")  # noqa: T201  (what --help is for)
        sys.exit(0)
