"""Checkpoints on a grid: the same bytes from any number of ranks, folds that change nothing, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.config.hybrid import HybridConfig
from megatron.config.mamba import MambaConfig
from megatron.config.model import ModelConfig
from megatron.config.moe import MoEConfig
from megatron.config.pipeline import Stage
from megatron.config.tokenizer import TokenizerConfig
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.averaging import averaged
from megatron.core.conversion.huggingface.stored_codes import stored
from megatron.core.conversion.huggingface.writing import write_huggingface
from megatron.core.conversion.native import read_native, write_native
from megatron.core.conversion.portable import PortableModel, load_weights
from megatron.core.conversion.proof import portable_answer
from megatron.core.conversion.quantized_checkpoints import read_quantization
from megatron.core.conversion.quantizing.calibrate import calibrated
from megatron.core.conversion.quantizing.folds import folds_of
from megatron.core.conversion.quantizing.matrices import Matrix, matrices_of, quantized_parameters
from megatron.core.conversion.quantizing.recipe import Recipe, check_length
from megatron.core.conversion.quantizing.texts import calibration_texts
from megatron.core.conversion.questions import question_for
from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.metadata import DatasetMetadata, TokenizerStamp
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.gpt.upcycling import upcycled
from megatron.core.models.registry import family_of
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.quantization.grid import Scales, codes_of, values_of_codes
from megatron.core.quantization.scheme import scheme_named
from megatron.core.transformer.layer import TransformerLayer
from megatron.errors import CheckpointError, ConfigError, DataError
from tests.harness import run_ranks
from tests.harness.runs import PIECES
from tests.harness.sentences import check_sentence, expect_error
from tests.tiers import pairs, tiers
from tests.unit.conversion.expert_checkpoints import LATENT
from tests.unit.conversion.megatron_checkpoints import CLASSIC, MODERN, portable, random_tensors

MOE = MoEConfig(num_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2, moe_shared_expert_intermediate_size=16)
TOKENS = torch.randint(0, 96, (9, 16), generator=torch.Generator().manual_seed(0))


def model_of(settings: dict[str, Any], *parts: object, dtype: torch.dtype = torch.float32) -> PortableModel:
    """A model with random weights."""
    model = ModelConfig(**{**settings, "num_layers": 2, "vocab_size": 96})
    groups = (GPTConfig(), *parts)
    return portable(model, random_tensors(model, groups, dtype=dtype), groups)


def quantized(
    context: ParallelContext, model: PortableModel, recipe: Recipe, folder: Path, lines: list[str] | None = None
) -> PortableModel:
    """The model, calibrated on a few tokens."""
    said = [] if lines is None else lines
    return calibrated(model, recipe, TOKENS, calibration={"seed": 1}, context=context, spool=folder, say=said.append)


def numbers(made: PortableModel) -> dict[str, Tensor]:
    """Everything that is written."""
    assert made.quantization is not None
    found = {name: tensor.make() for name, tensor in (*made.tensors.items(), *made.quantization.cache.items())}
    for name, scales in made.quantization.scales.items():
        for part in ("factors", "zeros", "inputs"):
            if (tensor := getattr(scales, part)) is not None:
                found[f"{name} {part}"] = tensor.make()
    return found


def of_ranks(context: ParallelContext, recipe: Recipe, folder: Path) -> dict[str, Tensor]:
    """What rank 0 of several would write."""
    made = quantized(context, model_of(MODERN, MOE), recipe, folder)
    return numbers(made) if context.mesh.world_rank == 0 else {}


RECIPES = {
    "gptq": Recipe(scheme_named("int4", group_size=8), "gptq"),
    "awq, keys and values": Recipe(scheme_named("int4-asym", group_size=16), "awq", cache=True),
    "smoothquant": Recipe(scheme_named("w8a8"), "smoothquant"),
    "inputs": Recipe(scheme_named("fp8-tensor")),
}
LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "tp4": {"tp": 4}}


@pytest.mark.parametrize(
    ("name", "layout"),
    pairs(RECIPES, LAYOUTS, rich=("tp2", "pp2", "dp2"), slow=("tp4", "smoothquant")),
)
def test_every_layout_writes_the_same_bytes(name: str, layout: str, tmp_path: Path) -> None:
    """Exports of one model would differ by where they were made."""
    alone = numbers(quantized(ParallelContext.single(), model_of(MODERN, MOE), RECIPES[name], tmp_path / "alone"))
    found = run_ranks(of_ranks, RECIPES[name], tmp_path / "ranks", **LAYOUTS[layout])[0]
    assert found.keys() == alone.keys()
    assert [each for each in alone if not torch.equal(found[each], alone[each])] == []
    assert any(each.endswith("k_scale") for each in alone) == ("keys" in name)


HYBRID = {**MODERN, "position_embedding_type": "none"}
KINDS: dict[str, tuple[dict[str, Any], tuple[object, ...]]] = {
    "gated, experts": (MODERN, (MOE,)),
    "one key for each query": ({**MODERN, "num_query_groups": 4, "apply_layernorm_1p": True}, ()),
    "biases, layer norms, relu": ({**CLASSIC, "activation": "relu"}, ()),
    "parallel": ({**MODERN, "parallel_attention": True}, ()),
    "latent": ({**MODERN, **LATENT, "kv_channels": None}, ()),
    "norms after": ({**MODERN, "norm_placement": "after"}, ()),
    "state space": (
        HYBRID,
        (HybridConfig(hybrid_layer_pattern="M-"), MambaConfig(mamba_head_dim=8, mamba_num_groups=2, mamba_state_dim=4)),
    ),
}


@pytest.mark.parametrize("kind", tiers(KINDS, first=["gated, experts", "biases, layer norms, relu", "latent"]))
@torch.no_grad()
def test_folds_change_nothing(kind: str) -> None:
    """A factor that is missing somewhere, such as in a router, would be another model."""
    settings, parts = KINDS[kind]
    model = model_of({name: value for name, value in settings.items() if value is not None}, *parts)
    build, context = family_of(model.groups).train_spec.build_model, ModelContext.single()
    stage = build(model.model, model.groups, context, stage=Stage(range(1), is_first=True, is_last=True)).eval()
    load_weights(stage.requires_grad_(False), model, context.mesh)
    names, by_weight = quantized_parameters(model.model, model.groups), dict[Tensor, list[Matrix]]()
    for name, weight in stage.named_parameters():
        if name in names:
            by_weight[weight] = matrices_of(name, weight.data)
            for matrix in by_weight[weight]:
                matrix.statistics.tokens = 1000
    before = stage(TOKENS).logits()
    (layer,) = [each for each in stage.modules() if isinstance(each, TransformerLayer)]
    folds = folds_of(layer, model.model, by_weight)
    for number, fold in enumerate(folds):
        width = fold.matrices[0].weight.shape[1]
        fold.apply(2.0 ** torch.randint(-3, 4, (width,), generator=torch.Generator().manual_seed(number)))
    torch.testing.assert_close(stage(TOKENS).logits(), before, rtol=1e-4, atol=1e-4)
    expected = {"norms after": 1, "state space": 1, "parallel": 2, "latent": 5, "gated, experts": 7}
    assert len(folds) == expected.get(kind, 4)


def test_methods_come_closer_than_rounding(tmp_path: Path) -> None:
    """In the logits of texts like those that they have seen."""
    model, single = model_of(MODERN), ParallelContext.single()
    question = question_for(model.model, model.groups)
    right, errors = portable_answer(model, question)["words"], dict[str, float]()
    for method in ("rtn", "gptq", "awq"):
        recipe = Recipe(scheme_named("int3", group_size=16), method)
        made = quantized(single, model, recipe, tmp_path / method)
        errors[method] = float((portable_answer(made, question)["words"] - right).square().mean().sqrt())
    assert errors["gptq"] < 0.9 * errors["rtn"] and errors["awq"] < 0.9 * errors["rtn"], errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_keeps_codes(dtype: torch.dtype, tmp_path: Path) -> None:
    """An export finds the codes again that the method chose: by its scales, weights lie on the grid exactly."""
    recipe = Recipe(scheme_named("int4-asym", group_size=16), "gptq", ignore=("*.linear_proj",))
    model = model_of(MODERN, MOE, dtype=dtype)
    made = quantized(ParallelContext.single(), model, recipe, tmp_path / "layers")
    write_native(made, tmp_path / "made", final=tmp_path / "made")
    back = read_native(tmp_path / "made")
    assert back.quantization is not None and made.quantization is not None
    assert (back.quantization.scheme, back.quantization.method) == (recipe.scheme, "gptq")
    before, after = numbers(made), numbers(back)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    grid = recipe.scheme.weights
    for name, scales in back.quantization.scales.items():
        weight, factors = after[name], after[f"{name} factors"]
        assert factors.dtype == weight.dtype == dtype and scales.zeros is not None
        flat = Scales(factors.flatten(0, -2), after[f"{name} zeros"].flatten(0, -2))
        codes = codes_of(weight.flatten(0, -2), flat, grid)
        assert torch.equal(values_of_codes(codes, flat, grid).view_as(weight), weight)
    assert not any("linear_proj" in name or "router" in name for name in back.quantization.scales)
    assert not torch.equal(
        after["decoder.layers.1.mlp.experts.linear_fc2.weight"],
        model.tensors["decoder.layers.1.mlp.experts.linear_fc2.weight"].make(),
    )
    folder = find_checkpoint(tmp_path / "made").path
    assert json.loads((folder / "quantization.json").read_text(encoding="utf-8"))["calibration"] == {"seed": 1}
    with expect_error(CheckpointError, "--load", "int4-asym", "gptq"):
        recipe.parameters(back)
    with expect_error(CheckpointError, "first", "int4-asym", "gptq"):
        averaged([("first", back), ("second", model)], [0.5, 0.5])
    with expect_error(CheckpointError, "int4-asym", "gptq"):
        upcycled(back, num_experts=4, granularity=1, topk=2, seed=1)


def test_settings_that_do_not_fit_are_damage(tmp_path: Path) -> None:
    """Groups of no inputs ended in a traceback of the server, and groups of others in an error about an index."""
    recipe = Recipe(scheme_named("int4", group_size=16))
    made = quantized(ParallelContext.single(), model_of(MODERN), recipe, tmp_path / "layers")
    write_native(made, tmp_path / "made", final=tmp_path / "made")
    folder = find_checkpoint(tmp_path / "made")
    there, held = folder.path / "quantization.json", StoredTensors(folder.path)
    settings = json.loads(there.read_text(encoding="utf-8"))
    for changed, facts in (
        ({"group_size": 0}, ("group_size 0",)),
        ({"group_size": 32}, ("[96, 2]", "[96, 1]")),
        ({"scheme": "int4-asym"}, ("zero points",)),
        ({"scheme": "int8"}, ("group_size 16", "int8")),
    ):
        there.write_text(json.dumps(settings | changed), encoding="utf-8")
        with expect_error(CheckpointError, str(there), *facts):
            read_quantization(folder, held)


def test_scales_of_floats_are_those_of_an_export(tmp_path: Path) -> None:
    """In bf16, an FP8 folder had other codes and scales in bf16 when its weights were rounded here before."""
    model, scheme = model_of(MODERN, dtype=torch.bfloat16), scheme_named("fp8")
    made = quantized(ParallelContext.single(), model, Recipe(scheme), tmp_path / "layers")
    assert made.quantization is not None
    for name, scales in made.quantization.scales.items():
        assert scales.factors.dtype == torch.float32
        there = stored(name, model.tensors[name], scheme, None, torch.bfloat16)
        here = stored(name, made.tensors[name], scheme, scales, torch.bfloat16)
        for part, tensor in there.items():
            assert tensor.dtype == here[part].dtype and torch.equal(tensor.make(), here[part].make()), part


def test_three_bits_have_no_reader(tmp_path: Path) -> None:
    """An export used to end in a traceback."""
    made = quantized(ParallelContext.single(), model_of(MODERN), Recipe(scheme_named("int3", group_size=16)), tmp_path)
    with expect_error(ConfigError, "int3", "int4"):
        write_huggingface(made, tmp_path / "folder", max_shard_size=1 << 30)


def test_experts_that_saw_little_are_rounded(tmp_path: Path) -> None:
    """A Hessian of a few tokens would make them worse than rounding does; and it is said."""
    model, lines = model_of(MODERN, dataclasses.replace(MOE, num_experts=64)), list[str]()
    recipe = Recipe(scheme_named("int4", group_size=16), "gptq")
    made = numbers(quantized(ParallelContext.single(), model, recipe, tmp_path / "gptq", lines))
    rounding = dataclasses.replace(recipe, method="rtn")
    plain = numbers(quantized(ParallelContext.single(), model, rounding, tmp_path / "rtn"))
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight"
    assert torch.equal(made[name], plain[name])
    check_sentence(next(line for line in lines if name in line), "64 of 64", name, "--samples")
    assert not torch.equal(
        made[name.replace("experts", "shared_experts")], plain[name.replace("experts", "shared_experts")]
    )


def test_what_can_t_be_quantized_is_refused_before_any_work(tmp_path: Path) -> None:
    """One sentence each, with what would work."""
    model = model_of(MODERN)
    for recipe, facts in (
        (Recipe(scheme_named("fp8-block")), ("--scheme fp8-block", "--quantize fp8-block")),
        (Recipe(scheme_named("int4"), "smoothquant"), ("--method smoothquant", "w8a8", "int4")),
        (Recipe(scheme_named("fp8"), "gptq"), ("--method gptq", "fp8", "rtn")),
        (Recipe(scheme_named("int4")), ("--group-size 128", "32", "16")),
        (
            Recipe(scheme_named("int8"), ignore=("*.q_proj",)),
            ("--quantize-ignore *.q_proj", "decoder.layers.0.self_attention.linear_qkv.weight"),
        ),
    ):
        with expect_error(ConfigError, *facts):
            recipe.parameters(model)
    with expect_error(ConfigError, "--seq-length 64", "32"):
        check_length(model, samples=1, length=64, learned=True)
    with expect_error(ConfigError, "--samples 9000", "--seq-length 1024"):
        check_length(model, samples=9000, length=1024, learned=False)
    latent = Recipe(scheme_named("int8"), cache=True)
    with expect_error(ConfigError, "--kv-cache-scales fp8", "latent"):  # before texts are read
        latent.parameters(model_of({**MODERN, **LATENT}))


def test_texts(tmp_path: Path) -> None:
    """Sequences of a data set, and sentences about those that don't serve."""
    model, prefix = model_of(MODERN), str(tmp_path / "data")
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for first in range(0, 90, 9):
            writer.add_document(np.arange(first, first + 9))
    found = calibration_texts(model, prefix, key="text", samples=5, length=16, seed=3)
    assert [row.tolist() for row in found.tokens] == [list(range(at, at + 16)) for at in range(0, 80, 16)]
    two = calibration_texts(model, prefix, key="text", samples=2, length=16, seed=3)
    assert {tuple(row.tolist()) for row in two.tokens} < {tuple(row.tolist()) for row in found.tokens}
    with expect_error(DataError, prefix, "90", "--samples 9", "144", "--samples 5"):
        calibration_texts(model, prefix, key="text", samples=9, length=16, seed=3)
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}\n')
    with expect_error(DataError, str(texts), "tokenizer"):
        calibration_texts(model, str(texts), key="text", samples=1, length=4, seed=3)
    smaller = dataclasses.replace(model, model=dataclasses.replace(model.model, vocab_size=50))
    with expect_error(DataError, prefix, "79", "49"):
        calibration_texts(smaller, prefix, key="text", samples=5, length=16, seed=3)
    with expect_error(DataError, str(tmp_path / "none"), ".idx"):
        calibration_texts(
            trained_on_text(model, tmp_path), str(tmp_path / "none"), key="text", samples=1, length=4, seed=3
        )
    words = trained_on_text(model, tmp_path)
    found = calibration_texts(words, str(texts), key="text", samples=1, length=2, seed=3)
    assert found.tokens.shape == (1, 2)
    with expect_error(DataError, "--data-path", "texts.jsonl:1", "story"):
        calibration_texts(words, str(texts), key="story", samples=1, length=2, seed=3)
    stamp = TokenizerStamp("Other", 90, 0, "0123456789abcdef")
    DatasetMetadata.path(prefix).write_text(
        DatasetMetadata(tokenizer=stamp, num_tokens=90, num_sequences=10, num_documents=10, max_token_id=89).to_json()
    )
    with expect_error(DataError, prefix, "Other", "0123456789ab"):
        calibration_texts(words, prefix, key="text", samples=1, length=4, seed=3)


def trained_on_text(model: PortableModel, folder: Path) -> PortableModel:
    """The model with a tokenizer of words."""
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join([*PIECES, *(f"w{number}" for number in range(82))]))
    tokenizer = TokenizerConfig(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(vocabulary))
    return dataclasses.replace(model, tokenizer=tokenizer)
