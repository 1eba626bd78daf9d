"""Faults in models that read images."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "gradients_of_other_places_forgotten",
        "megatron/core/models/vlm/model.py",
        old="        if self._context.splits_sequence:\n            features = enter(",
        new="        if False:\n            features = enter(",
        suffers="With sequence parallelism encoder and projector learn from a part of the places of each image.",
        first=("equivalence/test_images.py::clip, llama-cp2 tp2 sp",),
    ),
    Fault(
        "images_of_the_first_sample",
        "megatron/core/models/vlm/train_spec.py",
        old="torch.where(places >= 0, places + before.unsqueeze(1), -1)",
        new="places",
        suffers="Every text of a microbatch sees the images of its first sample.",
        first=("unit/models/vlm/test_samples.py::counted_over_a_batch",),
    ),
    Fault(
        "last_patch_for_the_class_token",
        "megatron/core/vision/encoder.py",
        old="            hidden = hidden[1:]\n",
        new="            hidden = hidden[:-1]\n",
        suffers="Each feature stands one place late, and the class token where the first patch should.",
        first=("unit/conversion/test_llava.py::logits_and_gradients",),
    ),
    Fault(
        "images_are_announced",
        "megatron/core/models/vlm/fields.py",
        old="    mask[:-1][places[1:] >= 0] = 0\n",
        new="",
        suffers="The model learns to say the id that stands at the places of images.",
        first=("unit/models/vlm/test_samples.py::announce",),
    ),
)
