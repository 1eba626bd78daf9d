"""BERT converts there and back: logits of both heads equal to fp32 rounding, files equal byte for byte."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.core.conversion import convert as conversion
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.formats import config_from_model, model_from_config
from megatron.core.conversion.huggingface.reading import read_huggingface, tensors_in
from megatron.core.conversion.native import read_native
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.proof import ProofError
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import CheckpointError
from megatron.training.checkpoints.loading import load
from tests.harness.runs import tiny_run
from tests.harness.sentences import expect_error
from tests.published.bert import MODERNBERT
from tests.unit.conversion.megatron_checkpoints import CLASSIC
from tests.unit.conversion.test_families import assert_same_bytes, do, weights

Folder = Callable[[str], Path]


def test_a_wrong_head_is_found(model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words alone would prove nothing about the order of texts."""

    def slightly_off(folder: Path) -> Any:
        found = read_huggingface(folder)
        right = found.tensors["binary_head.weight"]
        wrong = LazyTensor(right.shape, right.dtype, lambda: right.make() * 1.01)
        return dataclasses.replace(found, tensors={**found.tensors, "binary_head.weight": wrong})

    monkeypatch.setattr(conversion, "read_huggingface", slightly_off)
    with expect_error(ProofError):
        convert(Conversion("hf", model_folder("bert"), "megatron", tmp_path / "ours"), print)
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_from_it(model_folder: Folder, tmp_path: Path) -> None:
    """Pretraining takes the weights and the settings, the original's arrangement of norms among them."""
    do("hf", model_folder("bert"), "megatron", tmp_path / "ours")
    sizes = "--num-layers 3 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --vocab-size 100 --mock-data"
    norms = "--apply-residual-connection-post-layernorm --norm-epsilon 1e-12 --exact-gelu"
    flags = f"{sizes} {norms} --max-position-embeddings 64 --finetune --load {tmp_path / 'ours'}"
    run = tiny_run(ParallelContext.single(), flags, family=FAMILIES["bert"])
    load(run)
    assert torch.equal(
        run.models[0].get_parameter("encoder.final_layernorm.bias").detach(),
        weights(model_folder("bert"))["bert.encoder.layer.2.output.LayerNorm.bias"],
    )


def test_files_of_other_times(model_folder: Folder, tmp_path: Path) -> None:
    """BERT's own files on the hub: TensorFlow's names of norms, copies of tied tensors, buffers; one has the second
    head, and another only the pooler that it would read.
    """
    from safetensors.torch import save_file

    source = weights(model_folder("bert"))
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in source.items()}
    old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): tensor for name, tensor in old.items()}
    old["bert.embeddings.position_ids"] = torch.arange(64)[None].float()
    old["cls.predictions.decoder.weight"] = source["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = source["cls.predictions.bias"].clone()
    shutil.copytree(model_folder("bert"), tmp_path / "old")
    save_file(old, tmp_path / "old/model.safetensors", metadata={"format": "pt"})
    do("hf", tmp_path / "old", "megatron", tmp_path / "ours")
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    assert_same_bytes(model_folder("bert"), tmp_path / "back")

    pooled = {name: tensor for name, tensor in source.items() if "seq_relationship" not in name}
    save_file(pooled, tmp_path / "old/model.safetensors", metadata={"format": "pt"})
    found = read_huggingface(tmp_path / "old")
    assert (
        found.groups == (BertConfig(bert_binary_head=False), TokenTypesConfig(), MoEConfig())
        and "pooler.dense.weight" not in found.tensors
    )

    body = {name.removeprefix("bert."): tensor for name, tensor in source.items() if not name.startswith("cls.")}
    save_file(body, tmp_path / "old/model.safetensors", metadata={"format": "pt"})
    with expect_error(CheckpointError, "cls.predictions"):
        read_huggingface(tmp_path / "old")


@pytest.mark.parametrize(("release", "changed"), [("4", "decoder.bias"), ("5", "bias")])
def test_the_bias_of_an_untied_output(release: str, changed: str, model_folder: Folder, tmp_path: Path) -> None:
    """transformers 4 saves it where a tied one is; 5 reads it beside the weight, and keeps the other without use."""
    from safetensors.torch import save_file

    source = weights(model_folder("bert, untied"))
    live = source["cls.predictions.decoder.bias"]
    if release == "4":
        del source[f"cls.predictions.{changed}"]
    else:
        source[f"cls.predictions.{changed}"] = torch.zeros_like(live)
    shutil.copytree(model_folder("bert, untied"), tmp_path / "other")
    save_file(source, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    found = read_huggingface(tmp_path / "other")
    assert torch.equal(found.tensors["output_layer.bias"].make(), live)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"type_vocab_size": 3}, "bert.embeddings.token_type_embeddings.weight"),
        ({"position_embedding_type": "relative_key"}, "'absolute'"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_hidden_layers": 4}, "bert.encoder.layer.3.attention.output.LayerNorm.bias"),
    ],
)
def test_settings_that_cannot_be_converted(
    settings: dict[str, Any], fact: str, model_folder: Folder, tmp_path: Path
) -> None:
    """By name, with the value."""
    folder = shutil.copytree(model_folder("bert"), tmp_path / "bert")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    with expect_error(CheckpointError, fact):
        read_huggingface(folder)


