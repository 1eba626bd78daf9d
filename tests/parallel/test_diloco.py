"""DiLoCo: workers that train apart, and the outer steps in which they meet, against what they must be equal to."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.diloco import mean
from megatron.core.parallel.context import ParallelContext
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import Run, build_run
from megatron.training.step import train_step
from tests.end_to_end.commands import assert_same_tensors, tensors
from tests.harness import run_ranks
from tests.harness.runs import GPT, axes_of, context_of, tiny_config
from tests.tiers import tiers

ALWAYS = (
    "--mock-data --train-iters 100 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --log-interval 1"
)
PLAIN_MEAN = "--diloco-outer-lr 1 --diloco-outer-momentum 0"
STREAMING = "--diloco-sync-interval 4 --diloco-fragments 2 --diloco-overlap-steps 2"


def run_here(context: ParallelContext, flags: str) -> Run:
    """A run on this rank, loaded, in the type of the context."""
    config = tiny_config(f"{ALWAYS} {flags}", ranks=context.mesh.world_size)
    run = build_run(config, GPT.train_spec, context_of(config, context), started=0.0)
    load(run)
    return run


def train(context: ParallelContext, flags: str, number: int) -> str:
    """Train on for ``number`` steps and save; what was printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run = run_here(context, flags)
        batches = run.data.training_batches(run.progress.consumed_samples)
        for _ in range(number):
            run.reporter.step(train_step(run, next(batches)))
        Saver(run).save()
    return said.getvalue()


def losses(said: list[str]) -> list[float]:
    """The losses in the log, which the last rank prints."""
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", said[-1])]


def trained(folder: Path, flags: str, number: int, *, ranks: int = 1, dtype: torch.dtype = torch.float64) -> list[str]:
    """What each rank printed in ``number`` further steps of the run that is saved in ``folder``."""
    flags = f"{flags} --save {folder} --load {folder}"
    layout: dict[str, Any] = axes_of(tiny_config(f"{ALWAYS} {flags}", ranks=ranks))
    return run_ranks(train, flags, number, **layout, dtype=dtype)


def kept(folder: Path) -> dict[str, Tensor]:
    """The tensors of the newest checkpoint."""
    return tensors(find_checkpoint(str(folder)).path)


@pytest.mark.parametrize("dtype", tiers([torch.float32, torch.bfloat16], first=[torch.bfloat16]))
def test_one_worker_with_the_plain_mean_is_the_plain_run(tmp_path: Path, dtype: torch.dtype) -> None:
    """The outer step rounded weights whose mean it should have been, and the run was another one."""
    plain, outer = tmp_path / "plain", tmp_path / "outer"
    trained(plain, "", 5, dtype=dtype)
    trained(outer, f"--diloco-workers 1 --diloco-sync-interval 2 {PLAIN_MEAN} --diloco-dtype fp4", 5, dtype=dtype)
    found = kept(outer)
    for name, expected in kept(plain).items():
        assert torch.equal(found[name], expected), name


def test_meeting_after_each_step_of_sgd_is_data_parallelism(tmp_path: Path) -> None:
    """Workers read the same samples, or their mean counted a worker twice: the run was not that of the whole batch."""
    sgd = "--optimizer sgd --clip-grad 0 --weight-decay 0.1"
    one, two = tmp_path / "one", tmp_path / "two"
    expected = losses(trained(one, sgd, 4))
    found = losses(trained(two, f"{sgd} --diloco-workers 2 --diloco-sync-interval 1 {PLAIN_MEAN}", 4, ranks=2))
    assert found == pytest.approx(expected, rel=1e-6), "the log has the mean over the workers"
    apart, together = kept(two), kept(one)
    for name in (name for name in together if name.startswith("model.")):
        torch.testing.assert_close(apart[name], together[name], rtol=1e-13, atol=1e-14)


