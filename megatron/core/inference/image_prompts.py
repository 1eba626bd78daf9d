"""Texts with marks for images, as ids and tiles: what an engine is asked about pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron.config.flags import plural_s
from megatron.config.vision import VisionConfig
from megatron.core.images.expansion import MARKER, expansion, with_words
from megatron.core.images.prompts import CutImage, PromptImages
from megatron.core.tokenizers.base import Tokenizer
from megatron.errors import DataError


@dataclass(frozen=True)
class ImagePrompts:
    """Makes ids and tiles of texts in which ``MARKER`` stands for an image. ``image_id``: the id at its places;
    None: any id stands there.
    """

    vision: VisionConfig
    tokenizer: Tokenizer
    image_id: int | None = None

    @cached_property
    def _token(self) -> str | None:
        """The text of the id at places of images, such as ``<image>``, where the tokenizer makes that id of it."""
        known = self.image_id
        if known is None or known >= self.tokenizer.vocab_size:
            return None
        text = self.tokenizer.detokenize([known]).strip()
        return text if text.startswith(("<", "[")) and self.tokenizer.tokenize_parts([text])[0] == [known] else None

    @property
    def marker(self) -> str:
        """What this model's templates write for an image."""
        return self._token or MARKER

    def encoded(
        self, text: str, pictures: Sequence[CutImage], *, whole: bool = False
    ) -> tuple[list[int], PromptImages | None]:
        """Ids of a text and the images that stand in it, in order; ``whole``: with ids that the tokenizer puts around
        texts. Raises DataError where there are more or fewer marks than pictures.
        """
        encode = self.tokenizer.tokenize_batch if whole else self.tokenizer.tokenize_parts
        if self.marker != MARKER:
            text = text.replace(MARKER, self.marker)
        found, marked = text.count(self.marker), len(pictures)
        if found != marked:
            raise DataError(
                f"the text has {found} mark{plural_s(found)} {self.marker} for {marked} image{plural_s(marked)}: each "
                "image has one, and texts have none of their own"
            )
        if not pictures:
            return list(encode([text])[0]), None
        parts = self._parts(with_words(text, self.vision, marker=self.marker), whole=whole)
        if self.vision.images_first and text.startswith(self.marker):
            behind = next((number for number, part in enumerate(parts) if number and part), len(parts) - 1)
            parts[behind], parts[0] = [*parts[0], *parts[behind]], []  # images first (PaliGemma)
        ids, places, tiles = list[int](parts[0]), [-1] * len(parts[0]), list[NDArray[np.uint8]]()
        count = 0
        for picture, words in zip(pictures, parts[1:], strict=True):
            for each in expansion(picture.grid, self.vision):
                if isinstance(each, str):
                    said = self.tokenizer.tokenize_parts([each])[0]
                    ids, places = ids + said, places + [-1] * len(said)
                else:
                    places += np.where(each >= 0, each + count * self.vision.features_per_tile, each).tolist()
                    ids += [self._filler] * len(each)
            tiles.append(picture.tiles)
            count += picture.grid.tiles
            ids, places = ids + words, places + [-1] * len(words)
        images = PromptImages(np.concatenate(tiles), np.array(places, np.int64), self.vision.features_per_tile)
        assert len(images.tiles) == count, "a grid has as many tiles as places"
        return ids, images

    @property
    def _filler(self) -> int:
        known = self.image_id
        return self.tokenizer.eod if known is None or known >= self.tokenizer.vocab_size else known

    def _parts(self, text: str, *, whole: bool) -> list[list[int]]:
        """Ids between the marks of a text."""
        encode = self.tokenizer.tokenize_batch if whole else self.tokenizer.tokenize_parts
        if self._token is None:  # the tokenizer knows no mark, and tokenizes what is between
            first, *others = text.split(self.marker)
            return [encode([first])[0] if first or whole else [], *map(self._part, others)]
        parts = list[list[int]]([[]])
        for token in encode([text])[0]:
            if token == self.image_id:
                parts.append([])
            else:
                parts[-1].append(token)
        return parts

    def _part(self, text: str) -> list[int]:
        return self.tokenizer.tokenize_parts([text])[0] if text else []