def test_berts_that_hugging_face_does_not_have() -> None:
    """Pre-norm or original norms, both have a home; rotary positions have none."""
    model = ModelConfig(**CLASSIC)
    known: dict[str, Any] = {"dtype": "float32", "source": {}, "tokens": {}}
    assert config_from_model(model, (BertConfig(),), **known)["architectures"] == ["MegatronBertForPreTraining"]
    original = dataclasses.replace(model, apply_residual_connection_post_layernorm=True)
    bare = (BertConfig(bert_binary_head=False),)
    assert config_from_model(original, bare, **known)["architectures"] == ["BertForMaskedLM"]
    half = (BertConfig(exact_gelu_head=True),)
    with expect_error(CheckpointError, "GELU", "--exact-gelu-head"):
        config_from_model(model, half, **known)
    rotary = dataclasses.replace(model, position_embedding_type="rope", qk_layernorm=True)
    with expect_error(CheckpointError, "BERT"):
        config_from_model(rotary, (BertConfig(),), **known)


def test_the_padding_id_of_a_roberta() -> None:
    """transformers counts positions from it: with the tokenizer's other id, every position was off by one there."""
    more: dict[str, Any] = {
        "apply_residual_connection_post_layernorm": True,
        "activation": "gelu",
        "position_embedding_offset": 2,
    }
    model, groups = ModelConfig(**CLASSIC, **more), (BertConfig(bert_binary_head=False), TokenTypesConfig())
    known: dict[str, Any] = {"dtype": "float32", "source": {}}
    for padding in (None, 1):
        written = config_from_model(model, groups, **known, tokens={"pad_token_id": padding})
        assert (written["model_type"], written["pad_token_id"]) == ("roberta", 1)
        assert written["max_position_embeddings"] == CLASSIC["max_position_embeddings"] + 2
    with expect_error(CheckpointError, "1", "0"):
        config_from_model(model, groups, **known, tokens={"pad_token_id": 0})


MODERN = (BertConfig(bert_binary_head=False, head_bias=False), TokenTypesConfig(num_tokentypes=0))
HUB_MODERNBERT = {
    **MODERNBERT,
    "model_type": "modernbert",
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 5e4,
    "local_rope_theta": 700.0,
    "local_attention": 128,
    "norm_bias": False,
}


def test_a_modernbert_of_transformers_4() -> None:
    """The Hub's files have the two bases and the layers with full attention in settings that transformers 5 replaced;
    both are written.
    """
    model = model_from_config(HUB_MODERNBERT, where="x")
    assert (model.rotary_base, model.rotary_base_local, model.window_size) == (5e4, 700.0, (64, 64))
    assert [model.window_of(layer) is None for layer in range(4)] == [True, False, True, False]
    written = config_from_model(model, MODERN, dtype="float32", source={}, tokens={})
    left_out = {"pad_token_id": None, "architectures": None}
    assert (HUB_MODERNBERT | left_out).items() <= (written | left_out).items()
    layers = ["full_attention", "sliding_attention"] * 2
    assert (written["layer_types"], written["classifier_bias"]) == (layers, False)
    bases = {name: each["rope_theta"] for name, each in written["rope_parameters"].items()}
    assert bases == {"full_attention": 5e4, "sliding_attention": 700.0}


