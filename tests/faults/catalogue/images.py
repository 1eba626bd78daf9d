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
    Fault(
        "image_of_the_document_before",
        "megatron/core/models/vlm/image_text.py",
        old="            for image in self._images.of_document(self._first + within):\n                tiles",
        new="            for image in self._images.of_document(self._first):\n                tiles",
        suffers="Texts are trained on beside the images of others, and nothing tells.",
        first=("unit/tools/test_preprocess_images.py::stand_where_their_marks",),
    ),
    Fault(
        "images_leave_their_folder",
        "megatron/core/images/files.py",
        old="        if os.path.commonpath([real, self._root]) != self._root:\n",
        new="        if False:\n",
        suffers="Data of strangers name any file of the machine, and its picture is trained on.",
        first=("unit/tools/test_preprocess_images.py::cannot_be_read_is_named",),
    ),
    Fault(
        "changed_images_pass",
        "megatron/core/datasets/image_table.py",
        old="            if zlib.crc32(content) != image.crc32:\n",
        new="            if len(content) != image.bytes:\n",
        suffers="A resumed run goes on with other pictures than it began with.",
        first=("unit/tools/test_preprocess_images.py::has_changed_is_noticed",),
    ),
    Fault(
        "images_cut_at_the_end",
        "megatron/core/models/vlm/image_text.py",
        old="    left_out = has_images & (needed > length)\n",
        new="    left_out = has_images & (needed > length + vision.features_per_tile)\n",
        suffers="The last image of a long document loses features, or the run stops at it.",
        first=("unit/tools/test_preprocess_images.py::no_image_is_cut",),
    ),
    Fault(
        "tiles_column_by_column",
        "megatron/core/images/tiles.py",
        old="        tiles[:, :, channel] = grid.transpose(0, 2, 1, 3)\n",
        new="        tiles[:, :, channel] = grid.transpose(0, 2, 1, 3)[::-1]\n",
        suffers="Rows of tiles stand in another order than their tags and the model's training say.",
        first=("unit/images/test_tiles.py::row_by_row",),
    ),
)
