"""T5 converts there and back: logits of the decoder equal to fp32 rounding, files equal byte for byte."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.core.conversion import convert as conversion
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.formats import config_from_model, model_from_config
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.native import read_native
from megatron.core.conversion.portable import LazyTensor
from megatron.core.conversion.proof import ProofError, memory_needed
from megatron.core.conversion.transforms import KEY_VALUE
from megatron.core.models.registry import FAMILIES
from megatron.core.models.t5.config import T5Config
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import CheckpointError
from megatron.training.checkpoints.loading import load
from tests.harness.published import random_model
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_sentence, expect_error
from tests.published.t5 import T5, V1_1
from tests.unit.conversion.test_families import assert_same_bytes, do, weights

transformers = pytest.importorskip("transformers", reason="conversion is proven with the dev extra's transformers")
Folder = Callable[[str], Path]


def test_keys_and_values_of_each_head() -> None:
    """The transform by itself, on numbers that name their places."""
    model = ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=2, kv_channels=2)
    key, value = torch.arange(4)[:, None], torch.arange(10, 14)[:, None]
    fused = KEY_VALUE.join([key, value], model)
    assert fused.flatten().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
    assert [part.tolist() for part in KEY_VALUE.split(fused, model)] == [key.tolist(), value.tolist()]


@pytest.mark.parametrize(
    "name",
    [
        "embedding.word_embeddings.weight",
        "encoder_positions.weight",
        "decoder_positions.weight",
        "decoder.layers.2.cross_attention.linear_kv.weight",
        "encoder.final_layernorm.weight",
    ],
)
def test_a_wrong_tensor_is_found(
    name: str, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the encoder makes shows only in what the decoder says."""

    def off(folder: Path) -> Any:
        found = read_huggingface(folder)
        right = found.tensors[name]
        wrong = LazyTensor(right.shape, right.dtype, lambda: right.make() * 1.1)
        return dataclasses.replace(found, tensors={**found.tensors, name: wrong})

    monkeypatch.setattr(conversion, "read_huggingface", off)
    with expect_error(ProofError):
        convert(Conversion("hf", model_folder("t5"), "megatron", tmp_path / "ours"), print)
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_from_it(model_folder: Folder, tmp_path: Path) -> None:
    """Pretraining takes the weights and the settings, those of relative positions among them."""
    do("hf", model_folder("t5"), "megatron", tmp_path / "ours")
    sizes = "--decoder-num-layers 3 --hidden-size 48 --ffn-hidden-size 80 --num-attention-heads 4 --kv-channels 10"
    positions = "--relative-attention-num-buckets 8 --relative-attention-max-distance 20"
    kind = "--relu --softmax-scale 1 --scale-output --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6"
    data = "--mock-data --vocab-size 100 --max-position-embeddings 512 --position-embedding-type relative"
    flags = f"{sizes} {positions} {kind} {data} --finetune --load {tmp_path / 'ours'}"
    run = tiny_run(ParallelContext.single(), flags, family=FAMILIES["t5"])
    load(run)
    assert torch.equal(
        run.models[0].get_parameter("decoder_positions.weight").detach(),
        weights(model_folder("t5"))["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"],
    )


