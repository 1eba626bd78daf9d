"""Pipelines over ranks: chains of stages under every schedule, data where it is needed, memory, failing neighbours."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.parallel import PipelineScheduleName
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.transport import Transport
from megatron.core.parallel.weight_gradients import WeightGradients
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs, TensorSpec
from megatron.core.pipeline_parallel.lower import Plan, lower
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.tensor_parallel.linear import linear
from megatron.errors import ParallelError
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.evaluation.parity import Part, parts
from megatron.training.run.agreement import check_parameter_count
from megatron.training.run.pipeline import Plans, routes
from megatron.training.step import train_step
from tests.harness import run_ranks
from tests.harness.closed_forms import model_parameters
from tests.harness.runs import tiny_run
from tests.harness.sentences import check_sentence

WIDTH, MICROBATCHES = 6, 5
WIDE = TensorSpec((3, WIDTH), torch.float64)


class Link:
    """A stage of an encoder–decoder chain, of plain torch but for the matrix product.

    Encoder stages pass ``enc``; decoder stages pass ``dec``, hand ``enc`` through and use it; ``number`` is an integer.
    """

    def __init__(self, stage: int, num_stages: int, context: ModelContext) -> None:
        generator = torch.Generator().manual_seed(stage)
        self.weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
        self.bias = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
        self._encodes, self._begins = stage < num_stages // 2, stage == num_stages // 2
        self._last, self._context = stage == num_stages - 1, context
        number = {"number": TensorSpec((), torch.int64)}
        enc = {"enc": WIDE} | number if stage else {}
        self.incoming: Mapping[str, TensorSpec] = enc if self._encodes or self._begins else enc | {"dec": WIDE}
        self.outputs: list[weakref.ref[torch.UntypedStorage]] = []
        self.most_alive = 0

    def __call__(self, stage_inputs: StageInputs, microbatch: Microbatch) -> StageInputs | LossSum:
        """One microbatch."""
        number = stage_inputs.get("number", torch.tensor(microbatch.rng_key.sample))
        assert number.item() == microbatch.rng_key.sample
        if self._encodes:
            enc = stage_inputs["enc"] if "enc" in stage_inputs else microbatch.tensors["source"]
            return {"enc": self._noted(self._layer(enc)), "number": number}
        dec = microbatch.tensors["target"] if self._begins else stage_inputs["dec"]
        dec = self._layer(dec * stage_inputs["enc"]) + dec
        if self._last:
            return LossSum.single("loss", dec.square().sum(), torch.tensor(1.0))
        return {"dec": self._noted(dec), "enc": stage_inputs["enc"], "number": number}

    def _layer(self, x: Tensor) -> Tensor:
        return torch.tanh(linear(x, self.weight, self.bias, self._context))

    def _noted(self, output: Tensor) -> Tensor:
        self.most_alive = max(self.most_alive, sum(each() is not None for each in self.outputs))
        output = output + 0.0  # nothing saves this one for its backward pass
        self.outputs.append(weakref.ref(output.untyped_storage()))
        return output


def batches() -> list[Microbatch]:
    generator = torch.Generator().manual_seed(99)
    made = []
    for number in range(MICROBATCHES):
        fields = {
            name: torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for name in ("source", "target")
        }
        made.append(Microbatch(fields, StreamKey(number)))
    return made


def chain(
    context: ModelContext, name: PipelineScheduleName, chunks: int, overlap: bool
) -> tuple[dict[int, list[Tensor]], list[int]]:
    """Gradients by stage after one step over the ranks, and how many outputs each chunk had alive at a time."""
    settings = PipelineSettings(name, context.mesh.size("pp"), chunks, None, overlap)
    context = dataclasses.replace(context, weight_gradients=WeightGradients(may_wait=settings.splits_backward))
    stages = settings.placement.stages_of(context.mesh.rank("pp"))
    links = [Link(stage, settings.placement.num_stages, context) for stage in stages]
    runner = Runner(
        links,
        transport=Transport(context.mesh, context.device, routes=routes(settings.placement)),
        weight_gradients=context.weight_gradients,
    )
    plans = Plans(settings, context.mesh.rank("pp"))
    runner.step(plans.evaluation(MICROBATCHES), batches())
    assert all(link.weight.grad is None for link in links)
    runner.step(plans.training(MICROBATCHES), [replace(each, backward_scale=3.0) for each in batches()])
    gradients = {stage: [_grad(link.weight), _grad(link.bias)] for stage, link in zip(stages, links)}
    return gradients, [link.most_alive for link in links]


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def by_hand(num_stages: int) -> dict[int, list[Tensor]]:
    links = [Link(stage, num_stages, ModelContext.single()) for stage in range(num_stages)]
    for batch in batches():
        stage_inputs: StageInputs | LossSum = {}
        for link in links:
            assert isinstance(stage_inputs, dict)
            stage_inputs = link(stage_inputs, batch)
        assert isinstance(stage_inputs, LossSum)
        (3.0 * stage_inputs.sum).backward()  # type: ignore[no-untyped-call]
    return {stage: [_grad(link.weight), _grad(link.bias)] for stage, link in enumerate(links)}


CHAINS = [
    ("gpipe", 2, 1, True),
    ("1f1b", 3, 1, False),
    ("1f1b", 4, 1, True),
    ("interleaved", 2, 2, True),
    ("interleaved", 3, 2, False),
    ("zb-h1", 3, 1, True),
    ("zb-v", 2, 2, True),
    ("zb-v", 3, 2, False),
]


@pytest.mark.parametrize(("name", "ranks", "chunks", "overlap"), CHAINS)
def test_encoder_and_decoder_chain(name: str, ranks: int, chunks: int, overlap: bool) -> None:
    """T5 hands the encoder's output through every decoder stage; its gradient is a sum over all of them."""
    expected = by_hand(ranks * chunks)
    results = run_ranks(chain, name, chunks, overlap, pp=ranks, dtype=torch.float64)
    found = {stage: grads for gradients, _ in results for stage, grads in gradients.items()}
    assert found.keys() == expected.keys()
    for stage, grads in found.items():
        for one, other in zip(grads, expected[stage]):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_sent_outputs_are_freed() -> None:
    """GPipe's first stage would hold every microbatch's output until the first backward pass."""
    for _, alive in run_ranks(chain, "gpipe", 1, True, pp=2, dtype=torch.float64):
        assert max(alive) <= 2, "one is being sent while the next is computed"


