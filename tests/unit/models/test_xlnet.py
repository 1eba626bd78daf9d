"""examples/xlnet: which tokens are predicted and seen, and logits and gradients of transformers' own model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.conversion.huggingface.formats import model_from_config
from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import load_weights
from megatron.core.conversion.proof import compare
from megatron.core.conversion.questions import question_for
from megatron.core.models import registry
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import CheckpointError
from tests.end_to_end.commands import ROOT
from tests.harness.runs import tiny_config
from tests.harness.sentences import expect_error


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> registry.Family:
    """The family, which this process forgets after the test."""
    monkeypatch.syspath_prepend(ROOT / "examples/xlnet")
    found: registry.Family = import_module("xlnet").FAMILY
    monkeypatch.setitem(registry._REGISTERED, "xlnet", found)
    return found


FLAGS = (
    "--seq-length 12 --mem-len 8 --num-predict 4 --mock-data --position-embedding-type relative --train-iters 1 "
    "--global-batch-size 2"
)


def samples(family: registry.Family, count: int, flags: str = "") -> list[dict[str, np.ndarray[Any, Any]]]:
    """The first samples of a run."""
    config = tiny_config(f"{FLAGS} {flags}", family=family)
    data = import_module("xlnet.data").SegmentDatasets(config.with_vocab_size(51), _tokenizer())
    build = import_module("megatron.core.datasets.build")
    part = build.Part(data.mock(), "train", range(20), copy=0)
    dataset = data.dataset(part, None, remedy="more data")
    return [dataset[index] for index in range(count)]


def _tokenizer() -> Any:
    return import_module("tests.unit.datasets.conftest").FakeTokenizer()


def test_the_last_tokens_of_an_order_are_predicted(family: registry.Family) -> None:
    """A predicted token that others see as given, or an end of a document among them, would spoil the loss unseen."""
    found = samples(family, 30)
    for sample in found:
        assert sample["tokens"].shape == sample["ranks"].shape == (2, 12)
        for tokens, ranks, places, labels, mask in zip(
            *(sample[name] for name in ("tokens", "ranks", "places", "labels", "loss_mask"))
        ):
            assert ranks[places].tolist() == [0, 1, 2, 3]
            assert (ranks == -1).sum() == 8
            assert labels.tolist() == tokens[places].tolist()
            assert mask.tolist() == [1, 1, 1, 1]
            assert 50 not in labels
        ends = sample["tokens"].reshape(-1) == 50
        assert np.diff(sample["documents"].reshape(-1)).tolist() == ends[:-1].astype(int).tolist()
    assert all(np.array_equal(one["ranks"], other["ranks"]) for one, other in zip(found, samples(family, 30)))
    spans = [np.diff(np.sort(places)).min() for sample in found for places in sample["places"]]
    assert spans.count(1) > 20, "most segments have a span of two tokens or more"
    singles = samples(family, 30, "--max-gram 1 --num-predict 2")
    assert sum(np.diff(np.sort(each)).min() == 1 for sample in singles for each in sample["places"]) < 20


def test_what_a_row_sees() -> None:
    """Tokens 0, 2 and 3 are given, 4 is predicted before 1; the first segment has no memory, the second two tokens."""
    segments = import_module("xlnet.attention").Segments(2, 5, 2, 2)
    ranks = torch.tensor([[[-1, 1, -1, -1, 0]] * 2])
    places, documents = torch.tensor([[[4, 1]] * 2]), torch.tensor([[[0, 0, 0, 0, 0], [0, 1, 1, 1, 1]]])
    distance, same, unseen = import_module("xlnet.model").pairs(segments, ranks, places, documents)
    seen = (~unseen).int().tolist()
    own = [[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]
    queries = [[1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]
    assert seen[0][0] == [[0, 0, *row] for row in (*own, *queries)]
    assert seen[1][0] == [[1, 1, *row] for row in (*own, *queries)]
    assert (distance[1, 0, 5] - 4).tolist() == [6, 5, 4, 3, 2, 1, 0]
    assert same[1, 0, 6].tolist() == [False, False, False, True, True, True, True]


def published(**settings: Any) -> Any:
    """A tiny model of transformers' with large weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "initializer_range": 0.3}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**{**sizes, "dropout": 0.0, **settings}))
    torch.nn.init.normal_(model.lm_loss.bias)
    return model


@pytest.mark.parametrize("memory", [None, 7, 40])
def test_logits_and_gradients_are_those_of_transformers(memory: int | None) -> None:
    """Permutations, places and memory: a shift of a distance, or a gradient through the memory, would be silent."""
    theirs = published(mem_len=memory).eval()
    portable = from_transformers(theirs)
    spec = registry.family_of(portable.groups).train_spec
    ours: Any = spec.build_model(portable.model, portable.groups, ModelContext.single(), seed=0).eval()
    load_weights(ours, portable, ModelContext.single().mesh)
    question: Any = question_for(portable.model, portable.groups)
    expected = question.ask_theirs(theirs)
    compare(expected, {"words": question.ask_ours(ours, {})["words"].detach()})
    labels = question.tokens.gather(2, question.places).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(expected["words"].flatten(0, 1), labels.flatten(), reduction="sum")
    torch.autograd.backward(loss)
    output = ours(question.tokens, ranks=question.ranks, places=question.places, documents=question.documents)
    output.cross_entropy(labels, torch.ones_like(labels)).backward()
    layer, their_layer = ours.encoder.layers["0"].self_attention, theirs.transformer.layer[0].rel_attn
    key, value = layer.linear_kv.weight.grad.chunk(2)
    for name, grad, wanted in (
        ("keys", key, their_layer.k.grad.flatten(1).t()),
        ("values", value, their_layer.v.grad.flatten(1).t()),
        ("positions", layer.position_weight.grad, their_layer.r.grad.flatten(1).t()),
        ("documents", layer.document_embedding.grad, their_layer.seg_embed.grad.flatten(1)),
        ("mask", ours.mask_embedding.grad, theirs.transformer.mask_emb.grad.flatten()),
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item(), msg=name)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"attn_type": "uni"}, "attn_type"),
        ({"clamp_len": 30}, "clamp_len = 30"),
        ({"same_length": True}, "same_length = True"),
        ({"bi_data": True}, "bi_data = True"),
    ],
)
def test_what_has_no_counterpart_is_refused(settings: dict[str, Any], fact: str) -> None:
    """A setting that is passed over would be another model than the published one."""
    config = {**published().config.to_dict(), **settings}
    with expect_error(CheckpointError, fact):
        model_from_config(config, where="config.json")


def test_a_model_that_forgets_a_part_of_a_segment_is_refused() -> None:
    """``reuse_len`` keeps the first states of a segment alone."""
    with expect_error(CheckpointError, "reuse_len = 5"):
        from_transformers(published(reuse_len=5))
