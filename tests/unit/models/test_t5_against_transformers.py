"""T5 computes what transformers' T5ForConditionalGeneration computes, forward and backward, from the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.model import ModelConfig
from megatron.core.models.t5.config import T5Config
from megatron.core.models.t5.model import T5Model
from megatron.core.ops.relative_positions import relative_buckets
from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.output_layer import VocabularyOutput
from tests.harness.closed_forms import t5_flops_per_sample

transformers = pytest.importorskip("transformers", reason="parity needs the dev extra's transformers")

HIDDEN, HEADS, HEAD_WIDTH, INNER, VOCABULARY = 48, 4, 10, 80, 101
LAYERS, DECODER_LAYERS, LENGTH, DECODER_LENGTH = 2, 3, 40, 24
BUCKETS, DISTANCE = 8, 20

ORIGINAL: dict[str, Any] = {"activation": "relu"}
VERSION_1_1: dict[str, Any] = {"activation": "geglu_tanh", "untie_embeddings_and_output_weights": True}
THEIRS: dict[str, dict[str, Any]] = {
    "original": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def architecture(kind: str) -> ModelConfig:
    """A T5's of the test's size."""
    return ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        kv_channels=HEAD_WIDTH,
        ffn_hidden_size=INNER,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        position_embedding_type="relative",
        softmax_scale=1.0,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **(ORIGINAL if kind == "original" else VERSION_1_1),
    )


def ours(kind: str) -> T5Model:
    """A T5 of the test's size in fp64."""
    t5 = T5Config(
        decoder_seq_length=DECODER_LENGTH,
        decoder_num_layers=DECODER_LAYERS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=DISTANCE,
        scale_output=kind == "original",
    )
    return T5Model(architecture(kind), t5, ParallelContext.single(dtype=torch.float64), seed=1)


def norm_in_fp64(self: Any, x: Tensor) -> Tensor:
    """Transformers' norm, without its rounding of the variance to fp32."""
    out: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
    return out


@pytest.fixture(autouse=True)
def nothing_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare to fp64's rounding."""
    monkeypatch.setattr(transformers.models.t5.modeling_t5.T5LayerNorm, "forward", norm_in_fp64)


def reference_model(kind: str) -> Any:
    """A random T5 of transformers, with weights large enough that a mistake shows."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=HEAD_WIDTH, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS,
        num_decoder_layers=DECODER_LAYERS, relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=DISTANCE, dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=1,
        attn_implementation="eager",
        **THEIRS[kind],
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    if kind == "v1.1":  # whatever the settings say, transformers 5 makes a model with one matrix
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "layer_norm" in name else 0.0, 0.3)
    return model


def weights(reference: Any, kind: str) -> dict[str, Tensor]:
    """The reference's tensors under our names."""
    source = {name: tensor.detach() for name, tensor in reference.named_parameters()}
    found = {"embedding.word_embeddings.weight": source["shared.weight"]}
    if kind == "v1.1":
        found["output_layer.weight"] = source["lm_head.weight"]
    for stack, layers in (("encoder", LAYERS), ("decoder", DECODER_LAYERS)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found[f"{stack}_positions.weight"] = source[bias]
        found[f"{stack}.final_layernorm.weight"] = source[f"{stack}.final_layer_norm.weight"]
        for n in range(layers):
            here, there = f"{stack}.layers.{n}", f"{stack}.block.{n}.layer"
            mlp = 1 if stack == "encoder" else 2
            norms = {"input_layernorm": 0, "pre_mlp_layernorm": mlp}
            found[f"{here}.self_attention.linear_qkv.weight"] = fused(source, f"{there}.0.SelfAttention", "qkv")
            found[f"{here}.self_attention.linear_proj.weight"] = source[f"{there}.0.SelfAttention.o.weight"]
            if stack == "decoder":
                norms["pre_cross_attn_layernorm"] = 1
                cross = f"{there}.1.EncDecAttention"
                found[f"{here}.cross_attention.linear_q.weight"] = source[f"{cross}.q.weight"]
                found[f"{here}.cross_attention.linear_kv.weight"] = fused(source, cross, "kv")
                found[f"{here}.cross_attention.linear_proj.weight"] = source[f"{cross}.o.weight"]
            inner = ("wi",) if kind == "original" else ("wi_0", "wi_1")
            first = [source[f"{there}.{mlp}.DenseReluDense.{name}.weight"] for name in inner]
            found[f"{here}.mlp.linear_fc1.weight"] = torch.cat(first)
            found[f"{here}.mlp.linear_fc2.weight"] = source[f"{there}.{mlp}.DenseReluDense.wo.weight"]
            found |= {f"{here}.{norm}.weight": source[f"{there}.{m}.layer_norm.weight"] for norm, m in norms.items()}
    return found


def fused(source: dict[str, Tensor], prefix: str, names: str) -> Tensor:
    """Several matrices as one, head by head."""
    parts = [source[f"{prefix}.{name}.weight"].view(HEADS, HEAD_WIDTH, HIDDEN) for name in names]
    return torch.cat(parts, dim=1).flatten(0, 1)


def batch() -> dict[str, Tensor]:
    """Three samples, two of them padded, in encoder and decoder."""
    generator = torch.Generator().manual_seed(5)
    encoder = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)
    decoder = torch.randint(1, VOCABULARY, (3, DECODER_LENGTH), generator=generator)
    labels = torch.randint(1, VOCABULARY, (3, DECODER_LENGTH), generator=generator)
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13], [31]])
    answered = torch.arange(DECODER_LENGTH) < torch.tensor([[9], [DECODER_LENGTH], [15]])
    return {"encoder": encoder, "decoder": decoder, "labels": labels, "real": real, "answered": answered}


