"""What an engine has room for, and which requests it can answer. No torch: the HTTP server checks requests, too."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import plural_s
from megatron.core.inference.request import BeamSearch, Request
from megatron.errors import DataError


@dataclass(frozen=True)
class NamedFolder:
    """An adapter that requests may name: its ``name``, and the ``folder`` it is in."""

    name: str
    folder: str


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of a generation engine. ``max_requests``: texts that are generated at once. ``context_length``: tokens
    that the model sees, those of a text's prompt included. ``num_blocks`` of ``block_size`` tokens: the cache.
    ``vocabulary``: number of ids. ``max_encoder_length``: tokens of an encoder's prompt, 0 without an encoder.
    ``has_tokenizer``: whether tokens become text, in which stop strings are looked for. ``num_adapters``: how many
    adapters requests may name, by numbers from 1 on. ``image_shape``: height and width of tiles of images, and features
    of each; None for a model that reads none. ``joint_attention``: see RunnerLimits.
    """

    max_requests: int
    context_length: int
    num_blocks: int
    block_size: int
    vocabulary: int
    max_encoder_length: int
    has_tokenizer: bool
    num_adapters: int = 0
    image_shape: tuple[int, int, int] | None = None
    joint_attention: str = "causal"

    @property
    def room(self) -> int:
        """Tokens that the cache has room for."""
        return self.num_blocks * self.block_size

    @property
    def max_length(self) -> int:
        """The longest text, in tokens, its prompt included."""
        return min(self.context_length, self.room)

    def check(self, request: Request) -> None:
        """Raise DataError or ConfigError for a request that can never be answered."""
        prompt, room = request.prompt, self.room
        total = len(prompt) + request.max_tokens
        if not prompt:
            raise DataError("the prompt has no tokens; a prompt needs at least one token")
        if not 0 <= request.adapter <= self.num_adapters:
            raise DataError(f"the request names adapter {request.adapter}, and this engine has {self.num_adapters}")
        begins, shorten = "the prompt has", "shorten the prompt, or "
        if self.max_encoder_length:  # which reads what users call the prompt
            begins, shorten = "a text of this model begins with", ""
        found = (
            f"{begins} {len(prompt)} token{plural_s(len(prompt))}; with {request.max_tokens} generated ones that makes"
        )
        if total > self.context_length:
            left = self.context_length - len(prompt)
            advice = f"{shorten}generate at most {left}" if left >= 0 else "shorten the prompt"
            raise DataError(f"{found} {total}, and the model sees at most {self.context_length}: {advice}")
        if total > room:
            raise DataError(
                f"{found} {total}, and the cache has room for {room}: "
                f"{f'generate at most {room - len(prompt)}' if room >= len(prompt) else 'shorten the prompt'}, "
                "or give the cache more memory with --inference-dynamic-batching-buffer-size-gb"
            )
        self._check_images(request)
        if request.beams is not None:
            self._check_beams(request, request.beams)
        if request.stop.strings and not self.has_tokenizer:
            raise DataError("stop strings are looked for in text, and this engine has no tokenizer: give token ids")
        request.sampling.check_vocabulary(self.vocabulary)
        for tokens in (prompt, request.encoder_prompt):
            for token in (min(tokens, default=0), max(tokens, default=0)):  # no loop in Python: prompts are long
                if not 0 <= token < self.vocabulary:
                    raise DataError(f"token id {token} is not in the vocabulary: ids are 0 to {self.vocabulary - 1}")
        if bool(request.encoder_prompt) != bool(self.max_encoder_length):
            needs = "needs" if self.max_encoder_length else "has no encoder, and takes no"
            raise DataError(f"this model {needs} text for its encoder")
        if len(request.encoder_prompt) > self.max_encoder_length:
            raise DataError(
                f"the encoder's text has {len(request.encoder_prompt)} tokens, and the encoder sees at most "
                f"{self.max_encoder_length}: shorten it"
            )

    def _check_images(self, request: Request) -> None:
        images = request.images
        scores = request.prompt_logprobs is not None
        is_inside = images is not None and len(images.places) > 0 and images.places[-1] >= 0
        if (self.joint_attention == "prefix" and (scores or request.max_tokens == 0)) or (
            self.joint_attention == "bidirectional" and is_inside and request.max_tokens == 0
        ):
            raise DataError(
                "the log-probabilities of a prompt are asked for, whose tokens see later ones in this model: leave "
                "prompt_logprobs out, and generate one token or more"
            )
        if images is None:
            return
        if self.image_shape is None:
            raise DataError("the request has images, and this model reads only text")
        height, width, features = self.image_shape
        fits = images.tiles.shape[1:] == (3, height, width) and images.features == features
        is_inside = len(images.places) == len(request.prompt) and images.places.max() < len(images.tiles) * features
        if not fits or not is_inside:
            raise DataError(
                f"the request's images are {images.tiles.shape} with {images.features} features a tile at "
                f"{len(images.places)} places; this model has tiles of [3, {height}, {width}] and {features} features, "
                f"and the prompt has {len(request.prompt)} places"
            )

    def _check_beams(self, request: Request, beams: BeamSearch) -> None:
        if not 1 <= beams.width <= self.max_requests:
            raise DataError(
                f"beam search with {beams.width} beams: give 1 to {self.max_requests}, the number of texts that are "
                "generated at once (--inference-max-requests)"
            )
        if request.max_tokens < 1:
            raise DataError(f"beam search with max_tokens {request.max_tokens}: it must be 1 or more")
        if request.stop.strings:
            raise DataError("beam search has no stop strings: leave them out, or give token ids that end a text")
        if (needed := request.num_blocks(self.block_size)) > self.num_blocks:
            raise DataError(
                f"{beams.width} beams of up to {len(request.prompt) + request.max_tokens} tokens need {needed} blocks "
                f"of the cache, which has {self.num_blocks}: ask for fewer beams or tokens, or give the cache more "
                "memory with --inference-dynamic-batching-buffer-size-gb"
            )
