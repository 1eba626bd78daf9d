"""What a BERT makes of masks and padding, and BERTs of transformers for other tests; test_published compares them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.core.models.bert.model import BertModel, BertOutput
from megatron.core.parallel.model_context import ModelContext

transformers = pytest.importorskip("transformers", reason="parity needs the dev extra's transformers")

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY = 2, 48, 4, 24, 101


def config_of_the_original(*, dropout: float = 0.0, **settings: Any) -> ModelConfig:
    """A BERT of the test's size, with the original's arrangement of norms."""
    return ModelConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY,
        attention_dropout=0.0,
        hidden_dropout=dropout,
        norm_epsilon=1e-12,
        activation="gelu",
        apply_residual_connection_post_layernorm=True,
        **settings,
    )


def ours(**settings: Any) -> BertModel:
    """A BERT of the test's size in fp64."""
    return BertModel(config_of_the_original(**settings), ModelContext.single(dtype=torch.float64), seed=1)


def body_weights(reference: Any) -> dict[str, Tensor]:
    """The reference's tensors, but for its heads, under our names: a norm at the end of a layer is the norm at the
    start of the next.
    """
    source = {name: tensor.detach() for name, tensor in reference.named_parameters()}
    found = {
        f"embedding.{mine}_embeddings.weight": source[f"bert.embeddings.{theirs}_embeddings.weight"]
        for mine, theirs in (("word", "word"), ("position", "position"), ("tokentype", "token_type"))
    }
    norms = ["bert.embeddings.LayerNorm", *(f"bert.encoder.layer.{n}.output.LayerNorm" for n in range(LAYERS))]
    mine = [*(f"encoder.layers.{n}.input_layernorm" for n in range(LAYERS)), "encoder.final_layernorm"]
    for kind in ("weight", "bias"):
        found |= {f"{name}.{kind}": source[f"{theirs}.{kind}"] for name, theirs in zip(mine, norms)}
        for n in range(LAYERS):
            here, there = f"encoder.layers.{n}", f"bert.encoder.layer.{n}"
            three = (source[f"{there}.attention.self.{name}.{kind}"] for name in ("query", "key", "value"))
            heads = [part.view(HEADS, -1, *part.shape[1:]) for part in three]
            found[f"{here}.self_attention.linear_qkv.{kind}"] = torch.cat(heads, dim=1).flatten(0, 1)
            for name, target in (
                ("attention.output.dense", "self_attention.linear_proj"),
                ("attention.output.LayerNorm", "pre_mlp_layernorm"),
                ("intermediate.dense", "mlp.linear_fc1"),
                ("output.dense", "mlp.linear_fc2"),
            ):
                found[f"{here}.{target}.{kind}"] = source[f"{there}.{name}.{kind}"]
        found[f"pooler.dense.{kind}"] = source[f"bert.pooler.dense.{kind}"]
    return found


def reference_model(kind: str = "BertForPreTraining", **settings: Any) -> Any:
    """A random BERT of transformers, with weights large enough that a mistake shows."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN, max_position_embeddings=LENGTH, attn_implementation="eager",
        **settings,
    )  # fmt: skip
    model = getattr(transformers, kind)(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "LayerNorm.weight" in name else 0.0, 0.15)
    return model


def batch() -> dict[str, Tensor]:
    """Three samples, two of them padded; some words hidden, one sample without any."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)  # transformers freezes the row of padding
    types = (torch.arange(LENGTH) >= torch.tensor([[9], [4], [15]])).long()
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13], [20]])
    hidden = (torch.rand(3, LENGTH, generator=generator) < 0.3) & real
    hidden[2] = False
    labels = torch.where(hidden, torch.randint(VOCABULARY, (3, LENGTH), generator=generator), -100)
    return {"tokens": tokens, "types": types, "real": real, "labels": labels, "order": torch.tensor([0, 1, 1])}


def load(model: nn.Module, source: dict[str, Tensor]) -> None:
    """Copy logical tensors into the model; every parameter must be named."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == source.keys()
    with torch.no_grad():
        for name, tensor in source.items():
            parameters[name][: tensor.shape[0]].copy_(tensor)


def test_only_weighted_words_are_multiplied_out() -> None:
    """The loss over masked tokens is that over all with weights of zero, also in a batch without any masked token."""
    model, given = ours(), batch()
    labels = given["labels"].clamp(min=-1)

    def loss_and_gradients(mask: Tensor, *, everywhere: bool) -> dict[str, Tensor]:
        model.zero_grad()
        output = model(given["tokens"], given["types"], attention_mask=given["real"])
        assert isinstance(output, BertOutput)
        words = output.words
        loss = (words.cross_entropy if everywhere else words.cross_entropy_where_weighted)(labels, mask)
        torch.autograd.backward(loss)
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        return {"loss": loss.detach(), **gradients}

    for mask in ((labels >= 0).double(), torch.zeros_like(labels).double()):
        some, every = (loss_and_gradients(mask, everywhere=everywhere) for everywhere in (False, True))
        torch.testing.assert_close(some, every)


@pytest.mark.parametrize("residual_behind_norm", [False, True])
def test_padding_changes_nothing(residual_behind_norm: bool) -> None:
    """A sample's logits would depend on how long the others of its batch are."""
    config = ModelConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, max_position_embeddings=LENGTH,
        vocab_size=VOCABULARY, apply_residual_connection_post_layernorm=residual_behind_norm,
    )  # fmt: skip
    model = BertModel(config, ModelContext.single(dtype=torch.float64), seed=1, binary_head=False).eval()
    given, length = batch(), 13
    padded = model(given["tokens"][1:2], given["types"][1:2], attention_mask=given["real"][1:2])
    short = model(given["tokens"][1:2, :length], given["types"][1:2, :length])
    assert isinstance(padded, BertOutput) and isinstance(short, BertOutput)
    assert padded.order is None
    torch.testing.assert_close(padded.words.logits()[:, :length], short.words.logits())