def bytes_sent(context: ModelContext, flags: str) -> int:
    """By this rank, to other stages, in one step."""
    run = tiny_run(context, flags)
    with mock.patch.object(dist, "isend", wraps=dist.isend) as isend:
        train_step(run, next(run.data.training_batches(0)))
    return sum(call.args[0].nbytes for call in isend.call_args_list)


def test_stages_send_one_activation_each_way() -> None:
    """Anything more than hidden states, and their gradients, is bandwidth lost at every boundary."""
    flags = "--mock-data --tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --num-layers 4"
    flags += " --untie-embeddings-and-output-weights"
    boundary = 16 * 2 * 16 * 4  # tokens, samples of a microbatch, hidden size, bytes
    microbatches = 4
    assert run_ranks(bytes_sent, flags, pp=2) == [microbatches * boundary] * 2
    both = f"{flags} --tensor-model-parallel-size 2 --sequence-parallel"
    assert run_ranks(bytes_sent, both, pp=2, tp=2, sequence_parallel=True) == [microbatches * boundary // 2] * 4
    chunks = f"{flags} --num-virtual-stages-per-pipeline-rank 2"
    assert run_ranks(bytes_sent, chunks, pp=2) == [3 * microbatches * boundary] * 2


def failing(context: ModelContext) -> str:
    """Rank 1 hangs at the start of a step; what rank 0 says when its time is up."""
    settings = PipelineSettings("1f1b", 2, 1, None, overlap=True)
    runner = Runner(
        [Link(context.mesh.rank("pp"), 2, context)],
        transport=Transport(context.mesh, context.device, routes=routes(settings.placement)),
    )
    plan: Plan = lower(settings.schedule(3))[context.mesh.rank("pp")]
    if context.mesh.rank("pp") == 1:
        return ""
    isend, soon = dist.isend, timedelta(seconds=0.2)

    def impatient(*arguments: Any, **options: Any) -> Any:
        work: Any = isend(*arguments, **options)
        return SimpleNamespace(wait=lambda: work.wait(soon))

    with mock.patch.object(dist, "isend", impatient), pytest.raises(ParallelError) as caught:
        runner.step(plan, batches())
    return str(caught.value)


def test_a_failed_neighbour_is_named() -> None:
    """Somebody has to find out which of a thousand ranks to look at."""
    message, _ = run_ranks(failing, pp=2, dtype=torch.float64)
    check_sentence(message, "microbatch 0", "stage 0", "stage 1", hide=[r"(?<=hangs \().*(?=\))"])  # gloo's words


def fields_by_rank(context: ModelContext, flags: str) -> list[str]:
    run = tiny_run(context, flags)
    batch = next(run.data.training_batches(0))
    train_step(run, batch)
    return sorted(batch[0].tensors)


def test_stages_read_what_they_need() -> None:
    """Middle stages would read, and move to their device, data that nothing uses."""
    flags = "--mock-data --tokenizer-type NullTokenizer --pipeline-model-parallel-size 3 --num-layers 3"
    assert run_ranks(fields_by_rank, flags, pp=3) == [["tokens"], [], ["labels", "loss_mask"]]
    flags += " --reset-position-ids --reset-attention-mask --position-embedding-type rope"
    assert run_ranks(fields_by_rank, flags, pp=3) == [
        ["document_ids", "position_ids", "tokens"],
        ["document_ids", "position_ids"],
        ["document_ids", "labels", "loss_mask", "position_ids"],
    ]


def first_loss(context: ModelContext, flags: str) -> float:
    run = tiny_run(context, flags)
    batches = run.data.training_batches(0)
    return [train_step(run, next(batches)).losses["lm loss"] for _ in range(2)][1]


def test_stages_without_layers() -> None:
    """An embedding alone needs fewer process groups than the stages with attention, and is tied to the output."""
    flags = "--mock-data --tokenizer-type NullTokenizer --num-layers 2 --hidden-dropout 0 --attention-dropout 0"
    alone = first_loss(ModelContext.single(dtype=torch.float64), flags)
    flags += " --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|ttL"
    flags += " --context-parallel-size 2 --tensor-model-parallel-size 2"
    for loss in run_ranks(first_loss, flags, pp=2, cp=2, tp=2, dtype=torch.float64):
        assert loss == pytest.approx(alone, abs=1e-12)


def parameters_counted(context: ModelContext, flags: str) -> tuple[int, int]:
    run = tiny_run(context, flags)
    return check_parameter_count(run.config, run.train_spec, run.layout(), context), model_parameters(run.config)


@pytest.mark.parametrize("flags", ["", "--pipeline-schedule zb-v", "--untie-embeddings-and-output-weights"])
def test_parameters_are_counted_once(flags: str) -> None:
    """A tied matrix is on two ranks, or in two chunks of one; the count is what shows a lost layer."""
    flags += " --mock-data --tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 --num-layers 5"
    for counted, expected in run_ranks(parameters_counted, flags, pp=2):
        assert counted == expected


State = dict[str, tuple[tuple[int, ...], list[Part]]]

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("--pipeline-model-parallel-size 2", {"pp": 2}),
    ("--tensor-model-parallel-size 2", {"tp": 2}),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", {"pp": 2}),
    ("--pipeline-model-parallel-size 3 --pipeline-schedule zb-h1", {"pp": 3}),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --tensor-model-parallel-size 2", {"pp": 2, "tp": 2}),
    ("", {}),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v", {"pp": 2}),
]
"""Each loads what the one before it saved; neighbours differ in stages, chunks or both."""


