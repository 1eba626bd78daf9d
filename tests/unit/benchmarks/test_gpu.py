"""The command for the day a GPU is there: what it compares is the same model, and what is wrong fails."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu
from benchmarks.gpu_checks import ATTENTION, Found, attention_error
from benchmarks.gpu_plain import SIZES, PlainLlama, Size
from benchmarks.gpu_ranks import WorkerError, WorkerMemoryError, on_ranks
from benchmarks.gpu_steps import SPEC, Taken, run_of, scale_of, ways
from megatron.core.ops.attention.registry import BACKENDS
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import ConfigError
from megatron.rehearsal.accelerator import unavailable
from tests.harness.sentences import check_sentence, expect_error

CPU = torch.device("cpu")
TINY = SIZES["tiny"]


def both(size: Size) -> tuple[nn.Module, PlainLlama]:
    """Ours and the plain one, with the same weights in fp64."""
    run = run_of([*size.flags, "--micro-batch-size", "2", "--global-batch-size", "2"], 1)
    ours = SPEC.build_model(run.model, run.extra, ModelContext.single(dtype=torch.float64))
    plain = PlainLlama(size, CPU, dtype=torch.float64).double()
    weights = dict(plain.named_parameters())
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(ours_of(name, weights[name_of(name)], size))
    return ours, plain


def name_of(ours: str) -> str:
    """The plain model's name."""
    if not ours.startswith("decoder.layers."):
        names = {"embedding.word_embeddings": "words", "decoder.final_layernorm": "norm", "output_layer": "head"}
        return f"{names[ours.removesuffix('.weight')]}.weight"
    number, *path = ours.removeprefix("decoder.layers.").removesuffix(".weight").split(".")
    names = {"input_layernorm": "norm_1", "pre_mlp_layernorm": "norm_2", "linear_qkv": "qkv", "linear_proj": "out",
             "linear_fc1": "gate_up", "linear_fc2": "down"}  # fmt: skip
    return f"blocks.{number}.{names[path[-1]]}.weight"