def test_files_of_other_times(model_folder: Folder, tmp_path: Path) -> None:
    """Files on the hub: settings of transformers 4, copies of tied tensors, a table that nothing reads, or the words
    under a stack's name.
    """
    from safetensors.torch import save_file

    source = weights(model_folder("t5"))
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    old = {**source, **{name: source["shared.weight"].clone() for name in copies}, unread: torch.ones(8, 4)}
    folder = shutil.copytree(model_folder("t5"), tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    for name in ("scale_decoder_outputs", "tie_word_embeddings", "dense_act_fn", "is_gated_act"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps({**config, "n_positions": 64}))
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    do("hf", folder, "megatron", tmp_path / "ours")
    found = read_native(tmp_path / "ours")
    assert (found.model.max_position_embeddings, found.seq_length) == (64, 64)
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    assert_same_bytes(model_folder("t5"), tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["n_positions"] == 64

    renamed = {name: tensor for name, tensor in source.items() if name != "shared.weight"}
    save_file({**renamed, copies[0]: source["shared.weight"]}, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(
        read_huggingface(folder).tensors["embedding.word_embeddings.weight"].make(), source["shared.weight"]
    )


def test_settings_of_v1_1_in_transformers_4_and_5(model_folder: Folder, tmp_path: Path) -> None:
    """4 says with the tie that nothing is scaled, and 5 in so many words, with a tie that isn't one."""
    folder = shutil.copytree(model_folder("t5 v1.1"), tmp_path / "v1.1")
    config = json.loads((folder / "config.json").read_text())
    five = {**config, "tie_word_embeddings": True, "scale_decoder_outputs": False}
    new = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act")
    four = {name: value for name, value in config.items() if name not in new}
    for number, settings in enumerate((five, {**four, "tie_word_embeddings": False})):
        (folder / "config.json").write_text(json.dumps(settings))
        do("hf", folder, "megatron", tmp_path / f"ours{number}")
        found = read_native(tmp_path / f"ours{number}")
        assert found.model.untie_embeddings_and_output_weights
        assert found.model.activation == "geglu_tanh"
        do("megatron", tmp_path / f"ours{number}", "hf", tmp_path / f"back{number}")
        written = json.loads((tmp_path / f"back{number}/config.json").read_text())
        assert (written["tie_word_embeddings"], written["scale_decoder_outputs"]) == (False, False)
        assert_same_bytes(folder, tmp_path / f"back{number}")


def test_numbers_keep_their_type(tmp_path: Path) -> None:
    """Nothing is rounded, also where one matrix of each layer stayed in fp32, as in files of Flan-T5."""
    model = random_model("t5", V1_1).bfloat16()
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    model.save_pretrained(tmp_path / "source")
    do("hf", tmp_path / "source", "megatron", tmp_path / "ours")
    assert read_native(tmp_path / "ours").dtype == torch.bfloat16
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    assert_same_bytes(tmp_path / "source", tmp_path / "back")


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        (
            {"feed_forward_proj": "relu", "dense_act_fn": "relu", "is_gated_act": True},
            "is_gated_act = True",
        ),
        ({"dense_act_fn": "tanh"}, "dense_act_fn"),
        (
            {"feed_forward_proj": "gated-tanh", "dense_act_fn": "tanh", "is_gated_act": True},
            "feed_forward_proj",
        ),
        ({"d_kv": None}, "d_kv"),
        ({"num_decoder_layers": 4}, "decoder.block.3.layer.0.SelfAttention.k.weight"),
        ({"num_layers": 1}, "encoder.block.1.layer.0.SelfAttention.k.weight"),
        ({"relative_attention_num_buckets": 32}, "relative_attention_bias.weight"),
        (
            {"scale_decoder_outputs": False, "is_gated_act": True},
            "decoder.block.0.layer.2.DenseReluDense.wi_0.weight",
        ),
    ],
)
def test_settings_that_cannot_be_converted(
    settings: dict[str, Any], fact: str, model_folder: Folder, tmp_path: Path
) -> None:
    """By name, with the value."""
    folder = shutil.copytree(model_folder("t5, exact gelu, 3 heads"), tmp_path / "t5")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    with expect_error(CheckpointError, fact):
        read_huggingface(folder)


ORIGINAL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "position_embedding_type": "relative",
    "softmax_scale": 1.0,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "activation": "relu",
}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"position_embedding_type": "rope"}, "positions are not relative"),
        ({"normalization": "LayerNorm"}, "norms are not RMSNorm"),
        ({"apply_layernorm_1p": True}, "norm weights are stored with one subtracted"),
        ({"apply_residual_connection_post_layernorm": True}, "the residuals branch off after the norms"),
        ({"add_bias_linear": True}, "linear layers have biases"),
        ({"add_qkv_bias": True}, "linear layers have biases"),
        ({"activation": "squared_relu"}, "the MLP is squared ReLU"),
        ({"group_query_attention": True}, "keys and values are shared by heads"),
        ({"qk_layernorm": True}, "queries and keys are normalized"),
        ({"softmax_scale": None}, "scores are scaled (--softmax-scale 1 is not given)"),
        ({"untie_embeddings_and_output_weights": True}, "the output is scaled and not tied"),
    ],
)
def test_t5s_that_hugging_face_does_not_have(flags: dict[str, Any], words: str) -> None:
    """By what is different, where the file would describe another model."""
    known: dict[str, Any] = {"dtype": "float32", "source": {}, "tokens": {}}
    group = T5Config(decoder_num_layers=2, scale_output=True)
    written = config_from_model(ModelConfig(**ORIGINAL), (group,), **known)
    assert (written["feed_forward_proj"], written["scale_decoder_outputs"]) == ("relu", True)
    with pytest.raises(CheckpointError) as caught:
        config_from_model(ModelConfig(**{**ORIGINAL, **flags}), (group,), **known)
    check_sentence(str(caught.value), "T5", "t5", words)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "geglu", "geglu_tanh"])
def test_activations_of_models_that_were_trained_here(activation: str) -> None:
    """There is no file that says them already; "gated-gelu" alone is the tanh approximation."""
    model = ModelConfig(**{**ORIGINAL, "activation": activation})
    group = T5Config(decoder_num_layers=2)
    written = config_from_model(model, (group,), dtype="float32", source={}, tokens={})
    again = model_from_config(written, where="x")
    assert again.activation == activation
    assert transformers.T5Config(**written).dense_act_fn == ("gelu_new" if "tanh" in activation else "gelu")


