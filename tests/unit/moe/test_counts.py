"""The tokens that losses of routers are means over, of families with padding."""

from __future__ import annotations

import torch

from megatron.core.models.bert.train_spec import BertSpec
from megatron.core.models.t5.train_spec import T5Spec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.pipeline_parallel.chunk import Microbatch

ALONE = ParallelContext.single()


def test_each_stack_has_its_own_count() -> None:
    """The losses of a decoder's routers were means over the encoder's tokens, at every layout alike."""
    tensors = {
        "loss_mask": torch.ones(2, 4),
        "enc_mask": torch.ones(2, 8),
        "encoder_text_mask": torch.arange(16).view(2, 8) < 11,
        "decoder_text_mask": torch.arange(8).view(2, 4) < 5,
    }
    counts = T5Spec().counts(Microbatch(tensors, StreamKey(0)), ALONE)
    found = [counts[name].item() for name in ("load_balancing_loss", "decoder_load_balancing_loss", "lm loss")]
    assert found == [11, 5, 8]
    counted = {name: tensors[name] for name in ("loss_mask", "enc_mask")}  # --moe-count-padding
    counts = T5Spec().counts(Microbatch(counted, StreamKey(0)), ALONE)
    assert [counts["z_loss"].item(), counts["decoder_z_loss"].item()] == [16, 8]


def test_padding_of_a_bert_is_not_counted() -> None:
    """A batch of short texts had losses of routers near zero."""
    tensors = {"loss_mask": torch.ones(2, 4), "text_mask": torch.arange(8).view(2, 4) < 3}
    assert BertSpec().counts(Microbatch(tensors, StreamKey(0)), ALONE)["seq_load_balancing_loss"] == 3
