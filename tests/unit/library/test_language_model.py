"""Three lines in a notebook: a model of transformers, or a folder, as one object that generates and saves itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from typing_extensions import assert_type

import megatron
from megatron.errors import CheckpointError, ConfigError, MegatronError
from tests.architecture.source_tree import ROOT
from tests.harness.sentences import expect_error

transformers = pytest.importorskip("transformers", reason="its models are converted")
IDS = torch.arange(24).view(2, 12) * 5 % 101
LLAMA = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()


@pytest.fixture(scope="module")
def letters() -> Any:
    """A tokenizer whose tokens are bytes, and one that ends a text."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "<|endoftext|>"])}
    whole = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|endoftext|>")


def test_logits_gradients_and_greedy_text_are_those_of_transformers(llama: Any) -> None:
    """The model is a torch module: a loss of one's own has the gradients that it has there."""
    model = megatron.from_transformers(llama)
    assert_type(model, megatron.LanguageModel)
    assert isinstance(model, nn.Module)
    llama.zero_grad()
    for logits in (model(IDS), llama(IDS).logits):
        cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(model(IDS), llama(IDS).logits, rtol=1e-4, atol=1e-5)
    ours, theirs = model.model.embedding.word_embeddings.weight.grad, llama.model.embed_tokens.weight.grad  # type: ignore[union-attr]
    torch.testing.assert_close(ours[:101], theirs, rtol=1e-4, atol=1e-6)  # type: ignore[index]
    expected = llama.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, do_sample=False, pad_token_id=0)[0, 3:]
    assert_type(model.generate([5, 6, 7]), list[int])
    assert model.generate([5, 6, 7], max_new_tokens=9, temperature=0) == expected.tolist()
    assert model.generate([[9], [5, 6, 7]], max_new_tokens=9, temperature=0)[1] == expected.tolist()


