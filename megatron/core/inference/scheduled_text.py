"""Where a request's text is in generation: its tokens, its blocks and their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.inference.block_pool import block_key
from megatron.core.inference.request import Request


@dataclass(eq=False)
class BeamPlaces:
    """What the beams of one search share: free ``slots``, the slots ``encoded`` in which their encoder prompt was read,
    and how many ``blocks`` are reserved for them, enough for all beams at their full length. So no beam ever waits for
    another search or loses its blocks.
    """

    slots: list[int]
    blocks: int
    texts: list[ScheduledText] = field(default_factory=list)
    encoded: set[int] = field(default_factory=set)

    @property
    def num_missing(self) -> int:
        """Reserved blocks that no beam has yet."""
        return self.blocks - len({block for text in self.texts for block in text.blocks})


@dataclass(eq=False)
class ScheduledText:
    """A request's text and where it is: ``computed`` of its ``tokens`` are in the cache or on the way there.

    ``num_scored``: tokens of the prompt after the first whose log-probabilities have come. ``attempt``: how often the
    text has begun; results of an earlier attempt are stale. ``awaited``: the last block that it waited for, which
    another text was computing.
    """

    request: Request
    arrival: int
    tokens: list[int] = field(init=False)
    computed: int = 0
    slot: int | None = None
    is_encoded: bool = field(init=False)
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_scored: int = 0
    cached_tokens: int = 0
    attempt: int = 0
    awaited: int | None = None
    places: BeamPlaces | None = None
    keyed: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.is_encoded = not self.request.encoder_prompt

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet. A prompt's last token is computed only to sample the next one."""
        return len(self.tokens) - (self.request.max_tokens == 0) - self.computed

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are wanted and some are missing."""
        return self.request.prompt_logprobs is not None and self.num_scored < len(self.request.prompt) - 1

    def seen_together(self, end: int, joint_attention: str) -> tuple[int, int]:
        """First position, and the one after the last, of those that see each other both ways around ``end``; ``end``
        twice where none does: there a row may end.
        """
        prompt, images = len(self.request.prompt), self.request.images
        if joint_attention == "prefix":
            return (0, prompt) if 0 < end < prompt else (end, end)
        return images.tile_around(end) if joint_attention == "bidirectional" and images is not None else (end, end)

    def has_prompt_of(self, other: ScheduledText) -> bool:
        """Whether both have one prompt, the same object, as choices have, its images, and one adapter."""
        mine, its = self.request, other.request
        is_one = mine.prompt is its.prompt and mine.encoder_prompt is its.encoder_prompt
        return is_one and mine.images is its.images and mine.adapter == its.adapter

    def extend_keys(self, block_size: int) -> None:
        """Compute keys of blocks that have become full."""
        if (len(self.keys) + 1) * block_size > len(self.tokens):
            return
        # Decoder keys and values depend on the encoder's text, and all on the adapter.
        parent = self.keys[-1] if self.keys else block_key(self.request.adapter_key, self.request.encoder_prompt)
        while (start := len(self.keys) * block_size) + block_size <= len(self.tokens):
            parent = block_key(parent, self._keyed_tokens(start, start + block_size))
            self.keys.append(parent)

    def _keyed_tokens(self, start: int, end: int) -> Sequence[int]:
        if self.request.images is None:
            return self.tokens[start:end]
        if self.keyed is None:
            self.keyed = self.request.keyed_prompt
        return [*self.keyed[start:end], *self.tokens[max(start, len(self.keyed)) : end]]
