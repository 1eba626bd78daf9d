"""T5's FLOPs and buckets of distances are those of transformers; test_published compares what the models compute."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers", reason="parity needs the dev extra's transformers")

from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.ops.relative_positions import relative_buckets
from tests.harness.closed_forms import t5_flops_per_sample
from tests.harness.published import DECODER_LENGTH, LENGTH, PublishedBatch, random_model
from tests.published import MODELS


def test_flops() -> None:
    """What transformers' products come to, but for the half of the decoder's square that nobody needs."""
    reference = random_model(*MODELS["t5 v1.1"])
    portable = from_transformers(reference)
    inputs = PublishedBatch.of(portable).inputs
    with FlopCounterMode(display=False) as counter:
        reference(input_ids=inputs["input_ids"][:1], decoder_input_ids=inputs["decoder_input_ids"][:1])
    config = dataclasses.replace(portable.model, make_vocab_size_divisible_by=1)
    found = t5_flops_per_sample(config, LENGTH, decoder_num_layers=3, decoder_seq_length=DECODER_LENGTH)
    unneeded = 3 * 2 * 3 * config.num_attention_heads * config.kv_channels * DECODER_LENGTH**2
    assert found == 3 * counter.get_total_flops() - unneeded


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (32, 1000), (6, 7), (64, 100)])
def test_buckets(bidirectional: bool, buckets: int, distance: int) -> None:
    """A distance in the bucket beside would be another model, and only a little worse."""
    from transformers.models.t5.modeling_t5 import T5Attention

    queries, keys = torch.arange(700, 705), torch.arange(1400)
    expected = T5Attention._relative_position_bucket(  # type: ignore[no-untyped-call]
        keys.unsqueeze(0) - queries.unsqueeze(1), bidirectional, buckets, distance
    )
    found = relative_buckets(queries, keys, buckets=buckets, max_distance=distance, bidirectional=bidirectional)
    assert torch.equal(found, expected)
