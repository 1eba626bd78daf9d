"""``--fp32`` of the generation tools, with a checkpoint that was trained in bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.config.trained_model import TrainedModelConfig
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import launch_environment
from megatron.errors import ConfigError
from megatron.serving.serve import served_model
from megatron.serving.settings import ServerConfig
from megatron.training.checkpoints.saving import Saver
from megatron.training.checkpoints.trained_model import trained_model
from tests.harness.runs import tiny_run
from tests.harness.sentences import expect_error
from tools import text_generation_cli
from tools.generation.families import GENERATIVE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a checkpoint in bf16 whose fp32 master weights differ from its weights."""
    place = tmp_path_factory.mktemp("bf16") / "saved"
    run = tiny_run(ParallelContext.single(dtype=torch.bfloat16), f"--bf16 --mock-data --save {place} --save-interval 1")
    for entry in run.optimizer.master_entries():
        entry.tensor.mul_(1 + 2**-10)
    Saver(run).save()
    return str(place)


def test_answers_say_the_type_and_master_weights_are_read(folder: str) -> None:
    """Texts of two types could not be told apart, or fp32 was computed with weights that had been rounded."""
    weights, fingerprints = [], []
    for fp32 in (False, True):
        choice = TrainedModelConfig(load=folder, fp32=fp32)
        with trained_model(choice, GENERATIVE, launch_environment({})) as trained:
            assert trained.is_upcast == fp32
            weights.append(next(trained.model.parameters()).detach().clone())
            config = ServerConfig(port=0, no_access_log=True)
            fingerprints.append(served_model(trained, config, max_length=8).fingerprint)
    narrow, wide = weights
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(wide, narrow.float()), "the masters, not the rounded weights"
    torch.testing.assert_close(wide, narrow.float(), rtol=2**-7, atol=0)
    assert fingerprints[1] == f"{fingerprints[0]}-fp32"


def test_a_batch_of_one_type_does_not_go_on_in_another(folder: str, tmp_path: Path) -> None:
    """One file held answers of bf16 and of fp32."""
    asked, answers = tmp_path / "asked.jsonl", tmp_path / "answers.jsonl"
    asked.write_text("".join(f"{json.dumps({'prompt': f'{n} 7'})}\n" for n in (3, 4)))
    words = ["--load", folder, "--tokens-to-generate", "3", "--input-jsonl", str(asked), "--output-jsonl", str(answers)]
    text_generation_cli.main(words)
    answers.write_bytes(begun := answers.read_bytes().splitlines(keepends=True)[0])
    with expect_error(ConfigError, "1"):
        text_generation_cli.main([*words, "--fp32"])
    assert answers.read_bytes() == begun
