"""T5 as GGUF files: llama.cpp's encoder and decoder compute what the model computes, and files are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="GGUF files are written with the extra gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp proves GGUF files; it is in the extra dev-all")
pytest.importorskip("sentencepiece", reason="vocabularies of T5 are trained by sentencepiece")

from megatron.core.conversion.gguf import writing
from megatron.core.conversion.gguf.files import open_gguf
from megatron.core.conversion.gguf.proof import gguf_file, transformers_answer
from megatron.core.conversion.gguf.reading import read_gguf
from megatron.core.conversion.gguf.writing import gguf_form
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.proof import ProofError
from megatron.core.conversion.questions import question_for
from megatron.core.models.t5.config import T5Config
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import CheckpointError
from tests.harness.published import random_model
from tests.harness.sentences import check_line, expect_error
from tests.published.t5 import FAR, MT5, T5, V1_1
from tests.unit.conversion.test_families import do
from tests.unit.conversion.test_mistakes import change
from tests.unit.tokenizers.published_folders import t5_model

SIZES = {**FAR, "num_layers": 3, "num_decoder_layers": 2, "d_model": 64, "d_ff": 96, "d_kv": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {**T5, **SIZES}),
    "t5 v1.1": ("t5", {**V1_1, **SIZES}),
    "mt5 of one layer, few buckets": ("mt5", {**MT5, **SIZES, "num_layers": 1, "num_decoder_layers": 1,
                                              "relative_attention_num_buckets": 8}),
}  # fmt: skip


def folder(name: str, where: Path, **settings: Any) -> Path:
    """A published model with random weights, a vocabulary and sentinels."""
    model_type, sizes = KINDS[name]
    content = t5_model()
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_proto=content).get_piece_size()
    model = random_model(model_type, {**sizes, "vocab_size": pieces + 12, **settings})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".q.weight", ".k.weight")):
                parameter.mul_(0.4)  # scores aren't scaled, and a trained model's are no larger
    model.save_pretrained(where)
    (where / "spiece.model").write_bytes(content)
    (where / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer", "extra_ids": 10}))
    return where


def as_any(tokenizer: Any) -> Any:
    """A tokenizer with sentinels, which not all have."""
    return tokenizer


@pytest.mark.parametrize("name", ["t5", *(pytest.param(each, marks=pytest.mark.slow) for each in [*KINDS][1:])])
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    """There and back again, by llama.cpp's encoder and decoder. The original's output is scaled, llama.cpp's isn't."""
    source = folder(name, tmp_path / "source")
    said = do("hf", source, "gguf", tmp_path / "model", gguf_type="f32")
    assert any(line.startswith("proof: llama.cpp") for line in said)
    assert not [line for line in said if "other tokens" in line]
    said = do("gguf", tmp_path / "model", "megatron", tmp_path / "ours")
    assert any(line.startswith("proof: llama.cpp") for line in said)
    before, back = read_huggingface(source), read_gguf(tmp_path / "model", scratch=tmp_path / "scratch")
    assert back.model.untie_embeddings_and_output_weights
    for each, tensor in before.tensors.items():
        assert torch.equal(back.tensors[each].make(), tensor.make()), each
    one, other = (as_any(build_tokenizer(each.tokenizer)) for each in (before, back))
    for text in ("the cat sat on the mat", "  two  spaces ", "of <extra_id_0> and <extra_id_3>"):
        assert one.tokenize(text) == other.tokenize(text)
    assert (other.eod, other.pad, other.decoder_start) == (1, 0, 0)
    assert list(other.sentinels) == list(one.sentinels)


@pytest.mark.slow(reason="as decoders, whose types test_gguf.py has")
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "bf16"])
def test_few_bits(kind: Any, tmp_path: Path) -> None:
    """The table of relative positions stays whole, and transformers, which reads files of T5 wrongly, isn't asked."""
    said = do("hf", folder("t5 v1.1", tmp_path / "source"), "gguf", tmp_path / "model", gguf_type=kind)
    assert any(line.startswith("proof: llama.cpp") for line in said)
    back, file = read_gguf(tmp_path / "model", scratch=tmp_path / "scratch"), gguf_file(tmp_path / "model")
    assert transformers_answer(file, question_for(back.model, back.groups)) is None
    assert back.tensors["encoder_positions.weight"].dtype == torch.float32
    assert open_gguf(file).kinds == tuple(sorted({"F32", kind.upper(), *(["Q8_0"] if kind == "q4_0" else [])}))


@pytest.mark.slow(reason="a file of another program, which lacks one tensor of ours")
def test_a_file_of_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's converter writes the original without an output layer, whose probabilities llama.cpp then gets wrong:
    the model is the scaled one, and the proof compares with what llama.cpp computes.
    """
    plain = writing.gguf_form

    def without_output(portable: Any) -> Any:
        form = plain(portable)
        return writing.GgufForm(
            form.architecture, form.keys, {n: t for n, t in form.tensors.items() if n != "output.weight"}, form.notes
        )

    source = folder("t5", tmp_path / "source")
    monkeypatch.setattr(writing, "gguf_form", without_output)
    do("hf", source, "gguf", tmp_path / "model", gguf_type="f32", skip_proof=True)
    said = do("gguf", tmp_path / "model", "hf", tmp_path / "back")
    assert any(line.startswith("proof: llama.cpp") for line in said)
    back = read_huggingface(tmp_path / "back")
    assert T5Config.among(back.groups).scale_output and not back.model.untie_embeddings_and_output_weights


def test_what_llama_cpp_has_otherwise(tmp_path: Path) -> None:
    """A deeper decoder ends llama.cpp's process, and another distance, or ReLU for another function, another model."""
    for settings, facts in (
        ({"num_decoder_layers": 4}, ("--decoder-num-layers is 4", "--num-layers")),
        ({"relative_attention_max_distance": 64}, ("--relative-attention-max-distance is 64",)),
        ({"feed_forward_proj": "gelu"}, ("--activation is gelu", "--to hf")),
    ):
        source = folder("t5", tmp_path / str(len(settings)) / facts[0], **settings)
        with expect_error(CheckpointError, *facts):
            gguf_form(read_huggingface(source))


@pytest.mark.slow(reason="tests of decoders show that a wrong file is not written")
def test_a_wrong_file_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof asks llama.cpp's decoder, which has its encoder's output."""
    source = folder("t5", tmp_path / "source")
    scaled = writing._scaled
    monkeypatch.setattr(writing, "_scaled", lambda tensor, factor: scaled(tensor, 1.1 * factor))
    with expect_error(ProofError, hide=[r"xllamacpp [\d.]+", r"difference \S+", r"up to [\d.]+"]):
        do("hf", source, "gguf", tmp_path / "model", gguf_type="f32")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow(reason="as those of decoders")
def test_what_a_file_lacks(tmp_path: Path) -> None:
    """Missing keys are named; an encoder alone is another architecture."""
    source = folder("t5", tmp_path / "source")
    change(source, relative_attention_num_buckets=32)
    form = gguf_form(read_huggingface(source))
    from megatron.core.models.t5.gguf import FORMAT

    keys = {key: value for key, value in form.keys.items() if key != "attention.key_length"}
    with expect_error(CheckpointError, "t5.attention.key_length"):
        FORMAT.read(keys, form.tensors, form.architecture)
    with expect_error(CheckpointError, "feed_forward_length", "[1, 2, 3]"):
        FORMAT.read({**form.keys, "feed_forward_length": [1, 2, 3]}, form.tensors, form.architecture)
    check_line("\n".join(form.notes), "note", "word embedding")
