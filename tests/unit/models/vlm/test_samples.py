"""Samples of a vision-language model: features over a batch, no loss where an image follows, frozen parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.config.vision import VisionConfig
from megatron.core.inference.runner import EncoderDecoder, GenerativeModel
from megatron.core.models.registry import FAMILIES
from megatron.core.models.vlm.ahead import ahead_in_prefixes, ahead_in_tiles
from megatron.core.models.vlm.fields import IMAGES, PLACES, with_images
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import ConfigError
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error

VLM = FAMILIES["vlm"]
CLIP = (
    "--mock-data --num-layers 2 --vision-model-type clip --vision-num-layers 1 --vision-hidden-size 8 "
    "--vision-num-attention-heads 2 --vision-ffn-hidden-size 8 --img-h 8 --img-w 8 --patch-dim 4"
)


def test_features_are_counted_over_a_batch() -> None:
    """A sample that counted its own tiles would see the first sample's image."""
    run = tiny_config(CLIP, family=VLM)
    assert run.part(VisionConfig).features_per_tile == 5  # four patches and the class token
    batch = {
        IMAGES: torch.zeros(3, 3, 8, 8, dtype=torch.uint8),
        f"{IMAGES}_rows": torch.tensor([2, 0, 1]),
        PLACES: torch.tensor([[0, -1, 9], [-1, -1, -1], [-1, 4, 0]]),
    }
    found = VLM.train_spec.add_derived_fields(batch, run)[PLACES]
    assert found.tolist() == [[0, -1, 9], [-1, -1, -1], [-1, 14, 10]]


def test_no_token_learns_to_announce_an_image() -> None:
    """A place of an image has an id of no meaning, which the loss of the token before it would teach. The last place of
    an image predicts the word behind it.
    """
    sample = {name: np.arange(5) for name in ("tokens", "labels")} | {"loss_mask": np.ones(5, np.float32)}
    places = np.array([-1, 0, 1, -1, -1])
    found = with_images(sample, np.zeros((1, 3, 4, 4), np.uint8), places)
    assert found["loss_mask"].tolist() == [0, 0, 1, 1, 1]
    assert sample["loss_mask"].tolist() == [1] * 5


def test_each_part_is_frozen_by_its_flag() -> None:
    """The two stages of training such models differ in what is trained: the projector first, then more."""
    run = tiny_config(f"{CLIP} --freeze-LM --freeze-ViT", family=VLM)
    trained = run.optimizer.trained
    assert "vision_projection.linear_fc1.weight" in trained
    others = ("vision_model.encoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight")
    assert not any(name in trained for name in (*others, "decoder.layers.0.mlp.linear_fc1.weight"))
    run = tiny_config(f"{CLIP} --freeze-vision-projection --freeze embedding.*", family=VLM)
    assert [name in run.optimizer.trained for name in (*others, "vision_projection.linear_fc1.weight")] == [
        True,
        False,
        False,
    ]


MISTAKES = {
    "no encoder": ("--mock-data --num-layers 2", ("--vision-model-type",)),
    "nothing to train": (f"{CLIP} --freeze-LM --freeze-ViT --freeze-vision-projection", ("leave one of them out",)),
    "a patch and a half": (f"{CLIP} --img-w 10", ("--img-w 10", "8 or 12")),
    "odd rows of patches to join": (f"{CLIP} --pixel-shuffle --img-h 12", ("--pixel-shuffle", "8 or 16")),
    "heads that divide nothing": (f"{CLIP} --vision-num-attention-heads 3", ("--vision-hidden-size 8",)),
    "no room for an image": (f"{CLIP} --img-h 64 --img-w 64", ("--seq-length", "257")),
    "squares that fill no grid": (
        f"{CLIP} --vision-pool-size 3 --disable-vision-class-token",
        ("--vision-pool-size 3", "2 patches"),
    ),
    "squares with the class token": (f"{CLIP} --vision-pool-size 2", ("--disable-vision-class-token",)),
    "later places in a state": (
        f"{CLIP} --image-attention prefix --hybrid-layer-pattern M* --position-embedding-type none "
        "--mamba-state-dim 4 --mamba-head-dim 8 --mamba-num-groups 1",
        ("--image-attention prefix",),
    ),
    "several future tokens": (f"{CLIP} --mtp-num-layers 1", ("--mtp-num-layers",)),
}


def test_ranks_that_send_keys_see_no_later_places() -> None:
    """They compute causal parts of attention."""
    flags = f"{CLIP} --image-attention bidirectional --context-parallel-size 2 --seq-length 16"
    with expect_error(ConfigError, "--cp-comm-type a2a"):
        tiny_config(flags, family=VLM, ranks=2)
    tiny_config(f"{flags} --cp-comm-type a2a", family=VLM, ranks=2)


def test_what_places_see_ahead_of_them() -> None:
    """A document has a prompt of its own, and an image ends where the next begins."""
    places = torch.tensor([[-1, 0, 1, 2, 3, 4, 5, 6, 7, -1, 8, -2, -1]])
    assert ahead_in_tiles(places, 4).tolist() == [[0, 3, 2, 1, 0, 3, 2, 1, 0, 0, 0, 0, 0]]
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 2, 2]])
    mask = torch.tensor([[0, 0, 1, 0, 1, 1, 0, 1, 0, 0]])
    assert ahead_in_prefixes(mask, documents).tolist() == [[2, 1, 0, 0, 0, 0, 0, 0, 1, 0]]
    assert ahead_in_prefixes(mask, None).tolist() == [[2, 1, 0, 0, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_sizes_that_do_not_fit_are_refused(mistake: str) -> None:
    """Each in one sentence with what would fit, before anything starts."""
    flags, words = MISTAKES[mistake]
    with expect_error(ConfigError, *words):
        tiny_config(flags, family=VLM)


def test_mock_samples_have_none_one_or_two_images() -> None:
    """A run with mock data tries microbatches with images and without."""
    from megatron.training.run.data import offline_splits

    run = tiny_config(f"{CLIP} --seq-length 16", family=VLM)
    splits, _ = offline_splits(run, VLM.train_spec)
    assert splits.train is not None
    samples = [splits.train[number] for number in range(3)]
    assert [len(each[IMAGES]) for each in samples] == [0, 1, 2]
    assert [int((each[PLACES] >= 0).sum()) for each in samples] == [0, 5, 10]
    again = splits.train[2]
    assert all(np.array_equal(again[name], samples[2][name]) for name in again)


def test_layers_of_the_encoder_have_the_name_that_megatron_lm_gives_them() -> None:
    """In other scripts the flag is another word for --num-layers, and would set the depth of the language model."""
    flags = CLIP.replace("--vision-num-layers 1", "--encoder-num-layers 3")
    run = tiny_config(flags, family=VLM)
    assert (run.part(VisionConfig).vision_num_layers, run.model.num_layers) == (3, 2)
    assert tiny_config("--mock-data --encoder-num-layers 3").model.num_layers == 3


def test_texts_are_generated_as_by_a_decoder() -> None:
    """With a method of a name that encoder-decoders have, the server ended in a traceback before its first text."""
    run = tiny_config(CLIP, family=VLM).with_vocab_size(50)
    model = VLM.train_spec.build_model(run.model, run.extra, ModelContext.single(), seed=1)
    assert isinstance(model, GenerativeModel) and not isinstance(model, EncoderDecoder)
