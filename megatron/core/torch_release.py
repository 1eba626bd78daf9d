"""The oldest release of torch that this project runs on. A command that meets an older one ends with a sentence."""

from __future__ import annotations

import re

import torch

from megatron.errors import ConfigError

OLDEST_TORCH = (2, 9)
"""Below, attention of grouped queries reads beyond its tensors on CPUs, and 2.6 can't start two ranks."""


def require_torch(found: str = torch.__version__) -> None:
    """Raise ConfigError if ``found``, a version of torch such as 2.8.0+cpu, is older than the oldest promised one."""
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is not None and (int(release[1]), int(release[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ConfigError(
            f"torch {found} is installed, and torch {oldest} or newer is needed: older ones compute wrong attention on "
            f"CPUs, or don't start several ranks; pip install 'torch>={oldest},<3'"
        )