@pytest.mark.parametrize("kind", THEIRS)
def test_forward_loss_and_gradients(kind: str) -> None:
    """Embeddings, positions, both attentions, padding, norms, activations, output and loss are those of T5, to fp64's
    rounding.
    """
    reference, model, given = reference_model(kind), ours(kind), batch()
    source = weights(reference, kind)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == source.keys()
    with torch.no_grad():
        for name, tensor in source.items():
            parameters[name][: tensor.shape[0]].copy_(tensor)
    answered = given["answered"]
    expected = reference(
        input_ids=given["encoder"],
        attention_mask=given["real"].long(),
        decoder_input_ids=given["decoder"],
        decoder_attention_mask=answered.long(),
        labels=given["labels"].masked_fill(~answered, -100),
    )
    output = model(given["encoder"], given["decoder"], attention_mask=given["real"])
    assert isinstance(output, VocabularyOutput)
    torch.testing.assert_close(output.logits()[answered], expected.logits[answered], rtol=0, atol=1e-9)

    mask = answered.double()
    loss = output.cross_entropy(given["labels"], mask) / mask.sum()
    assert loss.item() == pytest.approx(expected.loss.item(), abs=1e-9)
    torch.autograd.backward((loss, expected.loss))
    for parameter in reference.parameters():
        parameter.data = parameter.grad  # so that the weight mapping maps gradients
    for name, gradient in weights(reference, kind).items():
        found = parameters[name].grad
        assert found is not None
        torch.testing.assert_close(found[: gradient.shape[0]], gradient, rtol=0, atol=1e-9, msg=name)


def test_flops() -> None:
    """What transformers' products come to, but for the half of the decoder's square that nobody needs."""
    reference, given = reference_model("v1.1"), batch()
    with FlopCounterMode(display=False) as counter:
        reference(input_ids=given["encoder"][:1], decoder_input_ids=given["decoder"][:1])
    config = dataclasses.replace(architecture("v1.1"), make_vocab_size_divisible_by=1)
    found = t5_flops_per_sample(config, LENGTH, decoder_num_layers=DECODER_LAYERS, decoder_seq_length=DECODER_LENGTH)
    unneeded = 3 * 2 * DECODER_LAYERS * HEADS * HEAD_WIDTH * DECODER_LENGTH**2
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
