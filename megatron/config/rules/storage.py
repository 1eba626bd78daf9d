"""Rules about storage that is away."""

from __future__ import annotations

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.checkpoint_storage import CheckpointStorageSettings
from megatron.config.family import Rule
from megatron.config.flags import subject
from megatron.config.rules.sentence import changed_flags, rule
from megatron.config.run import RunConfig


def retries_have_saves(run: RunConfig) -> str | None:
    """Settings of saves need --save."""
    given = changed_flags(run, CheckpointConfig, among=CheckpointStorageSettings)
    if not given or run.checkpoint.save is not None:
        return None
    return f"{subject(given, 'is', 'are')} about saving, and nothing is saved: give --save"


RULES: tuple[Rule, ...] = (
    retries_have_saves,
    rule(
        "--save-retry-copies {run.checkpoint.save_retry_copies} has no effect, as no save is tried again: leave it "
        "out, or give more --save-retry-minutes",
        lambda run: (
            run.checkpoint.save_retry_copies > 1
            and not (run.checkpoint.save_retry_minutes or run.checkpoint.save_retry_minutes_at_end)
        ),
    ),
)
