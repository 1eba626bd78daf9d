"""Megatron-LM's T5s become ours with the same numbers, and go back; what one of the two doesn't have is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.megatron_lm import forward
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.proof import ProofError
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.t5 import questions
from megatron.core.models.t5.config import T5Config
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.wordpiece import SPECIAL_TOKENS
from megatron.errors import CheckpointError
from tests.harness.sentences import check_line, expect_error
from tests.tiers import pairs
from tests.unit.conversion.megatron_checkpoints import CLASSIC, portable, random_tensors, write_torch
from tests.unit.conversion.test_megatron_lm import VERSIONS, assert_holds, dist_checkpoint, do
from tools.checkpoint import convert as tool

EQUAL = T5Config(decoder_num_layers=4, decoder_seq_length=20)
SETTINGS: dict[str, dict[str, Any]] = {
    "classic": CLASSIC,
    "modern": {
        **CLASSIC,
        "kv_channels": 12,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "ffn_hidden_size": 48,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    },
    "relative": {**CLASSIC, "position_embedding_type": "relative"},
    "no positions": {**CLASSIC, "position_embedding_type": "none", "activation": "squared_relu"},
}


LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]
FORMS = ["torch_dist", "torch"]


@pytest.mark.parametrize(
    ("version", "layout"), pairs(VERSIONS, LAYOUTS, rich=[(2, 2)], more={("core", 3.0): LAYOUTS}), ids=str
)
def test_every_version_at_every_layout(
    version: tuple[str, float | None], layout: tuple[int, int], tmp_path: Path
) -> None:
    """Keys and values of the encoder in three orders; pipelines whose first half is the encoder's, with copies."""
    model = ModelConfig(**CLASSIC)
    values = random_tensors(model, (EQUAL,))
    (style, number), (tp, pp) = version, layout
    write_torch(tmp_path / "theirs", CLASSIC, values, style=style, version=number, tp=tp, pp=pp, decoder_seq_length=20)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours", family="T5")
    found = read_native(tmp_path / "ours")
    assert_holds(found, values)
    assert (found.groups, found.model, found.iteration) == ((EQUAL, MoEConfig()), model, 500)


@pytest.mark.parametrize(
    ("name", "form"),
    pairs(
        list(SETTINGS)[1:],
        [("core", 1), ("core", 2), ("te", 1), ("te", 2)],
        rich=[("core", 2), ("te", 2)],
        more={"relative": [("core", 2)]},
        slow=[("core", 1), ("te", 1)],  # a part of the others
    ),
    ids=str,
)
def test_kinds_of_t5(name: str, form: tuple[str, int], tmp_path: Path) -> None:
    """Of relative positions every tensor-parallel rank stores the whole table."""
    values = random_tensors(ModelConfig(**SETTINGS[name]), (EQUAL,))
    style, tp = form
    write_torch(tmp_path / "theirs", SETTINGS[name], values, style=style, tp=tp)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    assert_holds(read_native(tmp_path / "ours"), values)


def test_before_core_the_decoder_had_a_depth_of_its_own(tmp_path: Path) -> None:
    """Also a depth that its settings don't know is said."""
    group = T5Config(decoder_num_layers=2, decoder_seq_length=8)
    values = random_tensors(ModelConfig(**CLASSIC), (group,))
    write_torch(tmp_path / "theirs", CLASSIC, values, style="legacy", tp=2, decoder_num_layers=2)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    assert read_native(tmp_path / "ours").groups == (group, MoEConfig())
    write_torch(tmp_path / "wrong", CLASSIC, values, style="legacy", decoder_num_layers=3)
    with expect_error(CheckpointError, "num_layers 4", "decoder_num_layers 3"):
        read_megatron_lm(tmp_path / "wrong")
    write_torch(tmp_path / "typed", CLASSIC, values, style="legacy", decoder_num_layers=2, decoder_seq_length="abc")
    with expect_error(CheckpointError, "decoder_seq_length", '"abc"'):
        read_megatron_lm(tmp_path / "typed")


