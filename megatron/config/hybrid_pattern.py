"""A hybrid's pattern of layers: its letters, stage borders and depths of multi-token prediction. Pure text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron.config.flags import abridged
from megatron.errors import ConfigError

MAMBA, DELTA_NET, ATTENTION, MLP, EXPERTS = "M", "G", "*", "-", "E"
LETTERS: dict[str, str] = {
    MAMBA: "Mamba-2",
    DELTA_NET: "gated-delta-net",
    ATTENTION: "attention",
    MLP: "MLP",
    EXPERTS: "expert",
}
"""The kind of layer that each letter of a pattern stands for."""

*_FIRST, _LAST = LETTERS.values()
HYBRID = f"hybrid of {', '.join(_FIRST)} and {_LAST} layers, all {LETTERS[MAMBA]} unless a pattern or ratios say which,"
"""What the scripts for hybrids pretrain, for ``--help``."""

_OF_OTHERS = {
    "+": "latent attention is * with --multi-latent-attention",
    **dict.fromkeys("DCHW", "sparse attention is not available; * is attention"),
    **dict.fromkeys("[]", "layers are not grouped; write their letters without brackets"),
}
_MEANINGS = (
    f"{', '.join(f'{letter} {kind}' for letter, kind in LETTERS.items())}; | is between pipeline stages, / before the "
    "layers of a depth of multi-token prediction"
)


@dataclass(frozen=True)
class HybridPattern:
    """A pattern that was read.

    ``layers``: a letter for each layer of the model. ``segments``: numbers of layers between stage borders.
    ``depths``: the letters of each depth of multi-token prediction that the pattern writes out.
    """

    layers: str
    segments: tuple[int, ...]
    depths: tuple[str, ...]

    def written(self, depths: int) -> str:
        """The pattern without stage borders, with its layers of multi-token prediction once for each of ``depths``."""
        repeated = self.depths * depths if len(self.depths) == 1 and depths else self.depths
        return "/".join((self.layers, *repeated))


@lru_cache(maxsize=64)
def read_pattern(text: str) -> HybridPattern:
    """Read a pattern such as ``M-M-|M*M-/*-``; ConfigError with one sentence where it is none."""
    where = f"--hybrid-layer-pattern {abridged(text)!r}"
    for place, letter in enumerate(text):
        if letter not in {*LETTERS, "|", "/"}:
            what = _OF_OTHERS.get(letter) or f"the letters are {_MEANINGS}"
            raise ConfigError(f"{where} has {letter!r} at place {place + 1}, which is no layer: {what}")
    main, *depths = text.split("/")
    segments = main.split("|")
    if not main.strip("|"):
        raise ConfigError(f"{where} has no layer; the letters are {_MEANINGS}")
    if "" in segments:
        raise ConfigError(f"{where}: stage {segments.index('')} is empty; write a layer there or take out a |")
    if any("|" in depth for depth in depths):
        raise ConfigError(f"{where}: multi-token prediction is on the last stage; take out the | after the /")
    if "" in depths:
        raise ConfigError(f"{where}: a / is followed by no layer; write those of a depth, such as /*-, or take it out")
    if len({*depths}) > 1:
        raise ConfigError(
            f"{where}: the depths of multi-token prediction differ ({', '.join(depths)}); write the same layers after "
            "each /"
        )
    return HybridPattern("".join(segments), tuple(map(len, segments)), tuple(depths))


def sizes_of(text: str) -> dict[str, Any]:
    """Settings that follow from a pattern unless they are given: numbers of layers and, where it has any, of depths."""
    main, *depths = text.split("/")
    layers = max(len(main.replace("|", "")), 1)  # a rule says what is wrong with a pattern without any
    return {"num_layers": layers} | ({"mtp_num_layers": len(depths)} if depths else {})


def allocated(num_layers: int, *, attention: float, mlp: float) -> str:
    """Megatron-LM's pattern with these shares of attention and MLP layers; the others are Mamba-2.

    Attention layers divide the others into sections of about one length, and MLPs are spread evenly over the others.
    Raises ConfigError where the rounded shares don't fit.
    """
    num_attention, num_mlp = round(num_layers * attention), round(num_layers * mlp)
    others = num_layers - num_attention
    if num_mlp > others:
        raise ConfigError(
            f"--hybrid-attention-ratio {attention:g} and --hybrid-mlp-ratio {mlp:g} of {num_layers} layers are "
            f"{num_attention} attention and {num_mlp} MLP layers, {num_attention + num_mlp} in all; give smaller ratios"
        )
    spread = _spread(num_layers, others / (num_attention + 1))
    found = "".join(ATTENTION if is_chosen else MAMBA for is_chosen in spread)
    if not num_mlp:
        return found
    chosen = iter(_spread(others, (others - num_mlp) / num_mlp))
    return re.sub(MAMBA, lambda _: MLP if next(chosen) else MAMBA, found)


def _spread(places: int, section: float) -> list[bool]:
    """Which of ``places`` are chosen, so that about ``section`` others come before each."""
    found, left = list[bool](), section
    for _ in range(places):
        found.append(left < 0.5)
        left += section if left < 0.5 else -1
    return found
