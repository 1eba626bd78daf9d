"""Vision-language models made of a language model and a published encoder; only the projector between them is new."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.vision import VisionConfig
from megatron.core.conversion.companions import TOKENIZER_FILES, tokenizer_of
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.huggingface.reading import read_config, tensors_in
from megatron.core.conversion.portable import LazyTensor, PortableModel, parameters_of
from megatron.core.conversion.proof import TOLERANCE, ProofError
from megatron.core.conversion.tables import matches_of, to_ours
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.registry import with_all_groups
from megatron.core.models.vlm.config import VLMConfig
from megatron.core.models.vlm.huggingface.processing import usual_processing
from megatron.core.models.vlm.huggingface.vision import DEFAULTS, KINDS, ROWS, encoder_of, read_vision
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import derive_seed
from megatron.core.parallel.sharding import Sharding
from megatron.core.vision.encoder import VisionEncoder
from megatron.errors import CheckpointError

_WHOLE = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
_BEHIND = ("text_model.", "visual_projection.", "text_projection.", "logit_scale", "logit_bias", "vision_model.head.")
_MARK = "<image>"
_DEVIATION = 0.02


def assembled(text: PortableModel, folder: Path, *, image_token_id: int | None, seed: int) -> PortableModel:
    """The language model ``text`` behind the encoder in the Hugging Face ``folder``, of CLIP or SigLIP.

    The projector, two matrices, has random weights that ``seed`` determines. CLIP's last layer and the norm behind
    SigLIP's are left out, as in LLaVA. ``image_token_id``: the id at places of images; unless given ``<image>``'s.
    Raises CheckpointError for what is no such encoder, for a text model of another kind, and without an id.
    """
    if not any(isinstance(each, GPTConfig) for each in text.groups):
        raise CheckpointError(
            "--load holds another model than a decoder that reads only text: give the checkpoint or folder of one"
        )
    vision = encoder_in(folder)
    marked = _mark_of(text) if image_token_id is None else image_token_id
    if marked is None or not marked < (text.model.vocab_size or 0):
        has = f"has ids 0 to {(text.model.vocab_size or 0) - 1}"
        found = f"the tokenizer has no {_MARK}" if marked is None else f"--image-token-id is {marked}"
        raise CheckpointError(
            f"{found}, and the model {has}: give --image-token-id, the id of a token that texts never use"
        )
    others = (each for each in text.groups if not isinstance(each, GPTConfig | VLMConfig | VisionConfig))
    groups = with_all_groups((VLMConfig(image_token_id=marked), vision, *others))
    groups = tuple(
        each.resolved(text.model, (text.model.num_layers,)) if isinstance(each, VisionConfig) else each
        for each in groups
    )
    parameters, dtype = parameters_of(text.model, groups), text.dtype
    tensors = {**text.tensors, **_encoder_tensors(folder, vision, parameters, dtype)}
    for name, sharding in parameters.items():
        if name.startswith("vision_projection."):
            tensors[name] = _new(name, sharding, dtype, seed)
    along = {name: path for name, path in text.companions.items() if name in TOKENIZER_FILES}
    note = (
        "note: the projector between encoder and language model has random weights: train it first, alone "
        "(--freeze-LM --freeze-ViT)"
    )
    return dataclasses.replace(text, groups=groups, tensors=tensors, companions=along, notes=(*text.notes, note))


def encoder_in(folder: Path) -> VisionConfig:
    """Settings of the encoder in a folder of a CLIP or SigLIP, whole or without its text part."""
    config = read_config(folder)
    model_type = str(config.get("model_type"))
    inside: dict[str, Any] = config
    if model_type in _WHOLE:
        inside = {"model_type": _WHOLE[model_type], **(config.get("vision_config") or {})}
    if (kind := str(inside.get("model_type"))) not in _WHOLE.values():
        raise CheckpointError(f"--vision-load {folder} is a {model_type}: encoders are those of a clip or siglip here")
    fields = read_vision(ConfigReader(inside, DEFAULTS[kind], str(folder / "config.json"), kinds=KINDS))
    is_clip = fields["vision_model_type"] == "clip"
    return VisionConfig(
        **{
            **fields,
            **usual_processing(fields),
            "vision_num_layers": fields["vision_num_layers"] - is_clip,
            "vision_final_norm": is_clip,
            "vision_class_token": not is_clip,
        }
    )


def _mark_of(text: PortableModel) -> int | None:
    tokenizer = tokenizer_of(text.tokenizer)
    if tokenizer is None or tokenizer.name == "NullTokenizer":
        return None
    ids = tokenizer.tokenize_parts([_MARK])[0]
    return ids[0] if len(ids) == 1 else None


def _encoder_tensors(
    folder: Path, vision: VisionConfig, parameters: dict[str, Sharding], dtype: torch.dtype
) -> dict[str, LazyTensor]:
    own = {name: each for name, each in parameters.items() if name.startswith("vision_model.")}
    theirs = {
        name if name.startswith(("vision_model.", *_BEHIND)) else f"vision_model.{name}": tensor
        for name, tensor in tensors_in(folder).items()
    }
    encoder, kind = encoder_of(vision), str(vision.vision_model_type)
    found = matches_of(own, ROWS[kind](vision, prefix="vision_model."), encoder, where=str(folder))
    is_clip = vision.vision_model_type == "clip"
    left_out = (*_BEHIND, *([f"vision_model.encoder.layers.{vision.vision_num_layers}."] if is_clip else []))

    def ignored(name: str) -> bool:
        return name.startswith(left_out) or name.endswith(".position_ids")

    made = to_ours(found, theirs, encoder, where=str(folder), ignored=ignored)
    return {name: _in_type(tensor, dtype) for name, tensor in made.items()}


def _in_type(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(tensor.shape, dtype, lambda: tensor.make().to(dtype))


def _new(name: str, sharding: Sharding, dtype: torch.dtype, seed: int) -> LazyTensor:
    """A weight with normal values, a bias of zeros."""

    def make() -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(sharding.shape, dtype=dtype)
        generator = torch.Generator().manual_seed(derive_seed(seed, name))
        return torch.randn(sharding.shape, generator=generator).mul_(_DEVIATION).to(dtype)

    return LazyTensor(tuple(sharding.shape), dtype, make)


@torch.no_grad()
def features_differ(made: PortableModel, folder: Path) -> float:
    """The largest difference between features here and transformers', in fp32, as a part of the largest feature.

    Raises ProofError where it is more than rounding explains.
    """
    import transformers

    vision = VisionConfig.among(made.groups)
    ours = VisionEncoder(vision, vision.encoder(made.model), ModelContext.single()).eval()
    for name, parameter in ours.named_parameters():
        parameter.copy_(made.tensors[f"vision_model.{name}"].make().float())
    model = transformers.CLIPVisionModel if vision.vision_model_type == "clip" else transformers.SiglipVisionModel
    load: Any = model.from_pretrained
    theirs = load(folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True).eval()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.to(made.dtype).float()
    pixels = torch.sin(torch.arange(3 * vision.img_h * vision.img_w) * 0.7919).view(1, 3, vision.img_h, vision.img_w)
    states = theirs(pixel_values=pixels, output_hidden_states=True).hidden_states
    wanted = states[vision.vision_num_layers]
    difference = float((ours(pixels).transpose(0, 1) - wanted).abs().max() / wanted.abs().max())
    if not difference <= TOLERANCE:
        raise ProofError(
            f"the encoder's features differ by {difference:.2e} of the largest from those of transformers; nothing was "
            "written; please report the source"
        )
    return difference
