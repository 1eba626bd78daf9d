"""The process in which images of requests are decoded, since only a process can be stopped."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.config.vision import VisionConfig
from megatron.core.images.decoding import decoded
from megatron.core.images.prompts import CutImage
from megatron.errors import DataError
from megatron.serving.bounded_process import answer_lines

_MOST_MEMORY = 3 << 30


def started(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that decodes the image of a question. ``first``: fields of ``vision``, and ``most_pixels``."""
    vision, most_pixels = VisionConfig(**first["vision"]), int(first["most_pixels"])

    def answered(asked: dict[str, Any]) -> dict[str, Any]:
        """Tiles of the image in ``data``, base64, and how they lie. Raises DataError."""
        try:
            content = base64.b64decode(asked["data"], validate=True)
        except (binascii.Error, ValueError):
            raise DataError("is no base64: send data:image/png;base64, and the file's bytes in base64") from None
        cut = CutImage.of(decoded(content, most_pixels=most_pixels), vision)
        grid = cut.grid
        return {
            "tiles": base64.b64encode(cut.tiles.tobytes()).decode(),
            "shape": list(cut.tiles.shape),
            "grid": dataclasses.astuple(grid),
        }

    return answered


if __name__ == "__main__":
    answer_lines(started, most_memory=_MOST_MEMORY)