@pytest.mark.parametrize("style", ["first", "legacy", "core"])
def test_residuals_behind_the_norm(style: str, tmp_path: Path) -> None:
    """The models before core knew that flag; core's ignore it, whatever was saved."""
    model = ModelConfig(**CLASSIC, apply_residual_connection_post_layernorm=style != "core")
    values = random_tensors(model, (EQUAL,))
    flags: dict[str, Any] = {"apply_residual_connection_post_layernorm": True}
    write_torch(tmp_path / "theirs", CLASSIC, values, style=style, pp=2, **flags)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    assert read_native(tmp_path / "ours").model == model


@pytest.mark.parametrize("name", SETTINGS)
def test_torch_dist(name: str, tmp_path: Path) -> None:
    """Two stacks of layers, and tensors under two names."""
    values = random_tensors(ModelConfig(**SETTINGS[name]), (EQUAL,))
    dist_checkpoint(tmp_path / "theirs", SETTINGS[name], values, common_in_dcp=False, family="t5")
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")
    assert_holds(read_native(tmp_path / "ours"), values)


@pytest.mark.parametrize(
    ("name", "form"), pairs(SETTINGS, FORMS, rich=FORMS, more={"classic": FORMS, "modern": ["torch_dist"]})
)
def test_ours_goes_to_megatron_lm_and_back(name: str, form: str, tmp_path: Path) -> None:
    """Byte for byte, and with the duplicates that its loader asks for."""
    dist = form == "torch_dist"
    model = ModelConfig(**SETTINGS[name])
    values = random_tensors(model, (EQUAL,))
    write_native(portable(model, values, (EQUAL,)), tmp_path / "ours", final=tmp_path / "ours")
    do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs", dist=dist)
    do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "back")
    found = read_native(tmp_path / "back")
    assert (found.groups, found.model) == ((EQUAL, MoEConfig()), model)
    for path in (tmp_path / "ours").rglob("*.distcp"):
        assert path.read_bytes() == (tmp_path / "back" / path.relative_to(tmp_path / "ours")).read_bytes()
    if dist:
        stored = StoredTensors(tmp_path / "theirs/release", foreign=True)
        kind = "weight" if model.untie_embeddings_and_output_weights else "bias"
        names = {f"output_layer.{kind}", f"lm_head.output_layer.{kind}"}
        assert names <= stored.entries.keys()
        assert ("position_embeddings.weight" in stored.entries) == (model.position_embedding_type == "learned_absolute")
        assert {"output_layer._extra_state/shard_0_1", "lm_head.output_layer._extra_state/shard_0_1"} <= {
            *stored.objects
        }


