"""Flags about the command itself, not about the run it describes: they are in no checkpoint and in no digest."""

from __future__ import annotations

from megatron.config.flags import Settings, flag, switch


class CommandConfig(Settings):
    """Where settings come from and whether the run is only checked."""

    config: tuple[str, ...] = flag(
        "YAML or JSON files of settings, flat or nested by group; flags take precedence.", default=()
    )
    dry_run: bool = switch(
        "Check every rule and every file that the run reads or writes, print settings, layout, parameters and memory, "
        "then exit. Uses no device and writes nothing."
    )
    check_files: bool = switch(
        "With --dry-run: do not check data, tokenizer, checkpoints and folders, which may be on another machine.",
        off="--no-check-files",
    )
    launch_file: str | None = flag(
        "With --dry-run: a Slurm batch script, a Kubernetes manifest or a SkyPilot task that shall start the run. Its "
        "ranks, memory, paths and times are compared with the settings.",
        default=None,
    )
    world_size: int | None = flag(
        "With --dry-run: ranks of the run; those of --launch-file or WORLD_SIZE unless given.", default=None, at_least=1
    )
    ranks_per_node: int = flag("With --dry-run: ranks of one node.", default=8, at_least=1)
    device_memory_gb: float | None = flag(
        "With --dry-run: memory of one device in GB (10^9 bytes); the report says whether the run fits, and which "
        "changes would make it fit.",
        default=None,
        above=0,
    )