LAYOUTS = [
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--pipeline-model-parallel-size 2",
    "--use-distributed-optimizer",
    "",
    "--context-parallel-size 2",
]


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What two workers of one rank each have after two intervals."""
    folder = tmp_path_factory.mktemp("two")
    trained(folder, "--diloco-workers 2 --diloco-sync-interval 2", 4, ranks=2)
    return kept(folder)


@pytest.mark.parametrize("layout", tiers(LAYOUTS, first=LAYOUTS[1:3]))
def test_the_layout_of_a_worker_does_not_matter(tmp_path: Path, layout: str, of_two_ranks: dict[str, Tensor]) -> None:
    """Shards met shards of other parameters, or tied copies drifted apart: another layout gave another model."""
    trained(tmp_path, f"--diloco-workers 2 --diloco-sync-interval 2 {layout}", 4, ranks=4)
    found = kept(tmp_path)
    assert found.keys() == of_two_ranks.keys()
    for name, expected in of_two_ranks.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("more", tiers(["", STREAMING], first=[STREAMING]))
def test_a_run_resumes_between_outer_steps(tmp_path: Path, more: str) -> None:
    """A resumed run forgot what was on its way, or the second worker went on with the first one's state."""
    flags = f"--diloco-workers 2 --diloco-sync-interval 4 --diloco-dtype bf16 {more}"
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    trained(cut, flags, 5, ranks=2, dtype=torch.bfloat16)  # the first fragment was sent in step 4
    trained(cut, flags, 5, ranks=2, dtype=torch.bfloat16)
    trained(whole, flags, 10, ranks=2, dtype=torch.bfloat16)
    assert_same_tensors(find_checkpoint(str(cut)).path, find_checkpoint(str(whole)).path)


def test_workers_may_leave_and_come_back(tmp_path: Path) -> None:
    """After the loss of a worker the run could not be continued, or the one that came back began at random weights."""
    flags = "--diloco-sync-interval 4"
    trained(tmp_path, f"{flags} --diloco-workers 2", 5, ranks=2)
    before = kept(tmp_path)
    assert not torch.equal(
        before["model.decoder.final_layernorm.weight"], before["worker1.model.decoder.final_layernorm.weight"]
    )
    trained(tmp_path, f"{flags} --diloco-workers 1", 0)
    alone = kept(tmp_path)
    for name in alone:
        assert torch.equal(alone[name], before[name]), name
    trained(tmp_path, f"{flags} --diloco-workers 2", 0, ranks=2)
    back = kept(tmp_path)
    for name in alone:
        assert torch.equal(back[name], before[name]), name
        parameter = name.removeprefix("model.")
        expected = before.get(f"diloco.theta.{parameter}", before[name])
        if not name.startswith("diloco."):
            assert torch.equal(back[f"worker1.{name}"], expected), f"{name} of the worker that came back"


def test_a_plain_run_goes_on_from_workers(tmp_path: Path) -> None:
    """A checkpoint of DiLoCo could be loaded by DiLoCo alone."""
    trained(tmp_path, "--diloco-workers 2 --diloco-sync-interval 3", 3, ranks=2)
    shared = kept(tmp_path)
    trained(tmp_path, "", 0)
    plain = kept(tmp_path)
    assert not any(name.startswith(("worker", "diloco")) for name in plain)
    for name in (name for name in plain if name.startswith("model.")):
        assert torch.equal(plain[name], shared[f"diloco.theta.{name.removeprefix('model.')}"]), name
    trained(tmp_path, "--diloco-workers 2 --diloco-sync-interval 3", 0, ranks=2)  # from a synchronous phase
    found = kept(tmp_path)
    for name in (name for name in plain if name.startswith("model.")):
        assert torch.equal(found[f"diloco.theta.{name.removeprefix('model.')}"], plain[name]), name
        assert torch.equal(found[f"worker1.{name}"], plain[name]), name


SENT = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256, "fp4": 0.5 + 4 / 256}
"""Bytes for each number."""