def test_modernberts_that_cannot_be_converted() -> None:
    """By name, in both directions."""
    settings: list[tuple[dict[str, Any], str]] = [
        ({"decoder_bias": False}, "decoder_bias = False"),
        ({"classifier_activation": "silu"}, "classifier_activation = 'silu'"),
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0"),
    ]
    for changed, fact in settings:
        with expect_error(CheckpointError, fact):
            model_from_config({**HUB_MODERNBERT, **changed}, where="x")
    model, (head, types) = model_from_config(HUB_MODERNBERT, where="x"), MODERN
    reasons: list[tuple[dict[str, Any], tuple[object, ...], str]] = [
        ({"window_size": (64, 0)}, MODERN, "windows"),
        ({"first_attention_norm": True}, MODERN, "attention"),
        ({}, (head, TokenTypesConfig()), "--num-tokentypes 0"),
        ({}, (dataclasses.replace(head, bert_binary_head=True), types), "head"),
        ({"activation": "swiglu"}, MODERN, "--exact-gelu-head"),
    ]
    for changed, groups, fact in reasons:
        other = dataclasses.replace(model, **changed)
        with expect_error(CheckpointError, fact):
            config_from_model(other, groups, dtype="float32", source={}, tokens={})


def test_a_family_that_is_not_there_is_said(model_folder: Folder, tmp_path: Path) -> None:
    """--model-type only checks what the source is."""
    do("hf", model_folder("bert"), "megatron", tmp_path / "ours", skip_proof=True)
    with expect_error(CheckpointError, "--model-type"):
        convert(Conversion("megatron", tmp_path / "ours", "hf", tmp_path / "x", family="GPT"), print)


@pytest.mark.parametrize("name", ["megatron-bert", "megatron-bert, masked tokens only"])
def test_by_way_of_megatron_lm(name: str, model_folder: Folder, tmp_path: Path) -> None:
    """With the exact GELU everywhere it is the same model in all three; token types that are nowhere there stop it."""
    if "only" not in name:
        do("hf", model_folder(name), "megatron-lm", tmp_path / "theirs")
        do("megatron-lm", tmp_path / "theirs", "hf", tmp_path / "back")
        assert_same_bytes(model_folder(name), tmp_path / "back")
    else:
        with expect_error(CheckpointError):
            do("hf", model_folder(name), "megatron-lm", tmp_path / "theirs")


PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "Cat"]


@pytest.mark.parametrize("kind", ["vocab.txt", "tokenizer.json"])
@pytest.mark.parametrize("lower", [True, False])
def test_the_vocabulary_travels(kind: str, lower: bool, model_folder: Folder, tmp_path: Path) -> None:
    """With as many ids as the model has rows, letters read as its settings say; back again transformers reads it."""
    import transformers

    source = shutil.copytree(model_folder("bert"), tmp_path / "source")
    pieces = [*PIECES, *(f"w{number}" for number in range(101 - len(PIECES)))]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    reference: Any = transformers.BertTokenizer(vocabulary, do_lower_case=lower)
    reference.save_pretrained(source)
    if kind == "vocab.txt":
        shutil.copyfile(tmp_path / "vocab.txt", source / "vocab.txt")
        (source / "tokenizer.json").unlink()
    do("hf", source, "megatron", tmp_path / "ours")
    config = read_native(tmp_path / "ours").tokenizer
    assert config.tokenizer_type == ("BertWordPieceLowerCase" if lower else "BertWordPieceCase")
    assert config.vocab_file == str(tmp_path / "ours/iter_0000000/tokenizer" / kind)
    tokenizer = build_tokenizer(config)
    assert tokenizer.vocab_size == 101
    assert tokenizer.tokenize("The Cats sat") == reference("The Cats sat", add_special_tokens=False)["input_ids"]
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    again: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again("The Cats sat")["input_ids"] == reference("The Cats sat")["input_ids"]


def test_tensors_come_in_one_file(model_folder: Folder) -> None:
    """What transformers itself leaves out of its files is what we ignore."""
    names = tensors_in(model_folder("bert"))
    assert "cls.predictions.bias" in names and "cls.predictions.decoder.weight" not in names
