"""Adapters from a base to checkpoints of their own, and from there to weights of a plain model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.config.lora import is_adapter
from megatron.core.checkpointing import storage
from megatron.core.checkpointing.base import BASE_FILE, Base
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion import proof
from megatron.core.conversion.native import read_native
from megatron.core.conversion.questions import question_for
from megatron.core.parallel.context import ParallelContext
from megatron.errors import CheckpointError, ConfigError
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import Run
from megatron.training.step import train_step
from tests.harness.runs import saved_model, tiny_run
from tests.harness.sentences import expect_error

GATED = "--swiglu --untie-embeddings-and-output-weights"
MODELS = {
    "grouped heads, gated": f"--group-query-attention --num-query-groups 2 {GATED}",
    "experts": f"--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 {GATED}",
    "experts that aren't gated": "--num-experts 2 --moe-ffn-hidden-size 8",
}
LORA = "--lora-rank 2 --lora-alpha 6"
BASE = "--pretrained-checkpoint unread"
ON = f"--lora-rank 2 {BASE}"


def trained(base: Path, flags: str, save: Path) -> Run:
    """A run with adapters beside the weights in ``base``, after two steps and a checkpoint."""
    run = tiny_run(ParallelContext.single(), f"--mock-data {flags} --pretrained-checkpoint {base} --save {save}")
    load(run)
    batches = run.data.training_batches(0)
    for _ in range(2):
        train_step(run, next(batches))
    Saver(run).save()
    return run


@pytest.mark.parametrize("model", MODELS)
def test_merged_weights_compute_what_the_adapters_do(model: str, tmp_path: Path) -> None:
    """A pair of the wrong rows, or another scale, gave an exported model that had learned something else."""
    saved_model(tmp_path, "gpt", flags=MODELS[model])
    base, adapted = tmp_path / "saved", tmp_path / "adapted"
    trained(base, f"{MODELS[model]} {LORA}", adapted)
    merged, before = read_native(adapted), read_native(base)
    assert merged.tensors.keys() == before.tensors.keys() and not any(map(is_adapter, merged.tensors))
    question = question_for(merged.model, merged.groups)
    found, plain = proof.portable_answer(merged, question), proof.portable_answer(before, question)
    proof.compare(proof.native_answer(adapted, question), found)
    with pytest.raises(proof.ProofError):
        proof.compare(plain, found)


def test_checkpoints_hold_what_is_trained_and_refer_to_the_rest(tmp_path: Path) -> None:
    """Each checkpoint of an adapter held the whole base again."""
    saved_model(tmp_path, "gpt")
    base, adapted = tmp_path / "saved", tmp_path / "adapted"
    run = trained(base, LORA, adapted)
    folder = find_checkpoint(adapted).path
    with mock.patch.object(storage, "base_of", return_value=None):
        own = StoredTensors(folder).model
    assert own and all(map(is_adapter, own))
    resumed = tiny_run(ParallelContext.single(), f"--mock-data {LORA} --load {adapted} --save {tmp_path / 'next'}")
    load(resumed)
    weights, again = dict(run.models[0].named_parameters()), dict(resumed.models[0].named_parameters())
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert resumed.base == run.base == find_checkpoint(base).path
    in_the_same_folder = tiny_run(
        ParallelContext.single(), f"--mock-data {LORA} --pretrained-checkpoint {base} --save {base}"
    )
    load(in_the_same_folder)
    assert in_the_same_folder.base is None, "a base that newer checkpoints may replace"


def test_a_base_that_is_gone_or_another_is_named(tmp_path: Path) -> None:
    """An adapter on other weights than its own answers, and answers wrongly."""
    saved_model(tmp_path, "gpt")
    base, adapted = tmp_path / "saved", tmp_path / "adapted"
    trained(base, LORA, adapted)
    shutil.move(base, tmp_path / "moved")
    with expect_error(CheckpointError, "adapted", "saved"):
        StoredTensors(adapted / "iter_0000002")
    (tmp_path / "other").mkdir()
    saved_model(tmp_path / "other", "gpt", flags="--seed 5")
    shutil.move(tmp_path / "other" / "saved", base)
    with expect_error(CheckpointError, "adapted", "saved"):
        StoredTensors(adapted / "iter_0000002")
    shutil.rmtree(base)
    base.symlink_to(tmp_path / "moved")
    assert StoredTensors(adapted / "iter_0000002").model
    itself = adapted / "iter_0000002"
    (itself / BASE_FILE).write_text(Base.of(itself).to_json())
    with expect_error(CheckpointError, "adapted"):
        StoredTensors(itself)
    (itself / BASE_FILE).write_text(json.dumps({"folder": 3}))
    with expect_error(CheckpointError, BASE_FILE):
        StoredTensors(adapted / "iter_0000002")


def test_mistakes_with_adapters(tmp_path: Path) -> None:
    """What would be left out, or trained from nothing, is refused before anything is read."""
    saved_model(tmp_path, "gpt")
    adapted = tmp_path / "adapted"
    trained(tmp_path / "saved", LORA, adapted)
    for flags, facts in {
        f"{LORA} --load {tmp_path / 'saved'}": ("--lora-rank is 2", "--pretrained-checkpoint", "--finetune"),
        f"--lora-rank 3 --load {adapted}": ("--lora-rank is 2", "3", "--lora-alpha is 6.0"),
        f"--load {adapted}": ("--lora-rank is 2",),
    }.items():
        with expect_error(CheckpointError, *facts):
            load(tiny_run(ParallelContext.single(), f"--mock-data {flags}"))
    for flags, facts in {
        "--lora-rank 2": ("--lora-rank 2", "--pretrained-checkpoint", "--load-hf", "--load"),
        f"{ON} --lora-targets linear_qvk": ("--lora-targets linear_qvk", "linear_qkv"),
        f"{ON} --lora-targets gate_proj": ("--lora-targets", "gate", "linear_fc1"),
        f"{ON} --lora-targets linear_kv_up_proj": ("--lora-targets linear_kv_up_proj",),
        "--lora-alpha 2": ("--lora-alpha 2.0", "--lora-rank"),
        f"{ON} --train-only bias": ("--train-only bias",),
        "--train-only *.bias --freeze *": ("--train-only *.bias", "--freeze *"),
    }.items():
        with expect_error(ConfigError, *facts):
            tiny_run(ParallelContext.single(), f"--mock-data {flags}")


def test_dropout_is_drawn_again_when_a_layer_is_recomputed(tmp_path: Path) -> None:
    """The backward pass of a recomputed layer would belong to another mask than its forward pass."""
    gradients = []
    for recompute in ("", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"):
        run = tiny_run(ParallelContext.single(), f"--mock-data {LORA} {BASE} --lora-dropout 0.4 {recompute}")
        batches = run.data.training_batches(0)
        for _ in range(2):
            train_step(run, next(batches))
        gradients.append([each.detach().clone() for each in run.models[0].parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    plain = tiny_run(ParallelContext.single(), f"--mock-data {LORA} {BASE}")
    batches = plain.data.training_batches(0)
    for _ in range(2):
        train_step(plain, next(batches))
    assert not all(map(torch.equal, gradients[0], plain.models[0].parameters()))