def test_an_encoder_alone_is_said_in_a_sentence(tmp_path: Path) -> None:
    """A T5EncoderModel, as image generators ship, was answered with a list of missing tensors."""
    transformers.T5EncoderModel(transformers.T5Config(**V1_1)).save_pretrained(tmp_path)
    with expect_error(CheckpointError, "T5EncoderModel"):
        read_huggingface(tmp_path)


def test_what_a_t5_cannot_become(model_folder: Folder, tmp_path: Path) -> None:
    """Megatron-LM has no ReLU; and a proof by layers needs no more memory than a few of both stacks."""
    do("hf", model_folder("t5"), "megatron", tmp_path / "ours", skip_proof=True)
    with expect_error(CheckpointError, "ReLU", "--relu"):
        convert(Conversion("megatron", tmp_path / "ours", "megatron-lm", tmp_path / "theirs"), print)
    with expect_error(CheckpointError, "--model-type"):
        convert(Conversion("megatron", tmp_path / "ours", "hf", tmp_path / "x", family="BERT"), print)
    found = read_native(tmp_path / "ours")
    assert found.num_layers == 5
    assert memory_needed(found, {"megatron"}) == 4 * found.num_parameters // 5 * 2


def test_the_vocabulary_travels(tmp_path: Path) -> None:
    """As spiece.model alone, where the model has no rows for the 100 usual sentinels, and as tokenizer.json; back again
    transformers reads the one, and both are there.
    """
    import sentencepiece

    written = io.BytesIO()
    text = "the cat sat on a mat and the dog ran to see what it was about"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 5), model_writer=written, vocab_size=60, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    source = tmp_path / "source"
    random_model("t5", {**T5, "vocab_size": model.get_piece_size() + 10}).save_pretrained(source)
    (source / "spiece.model").write_bytes(written.getvalue())
    do("hf", source, "megatron", tmp_path / "plain", skip_proof=True)
    config = read_native(tmp_path / "plain").tokenizer
    assert config.tokenizer_model == str(tmp_path / "plain/iter_0000000/tokenizer")
    tokenizer = build_tokenizer(config)
    alone: Any = transformers.AutoTokenizer.from_pretrained(source)
    assert tokenizer.tokenize("the cat sat") == alone("the cat sat")["input_ids"]
    assert tokenizer.tokenize_parts(["the cat sat"]) == [model.encode("the cat sat")]
    assert (tokenizer.vocab_size, tokenizer.eod) == (model.get_piece_size(), 1)

    pieces = [(model.id_to_piece(number), model.get_score(number)) for number in range(model.get_piece_size())]
    sentinels = [(f"<extra_id_{number}>", 0.0) for number in reversed(range(10))]
    reference: Any = transformers.T5Tokenizer(vocab=[*pieces, *sentinels], extra_ids=10)
    reference.save_pretrained(source)
    do("hf", source, "megatron", tmp_path / "ours")
    tokenizer = build_tokenizer(read_native(tmp_path / "ours").tokenizer)
    assert tokenizer.vocab_size == model.get_piece_size() + 10
    asked = "the cat <extra_id_0> a mat"
    assert tokenizer.tokenize(asked) == reference(asked)["input_ids"]
    assert tokenizer.tokenize("<extra_id_0>")[0] == tokenizer.vocab_size - 1
    do("megatron", tmp_path / "ours", "hf", tmp_path / "back")
    again: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again(asked)["input_ids"] == reference(asked)["input_ids"]
    assert (tmp_path / "back/spiece.model").read_bytes() == written.getvalue()


def test_an_mt5_with_its_pieces_alone(tmp_path: Path) -> None:
    """Its decoder begins as config.json says; the server knew no token for that, and texts lacked their end."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on a mat and the dog ran to see it"] * 5), model_writer=written,
        vocab_size=60, hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
        user_defined_symbols=["▁<extra_id_1>", "▁<extra_id_0>"],
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    source = tmp_path / "source"
    random_model("t5", {**T5, "vocab_size": model.get_piece_size() + 12}).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    names = {"model_type": "mt5", "architectures": ["MT5ForConditionalGeneration"], "decoder_start_token_id": 0}
    (source / "config.json").write_text(json.dumps(config | names))
    (source / "spiece.model").write_bytes(written.getvalue())
    do("hf", source, "megatron", tmp_path / "ours", skip_proof=True)
    shutil.rmtree(source)
    tokenizer: Any = build_tokenizer(read_native(tmp_path / "ours").tokenizer)
    assert tokenizer.tokenize("the cat") == [*model.encode("the cat"), 1]
    assert (tokenizer.decoder_start, tokenizer.eod, tokenizer.vocab_size) == (0, 1, model.get_piece_size())
    assert [model.id_to_piece(token) for token in tokenizer.sentinels] == ["▁<extra_id_0>", "▁<extra_id_1>"]
