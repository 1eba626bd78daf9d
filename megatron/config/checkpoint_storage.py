"""What happens when the storage of checkpoints is away."""

from __future__ import annotations

from megatron.config.flags import COUNT, Settings, flag

_MOST_MINUTES = 60 * 24 * 365


class CheckpointStorageSettings(Settings):
    """Saves that fail and are tried again."""

    save_retry_minutes: float = flag(
        "Minutes for which a save that fails in a way that may pass (a server that is away, a cut network, 5xx of a "
        "service) is tried again, with growing pauses, while training goes on and a copy waits in main memory. "
        "0: the run ends at the first failure.",
        default=30.0,
        at_least=0.0,
        at_most=_MOST_MINUTES,
    )
    save_retry_minutes_at_end: float = flag(
        "The same for the last save of a run, which has nothing else to do.",
        default=120.0,
        at_least=0.0,
        at_most=_MOST_MINUTES,
    )
    save_retry_copies: int = flag(
        "Number of failed saves that wait in main memory at most; a further one takes the place of the oldest.",
        default=1,
        at_least=1,
        at_most=COUNT,
    )
