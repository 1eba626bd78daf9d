"""Tasks and lm-evaluation-harness measure a user's own family, and refuse what is no causal language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.config.inference import InferenceConfig
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.inference.request import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.models import registry
from megatron.core.models.registry import FAMILIES, Family
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import launch_environment
from megatron.errors import CheckpointError, ConfigError
from megatron.library.opening import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.checkpoints.trained_model import load_model, trained_model
from megatron.training.evaluation.generating import draft_model, generation_engine
from megatron.training.run.run import Run
from tasks import main as tasks
from tasks.model_args import run_of
from tasks.registry import TASKS
from tasks.zero_shot.questions import Questions, sample_of
from tests.architecture.source_tree import ROOT
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_line, expect_error

TEXT = "5 6 7 8 9 10 11"


@pytest.fixture
def recurrent(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The family of examples/own_model, registered as a script of its own does."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/own_model"))
    from recurrent import FAMILY

    family: Family = FAMILY
    monkeypatch.setitem(registry._REGISTERED, family.name, family)
    return family


def saved(family: Family, folder: Path) -> Run:
    """A run of the family, saved in ``folder`` with its initial weights."""
    own = "" if family in FAMILIES.values() else "--position-embedding-type none --forget-floor 0.25"
    run = tiny_run(ParallelContext.single(), f"--mock-data {own} --save {folder}", family=family)
    Saver(run).save()
    return run


def test_a_family_of_ones_own_is_measured(recurrent: Family, tmp_path: Path) -> None:
    """It was refused: "holds a recurrent model, where a gpt model is wanted"."""
    run = saved(recurrent, tmp_path / "saved")
    (tmp_path / "text.txt").write_text(TEXT)
    flags = ["--task", "LM", "--load", str(tmp_path / "saved"), "--valid-data", str(tmp_path / "text.txt")]
    assert tasks.main([*flags, "--seq-length", "16", "--dry-run"]) == 0
    config = tasks.settings(flags, TASKS["LM"])
    assert config.family.title == "Recurrent" and config.purpose.only_reads
    result = TASKS["LM"].load()(config, ParallelContext.single())

    ids = torch.tensor([[run.tokenizer.eod, *run.tokenizer.tokenize(TEXT)]])
    with torch.no_grad():
        (whole,) = run.models
        logprobs = whole.eval()(ids[:, :-1]).logits()[0].log_softmax(-1)
    expected = logprobs.gather(1, ids[0, 1:, None])
    assert result.metrics["loss"] == pytest.approx(-expected.mean().item(), rel=1e-5)

    harness = run_of({"load": str(tmp_path / "saved")}, batch_size=None, device="cpu")
    asked = Questions(load_model(harness, recurrent.train_spec, ParallelContext.single()))
    ((likelihood, _),) = asked.likelihoods([sample_of(ids[0, :3].tolist(), ids[0, 3:].tolist(), length=16)])
    assert likelihood == pytest.approx(expected[2:].sum().item(), rel=1e-5)


@pytest.mark.parametrize("declares", [True, False])
def test_a_family_of_ones_own_generates_the_text_of_whole_forward_passes(
    recurrent: Family,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    declares: bool,
) -> None:
    """The state of each text was lost between tokens: `5 6 7` went on with other tokens, and said nothing.

    A layer that doesn't declare what it keeps is read as whole texts, with a remark.
    """
    from recurrent.model import Recurrence

    run = saved(recurrent, tmp_path)
    if not declares:
        monkeypatch.delattr(Recurrence, "text_state")
    prompts, (whole,) = [(5, 6, 7), (9,), (5, 6, 7, 8, 9)], run.models
    expected = [[*prompt] for prompt in prompts]
    for text in expected:
        for _ in range(6):
            with torch.no_grad():
                text.append(int(whole.eval()(torch.tensor([text])).logits()[0, -1].argmax()))
    sampling = Sampling(temperature=0.0)
    requests = [Request(id=str(n), prompt=each, max_tokens=6, sampling=sampling) for n, each in enumerate(prompts)]
    choice, specs = TrainedModelConfig(load=str(tmp_path)), {"gpt": FAMILIES["gpt"].train_spec}
    with trained_model(choice, specs, launch_environment({})) as trained:
        config = InferenceConfig(num_speculative_tokens=2)
        with generation_engine(trained, config) as engine:
            assert engine is not None
            assert [[*each, *found.ids] for each, found in zip(prompts, engine.generate(requests))] == expected
        if declares:
            said = capsys.readouterr().err
            check_line(said, "snapshots")
            config = InferenceConfig(num_speculative_tokens=2, draft_load=str(tmp_path))  # a draft model with states
            with generation_engine(trained, config) as engine:
                assert engine is not None
                assert [[*each, *found.ids] for each, found in zip(prompts, engine.generate(requests))] == expected
                assert engine.statistics.accepted_tokens == engine.statistics.drafted_tokens > 0
            capsys.readouterr()
            with generation_engine(trained, InferenceConfig(inference_dynamic_batching_buffer_size_gb=3.9e-6)):
                check_line(capsys.readouterr().err, "again")
            with expect_error(ConfigError, "--inference-max-requests 32"):
                generation_engine(trained, InferenceConfig(inference_dynamic_batching_buffer_size_gb=3e-6)).__enter__()
            with monkeypatch.context() as undeclared, expect_error(ConfigError, "Recurrence"):
                undeclared.delattr(Recurrence, "text_state")
                draft_model(trained, str(tmp_path), length=8)
        else:
            check_line(capsys.readouterr().err.strip(), "Recurrence")
            with expect_error(ConfigError, "Recurrence", "--batch-invariant"):
                generation_engine(trained, InferenceConfig(batch_invariant=True)).__enter__()
    language_model = load(tmp_path)
    assert language_model.generate([*map(list, prompts)], max_new_tokens=6, temperature=0.0) == [
        text[len(prompt) :] for prompt, text in zip(prompts, expected)
    ]


def test_what_no_task_can_measure_is_refused_in_one_sentence(
    recurrent: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family without its package, a family that predicts no next token, and a rule of the user's family."""
    saved(recurrent, tmp_path / "own")
    measured = ["--task", "LM", "--valid-data", "text.txt", "--dry-run", "--world-size", "2"]
    with expect_error(ConfigError, "--context-parallel-size"):
        tasks.main([*measured, "--load", str(tmp_path / "own"), "--context-parallel-size", "2"])
    monkeypatch.delitem(registry._REGISTERED, recurrent.name)
    with expect_error(CheckpointError, "'recurrent'"):
        tasks.main([*measured, "--load", str(tmp_path / "own")])
    saved(FAMILIES["bert"], tmp_path / "bert")
    with expect_error(CheckpointError):
        tasks.main([*measured, "--load", str(tmp_path / "bert")])
