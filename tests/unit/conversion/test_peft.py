"""Adapters in PEFT's format, with peft itself as the oracle: what it computes beside a published base, we compute."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import pkgutil
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from megatron.config.lora import LoraConfig, is_adapter, without_adapters
from megatron.core.conversion import proof
from megatron.core.conversion.adapters import merged
from megatron.core.conversion.huggingface.reading import read_huggingface
from megatron.core.conversion.native import read_native
from megatron.core.conversion.peft.reading import with_peft
from megatron.core.conversion.peft.units import their_matrices
from megatron.core.conversion.peft.writing import write_peft
from megatron.core.conversion.portable import LazyTensor, PortableModel, parameters_of
from megatron.core.conversion.questions import Answer, question_for
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.saving import Saver
from megatron.training.step import train_step
from tests import published
from tests.harness.published import random_model
from tests.harness.sentences import expect_error
from tests.unit.conversion.test_starting import config_of, started

CASES: dict[str, dict[str, Any]] = {}
"""By ``model_type``, its first settings in the tests of published models."""
for _module in pkgutil.iter_modules(published.__path__):
    for _type, _settings in getattr(importlib.import_module(f"tests.published.{_module.name}"), "CASES", {}).values():
        CASES.setdefault(_type, _settings)
# Their shared experts and dense layers have the names of experts' layers, for which PEFT takes them.
UNCLEAR = ("deepseek_v2", "deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_next")
# PEFT refuses adapters beside a matrix of their mixers.
MIXERS = ("mamba2", "nemotron_h")
WITH_PEFT = [each for each in CASES if each not in MIXERS]
DEFAULT_TIER = ("gpt2", "mixtral")
Base = Callable[[str], Path]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The folder of a published model with random weights, made once."""
    root = tmp_path_factory.mktemp("bases")

    def made(model_type: str) -> Path:
        folder = root / model_type
        if not folder.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                random_model(model_type, CASES[model_type]).save_pretrained(folder)
        return folder

    return made


def adapted(model: PortableModel, targets: tuple[str, ...]) -> PortableModel:
    """The model with random adapters."""
    lora = LoraConfig(lora_rank=3, lora_alpha=5.0, lora_targets=targets)
    groups = (*without_adapters(model.groups), lora)
    tensors, generator = dict(model.tensors), torch.Generator().manual_seed(1)
    for name, layout in parameters_of(model.model, groups).items():
        if is_adapter(name):
            drawn = torch.randn(layout.shape, generator=generator) * 0.3
            tensors[name] = LazyTensor(tuple(layout.shape), torch.float32, drawn.clone)
    return dataclasses.replace(model, tensors=tensors, groups=groups)


def targets_of(model: PortableModel, model_type: str) -> tuple[str, ...]:
    """All linear layers that a PEFT folder can have adapters of."""
    theirs, stacked = their_matrices(model.model, model.groups, model_type)
    units = {unit for matrix in theirs.values() for unit in matrix.units}
    without = {each.rpartition(".")[0].rpartition(".")[2] for each in stacked.values()} | {"linear_kv_up_proj"}
    if model_type in UNCLEAR:
        without |= {"linear_fc1", "linear_fc2"}
    names = {unit.layer.rpartition(".")[2] for unit in units} - without
    return tuple(sorted(name for name in names if name.startswith("linear") or name in ("in_proj", "out_proj")))