def fake_training(context: ParallelContext, flags: str, number: int) -> tuple[list[dict[str, Tensor]], list[int]]:
    """The weights after each of ``number`` steps that add known numbers, and the bytes that outer steps sent."""
    run, sent, history = run_here(context, flags), list[int](), list[dict[str, Tensor]]()
    assert run.outer is not None
    workers = context.mesh.size("dc")

    def counted(function: Any) -> Any:
        def call(x: Tensor, *arguments: Any) -> Any:
            # all-to-all sends all parts but the own one; all-gather sends the own part to all others
            sent.append(x.nbytes * (workers - 1) // (workers if x.shape[0] == workers else 1))
            return function(x, *arguments)

        return call

    names = ("start_all_to_all_rows", "all_gather_async")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(mean, name, counted(getattr(mean, name))))
        for step in range(number):
            for master in run.optimizer.masters():
                weights = master.read()
                weights += learned(master.entry.name, step, context.mesh.rank("dc"), len(weights))
                master.write(weights)
            run.outer.after_step()
            history.append({each.entry.name: each.read().clone() for each in run.optimizer.masters()})
    return history, sent


def learned(name: str, step: int, worker: int, size: int) -> Tensor:
    """What a worker adds to a parameter in a step."""
    return torch.sin(torch.arange(size, dtype=torch.float64) * (1 + worker) + step + len(name)) / 10


@pytest.fixture(scope="module")
def streamed() -> tuple[list[list[dict[str, Tensor]]], list[int]]:
    """Weights after each of nine steps, by worker, and what the first sent."""
    found = run_ranks(
        fake_training,
        f"--num-layers 3 --diloco-workers 2 --diloco-mixing 0.25 {STREAMING}",
        9,
        dc=2,
        dtype=torch.float64,
    )
    return [history for history, _ in found], found[0][1]


def test_fragments_are_those_of_a_reference(streamed: tuple[list[list[dict[str, Tensor]]], list[int]]) -> None:
    """A fragment was sent at another time, applied too early, or mixed with the other part of the own weights."""
    histories, _ = streamed
    first = histories[0][0]
    assert {"decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"} <= first.keys()
    for name, after_one in first.items():
        size = len(after_one)
        layer = re.search(r"layers\.(\d)", name)
        fragment = int(layer[1]) % 2 if layer else 1
        start = after_one - learned(name, 0, 0, size)
        own, shared, velocity, coming = [start.clone(), start.clone()], start.clone(), torch.zeros(size), None
        for step in range(1, 10):
            own = [weights + learned(name, step - 1, worker, size) for worker, weights in enumerate(own)]
            if step % 4 == 2 * fragment:
                coming = (step + 2, sum(shared - weights for weights in own) / 2)
            if coming is not None and step == coming[0]:
                velocity = 0.9 * velocity + coming[1]
                shared = shared - 0.7 * (coming[1] + 0.9 * velocity)
                own = [0.25 * weights + 0.75 * shared for weights in own]
            for worker in (0, 1):
                torch.testing.assert_close(histories[worker][step - 1][name], own[worker], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", tiers([*SENT], first=["fp4"]))
def test_outer_steps_send_what_their_format_says(dtype: str) -> None:
    """Compressed differences travelled in fp32, or every rank of a worker sent the whole model."""
    flags = f"--diloco-workers 2 --diloco-sync-interval 2 --diloco-dtype {dtype}"
    sharded = f"{flags} --use-distributed-optimizer"
    (history, sent), *others = run_ranks(fake_training, sharded, 4, dc=2, dp=2, dtype=torch.float32)
    shard = sum(len(weights) for weights in history[0].values())
    padded = -(-shard // 512) * 512 if dtype in ("int8", "fp4") else shard
    assert len(sent) == 4, "two halves of two outer steps"
    assert sum(sent[:2]) == padded * SENT[dtype], "both halves send half of the rank's numbers"
    counterpart = others[1][0]
    for name, weights in history[1].items():
        assert torch.equal(weights, counterpart[1][name]), "workers leave an outer step with the same weights"