@pytest.mark.parametrize(
    ("owner", "method", "nothing"),
    [(forward.MegatronLMModel, "_crossing", (1, 1, 1)), (questions, "_relative", (1, 1, 1, 1))],
    ids=["attention to the encoder", "positions"],
)
def test_the_proof_asks_about_every_part(
    owner: object, method: str, nothing: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention to the encoder and positions, left out on one side."""
    values = random_tensors(ModelConfig(**SETTINGS["relative"]), (EQUAL,))
    write_torch(tmp_path / "theirs", SETTINGS["relative"], values, style="core")
    monkeypatch.setattr(owner, method, lambda *given, **more: torch.zeros(nothing))
    with expect_error(ProofError):
        do("megatron-lm", tmp_path / "theirs", "megatron", tmp_path / "ours")


@pytest.mark.parametrize("title", ["BERT", "T5"])
def test_megatron_lms_own_spelling(title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a vocab.txt, whose words and sentinels say where padding begins; back again the tokenizer is the same."""
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *(f"w{number}" for number in range(60))]) + "\n")
    settings = {**CLASSIC, "vocab_size": 65 + 2 + 10}
    family = (EQUAL,) if title == "T5" else (BertConfig(exact_gelu_head=True), TokenTypesConfig())
    groups = (*family, MoEConfig())
    values = random_tensors(ModelConfig(**settings), groups)
    files = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(tmp_path / "vocab.txt")}
    flags: dict[str, Any] = {**files, "vocab_extra_ids": 10, "vocab_size": None, "decoder_seq_length": 20}
    write_torch(tmp_path / "theirs", settings, values, style="core", tp=2, **flags)
    words = f"--model-type {title} --loader mcore --saver mcore --load-dir {tmp_path / 'theirs'}"
    tool.main([*words.split(), "--save-dir", str(tmp_path / "ours"), "--target-tensor-parallel-size", "2"])
    check_line(capsys.readouterr().out, "difference")
    do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "again")
    do("megatron-lm", tmp_path / "again", "megatron", tmp_path / "back")
    for name in ("ours", "back"):
        found = read_native(tmp_path / name)
        assert_holds(found, values)
        assert found.groups == groups
        assert build_tokenizer(found.tokenizer).vocab_size == 77
        assert found.tokenizer.vocab_file == str(tmp_path / name / "iter_0000500/tokenizer/vocab.txt")
    other = "BERT" if title == "T5" else "T5"
    with expect_error(CheckpointError, f"--model-type {other}", tmp_path / "theirs", title):
        tool.main([*words.replace(title, other, 1).split(), "--save-dir", str(tmp_path / "x")])


THAT_WE_LACK: list[tuple[str, dict[str, Any], list[str]]] = [
    ("core", {"add_bias_linear": False}, ["T5", "add_bias_linear"]),
    (
        "core",
        {"position_embedding_type": "mrope"},
        ["'mrope'", "T5", "learned_absolute", "rope", "none"],
    ),
    ("core", {"num_layers": 5}, ["4 layers", "num_layers 5"]),
]


@pytest.mark.parametrize(("style", "flags", "facts"), THAT_WE_LACK, ids=[next(iter(row[1])) for row in THAT_WE_LACK])
def test_what_cannot_be_converted_is_said(style: str, flags: dict[str, Any], facts: list[str], tmp_path: Path) -> None:
    """A model that is almost ours must not come out as one."""
    write_torch(tmp_path, CLASSIC, random_tensors(ModelConfig(**CLASSIC), (EQUAL,)), style=style, **flags)
    with expect_error(CheckpointError, *facts):
        read_megatron_lm(tmp_path)


def test_stages_with_tables_of_their_own(tmp_path: Path) -> None:
    """Their stages don't keep relative positions equal, and ours are one table."""
    values = random_tensors(ModelConfig(**SETTINGS["relative"]), (EQUAL,))
    write_torch(tmp_path, SETTINGS["relative"], values, style="core", pp=2)
    with expect_error(CheckpointError):
        read_megatron_lm(tmp_path)


THAT_THEY_LACK: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {},
        {"decoder_num_layers": 2},
        ["T5", "2 and 4"],
    ),
    ({}, {"scale_output": True}, ["T5's", "--scale-output"]),
    ({"group_query_attention": True, "num_query_groups": 2}, {}, ["T5", "keys"]),
    (
        {"add_bias_linear": False, "activation": "gelu"},
        {},
        ["T5's", "--disable-bias-linear"],
    ),
    ({"qk_l2_norm": True}, {}, ["norms", "T5"]),
]


@pytest.mark.parametrize(("settings", "own", "facts"), THAT_THEY_LACK)
def test_t5s_that_megatron_lm_does_not_have(
    settings: dict[str, Any], own: dict[str, Any], facts: list[str], tmp_path: Path
) -> None:
    model, group = ModelConfig(**CLASSIC, **settings), T5Config(**{"decoder_num_layers": 4, **own})
    values = random_tensors(model, (group,))
    write_native(portable(model, values, (group,)), tmp_path / "ours", final=tmp_path / "ours")
    with expect_error(CheckpointError, *facts):
        do("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
