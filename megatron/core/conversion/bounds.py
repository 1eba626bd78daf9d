"""Types of the settings in other programs' checkpoints, with bounds beyond any model's."""

from __future__ import annotations

from typing import Annotated

from megatron.small_files import Between

Count = Annotated[int, Between(1, 1 << 31)]
Layers = Annotated[int, Between(1, 100_000)]
Width = Annotated[int, Between(1, 1 << 24)]
Heads = Annotated[int, Between(1, 1 << 16)]
Rate = Annotated[float, Between(0, 0.999)]
Small = Annotated[float, Between(1e-30, 1)]
Factor = Annotated[float, Between(1e-6, 1e12)]
