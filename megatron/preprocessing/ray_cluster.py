"""Pieces encoded by the workers of a Ray cluster. A piece of a lost worker is given to another one.

All nodes reach input, output and the tokenizer's files by the same names, and have this package.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import Counter, deque
from functools import lru_cache
from pathlib import Path
from typing import Any

import megatron
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.datasets.journal import Totals
from megatron.errors import RESTART_MAY_HELP, ConfigError, DataError, MegatronError
from megatron.preprocessing.pieces import Plan, encode_pieces, make_plan
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.settings import PreprocessConfig

MOST_TRIES = 4  # of a piece whose worker is lost
_ANSWERS_WITHIN = 10.0  # seconds; the library itself waits for minutes
_AHEAD = 2  # pieces given out for each one that can be encoded at once


def encode_on_ray(plan: Plan, tokenizer_config: TokenizerConfig) -> None:
    """Encode the pieces that are missing, ``--workers`` processes each.

    Raises ConfigError without the library, for an address without a cluster and for workers without this package;
    DataError where encoding fails, or a piece loses its worker again and again.
    """
    ray = _start(plan.config)
    left = deque(plan.missing())
    size = plan.division.piece_bytes
    progress = Progress(len(left) * size, log_interval=plan.config.log_interval, stream=sys.stderr)
    task = ray.remote(num_cpus=plan.config.workers, max_retries=0)(encode_piece)
    running: dict[Any, int] = {}
    tries, done, finished = Counter[int](), Totals(), 0
    try:
        config = ray.put(plan.config), ray.put(tokenizer_config)
        while left or running:
            at_once = max(1, int(ray.cluster_resources().get("CPU", 1)) // plan.config.workers)
            while left and len(running) < _AHEAD * at_once:
                number = left.popleft()
                tries[number] += 1
                running[task.remote(*config, number, plan.digest)] = number
            for reference in ray.wait(list(running), timeout=5.0)[0]:
                number = running.pop(reference)
                found = _result(ray, reference, number, tries[number], progress)
                if found is None:
                    left.append(number)
                    continue
                done.add(found)
                finished += 1
                progress.update(done, finished * size)
        progress.say(f"encoded {done.documents:,} documents on Ray ({progress.rates(done)})")
    finally:
        progress.bar.clear()
        for reference in running:
            ray.cancel(reference, force=True)
        ray.shutdown()


def library() -> Any:
    """The module ``ray``; raises ConfigError where it isn't installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs the ray library on all nodes: pip install ray") from None
    return ray


def check_cluster(address: str) -> None:
    """Raise ConfigError without the library, and for the address of a machine that doesn't answer."""
    library()
    found = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:([0-9]{1,5})", address)
    try:
        if found is not None:
            socket.create_connection((found[1], int(found[2])), timeout=_ANSWERS_WITHIN).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _no_cluster(address, getattr(error, "strerror", None) or str(error)) from None


def _no_cluster(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"--ray {address} has no cluster that answers ({reason}): start one with ray start --head, or give local"
    )


def _start(config: PreprocessConfig) -> Any:
    """The library, connected to the cluster that ``--ray`` names."""
    ray = library()
    code = str(Path(megatron.__file__).parents[1])
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH")))),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    options: dict[str, Any] = {"runtime_env": {"env_vars": variables}, "log_to_driver": False, "logging_level": "ERROR"}
    try:
        if config.ray == "local":
            ray.init(include_dashboard=False, **options)
        else:
            ray.init(address=config.ray, **options)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise _no_cluster(str(config.ray), str(error).partition("\n")[0].rstrip(".")) from None
    return ray


def _result(ray: Any, reference: Any, number: int, tries: int, progress: Progress) -> Totals | None:
    """What a task has encoded; None when its worker was lost, and it is to be tried again."""
    try:
        found: Totals = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MegatronError):
            raise cause from None
        if isinstance(cause, ImportError):
            raise ConfigError(
                f"a Ray worker can't import what encodes ({cause}): install this package on every node, or put the "
                "checkout into the same folder of all"
            ) from None
        raise DataError(f"piece {number} failed on a Ray worker: {cause!r}", exit_code=RESTART_MAY_HELP) from error
    except ray.exceptions.RayError as error:
        said = type(error).__name__
        if tries >= MOST_TRIES:
            raise DataError(
                f"piece {number} lost its Ray worker {tries} times ({said}): is memory short?",
                exit_code=RESTART_MAY_HELP,
            ) from None
        progress.say(f"piece {number}: its Ray worker was lost ({said}), another one encodes it")
        return None
    return found


def encode_piece(config: PreprocessConfig, tokenizer_config: TokenizerConfig, number: int, digest: str) -> Totals:
    """Encode one piece in a Ray worker; what it holds."""
    plan = _plan(config, tokenizer_config)
    if plan.digest != digest:
        raise DataError(
            f"node {socket.gethostname()} reads another input or tokenizer than the node that started this: all nodes "
            "must reach the same files by the same names"
        )
    return encode_pieces(plan, [number], maker=socket.gethostname())


@lru_cache(maxsize=1)
def _plan(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> Plan:
    """The plan of this worker, made once for all its pieces."""
    return make_plan(config, tokenizer_config)