def ours_of(name: str, plain: Tensor, size: Size) -> Tensor:
    """Rows of queries, keys and values in our order: [q … q, k, v] for each group of heads."""
    if "linear_qkv" not in name:
        return plain
    width = size.hidden // size.heads
    q, k, v = torch.split(plain, [size.heads * width, size.groups * width, size.groups * width])
    parts = [x.view(size.groups, -1, size.hidden) for x in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(plain.shape)


@pytest.mark.parametrize("tied", [True, False])
def test_both_compute_the_same_loss_and_gradients(tied: bool) -> None:
    """Else one would be faster for another reason."""
    size = dataclasses.replace(TINY, tied=tied)
    ours, plain = both(size)
    ids = torch.randint(size.vocabulary, (2, size.sequence + 1), generator=torch.Generator().manual_seed(3))
    tokens, labels = ids[:, :-1], ids[:, 1:].contiguous()
    shares = torch.full(labels.shape, 1 / labels.numel(), dtype=torch.float64)
    losses = [ours(tokens).cross_entropy(labels, shares), plain(tokens, labels)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-9, atol=1e-9)
    wanted = {name: weight.grad for name, weight in plain.named_parameters()}
    for name, weight in ours.named_parameters():
        gradient = wanted[name_of(name)]
        assert weight.grad is not None and gradient is not None
        torch.testing.assert_close(weight.grad, ours_of(name, gradient, size), rtol=1e-9, atol=1e-9)


def test_model_flops_are_those_of_the_plain_products() -> None:
    """MFU counts these for both, and half of the scores of attention, which torch's counter doesn't know on a CPU."""
    plain = PlainLlama(TINY, CPU, dtype=torch.float32)
    ids = torch.randint(TINY.vocabulary, (1, TINY.sequence + 1))
    with FlopCounterMode(display=False) as counter:
        plain(ids[:, :-1], ids[:, 1:]).backward()
    scores = 4 * TINY.layers * TINY.hidden * TINY.sequence**2
    assert scale_of(TINY).flops == counter.get_total_flops() + 3 * scores / 2
    assert scale_of(TINY).parameters == sum(weight.numel() for weight in plain.parameters())


@pytest.mark.parametrize(("name", "billions"), [("1B", 1.24), ("3B", 3.21), ("8B", 8.03)])
def test_sizes_are_what_they_are_called(name: str, billions: float) -> None:
    assert scale_of(SIZES[name]).parameters / 1e9 == pytest.approx(billions, abs=0.005)


def test_settings_that_need_less_come_later() -> None:
    found = ways(SIZES["8B"], ranks=8, samples=8, precision=["--bf16"])
    assert found[0].about == "microbatch 4, ZeRO 1"
    check_sentence(found[-1].about)
    fitting = next(way for way in found if way.estimated < 0.92 * 80e9)
    assert fitting.about == "microbatch 2, TP 2 with SP, ZeRO 1"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would run in processes of its own runs in this one, where it can be patched."""

    def call(function: Callable[..., Any], *arguments: Any, ranks: int = 1) -> Any:
        return function(*arguments)

    monkeypatch.setattr(gpu, "on_ranks", call)


def run(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    saved = tmp_path / "found.json"
    code = gpu.main(["--device", "cpu", "--ranks", "1", "--json", str(saved), *flags])
    return code, json.loads(saved.read_text())


def test_a_broken_backend_fails_and_the_others_are_still_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, options: Any) -> Tensor:
        return BACKENDS["eager"].attend(q, k, v, dataclasses.replace(options, causal=False))

    broken = SimpleNamespace(supports=lambda request: None, attend=attend)
    monkeypatch.setitem(BACKENDS, "chunked", broken)
    flags = ("--stages", "kernels", "tests", "--checks", "attention: chunked", "fp8: tensorwise", "optimizer")
    code, found = run(tmp_path, *flags)
    said = capsys.readouterr().out
    assert code == 1
    assert "FAILED  attention: chunked: causal, bfloat16: off by" in said
    assert "passed  attention: chunked: bidirectional, bfloat16" in said
    assert "passed  fp8: tensorwise: " in said and "passed  optimizer: AdamW, three steps" in said
    assert "skipped tests/gpu: tests/gpu needs a GPU" in said
    assert any(each.startswith("attention: chunked: causal") for each in found["failures"])


def test_an_error_in_a_kernel_is_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def attend(*args: Any) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    monkeypatch.setitem(BACKENDS, "chunked", SimpleNamespace(supports=lambda request: None, attend=attend))
    code, _ = run(tmp_path, "--stages", "kernels", "--checks", "attention: chunked")
    assert code == 1
    assert "RuntimeError: CUDA error: an illegal memory access was encountered\n" in capsys.readouterr().out


def test_wrong_losses_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None) -> None:
    losses = {"--bf16": [5.0, 4.8], "": [5.0, 4.9]}

    def steps(flags: list[str], number: int, unmeasured: int) -> Taken:
        return Taken([0.1], losses["--bf16" if "--bf16" in flags else ""], 1)

    monkeypatch.setattr(gpu, "our_steps", steps)
    code, found = run(tmp_path, "--stages", "training", "--layouts", "fp32", "bf16", "fp32, CP 2")
    assert code == 1 and len(found["failures"]) == 1 and "bf16" in found["failures"][0]
    check_sentence(found["training"]["fp32, CP 2"][0]["skipped"], "2")


def test_settings_without_enough_memory_are_left() -> None:
    taken = Taken([1.0, 3.0], [2.0], 5)

    def take(setting: str) -> Taken:
        if setting == "large":
            raise WorkerMemoryError("no memory")
        return taken

    contender = gpu.Contender("x", take, [("four", 9 * 10**9, "large"), ("two", None, "small")])
    contender.turn()
    assert contender.turns == [taken] and contender.seconds == 2.0
    assert contender.problems == ["out of memory with four, estimated 9.0 GB"]


def test_a_size_that_does_not_fit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "described", lambda backend: {"device": "x", "memory": 40 * 10**9, "peak": {"bf16": None}})
    monkeypatch.setattr(gpu, "plain_steps", lambda *arguments: Taken([0.5], [2.0], 10**9))
    code, _ = run(tmp_path, "--stages", "speed", "--sizes", "8B", "--contenders", "megatron", "plain PyTorch")
    said = capsys.readouterr().out
    assert code == 0
    assert "| megatron | skipped: the estimate is 147.2 GB at least" in said and "of 40.0 GB 92% are usable" in said
    assert "| plain PyTorch | microbatch 4 | 500 |" in said and "MFU: no peak on file" in said


def test_without_a_gpu_it_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpus", lambda: 0)
    with expect_error(ConfigError, "GPU", "--device cpu") as found:
        gpu.main([])
    assert found.value.exit_code == 2
    monkeypatch.setattr(gpu, "gpus", lambda: 2)
    with expect_error(ConfigError, "--ranks 4", "2", "GPUs"):
        gpu.main(["--ranks", "4"])


def test_infinite_results_are_wrong() -> None:
    assert Found("x", float("nan"), 1.0).is_wrong and Found("x", 2.0, 1.0).is_wrong and Found("x", failed="y").is_wrong
    assert not Found("x", 1.0, 1.0).is_wrong and not Found("x", skipped="y").is_wrong


@pytest.mark.parametrize("case", ATTENTION)
def test_each_case_of_attention_can_be_told_from_another(case: str) -> None:
    assert attention_error("eager", case, CPU, torch.float32) < 1e-5


def dies() -> None:
    if os.environ["RANK"] == "1":
        os._exit(7)


def raises() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\n  more")


@pytest.mark.slow  # starts processes, which import torch
def test_ranks_that_fail_are_named() -> None:
    with expect_error(WorkerError, "1", "7"):
        on_ranks(dies, ranks=2)
    with expect_error(WorkerMemoryError, "OutOfMemoryError", "CUDA"):
        on_ranks(raises)


@pytest.mark.slow  # every stage in processes of its own, as on a GPU: half a minute
def test_every_stage_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = "--stages kernels training tests speed --rounds 1 --steps 1 --ranks 2 --checks optimizer operations"
    layouts, programs = ["fp32", "fp32, TP 2 with SP"], ["megatron", "plain PyTorch"]
    code, found = run(tmp_path, *few.split(), "--layouts", *layouts, "--contenders", *programs)
    assert code == 0, capsys.readouterr().out
    assert [row["program"] for row in found["speed"]] == programs
    for row in found["speed"]:
        assert row["ms/step"] > 0 and row["MFU"] > 0 and row["losses"][-1] < 5.7
    assert found["training"]["fp32, TP 2 with SP"][0]["error"] < 1e-6


@pytest.mark.slow  # six processes with fake tensors
@pytest.mark.skipif(unavailable() is not None, reason="this torch has no devices in Python")
def test_rehearsed_steps_need_what_is_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two layers of each size; all of them are a matter of minutes."""
    for name in ("1B", "3B", "8B"):
        monkeypatch.setitem(SIZES, name, dataclasses.replace(SIZES[name], layers=2))
    assert gpu.main(["--rehearse"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1] for row in rows] == ["megatron", "plain PyTorch"] * 3
    assert [float(row[5]) for row in rows[::2]] == pytest.approx([1.0] * 3, abs=0.03)