def by_peft(folder: Path, adapter: Path, model: PortableModel) -> Answer:
    """Logits of transformers' model with the adapter that peft has read."""
    question = question_for(model.model, model.groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = proof.loaded_by_transformers(folder, question, dequantize=True)
        return proof.answer_of(peft.PeftModel.from_pretrained(theirs, str(adapter)).eval(), folder, question)


def close(one: Answer, other: Answer, most: float = 1e-3) -> bool:
    return all(bool((one[key] - other[key]).abs().max() <= most * one[key].abs().max()) for key in one)


@pytest.mark.parametrize(
    "model_type", [pytest.param(each, marks=() if each in DEFAULT_TIER else pytest.mark.slow) for each in WITH_PEFT]
)
def test_peft_computes_with_our_adapters_what_we_do(model_type: str, base: Base, tmp_path: Path) -> None:
    """A user's PEFT folder had pairs of other rows, another scale, or one that peft left out without a word."""
    plain = read_huggingface(base(model_type))
    ours = adapted(plain, targets_of(plain, model_type))
    question = question_for(plain.model, plain.groups)
    answer = proof.portable_answer(ours, question)
    write_peft(ours, tmp_path / "peft", base=None)
    again = with_peft(plain, tmp_path / "peft")
    assert close(answer, by_peft(base(model_type), tmp_path / "peft", plain))
    assert close(answer, proof.portable_answer(again, question))
    assert close(answer, proof.portable_answer(merged(again), question))
    assert not close(answer, proof.portable_answer(plain, question))


PEFT: dict[str, dict[str, Any]] = {
    "patterns, root of the rank": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "r": 4,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6},
        "alpha_pattern": {"k_proj": 3},
        "use_rslora": True,
        "lora_alpha": 7,
    },
    "all linear, biases": {"target_modules": "all-linear", "r": 3, "bias": "all"},
    "one layer": {"target_modules": ["q_proj"], "r": 3, "layers_to_transform": [1], "bias": "lora_only"},
    "a pattern, modules trained whole": {
        "target_modules": r".*\.1\..*(q_proj|up_proj)",
        "r": 3,
        "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"],
    },
}


@pytest.mark.parametrize("case", PEFT)
def test_folders_of_peft_mean_the_same_here(case: str, base: Base, tmp_path: Path) -> None:
    """A setting of the folder was skipped: the model answered as if it weren't there."""
    folder = base("qwen2")
    plain = read_huggingface(folder)
    question = question_for(plain.model, plain.groups)
    generator = torch.Generator().manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = proof.loaded_by_transformers(folder, question, dequantize=True)
        model = peft.get_peft_model(theirs, peft.LoraConfig(task_type="CAUSAL_LM", **PEFT[case])).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        model.save_pretrained(str(tmp_path / "peft"))
        answer = proof.answer_of(model, folder, question)
    ours = with_peft(plain, tmp_path / "peft")
    assert close(answer, proof.portable_answer(ours, question))
    assert close(answer, proof.portable_answer(merged(ours), question))
    if case == "one layer":
        write_peft(ours, tmp_path / "again", base=None)
        settings = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
        assert settings["target_modules"] == ["model.layers.1.self_attn.q_proj"]


def test_folders_that_mean_something_else_are_refused(base: Base, tmp_path: Path) -> None:
    """What isn't computed here, or belongs to another base, is named before anything is read."""
    plain = read_huggingface(base("qwen2"))
    write_peft(adapted(plain, ("linear_qkv",)), tmp_path / "peft", base=None)
    text = (tmp_path / "peft" / "adapter_config.json").read_text()

    def changed(**settings: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "peft", folder)
        (folder / "adapter_config.json").write_text(json.dumps({**json.loads(text), **settings}))
        return folder

    for settings, facts in (
        ({"peft_type": "LOHA"}, ("peft_type", "LOHA")),
        ({"use_dora": True}, ("use_dora",)),
        ({"target_parameters": ["experts.up"]}, ("target_parameters", "experts.up")),
        ({"trainable_token_indices": [1]}, ("trainable_token_indices",)),
        ({"a_new_thing": True}, ("a_new_thing",)),
        ({"init_lora_weights": "pissa_niter_4"}, ("init_lora_weights", "pissa_niter_4")),
        ({"r": 4}, ("[3, 48]", "[4, 48]")),
        ({"r": 0}, ("r is 0",)),
        ({"lora_alpha": -1}, ("lora_alpha",)),
        ({"bias": "some"}, ("bias", "some")),
        ({"target_modules": "("}, ("(", "adapter_config.json")),
        ({"target_modules": ["k_proj", "v_proj"]}, ("q_proj", "target_modules")),
        ({"target_modules": ["k_proj", "q_proj", "v_proj", "o_proj"]}, ("o_proj",)),
        ({"layers_to_transform": [0]}, ("model.layers.1.self_attn.k_proj", "target_modules")),
    ):
        with expect_error(CheckpointError, *facts):
            with_peft(plain, changed(**settings))
    with expect_error(CheckpointError, "adapter_config.json"):
        with_peft(plain, tmp_path)
    (changed() / "adapter_model.safetensors").unlink()
    with expect_error(CheckpointError, "adapter_model.safetensors"):
        with_peft(plain, tmp_path / "changed")
    gpt2 = read_huggingface(base("gpt2"))
    with expect_error(CheckpointError, "gpt2", "transformer.model.layers.0.self_attn.k_proj"):
        with_peft(gpt2, tmp_path / "peft")


