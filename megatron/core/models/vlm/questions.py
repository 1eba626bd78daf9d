"""What a vision-language model is asked in a proof: a text with an image, and one without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.conversion.megatron_lm.forward import MegatronLMModel
from megatron.core.conversion.questions import Answer
from megatron.core.images.expansion import feature_runs
from megatron.core.images.tiles import grid_of
from megatron.core.models.vlm.ahead import ahead_in_prefixes, ahead_in_tiles
from megatron.core.models.vlm.config import VLMConfig
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.errors import CheckpointError

_WORDS_BEFORE, _WORDS_AFTER = 5, 11


@dataclass(frozen=True)
class ImageQuestion:
    """What follows each of ``tokens`` ``[b, s]``, where ``places`` ``[b, s]`` are those of ``images``?

    ``sizes`` ``[n, 2]``: heights and widths of the pictures, for models whose tiles depend on them. ``ahead``: see
    ``LayerInputs``; ``kinds`` ``[b, s]``: transformers' ``token_type_ids``, which say the same.
    """

    tokens: Tensor
    places: Tensor
    images: Tensor
    sizes: Tensor | None = None
    ahead: Tensor | None = None
    kinds: Tensor | None = None
    auto_class = "AutoModelForImageTextToText"

    def ask_theirs(self, model: Any) -> Answer:
        """Logits of every position."""
        more: dict[str, Any] = {"pixel_values": self.images}
        if self.sizes is not None:
            more = {
                "pixel_values": self.images.view(len(self.sizes), -1, *self.images.shape[1:]),
                "image_sizes": self.sizes,
            }
        if self.kinds is not None:
            more["token_type_ids"] = self.kinds
        return {"words": model(input_ids=self.tokens, use_cache=False, **more).logits}

    def ask_megatron_lm(self, model: MegatronLMModel) -> Answer:
        """Refuse: such files of Megatron-LM are not read."""
        raise CheckpointError("Megatron-LM's vision-language models are not read")

    def ask_ours(self, stage: nn.Module, handed: Mapping[str, Tensor]) -> Answer:
        """Logits of every position from our model; before the last stage, its hidden states."""
        output: VocabularyOutput | Tensor = stage(
            self.tokens, images=self.images, image_places=self.places, ahead=self.ahead, **handed
        )
        return {"words": output.logits()} if isinstance(output, VocabularyOutput) else {"hidden": output}


def question_for(model: ModelConfig, groups: Sequence[object]) -> ImageQuestion:
    """The question for this model: an image among words, and as many words. Where images are cut into ``--image-grids``
    it is one that is between bars.
    """
    assert model.vocab_size is not None, "a model has a vocabulary"
    family, vision = VLMConfig.among(groups), VisionConfig.among(groups)
    width, height = vision.img_w, vision.img_h
    if vision.image_grids:
        rows, columns = vision.grids[0]
        width, height = -(-columns * width * 2 // 3), rows * height
    grid = grid_of(width, height, vision)
    features = torch.from_numpy(np.concatenate(feature_runs(grid, vision)))
    length = _WORDS_BEFORE + len(features) + _WORDS_AFTER
    marked = model.vocab_size - 1 if family.image_token_id is None else family.image_token_id
    tokens = (torch.arange(2 * length).view(2, length) * 7919 + 13) % model.vocab_size
    tokens[tokens == marked] = (marked + 1) % model.vocab_size
    places = torch.full_like(tokens, -1)
    places[0, _WORDS_BEFORE : _WORDS_BEFORE + len(features)] = features
    tokens[places != -1] = marked
    pixels = torch.arange(grid.tiles * 3 * vision.img_h * vision.img_w, dtype=torch.float64)
    images = torch.sin(pixels * 0.7919).float().view(grid.tiles, 3, vision.img_h, vision.img_w)
    sizes = torch.tensor([[height, width]]) if vision.image_grids else None
    ahead, kinds = _ahead(places, vision)
    return ImageQuestion(tokens, places, images, sizes, ahead, kinds)


def _ahead(places: Tensor, vision: VisionConfig) -> tuple[Tensor | None, Tensor | None]:
    """What ``places`` see ahead of them, here and as ``token_type_ids``: a prompt ends in the middle of the words."""
    if vision.image_attention == "bidirectional":
        return ahead_in_tiles(places, vision.features_per_tile), (places >= 0).long()
    if vision.image_attention == "prefix":
        is_answer = (torch.arange(places.shape[1]) >= places.shape[1] - _WORDS_AFTER // 2).long().expand_as(places)
        return ahead_in_prefixes(is_answer.roll(-1, 1), None), is_answer
    return None, None
