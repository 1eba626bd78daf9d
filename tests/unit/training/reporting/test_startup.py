"""The report at the start is what one compares when two runs differ: sizes, layout and every chosen setting."""

from __future__ import annotations

import torch

from megatron.config.parse import parse_run
from megatron.config.report import describe_model
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.errors import ConfigError
from megatron.planning.mixers import mixer_backends, mixer_lines
from megatron.training.reporting.startup import StartupFacts, startup_report
from tests.harness.runs import tiny_config
from tests.harness.sentences import check_line, check_sentence, expect_error

ARGUMENTS = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --swiglu "
    "--max-position-embeddings 256 --seq-length 256 --micro-batch-size 2 --global-batch-size 16 --train-iters 1000 "
    "--lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --mock-data --vocab-size 50256 --bf16 "
    "--tensor-model-parallel-size 2"
)


def report(*, ranks: int = 8, **facts: object) -> str:
    run = parse_run(ARGUMENTS.split(), world_size=ranks, extra_groups=GPT_GROUPS)
    known = {"model_name": "gpt", "device": "CPU", "parameters": 7_300_000, "parameters_here": 3_700_000}
    return startup_report(run, StartupFacts(flops_per_sample=1e10, **known | facts))  # type: ignore[arg-type]


def test_says_what_is_trained_on_what_and_how() -> None:
    lines = {line.split()[0]: line for line in report().splitlines()}
    check_sentence(lines["model"], "4 layers of 128", "8 heads of 16", "320", "50,257", "50,432")
    assert lines["parameters"].endswith("7.3 M, 3.7 M on each rank")
    assert lines["ranks"].endswith("8 on CPU: tensor 2 x data 4")
    assert lines["batch"].endswith("16 samples of 256 tokens: 4 replicas x 2 a microbatch x 2 accumulated")
    check_line(report(ranks=2), "1 replica")
    assert lines["length"].endswith("1,000 iterations, 16,000 samples, 4.1 M tokens, 1.6e+14 model FLOPs")
    check_sentence(lines["optimizer"], "adam", "0.0006", "cosine", "6e-05")
    assert lines["precision"].endswith("bf16")
    assert lines["checkpoint"].endswith("not saved")


def test_a_hybrid_has_no_heads_or_mlp_that_it_lacks() -> None:
    """A model of Mamba-2 layers alone was said to have attention heads and an MLP."""
    others = ARGUMENTS.replace("--num-layers 4", "--mamba-num-groups 2")
    for pattern, words in (("MM", (False, False)), ("M-M-", (False, True)), ("M*M*", (True, False))):
        run = parse_run([*others.split(), "--hybrid-layer-pattern", pattern], world_size=8, extra_groups=GPT_GROUPS)
        said = describe_model(run)
        assert ("8 heads of 16" in said, "SwiGLU MLP" in said) == words


def test_a_model_without_positions_is_said_to_have_none() -> None:
    """Hybrids usually have none, and were said to have "none positions"."""
    others = [*ARGUMENTS.split(), "--position-embedding-type", "none"]
    check_sentence(describe_model(parse_run(others, world_size=8, extra_groups=GPT_GROUPS)))


def test_names_the_sizes_and_backends_of_mixers() -> None:
    """Sizes of Mamba-2, and what computes a gated delta net, were nowhere to be read.

    A backend that cannot serve was refused in the first step, after the data.
    """
    sizes = "--mamba-head-dim 8 --mamba-num-groups 2 --linear-num-value-heads 16"
    hybrid = f"--mock-data --num-layers 3 --hybrid-layer-pattern M*G {sizes}"
    run, spec, cpu = tiny_config(hybrid), GPTSpec(), torch.device("cpu")
    check_sentence(
        describe_model(run), "1 Mamba-2", "1 gated-delta-net", "1 attention", "2 groups", "8 x 128", "128 x 128"
    )
    found = mixer_backends(run, spec, cpu)
    assert found["scan"].startswith("chunked (mamba-ssm refused")
    assert found["delta rule"].startswith("chunked (fla refused")
    assert "   delta rule  chunked" in report(mixers=found) and "   scan " not in report()
    assert mixer_lines(run, spec) == [
        "scan: mamba-ssm on a GPU, chunked on a CPU",
        "delta rule: fla on a GPU, chunked on a CPU",
    ]
    assert mixer_lines(tiny_config(f"{hybrid} --mamba-scan-backend chunked"), spec)[0] == "scan: chunked"
    assert mixer_backends(tiny_config("--mock-data"), spec, cpu) == {}
    with expect_error(ConfigError, "--mamba-scan-backend mamba-ssm", "GPUs"):
        mixer_backends(tiny_config(f"{hybrid} --mamba-scan-backend mamba-ssm"), spec, cpu)


def test_says_where_a_resumed_run_goes_on() -> None:
    text = report(start_iteration=400, loaded_from="runs/x/iter_0000400")
    check_line(text, "1,000", "iteration 400")
    check_line(text, "runs/x/iter_0000400")


def test_lists_every_setting_that_is_not_a_default() -> None:
    table = report().split("== settings that are not the defaults\n")[1]
    names = {line.split()[0] for line in table.splitlines()}
    assert {"--num-layers", "--lr", "--bf16", "--activation", "--tensor-model-parallel-size"} <= names
    assert "--weight-decay" not in names


def test_says_whose_flops_are_missing() -> None:
    """MFU of a model with a module of one's own was too low, and nothing said so."""
    assert report(uncounted=frozenset({"Router", "Gate"})).count("model FLOPs without those of Gate, Router\n") == 1
    assert "without those" not in report()


def test_repeats_what_a_user_should_know_about_flags() -> None:
    run = parse_run([*ARGUMENTS.split(), "--use-mcore-models"], world_size=8, extra_groups=GPT_GROUPS)
    facts = StartupFacts(model_name="gpt", device="CPU", parameters=1, parameters_here=1, flops_per_sample=1.0)
    assert "--use-mcore-models" in startup_report(run, facts).split("== notes\n")[1]
