"""One optimizer step: what it counts, and what it refuses to learn from."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
from typing_extensions import override

from megatron.config.parse import parse_run
from megatron.config.run import RunConfig
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.optimizer.optimizer import UpdateResult
from megatron.core.parallel.context import ParallelContext
from megatron.errors import ConfigError
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run.run import Run, build_run
from megatron.training.run.stop import NonFiniteError
from megatron.training.step import train_step, with_gradient_scales
from tests.harness.sentences import expect_error

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 10 --mock-data --vocab-size 50 --num-workers 0 --eval-iters 0"
)


STEP_TIMERS = {"gradient-norm", "forward-backward", "grads-sync", "optimizer"}
COMPUTE_TIMERS = {"forward-compute", "backward-compute"}


def tiny_run(*more: str) -> Run:
    config = parse_run([*FLAGS.split(), *more], world_size=1, extra_groups=GPT_GROUPS)
    return build_run(config, GPTSpec(), ParallelContext.single(), started=time.monotonic())


@pytest.fixture
def run() -> Run:
    return tiny_run()


def test_progress_counts_samples(run: Run) -> None:
    record = train_step(run, next(run.data.training_batches(0)))
    assert (record.iteration, record.consumed_samples, run.progress.scheduled_samples) == (1, 4, 4)
    assert record.learning_rate == pytest.approx(1e-2 * (1 - 4 / 40))


def test_gradient_that_is_not_finite_is_named(run: Run) -> None:
    """A step that silently does nothing, again and again, looks like a plateau."""
    weight = run.models[0].get_parameter("decoder.layers.0.mlp.linear_fc2.weight")
    weight.register_hook(lambda grad: grad * torch.inf)  # type: ignore[no-untyped-call]
    before = {name: p.detach().clone() for name, p in run.models[0].named_parameters()}
    with expect_error(NonFiniteError, "decoder.layers.0.mlp.linear_fc2.weight", "1", "3"):
        train_step(run, next(run.data.training_batches(0)))
    assert all(torch.equal(before[name], p) for name, p in run.models[0].named_parameters())


@pytest.mark.parametrize("flags", ["", "--bf16 --log-num-zeros-in-grad --log-params-norm"])
def test_nothing_reads_gradients_after_the_update(flags: str) -> None:
    """A GPU's fused kernels write scaled gradients back; what read them later would see other numbers there."""
    assert two_steps(flags, spoils=True) == two_steps(flags, spoils=False)


def two_steps(flags: str, *, spoils: bool) -> list[StepRecord]:
    """Two steps; with ``spoils`` gradients are NaN as soon as the optimizer has used them."""
    run = tiny_run(*flags.split())
    usual, batches = run.optimizer.update, run.data.training_batches(0)

    def update(**options: Any) -> UpdateResult:
        found = usual(**options)
        for buffer in run.buffers if spoils else ():
            buffer.grads.fill_(torch.nan)
        return found

    with mock.patch.object(run.optimizer, "update", update):
        return [train_step(run, next(batches)) for _ in range(2)]


def test_loss_that_is_not_finite_ends_the_run(run: Run) -> None:
    with torch.no_grad():
        run.models[0].get_parameter("decoder.final_layernorm.bias").fill_(torch.nan)
    with expect_error(NonFiniteError, "1"):
        train_step(run, next(run.data.training_batches(0)))


def test_check_can_be_turned_off() -> None:
    """Then the step is skipped and counted, and the schedule waits."""
    run = tiny_run("--no-check-for-nan-in-loss-and-grad")
    bias = run.models[0].get_parameter("decoder.final_layernorm.bias")
    bias.register_hook(lambda grad: grad * torch.nan)  # type: ignore[no-untyped-call]
    record = train_step(run, next(run.data.training_batches(0)))
    assert record.skipped and run.progress.consumed_samples == 4 and run.progress.scheduled_samples == 0


