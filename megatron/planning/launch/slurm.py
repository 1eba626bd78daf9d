"""Slurm batch scripts: their ``#SBATCH`` lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from megatron.errors import ConfigError
from megatron.planning.launch.launch_file import LaunchFile, Mount, Said, size_in_bytes, whole

_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-t": "--time", "-G": "--gpus"}
_SWITCHES = frozenset(("--requeue", "--exclusive", "--no-requeue", "--contiguous", "--wait", "--hold"))


def read_batch_script(path: str, text: str) -> LaunchFile:
    """What the ``#SBATCH`` lines of a batch script say; parts of a heterogeneous job are added. Raises ConfigError."""
    components = list(_components(path, text))
    options = components[0]
    nodes, ranks, models = [], [], []
    for each in components:
        nodes.append(whole(each.get("--nodes", "1").partition("-")[0], where=f"{path}: #SBATCH --nodes"))
        for flag in ("--ntasks-per-node", "--gpus-per-node", "--gres"):
            kind, number = _gpus(each.get(flag, ""), is_gres=flag == "--gres")
            if number:
                ranks.append(Said(whole(number, where=f"{path}: #SBATCH {flag}"), f"#SBATCH {flag}"))
            if kind:
                models.append(Said(kind, f"#SBATCH {flag}"))
    signal = re.search(r"@(\d+)$", options.get("--signal", ""))
    memory = options.get("--mem")
    image, mounts = options.get("--container-image"), options.get("--container-mounts", "")
    return LaunchFile(
        path=path,
        kind="a Slurm batch script",
        nodes=(Said(sum(nodes), "#SBATCH --nodes"),),
        ranks_per_node=tuple(ranks),
        gpu=models[0] if models else None,
        memory=None if memory in (None, "0") else Said(_megabytes(memory, path), "#SBATCH --mem"),
        grace=None if signal is None else Said(int(signal[1]), "#SBATCH --signal"),
        mounts=None if image is None else tuple(_mounts(mounts)),
        words=tuple(_command(text)),
        stops_early="jobs reach their time limit and are preempted" if "--requeue" in options else "",
    )


def _components(path: str, text: str) -> Iterator[dict[str, str]]:
    """Options of each component of the job."""
    options: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if re.match(r"#SBATCH\s+(?:hetjob|packjob)\b", line):
            yield options
            options = {}
            continue
        if line.strip() and not line.startswith("#"):
            break
        if not line.startswith("#SBATCH"):
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError as error:
            raise ConfigError(
                f"{path}:{number}: {str(error).lower()}; quotes must be closed on the same line"
            ) from None
        while words:
            flag, _, value = words.pop(0).partition("=")
            flag = _SHORT.get(flag, flag)
            takes_next = not value and flag not in _SWITCHES and bool(words) and not words[0].startswith("-")
            options[flag] = words.pop(0) if takes_next else value
    yield options


def _gpus(text: str, *, is_gres: bool) -> tuple[str, str]:
    """Model and number of GPUs in ``8``, ``h100:8`` or, for ``--gres``, ``gpu:h100:8``."""
    if is_gres:
        if not text.startswith("gpu"):
            return "", ""
        text = text.removeprefix("gpu").removeprefix(":")
    kind, colon, number = text.rpartition(":")
    return (kind, number) if colon else ("", text)


def _megabytes(text: str | None, path: str) -> int:
    """Bytes of Slurm's sizes: megabytes of 2^20 unless a letter says otherwise."""
    match = re.fullmatch(r"(\d{1,12})([KMGT]?)B?", text or "")
    if match is None:
        raise ConfigError(f"{path}: #SBATCH --mem is {text!r}, which is no size such as 512G; correct it")
    return size_in_bytes(f"{match[1]}{match[2] or 'M'}i", where=f"{path}: #SBATCH --mem")


def _mounts(text: str) -> Iterator[Mount]:
    """Mounts of pyxis: ``/outside:/inside:ro,/same``."""
    for each in filter(None, text.split(",")):
        outside, _, rest = each.partition(":")
        inside, _, flags = rest.partition(":")
        where = f"#SBATCH --container-mounts {each}"
        yield Mount(path=inside or outside, where=where, read_only="ro" in re.split(r"[+:]", flags))


def _command(text: str) -> list[str]:
    """The script that the batch script starts with ``LAUNCH=srun``, variables at their defaults, and its flags."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    defaults = dict(re.findall(r"^(\w+)=\$\{\w+:-([^}$]+)\}", "\n".join(lines), re.MULTILINE))
    line = next((line for line in lines if "LAUNCH=srun" in line), "")
    named = re.sub(
        r'"?\$\{?(\w+)\}?"?', lambda found: defaults.get(found[1], found[0]), line.partition("LAUNCH=srun")[2]
    )
    return [word for word in named.split() if word not in ("&", '"$@"')]
