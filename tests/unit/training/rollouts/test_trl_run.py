"""Two whole steps of GRPO are those of trl's trainer: from the weights and answers of its run to losses and weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.parse import parse_run
from megatron.core.datasets.prompts import PromptTexts
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.published import published_config
from megatron.training.loop import train_from_start_to_end
from megatron.training.reporting.metrics import StepRecord
from megatron.training.rollouts.rated import Rated, Rater
from megatron.training.run.run import Run
from tests.golden.regenerate_trl import model, reward, tokenizer

pytest.importorskip("transformers", reason="it writes the model")

RECORDED = json.loads((Path(__file__).parents[2] / "objectives" / "trl_grpo_run.json").read_text())
"""Of tests/golden/regenerate_trl.py."""
FLAGS = (
    "--load-hf-proof off --perform-rl-step --grpo-prompts-per-step 2 --grpo-group-size 4 --grpo-iterations 2 "
    "--grpo-max-new-tokens 8 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --eval-iters 0 "
    "--optimizer sgd --sgd-momentum 0 --weight-decay 0 --lr-decay-style constant --clip-grad 1 --log-interval 1 "
    "--num-workers 0 --attention-dropout 0 --hidden-dropout 0"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its tokenizer in ``hf``, prompts, and a reward function."""
    found = tmp_path_factory.mktemp("trl")
    model(0).save_pretrained(found / "hf")
    tokenizer().save_pretrained(found / "hf")
    (found / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in RECORDED["prompts"]))
    (found / "rewards.py").write_text("def unused(**_):\n    return []\n")
    return found


def settings() -> str:
    """Flags of trl's settings."""
    given = RECORDED["settings"]
    bounds = f"--grpo-clamp-eps-lower {given['epsilon']} --grpo-clamp-eps-upper {given['epsilon']}"
    sampling = f"--rl-default-temperature {given['temperature']} --grpo-kl-beta {given['beta']}"
    return f"{bounds} {sampling} --lr {given['learning_rate']}"


@pytest.mark.slow  # writes a model by transformers; the default tier compares losses and their slopes with trl's
@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_steps_are_those_of_trls_trainer(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step is on the same answers, whose probabilities have moved: rewards, their groups, probabilities then
    and of the initial model, clipping, the mean over tokens and the update all show in it.
    """
    expected, steps = RECORDED["runs"][kind], list[StepRecord]()

    def recorded(self: Rater, texts: PromptTexts, numbers: Sequence[int], *_: Any, **__: Any) -> Any:
        answers = {
            number: [b for a, b in expected["answers"] if tuple(a) == texts.tokens[number]] for number in numbers
        }
        groups = [[Rated(tuple(ids), ids[-1] == 1, reward([ids])[0]) for ids in answers[each]] for each in numbers]
        return groups, {"generation": 0.0, "rewards": 0.0}

    def built(run: Run) -> None:
        run.after_step.append(steps.append)

    monkeypatch.setattr(Rater, "rated", recorded)
    data = f"--load-hf {folder}/hf --grpo-prompts {folder}/prompts.jsonl --reward-function {folder}/rewards.py:unused"
    corrected = "--grpo-use-bias-correction-kl" if expected["corrected"] else ""
    line = f"{FLAGS} {settings()} {corrected} --grpo-loss-type {kind} {data}".split()
    config = parse_run(line, extra_groups=FAMILIES["gpt"].groups, published_config=published_config)
    context = ParallelContext.single(dtype=torch.float64)
    run = train_from_start_to_end(config, FAMILIES["gpt"].train_spec, context, started=0.0, built=built)
    for step, loss, logged in zip(steps, expected["losses"], expected["logged"], strict=True):
        assert step.losses[kind] == pytest.approx(loss, abs=1e-6)
        assert step.grad_norm == pytest.approx(logged["grad_norm"], rel=1e-5)  # of fp32
        for each in ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            assert step.losses[each] == pytest.approx(logged[each], abs=1e-6), each
    assert steps[0].losses["reward"] == pytest.approx(expected["logged"][0]["reward"], abs=1e-6)
    ours = {entry.name: entry.tensor for entry in run.model_state()}
    for theirs, name in (("model.embed_tokens.weight", "embedding"), ("lm_head.weight", "output_layer")):
        [weight] = [each for key, each in ours.items() if name in key]
        assert weight.flatten()[:8].tolist() == pytest.approx(expected["weights"][theirs], abs=1e-6)