def test_a_loss_scale_means_what_it_means_in_megatron_lm() -> None:
    """Its loss is a mean, divided by the number of microbatches; ours overflowed at a scale that many times smaller."""
    for more, tokens in (([], 64), (["--micro-batch-size", "4"], 64), (["--global-batch-size", "8"], 128)):
        run = tiny_run("--fp16", "--initial-loss-scale", "1024", *more)
        ready = with_gradient_scales(run, next(run.data.training_batches(0)))
        assert {each.backward_scale for each in ready} == {1024 / tokens}
        assert run.optimizer.loss_scale == 1024


def test_a_loss_scale_counts_what_is_learned() -> None:
    """A mean is over unmasked tokens; where half are masked, gradients are twice as large."""
    run = tiny_run("--fp16", "--initial-loss-scale", "1024")
    batch = next(run.data.training_batches(0))
    for each in batch:
        each.tensors["loss_mask"][:, 8:] = 0
    assert {each.backward_scale for each in with_gradient_scales(run, batch)} == {1024 / 32}


def test_a_loss_without_a_count_is_named() -> None:
    """A family of one's own whose counts() lacked a name of its loss_names() ended in a bare KeyError."""

    class Forgetful(GPTSpec):
        name = "forgetful"

        @override
        def loss_names(self, run: RunConfig) -> tuple[str, ...]:
            return (*super().loss_names(run), "router loss")

    run = build_run(parse_run(FLAGS.split(), extra_groups=GPT_GROUPS), Forgetful(), ParallelContext.single())
    with expect_error(ConfigError, "counts()", "router loss", "loss_names()"):
        train_step(run, next(run.data.training_batches(0)))


@pytest.mark.parametrize(("level", "names"), [(0, set()), (1, STEP_TIMERS), (2, STEP_TIMERS | COMPUTE_TIMERS)])
def test_timing_level_says_how_finely_a_step_is_timed(level: int, names: set[str]) -> None:
    """A level that the flag offers would measure nothing."""
    run = tiny_run("--timing-log-level", str(level))
    train_step(run, next(run.data.training_batches(0)))
    assert set(run.reporter.timers.take()) == names


def test_figures_of_a_step_are_reported_where_asked_for() -> None:
    """They cost time, so flags ask for them; one that does nothing would leave out a column of the log."""
    plain, asked = (
        tiny_run(),
        tiny_run(*["--log-params-norm", "--log-num-zeros-in-grad", "--max-position-embeddings", "24"]),
    )
    record = train_step(plain, next(plain.data.training_batches(0)))
    assert (record.params_norm, record.num_zeros) == (None, None)
    record = train_step(asked, next(asked.data.training_batches(0)))
    assert record.params_norm == pytest.approx(
        torch.cat([parameter.detach().flatten() for parameter in asked.models[0].parameters()]).norm().item()
    )
    assert record.num_zeros == (24 - 16) * 16  # of positions that no sample has


@pytest.mark.parametrize(
    ("flags", "dtype", "expected"),
    [
        ("", torch.float32, torch.float32),
        ("--bf16", torch.bfloat16, torch.float32),
        ("--fp16", torch.float16, torch.float32),
        ("--bf16 --grad-reduce-in-bf16", torch.bfloat16, torch.bfloat16),
        ("", torch.float64, torch.float64),
    ],
)
def test_gradients_are_accumulated_in_the_type_asked_for(flags: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    """Sums over many microbatches lose their small terms in bf16, which therefore is only on request."""
    config = parse_run([*FLAGS.split(), *flags.split()], extra_groups=GPT_GROUPS)
    run = build_run(config, GPTSpec(), ParallelContext.single(dtype=dtype), started=time.monotonic())
    assert {buffer.grads.dtype for buffer in run.buffers} == {expected}


def test_a_step_updates_delayed_scales() -> None:
    """--fp8-recipe delayed: scales that no step sets stay 1, and numbers beyond the format's range are cut off."""
    run = tiny_run("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "delayed")
    scaling, batches = run.scaling, run.data.training_batches(0)
    assert scaling is not None
    first = [each.tensor.clone() for each in scaling.state() if each.name.endswith(".scale")]
    assert all(each.item() == 1.0 for each in first)
    train_step(run, next(batches))
    second = [each.tensor.item() for each in scaling.state() if each.name.endswith(".scale")]
    assert len(second) == 4 * 3 and all(each != 1.0 for each in second)
