"""lm-evaluation-harness gives a checkpoint the scores that it gives the same weights through transformers."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import ROOT, environment, started
from tests.harness.evaluation import OPENINGS, WIKITEXT_AS_TEXT, SmallGPT2

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install -e '.[lm-eval]'")

TASKS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{opening}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "tiny_generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{opening}}",
        "doc_to_target": "{{endings[0]}}",
        "generation_kwargs": {"until": ["a", "\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


ENDINGS = [" the sea.", " nobody", " mended by the keeper"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of a few documents, of which one is longer than the model sees."""
    folder = tmp_path_factory.mktemp("harness")
    texts = [*WIKITEXT_AS_TEXT.split("\n\n")[1:], WIKITEXT_AS_TEXT, "One", "Two"]
    openings = [*OPENINGS, " ".join(OPENINGS)]
    documents = [
        {"opening": opening, "endings": ENDINGS, "gold": number % 3, "text": text}
        for number, (opening, text) in enumerate(zip(openings, texts))
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "test_split": "test",
    }
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))
    return folder


def evaluate(folder: Path, module: str, model: str, arguments: str, *more: str, ranks: int = 1) -> dict[str, Any]:
    """The harness's command in a process of its own, offline: answers of each task by document."""
    output = folder / re.sub(r"\W+", "-", f"{model}-{arguments}-{more}-{ranks}")[-120:]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words = [*launcher, *module.split(), "--model", model, "--model_args", arguments, "--device", "cpu"]
    words += ["--tasks", *TASKS, "--include_path", str(folder), "--output_path", str(output), "--log_samples", *more]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(words, env=environment() | offline, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("|tiny_choice") == 1, "the table of results is shown once"
    found = {}
    for task in TASKS:
        (path,) = output.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        found[task] = [sample["resps"] for sample in sorted(samples, key=lambda sample: int(sample["doc_id"]))]
    return found


def numbers_in(answers: Any) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", json.dumps(answers))]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Texts exactly, log-likelihoods to 1e-4, and whether they are greedy."""
    assert found["tiny_generation"] == expected["tiny_generation"]
    assert len({text for ((text,),) in expected["tiny_generation"]}) > 3
    for task in ("tiny_choice", "tiny_rolling"):
        assert numbers_in(found[task]) == pytest.approx(numbers_in(expected[task]), rel=1e-4)
        assert len(numbers_in(found[task])) >= 6
    assert re.findall("True|False", json.dumps(found)) == re.findall("True|False", json.dumps(expected))


@pytest.fixture(scope="module")
def ours(folder: Path, gpt2: SmallGPT2) -> dict[str, Any]:
    return evaluate(folder, "tasks/lm_eval.py", "megatron", f"load={gpt2.native}", "--batch_size", "3")


def test_the_harness_finds_what_it_finds_through_transformers(
    folder: Path, gpt2: SmallGPT2, ours: dict[str, Any]
) -> None:
    """Choices, whole texts and generated ones: the same weights, so the same answers."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("the harness runs transformers with accelerate, which is not installed")
    assert_same(
        ours, evaluate(folder, "-m lm_eval run", "hf", f"pretrained={gpt2.hf},dtype=float32", "--batch_size", "2")
    )


@pytest.mark.slow  # the test above runs the real command; layouts of evaluation are in tests/parallel/test_tasks.py
def test_answers_do_not_depend_on_batch_or_layout(folder: Path, gpt2: SmallGPT2, ours: dict[str, Any]) -> None:
    """Two ranks, another batch: the same answers, said once."""
    layout = f"load={gpt2.native},pipeline_model_parallel_size=2"
    assert_same(evaluate(folder, "tasks/lm_eval.py", "megatron", layout, "--batch_size", "1", ranks=2), ours)


@pytest.mark.slow
def test_a_server_gets_the_scores_of_its_checkpoint_in_process(folder: Path, gpt2: SmallGPT2, tmp_path: Path) -> None:
    """The harness's client asks by token ids and echo; it took another token than the tokenizer's to begin whole texts.

    It keeps two tokens of ``max_length`` free, but one in a text to continue: the longest one is left out.
    """
    pytest.importorskip("starlette", reason="needs the server: pip install -e '.[serve]'")
    pytest.importorskip("tenacity", reason="needs the harness's clients: pip install -e '.[lm-eval]'")
    expected = evaluate(folder, "tasks/lm_eval.py", "megatron", f"load={gpt2.native},seq_length=62")
    with started(tmp_path / "log", "--load", str(gpt2.native)) as (_, url):
        client = f"model={gpt2.native.name},base_url={url}/v1/completions,max_length=64,num_concurrent=4"
        found = evaluate(folder, "-m lm_eval run", "local-completions", client, "--batch_size", "3")
    found["tiny_generation"][-1] = expected["tiny_generation"][-1]
    assert_same(found, expected)