def test_folders_of_both_formats_hold_the_model(llama: Any, tmp_path: Path) -> None:
    """What ``save`` writes loads again, also in another type; nothing is overwritten unless asked."""
    model = megatron.from_transformers(llama)
    model.save(tmp_path / "ours")
    model.save_pretrained(tmp_path / "hf")
    for folder in ("ours", "hf"):
        assert torch.equal(megatron.load(tmp_path / folder)(IDS), model(IDS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert torch.equal(theirs(IDS).logits, llama(IDS).logits)
    half = megatron.load(tmp_path / "ours", dtype="bf16")
    assert half.dtype == half(IDS).dtype == torch.bfloat16
    with expect_error(CheckpointError):
        model.save(tmp_path / "ours")
    model.save(tmp_path / "ours", overwrite=True)


def test_changed_weights_are_generated_from_and_saved(llama: Any, tmp_path: Path) -> None:
    """Caches of an earlier call held copies of the weights before a step of training."""
    model = megatron.from_transformers(llama)
    before = model.generate([5, 6, 7], max_new_tokens=9, temperature=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    after = model.generate([5, 6, 7], max_new_tokens=9, temperature=0)
    assert after != before
    model.save(tmp_path / "changed")
    assert megatron.load(tmp_path / "changed").generate([5, 6, 7], max_new_tokens=9, temperature=0) == after


def test_text_with_a_tokenizer(letters: Any, tmp_path: Path) -> None:
    """It travels into both kinds of folders. Dropout follows torch's seed and differs from call to call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=256, bos_token_id=256))
    model = megatron.from_transformers(theirs, tokenizer=letters)
    assert_type(model.generate("hello"), str)
    text = model.generate("hello", max_new_tokens=12)
    assert [text] == model.generate(["hello"], max_new_tokens=12)
    model.save(tmp_path / "ours")
    model.save_pretrained(tmp_path / "hf")
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert megatron.load(tmp_path / "ours").generate("hello", max_new_tokens=12) == text
    assert megatron.load(tmp_path / "hf").generate("hello", max_new_tokens=12) == text

    model.train()
    torch.manual_seed(1)
    first, second = model(IDS), model(IDS)
    torch.manual_seed(1)
    assert torch.equal(model(IDS), first)
    assert not torch.equal(first, second)


def test_encoders_and_decoders(tmp_path: Path) -> None:
    """T5 gives logits of its decoder and answers ids; BERT gives logits, and continues no text."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    model = megatron.from_transformers(theirs)
    logits = theirs(input_ids=IDS, decoder_input_ids=IDS[:, :5]).logits
    torch.testing.assert_close(model(IDS, IDS[:, :5]), logits, rtol=1e-3, atol=1e-4)
    asked = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    answer = theirs.generate(torch.tensor([[5, 6, 7]]), **asked)[0, 1:].tolist()
    assert model.generate([5, 6, 7], max_new_tokens=6, min_new_tokens=6, temperature=0) == answer

    sizes = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=48)).eval()
    model, real = megatron.from_transformers(bert), torch.ones_like(IDS, dtype=torch.bool)
    found = model(IDS, torch.zeros_like(IDS), attention_mask=real)
    torch.testing.assert_close(found, bert(IDS).logits, rtol=1e-3, atol=1e-4)
    with expect_error(ConfigError):
        model.generate([5, 6])


@pytest.mark.parametrize(
    ("prompts", "options", "facts"),
    [
        ("hi", {}, ["'hi'", "token ids"]),
        (IDS, {}, ["Tensor", "ids.tolist()"]),
        ([[1.5]], {}, ["prompt 1 (list)"]),
        ("", {}, ["''", "token ids"]),
        ([], {}, None),
        ([[]], {}, ["prompt"]),
        ([200], {}, ["token id 200", "0 to 100"]),
        ([5], {"max_new_tokens": 64}, ["at most 64", "at most 63"]),
        ([5] * 65, {"max_new_tokens": 1}, ["at most 64"]),
        ([5], {"max_new_tokens": 0}, ["max_new_tokens is 0"]),
        ([5], {"num_beams": 0}, ["num_beams is 0"]),
        ([5], {"temperature": -1.0}, ["temperature is -1.0"]),
        ([5], {"length_penalty": 2.0}, ["length_penalty", "num_beams"]),
        ([5], {"num_beams": 2, "temperature": 0.5}, ["temperature", "num_beams=2"]),
        ([5], {"num_beams": 2, "top_k": 3}, ["top_k", "num_beams=2"]),
        ([5], {"num_beams": 2, "top_p": 0.5}, ["top_p", "num_beams=2"]),
        ([5], {"num_beams": 2, "min_p": 0.5}, ["min_p", "num_beams=2"]),
        ([5], {"num_beams": 2, "stop": "."}, ["stop", "num_beams=2"]),
    ],
)
def test_wrong_prompts_and_options(llama: Any, prompts: Any, options: dict[str, Any], facts: list[str] | None) -> None:
    """One sentence each, which says what would work."""
    model = megatron.from_transformers(llama)
    if facts is None:
        assert model.generate(prompts) == []
        return
    with expect_error(MegatronError, *facts, exit_code=2):
        model.generate(prompts, **options)


def test_wrong_models_and_folders(llama: Any, tmp_path: Path) -> None:
    """A folder with nothing in it, a module of something else, and a model that was converted after it was built."""
    with expect_error(CheckpointError, "megatron.load"):
        megatron.load(tmp_path / "none")
    with expect_error(CheckpointError):
        megatron.from_transformers(nn.Linear(2, 2))
    with expect_error(ConfigError):
        megatron.from_transformers(llama, tokenizer=tmp_path)
    with expect_error(ConfigError, "'int8'", "torch.float32"):
        megatron.from_transformers(llama, dtype="int8")
    with expect_error(ConfigError):
        megatron.from_transformers(llama).bfloat16()(IDS)
    with expect_error(ConfigError, "dtype and device"):
        megatron.load(tmp_path, nn.Linear(2, 2), dtype="bf16", device="meta")  # type: ignore[call-overload]


def test_the_names_need_torch_only_when_they_are_used() -> None:
    """``import megatron`` takes milliseconds, and an editor's completion shows the names."""
    code = (
        "import sys, megatron; names = dir(megatron); assert not {'torch', 'numpy'} & set(sys.modules); "
        "assert {'load', 'pretrain', 'from_transformers', 'LanguageModel'} <= set(names); megatron.load; "
        "assert 'torch' in sys.modules; "
        "assert 'module' in megatron.pretrain.__doc__; assert not hasattr(megatron, 'lode')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
