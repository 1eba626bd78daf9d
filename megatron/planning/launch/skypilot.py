"""Tasks of SkyPilot, which finds a cloud that has the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.errors import ConfigError
from megatron.planning.launch.launch_file import LaunchFile, Mount, Said, size_in_bytes, whole


def read_task(path: str, task: Mapping[str, Any]) -> LaunchFile:
    """What a task says. Raises ConfigError."""
    resources, variables = task.get("resources"), task.get("envs")
    resources = resources if isinstance(resources, Mapping) else {}
    variables = {str(name): str(value) for name, value in variables.items()} if isinstance(variables, Mapping) else {}
    name, number = _accelerators(resources.get("accelerators"), path)
    ranks = [] if number is None else [Said(number, "accelerators")]
    nodes = [Said(whole(task.get("num_nodes", 1), where=f"{path}: num_nodes"), "num_nodes")]
    for found, variable in ((nodes, "NODES"), (ranks, "GPUS_PER_NODE")):
        if variables.get(variable, "").isdecimal():
            found.append(Said(whole(variables[variable], where=f"{path}: {variable}"), f"the variable {variable}"))
    memory = str(resources.get("memory", "")).rstrip("+")
    return LaunchFile(
        path=path,
        kind="a SkyPilot task",
        nodes=tuple(nodes),
        ranks_per_node=tuple(ranks),
        gpu=None if name is None else Said(name, "accelerators"),
        memory=Said(size_in_bytes(f"{memory}G", where=f"{path}: memory"), "memory") if memory.isdecimal() else None,
        mounts=tuple(_mounts(task.get("file_mounts"))),
        variables=variables,
        words=tuple(str(task.get("run", "")).split()),
        stops_early="spot machines are taken back" if resources.get("use_spot") else "",
    )


def _accelerators(given: object, path: str) -> tuple[str | None, int | None]:
    if given is None:
        return None, None
    if isinstance(given, Mapping) and len(given) == 1:
        ((name, number),) = given.items()
    elif isinstance(given, str):
        name, _, number = given.partition(":")
    else:
        raise ConfigError(f"{path}: accelerators must be one kind of GPU, such as H100:8, for ranks to be alike")
    return str(name), whole(number or 1, where=f"{path}: accelerators")


def _mounts(given: object) -> Iterator[Mount]:
    """Buckets and copies of folders; the machine's other folders are lost with it."""
    for path, source in given.items() if isinstance(given, Mapping) else ():
        is_bucket = isinstance(source, Mapping)
        is_copy = not is_bucket or str(source.get("mode", "MOUNT")).upper() == "COPY"
        yield Mount(path=str(path), where=f"file_mounts {path}", lasts=is_bucket and not is_copy)
