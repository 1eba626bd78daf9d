"""Rules about storage that is away, and about the copies in front of it."""

from __future__ import annotations

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checkpoint_storage import CheckpointStorageSettings
from megatron.config.family import Rule
from megatron.config.flags import flag_of, subject
from megatron.config.rules.sentence import changed_flags, rule
from megatron.config.run import RunConfig


def retries_have_saves(run: RunConfig) -> str | None:
    """Settings of saves need --save."""
    given = [
        each
        for each in changed_flags(run, CheckpointConfig, among=CheckpointStorageSettings)
        if each.startswith("--save-")
    ]
    if not given or run.checkpoint.save is not None:
        return None
    return f"{subject(given, 'is', 'are')} about saving, and nothing is saved: give --save"


_COPIES = (
    "non_persistent_global_ckpt_dir",
    "non_persistent_local_ckpt_dir",
    "replication",
    "replication_jump",
    "replication_factor",
)


def copies_are_made(run: RunConfig) -> str | None:
    """Settings of copies come with an interval and a type, and serve a run that goes on from its own folder."""
    asked = run.checkpoint
    interval, kind = asked.non_persistent_save_interval, asked.non_persistent_ckpt_type
    given = [flag_of(name) for name in _COPIES if run.given(name)]
    if interval is None and kind is None:
        if not given:
            return None
        return f"{subject(given, 'needs', 'need')} --non-persistent-save-interval and --non-persistent-ckpt-type"
    if interval is None or kind is None:
        here, other = "--non-persistent-save-interval", "--non-persistent-ckpt-type"
        if interval is None:
            here, other = other, here
        return f"{here} {kind if interval is None else interval} needs {other}: when copies are made, and where"
    if not asked.resumes_own or asked.finetune:
        return (
            f"--non-persistent-ckpt-type {kind} makes copies for a restart of the same command, which must go on from "
            "its own folder: give the same folder as --save and --load"
            + (", and leave --finetune out" if asked.finetune else "")
        )
    return None


def copies_have_their_place(run: RunConfig) -> str | None:
    """The folder that is named is that of the type."""
    asked = run.checkpoint
    kind = asked.non_persistent_ckpt_type
    if kind == "local" and asked.non_persistent_local_ckpt_dir is None:
        return "--non-persistent-ckpt-type local needs --non-persistent-local-ckpt-dir: a folder on each node"
    if kind == "global" and asked.non_persistent_local_ckpt_dir is not None:
        return "--non-persistent-local-ckpt-dir is not used with --non-persistent-ckpt-type global: leave it out"
    if asked.copies_on_nodes and asked.non_persistent_global_ckpt_dir is not None:
        return f"--non-persistent-global-ckpt-dir is not used with --non-persistent-ckpt-type {kind}: leave it out"
    return None


def parts_have_partners(run: RunConfig) -> str | None:
    """--replication has ranks that can keep each other's parts."""
    asked, world = run.checkpoint, run.world_size
    factor = asked.replication_factor
    if not asked.replication:
        given = [flag_of(name) for name in _COPIES[3:] if run.given(name)]
        return f"{subject(given, 'has', 'have')} no effect without --replication" if given else None
    if asked.non_persistent_ckpt_type == "global":
        return "--replication is for copies on nodes: leave it out with --non-persistent-ckpt-type global"
    jump = asked.replication_jump or (run.command.ranks_per_node if run.given("ranks_per_node") else 1)
    if world % (jump * factor) == 0:
        return None
    return (
        f"--replication-factor {factor} with parts {jump} rank{'' if jump == 1 else 's'} apart needs a multiple of "
        f"{jump * factor} ranks, and there are {world}: give another --replication-jump, or leave --replication out"
    )


RULES: tuple[Rule, ...] = (
    retries_have_saves,
    copies_are_made,
    copies_have_their_place,
    parts_have_partners,
    rule(
        "--save-retry-copies {run.checkpoint.save_retry_copies} has no effect, as no save is tried again: leave it "
        "out, or give more --save-retry-minutes",
        lambda run: (
            run.checkpoint.save_retry_copies > 1
            and not (run.checkpoint.save_retry_minutes or run.checkpoint.save_retry_minutes_at_end)
        ),
    ),
)