def go_on(context: ModelContext, flags: str) -> tuple[State, State]:
    """Load if there is something, take a step, save; the state after loading and at the end."""
    run = tiny_run(context, flags)
    if "--load" in flags:
        load(run)
    loaded = _state(run)
    train_step(run, next(run.data.training_batches(run.progress.consumed_samples)))
    Saver(run).save()
    return loaded, _state(run)


def _state(run: Any) -> State:
    entries = [*run.model_state(), *run.optimizer.entries()]
    return {e.name: (e.sharding.shape, parts(e.tensor, e.sharding, run.context.mesh)) for e in entries}


def _whole(states: list[State]) -> dict[str, Tensor]:
    """Logical tensors; copies on several ranks must agree bit for bit."""
    found: dict[str, Tensor] = {}
    for state in states:
        for name, (shape, pieces) in state.items():
            whole = found.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
            for part in pieces:
                where = tuple(slice(o, o + size) for o, size in zip(part.offsets, part.values.shape))
                assert whole[where].isnan().all() or torch.equal(whole[where], part.values), name
                whole[where] = part.values
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


@pytest.mark.slow  # test_layout_pairs.py has layouts of every kind
def test_checkpoints_move_between_stages(tmp_path: Path) -> None:
    """A run continues with other stages, chunks and placements: weights and moments, tied ones too."""
    flags = "--mock-data --tokenizer-type NullTokenizer --num-layers 5 --train-iters 10 --save-interval 100"
    before: dict[str, Tensor] | None = None
    for layout, axes in LAYOUTS:
        more = "" if before is None else f" --load {tmp_path}"
        results = run_ranks(go_on, f"{flags} --save {tmp_path} {layout}{more}", dtype=torch.float64, **axes)
        loaded = _whole([first for first, _ in results])
        if before is not None:
            assert loaded.keys() == before.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in before.items())
        before = _whole([last for _, last in results])
