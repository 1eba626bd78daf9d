"""What happens when the storage of checkpoints is away, and quicker tiers in front of it."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import COUNT, Settings, flag, switch

_MOST_MINUTES = 60 * 24 * 365


class CheckpointStorageSettings(Settings):
    """Saves that fail and are tried again, and copies that a restart finds quicker than checkpoints."""

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
    save_fallback_dir: str | None = flag(
        "Folder on each node for a copy of the run, when a save has been tried again for long enough: the same command "
        "goes on from it. Not given: that of --non-persistent-ckpt-type local or in_memory, else the one for temporary "
        "files.",
        default=None,
    )
    non_persistent_save_interval: int | None = flag(
        "Iterations between copies of the run that only a restart needs: each takes the place of the one before.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = flag(
        "Where such copies are. global: a checkpoint in --non-persistent-global-ckpt-dir; local: each rank's part in a "
        "folder of its node; in_memory: the same in the memory of the node (/dev/shm), where it outlives the rank.",
        default=None,
    )
    non_persistent_global_ckpt_dir: str | None = flag(
        "Folder that all ranks share, or URL. Not given: non_persistent in --save.", default=None
    )
    non_persistent_local_ckpt_dir: str | None = flag(
        "Folder on each node; $NAME stands for a variable of the node, as in $SLURM_TMPDIR.", default=None
    )
    non_persistent_local_ckpt_algo: Literal["fully_parallel"] = flag(
        "How ranks share the writing. fully_parallel: what several ranks hold is written by one of them.",
        default="fully_parallel",
        refused_values={"atomic": "tensors are written once, and ranks send each other what they lack: leave it out"},
    )
    replication: bool = switch("Keep each rank's part of a copy on other nodes, too, in case its own is lost.")
    replication_jump: int | None = flag(
        "Distance of the ranks that keep each other's parts: n, n+J, n+2J … Not given: the ranks of a node.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    replication_factor: int = flag(
        "Number of nodes that have a rank's part, its own included.", default=2, at_least=2, at_most=COUNT
    )

    @property
    def copies_on_nodes(self) -> bool:
        """Whether copies are in folders or memory of nodes."""
        return self.non_persistent_ckpt_type in ("local", "in_memory")