def test_adapters_that_peft_would_leave_out_are_refused(base: Base, tmp_path: Path) -> None:
    """PEFT takes a dense layer's gate_proj for the experts', and leaves it out without a word."""
    mixed = read_huggingface(base("deepseek_v3"))
    with expect_error(CheckpointError, "gate_proj", "deepseek_v3", "--lora-targets"):
        write_peft(adapted(mixed, ("linear_fc1", "linear_fc2")), tmp_path / "peft", base=None)
    with expect_error(CheckpointError, "--lora-rank"):
        write_peft(mixed, tmp_path / "peft", base=None)
    write_peft(adapted(mixed, ("linear_kv_up_proj",)), tmp_path / "absorbed", base=None)
    with expect_error(CheckpointError, "kv_b_proj", "merge_and_unload"):  # generation would leave them out
        with_peft(mixed, tmp_path / "absorbed")
    stacked = read_huggingface(base("gpt_oss"))
    with expect_error(CheckpointError, "gpt_oss", "linear_fc1"):
        write_peft(adapted(stacked, ("linear_fc1",)), tmp_path / "peft", base=None)
    assert not (tmp_path / "peft").exists()


def test_a_run_goes_on_from_a_folder(base: Base, tmp_path: Path) -> None:
    """--load-peft started from new adapters, or trained what the folder doesn't adapt; a restart began again from it,
    and the base in --save wasn't the one that the folder's whole modules belong to.
    """
    folder, adapter = base("qwen2"), tmp_path / "peft"
    plain = read_huggingface(folder)
    write_peft(adapted(plain, ("q_proj", "linear_fc2")), adapter, base="some/base", others={"output_layer.weight"})
    beside = f"--load-hf {folder} --load-hf-proof off --load-peft {adapter}"
    save = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"

    run = started(ParallelContext.single(), "gpt", f"{beside} {save}")
    assert run.config.part(LoraConfig).targets == ("linear_fc2", "q_proj")
    before = {name: parameter.detach().clone() for name, parameter in run.models[0].named_parameters()}
    question = question_for(plain.model, plain.groups)
    there = {name: tensor.make() for name, tensor in with_peft(plain, adapter).tensors.items()}
    assert all(torch.equal(there[name], tensor[: len(there[name])]) for name, tensor in before.items())  # padded
    batches = list(itertools.islice(run.data.training_batches(0), 2))
    train_step(run, batches[0])
    run.progress.iteration = 1
    Saver(run).save()
    resumed = started(ParallelContext.single(), "gpt", f"{beside} {save}")
    for each in (run, resumed):
        train_step(each, batches[1])
    pairs = zip(run.models[0].named_parameters(), resumed.models[0].parameters())
    moved = set()
    for (name, one), other in pairs:
        assert torch.equal(one, other)
        moved |= {name} if not torch.equal(one, before[name]) else set()
    assert moved == {name for name in before if is_adapter(name)}
    answer = proof.native_answer(tmp_path / "saved", question)
    assert close(answer, proof.portable_answer(read_native(tmp_path / "saved"), question))

    with expect_error(CheckpointError, "--lora-rank 8", "3", "--load-peft"):
        started(ParallelContext.single(), "gpt", f"{beside} --lora-rank 8")
    with expect_error(ConfigError, "--load-peft", "--load-hf"):
        config_of("gpt", f"--load-peft {adapter} --lora-rank 3 --pretrained-checkpoint {tmp_path / 'saved'}")
