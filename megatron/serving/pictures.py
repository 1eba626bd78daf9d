"""Images in conversations: data URLs alone, within limits, and decoded in a process of their own."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.config.flags import flags_of
from megatron.config.vision import VisionConfig
from megatron.core.images.expansion import MARKER
from megatron.core.images.files import DATA_URL
from megatron.core.images.prompts import CutImage
from megatron.core.images.tiles import Grid
from megatron.core.inference.image_prompts import ImagePrompts
from megatron.serving.bounded_process import ProcessPool
from megatron.serving.errors import ApiError
from megatron.small_files import shown


@dataclass(eq=False)
class Pictures:
    """Reads images of requests for a model. ``most``: of a request; ``most_pixels``: of an image. ``seconds``: for
    decoding one.
    """

    prompts: ImagePrompts
    most: int = 16
    most_pixels: int = 1 << 25
    seconds: float = 10.0
    _pool: ProcessPool | None = field(default=None, repr=False)

    async def read(self, urls: Mapping[str, str]) -> list[CutImage]:
        """Images by their places in a request. Raises ApiError for the first that can't be read."""
        if len(urls) > self.most:
            raise ApiError(
                f"the conversation has {len(urls)} images, and at most {self.most} are read: leave some out",
                param="messages",
            )
        return [await self._decoded(place, url) for place, url in urls.items()]

    async def _decoded(self, place: str, url: str) -> CutImage:
        if not url:
            raise ApiError(f"{place} has no image_url, an object with a url", param="messages")
        begun = DATA_URL.match(url)
        if begun is None:
            raise ApiError(
                f"{place}.image_url.url is {shown(url[:80])}: images come as data URLs "
                "(data:image/png;base64,...) alone, since this server opens no addresses and no files",
                param="messages",
            )
        if self._pool is None:  # here, since a pool belongs to the process and the event loop that use it
            self._pool = ProcessPool(
                "megatron.serving.image_process", "image", seconds=self.seconds, first=self._settings
            )
        answer = await self._pool.ask({"data": url[begun.end() :]})
        if "error" in answer:
            raise ApiError(f"the image of {place} {answer['error']}", param="messages")
        tiles = np.frombuffer(base64.b64decode(answer["tiles"]), np.uint8).reshape(answer["shape"])
        return CutImage(tiles, Grid(*answer["grid"]))

    def _settings(self) -> dict[str, Any]:
        vision = self.prompts.vision
        fields = {spec.field: getattr(vision, spec.field) for spec in flags_of(VisionConfig)}
        return {"vision": fields, "most_pixels": self.most_pixels}

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await self._pool.close()


def without_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """The messages with a mark in place of each image, and the images' URLs by their places."""
    found, urls = list[Mapping[str, Any]](), dict[str, str]()
    for number, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = list[Any]()
            for index, part in enumerate(content):
                if isinstance(part, Mapping) and part.get("type") == "image_url":
                    place = f"messages[{number}].content[{index}]"
                    urls[place] = (part.get("image_url") or {"url": ""})["url"]
                    parts.append({"type": "text", "text": f"{MARKER}\n"})
                else:
                    parts.append(part)
            message = {**message, "content": parts}
        found.append(message)
    return found, urls
