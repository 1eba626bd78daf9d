"""Megatron-LM's BERTs become ours with the same numbers, and go back; what one of the two doesn't have is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.proof import ProofError
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.bert.megatron_lm import BertFormat
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError
from megatron.training.checkpoints.loading import load
from tests.harness.runs import tiny_run
from tests.harness.sentences import expect_error
from tests.tiers import pairs, tiers
from tests.unit.conversion.megatron_checkpoints import CLASSIC, portable, random_tensors, write_torch
from tests.unit.conversion.test_megatron_lm import VERSIONS, assert_holds, do

TYPES = "embedding.tokentype_embeddings.weight"
BARE = (BertConfig(bert_binary_head=False, exact_gelu_head=True), TokenTypesConfig(), MoEConfig())
BERTS = {"bert": (BertConfig(exact_gelu_head=True), TokenTypesConfig(), MoEConfig()), "masked tokens only": BARE}


def bert(groups: tuple[Any, ...], **settings: Any) -> tuple[ModelConfig, dict[str, Tensor], dict[str, Tensor]]:
    """A BERT as Megatron-LM trains it, its tensors here and there: without the second head it has no token types."""
    model = ModelConfig(**{**CLASSIC, **settings})
    values = random_tensors(model, groups)
    theirs = dict(values)
    if not groups[0].bert_binary_head:
        del theirs[TYPES]
        values[TYPES] = torch.zeros(2, 32)
    return model, values, theirs


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)]


@pytest.mark.parametrize(
    ("version", "layout"), pairs(VERSIONS, LAYOUTS, rich=[(2, 2, 2)], more={("core", 3.0): LAYOUTS}), ids=str
)
@pytest.mark.parametrize("heads", tiers(BERTS, first=["bert"]))
def test_every_bert_at_every_layout(
    heads: str, version: tuple[str, float | None], layout: tuple[int, int, int], tmp_path: Path
) -> None:
    """BERT has the same history, and heads that the last stage holds, their bias split by words."""
    (style, number), (tp, pp, vpp) = version, layout
    model, values, theirs = bert(BERTS[heads])
    write_torch(tmp_path / "theirs", CLASSIC, theirs, style=style, version=number, tp=tp, pp=pp, vpp=vpp)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", family="BERT")
    found = read_native(tmp_path / "ours")
    assert_holds(found, values)
    assert (found.groups, found.model) == (BERTS[heads], model)


@pytest.mark.parametrize("dist", [True, False], ids=["torch_dist", "torch"])
@pytest.mark.parametrize("heads", BERTS)
@pytest.mark.parametrize(
    "settings", [{}, {"activation": "swiglu", "normalization": "RMSNorm"}], ids=["classic", "modern"]
)
def test_our_bert_goes_to_megatron_lm_and_back(
    settings: dict[str, Any], heads: str, dist: bool, tmp_path: Path
) -> None:
    """Both heads, or the first alone, whose token types are nowhere there."""
    model, values, theirs = bert(BERTS[heads], **settings, untie_embeddings_and_output_weights=dist)
    write_native(portable(model, values, BERTS[heads]), tmp_path / "ours", final=tmp_path / "ours")
    do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs", dist=dist)
    found = read_megatron_lm(tmp_path / "theirs")
    assert_holds(found, values)
    assert (found.groups, found.model) == (BERTS[heads], model)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "back")
    for path in (tmp_path / "ours").rglob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "back" / path.relative_to(tmp_path / "ours")).read_bytes()
    stored = StoredTensors(tmp_path / "theirs/release", foreign=True).entries if dist else {}
    assert not dist or (TYPES in stored) == (TYPES in theirs)


def test_the_proof_sees_a_wrong_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which GELU a BERT's head has changes logits little, and the proof says so."""
    write_torch(tmp_path / "theirs", CLASSIC, bert(BERTS["bert"])[2], style="core")
    monkeypatch.setattr(BertFormat, "groups_from_arguments", lambda *given, **more: (BertConfig(),))
    with expect_error(ProofError):
        do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")


