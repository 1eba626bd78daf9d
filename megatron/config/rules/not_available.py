"""One rule per setting that is accepted by name but not built yet; delete the rule when the feature lands."""

from __future__ import annotations

from megatron.config.run import RunConfig


def async_save(run: RunConfig) -> str | None:
    """Checkpoints written while training goes on."""
    if not run.checkpoint.async_save:
        return None
    return "--async-save is not available yet; leave it out: checkpoints are written before training goes on"


RULES = (async_save,)