@pytest.mark.parametrize(
    ("style", "flags", "activation", "head"),
    [
        ("legacy", {}, "gelu_tanh", True),
        ("legacy", {"openai_gelu": True, "bias_gelu_fusion": False}, "gelu_tanh", False),
        ("core", {"openai_gelu": True, "bias_gelu_fusion": False}, "gelu", False),
        ("core", {"bias_gelu_fusion": False}, "gelu", False),
    ],
)
def test_the_gelu_of_the_head(style: str, flags: dict[str, Any], activation: str, head: bool, tmp_path: Path) -> None:
    """Exact in core whatever the layers have; where those have it, too, nothing needs to be said."""
    write_torch(tmp_path / "theirs", CLASSIC, bert(BERTS["bert"])[2], style=style, **flags)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    found = read_native(tmp_path / "ours")
    assert (found.model.activation, found.groups) == (
        activation,
        (BertConfig(exact_gelu_head=head), TokenTypesConfig(), MoEConfig()),
    )


def test_a_run_goes_on_from_it(tmp_path: Path) -> None:
    """With Megatron-LM's head; without its flag the run would be another model, which is said."""
    _, values, theirs = bert(BERTS["bert"])
    write_torch(tmp_path / "theirs", CLASSIC, theirs, style="legacy", tp=2)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    sizes = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --vocab-size 100 --mock-data --seq-length 32"
    flags = f"{sizes} --finetune --load {tmp_path / 'ours'}"
    run = tiny_run(ParallelContext.single(), f"{flags} --exact-gelu-head", family=FAMILIES["bert"])
    load(run)
    found = run.models[0].get_parameter("encoder.layers.3.mlp.linear_fc2.weight")
    assert torch.equal(found.detach(), values["encoder.layers.3.mlp.linear_fc2.weight"])
    with expect_error(CheckpointError, "--exact-gelu-head"):
        load(tiny_run(ParallelContext.single(), flags, family=FAMILIES["bert"]))


def test_token_types_without_the_second_head(tmp_path: Path) -> None:
    """Where a checkpoint has them, they stay."""
    values = random_tensors(ModelConfig(**CLASSIC), BARE)
    write_torch(tmp_path / "theirs", CLASSIC, values, style="first", version=0.0)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    assert_holds(read_native(tmp_path / "ours"), values)


BERT_THAT_MEGATRON_LM_LACKS: list[tuple[dict[str, Any], BertConfig, list[str]]] = [
    (
        {"activation": "gelu"},
        BertConfig(head_bias=False),
        ["--bert-no-head-bias"],
    ),
    ({}, BertConfig(), ["--exact-gelu-head"]),
    (
        {"position_embedding_type": "rope"},
        BertConfig(exact_gelu_head=True),
        ["BERT", "rope"],
    ),
    (
        {"activation": "gelu", "apply_residual_connection_post_layernorm": True},
        BertConfig(),
        ["--apply-residual-connection-post-layernorm"],
    ),
    (
        {"activation": "gelu"},
        BertConfig(bert_binary_head=False),
        ["token types", "zero"],
    ),
]


@pytest.mark.parametrize(("settings", "group", "facts"), BERT_THAT_MEGATRON_LM_LACKS)
def test_berts_that_megatron_lm_does_not_have(
    settings: dict[str, Any], group: BertConfig, facts: list[str], tmp_path: Path
) -> None:
    model = ModelConfig(**CLASSIC, **settings)
    values = random_tensors(model, (group,))
    write_native(portable(model, values, (group,)), tmp_path / "ours", final=tmp_path / "ours")
    with expect_error(CheckpointError, *facts):
        do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_bert_with_another_head(tmp_path: Path) -> None:
    """One that was fine-tuned; and what --model-type says has to be there."""
    _, _, theirs = bert(BERTS["bert"])
    write_torch(tmp_path / "theirs", CLASSIC, theirs, style="core")
    with expect_error(CheckpointError, "--model-type"):
        do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", family="GPT")
    path = next((tmp_path / "theirs").rglob("*rng.pt"))
    content = torch.load(path, weights_only=False)
    content["model"]["classification_head.weight"] = torch.zeros(3, 32)
    torch.save(content, path)
    with expect_error(CheckpointError, "classification_head.weight", "BERT"):
        read_megatron_lm(tmp_path / "theirs")
