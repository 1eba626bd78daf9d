"""The optimizer over ranks: replicated, sharded and overlapped are the same to the last bit, and norms count once."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.core.distributed import param_gather
from megatron.core.distributed.buffers import build_buffers
from megatron.core.distributed.grad_sync import GradSync
from megatron.core.distributed.parameter_policy import parameter_policies
from megatron.core.optimizer.grad_norm import nonfinite_gradients
from megatron.core.optimizer.optimizer import Optimizer
from megatron.core.parallel.collectives import all_gather
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.grid import Axis
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.sharding import ShardedState, Sharding, sharded_parameter
from megatron.core.parallel.weight_gradients import WeightGradients
from tests.harness import run_ranks

WIDTH = 24


@dataclass(frozen=True)
class Way:
    """How data parallelism is done."""

    sharded: bool = False
    overlap: bool = False
    overlap_forward: bool = False
    grad_dtype: torch.dtype = torch.float32


WAYS = [Way(), Way(overlap=True), Way(sharded=True), Way(sharded=True, overlap=True, overlap_forward=True)]


class Layer(nn.Module):
    """A matrix and a bias that are used in the module's own forward."""

    def __init__(self, context: ParallelContext, seed: int) -> None:
        super().__init__()
        self.weight = parameter(context, Sharding((WIDTH, WIDTH)), seed)
        self.bias = parameter(context, Sharding((WIDTH,)), seed)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """One nonlinear step."""
        return torch.tanh(x @ self.weight + self.bias)


class Head(nn.Module):
    """A matrix that others read: this module is never called."""

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        self.weight = parameter(context, Sharding((WIDTH, WIDTH)), 99)


class Model(nn.Module):
    """Layers and a head."""

    def __init__(self, context: ParallelContext, *, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(context, seed) for seed in range(layers))
        self.head = Head(context)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """A sum over the batch."""
        for layer in self.layers:
            x = layer(x)
        return (x @ self.head.weight).float().square().sum()


def parameter(context: ParallelContext, sharding: Sharding, seed: int) -> nn.Parameter:
    """The same values on every rank."""
    made = sharded_parameter(sharding, context.mesh, dtype=context.dtype, device=context.device)
    generator = torch.Generator().manual_seed(seed)
    made.data.copy_(torch.randn(made.shape, generator=generator) * 0.3)
    return made


class Trainer:
    """A model with everything that changes it."""

    def __init__(self, context: ParallelContext, way: Way, **settings: Any) -> None:
        self.context = context
        self.model = Model(context)
        config, named = OptimizerConfig(clip_grad=0.01, **settings), list(self.model.named_parameters())
        policies = parameter_policies(named, config)
        self.buffers = build_buffers(named, context, grad_dtype=way.grad_dtype, bucket_size=500, policies=policies)
        self.sync = GradSync(
            self.buffers, context, weight_gradients=WeightGradients(), sharded=way.sharded, overlap=way.overlap
        )
        precision = PrecisionConfig(bf16=context.dtype == torch.bfloat16, fp16=context.dtype == torch.float16)
        self.optimizer = Optimizer(
            self.buffers,
            config,
            precision,
            context,
            low_precision=LowPrecision(),
            sharded=way.sharded,
            count_zeros=True,
        )
        self.optimizer.expect(precision.initial_loss_scale if precision.fp16 else 1.0)
        if way.overlap_forward:
            self.optimizer.gather.overlap_forward(self.model)

    def step(self, number: int) -> tuple[float, int | None]:
        """Two microbatches and an update."""
        self.sync.zero()
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(
                1000 * number + 10 * microbatch + self.context.mesh.rank("dp", "cp")
            )
            x = torch.randn(5, WIDTH, generator=generator).to(self.context.dtype)
            with self.sync.last_backward() if microbatch == 1 else nullcontext():
                self.model(x).backward()
        self.sync.finish()
        result = self.optimizer.update(count=17.0, lr=0.01, weight_decay=0.1)
        assert not result.skipped
        return result.grad_norm, result.num_zeros


Outcome = tuple[list[Any], list[Tensor]]


def train(context: ParallelContext, ways: list[Way], settings: dict[str, Any]) -> list[Outcome]:
    """For each way: norms and zeros of four steps, and the weights after them."""
    outcomes: list[Outcome] = []
    for way in ways:
        trainer = Trainer(context, way, **settings)
        history = [trainer.step(number) for number in range(4)]
        norm = trainer.optimizer.parameter_norm()
        outcomes.append(([*history, norm], [each.detach().clone() for each in trainer.model.parameters()]))
    return outcomes


class SlowGather:
    """An all-gather whose result arrives only when somebody waits for it; until then others' shards are NaN."""

    under_way = 0

    def __init__(self, out: Tensor, x: Tensor, mesh: Mesh, *axes: Axis) -> None:
        SlowGather.under_way += 1
        self._out, self._result = out, all_gather(x, mesh, *axes)
        mine = x.clone()
        out.fill_(math.nan)
        x.copy_(mine)

    def wait(self) -> Tensor:
        """Let the result arrive."""
        SlowGather.under_way -= 1
        return self._out.copy_(self._result)


def train_with_slow_gathers(context: ParallelContext, settings: dict[str, Any]) -> tuple[list[int], Outcome, Outcome]:
    """Gathers under way after each update; and outcomes with overlapped slow gathers, and without overlap."""
    (plain,) = train(context, [Way(sharded=True)], settings)
    with mock.patch.object(param_gather, "all_gather_into_async", SlowGather):
        trainer = Trainer(context, Way(sharded=True, overlap_forward=True), **settings)
        history, under_way = [], []
        for number in range(4):
            history.append(trainer.step(number))
            under_way.append(SlowGather.under_way)
        norm = trainer.optimizer.parameter_norm()
    weights = [each.detach().clone() for each in trainer.model.parameters()]
    return under_way, ([*history, norm], weights), plain


@pytest.mark.parametrize(("freeze", "least"), [((), 4), (("layers.*",), 1)])
def test_forward_waits_for_the_weights_it_reads(freeze: tuple[str, ...], least: int) -> None:
    """--overlap-param-gather would compute with half of the new weights, as it did where all that is trained is read
    from modules that are never called, or would not overlap at all.
    """
    for under_way, overlapped, plain in run_ranks(train_with_slow_gathers, {"freeze": freeze}, dp=2):
        assert len(set(under_way)) == 1
        assert under_way[0] >= least
        assert overlapped[0] == plain[0]
        assert all(torch.equal(a, b) for a, b in zip(overlapped[1], plain[1]))


@pytest.mark.parametrize(
    ("ranks", "dtype", "settings"),
    [
        ({"dp": 2}, torch.float32, {}),
        ({"dp": 3}, torch.float32, {"optimizer": "sgd"}),
        ({"dp": 2, "cp": 2}, torch.float32, {}),
        ({"dp": 2}, torch.bfloat16, {}),
        ({"dp": 3}, torch.float16, {}),
        ({"dp": 2}, torch.float64, {}),
    ],
)
def test_every_way_gives_the_same_bits(ranks: dict[str, Any], dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """--use-distributed-optimizer or an overlap flag would change the run, or a forward pass would read old weights."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ways = [Way(way.sharded, way.overlap, way.overlap_forward, wide) for way in WAYS]
    per_rank = run_ranks(train, ways, settings, dtype=dtype, **ranks)
    first_history, first_weights = per_rank[0][0]
    assert len({history[0] for history in first_history[:-1]}) == 4
    for history, weights in (outcome for outcomes in per_rank for outcome in outcomes):
        assert history == first_history
        assert all(torch.equal(a, b) for a, b in zip(weights, first_weights))


def test_gradients_in_bf16_are_sharded_alike() -> None:
    """--grad-reduce-in-bf16 with and without --use-distributed-optimizer."""
    ways = [Way(sharded=sharded, grad_dtype=torch.bfloat16) for sharded in (False, True)]
    (replicated, sharded), _ = run_ranks(train, ways, {}, dtype=torch.bfloat16, dp=2)
    assert replicated[0] == sharded[0]
    assert all(torch.equal(a, b) for a, b in zip(replicated[1], sharded[1]))


def entries_after_a_step(context: ParallelContext) -> tuple[list[ShardedState], list[ShardedState]]:
    """Entries of a replicated and of a sharded optimizer."""
    trainers = Trainer(context, Way()), Trainer(context, Way(sharded=True))
    for trainer in trainers:
        trainer.step(0)
    return list(trainers[0].optimizer.entries()), list(trainers[1].optimizer.entries())


def test_shards_of_the_state_make_the_whole_state() -> None:
    """A checkpoint of a sharded optimizer would have holes, or load elsewhere as something else."""
    per_rank = run_ranks(entries_after_a_step, dp=3, dtype=torch.bfloat16)
    whole = {entry.name: entry.tensor for entry in per_rank[0][0]}
    found = {name: torch.full((tensor.numel(),), math.nan) for name, tensor in whole.items()}
    owned = 0
    for entry in (entry for _, sharded in per_rank for entry in sharded):
        start, stop = entry.flat_range or (0, entry.tensor.numel())
        found[entry.name][start:stop] = entry.tensor.flatten()
        owned += entry.tensor.numel()
    assert owned == sum(tensor.numel() for tensor in whole.values())
    assert all(torch.equal(found[name].view(tensor.shape), tensor) for name, tensor in whole.items())


def layout_statistics(context: ParallelContext) -> list[tuple[float, int | None, float]]:
    """Gradient norm, zeros and parameter norm of one logical model, for a replicated and a sharded optimizer.

    Element i of each logical tensor has weight i and gradient i mod 5.
    """
    mesh = context.mesh
    stage, stages = mesh.rank("pp"), mesh.size("pp")
    tied = Sharding((10, 4), {0: "tp"}, pad_multiple=8, tied="embedding" if stages > 1 else None)
    made = {"rows": (4, 6), "columns": (6, 4)}
    shardings = {
        "rows": Sharding(made["rows"], {0: "tp"}),
        "columns": Sharding(made["columns"], {1: "tp"}),
        "norm": Sharding((6,)),
        "experts": Sharding((4, 2, 8), {0: "ep", 2: "etp"}, reduce=("edp",)),
    }
    holds = {name: sharding for name, sharding in shardings.items() if stages == 1 or (stage == 0) == (name == "rows")}
    parameters = {name: parameter(context, sharding, 0) for name, sharding in holds.items()}
    if stage in (0, stages - 1):
        parameters["embedding"] = parameter(context, tied, 0)
    buffers = build_buffers(parameters.items(), context, grad_dtype=torch.float32)
    for each in parameters.values():
        fill_logical(each, context)
    found = []
    for sharded in (False, True):
        optimizer = Optimizer(
            buffers,
            OptimizerConfig(clip_grad=0.0),
            PrecisionConfig(),
            context,
            low_precision=LowPrecision(),
            sharded=sharded,
            count_zeros=True,
        )
        norm = optimizer.parameter_norm()
        result = optimizer.update(count=1.0, lr=0.0, weight_decay=0.0)
        found.append((result.grad_norm, result.num_zeros, norm))
    return found


def fill_logical(made: nn.Parameter, context: ParallelContext) -> None:
    """Weights and gradients by logical position; vocabulary padding gets garbage that must not count."""
    sharding: Sharding = made.sharding  # type: ignore[attr-defined]
    logical = torch.arange(math.prod(sharding.shape), dtype=torch.float32).view(sharding.shape)
    main_grad: Tensor = made.main_grad  # type: ignore[attr-defined]
    with torch.no_grad():
        made.fill_(1e6)
        main_grad.fill_(1e6)
        for piece in sharding.pieces(context.mesh):
            values = logical[piece.slices(of_local=False)]
            made[piece.slices(of_local=True)] = values
            main_grad[piece.slices(of_local=True)] = values % 5


EXPERT_RANKS: list[dict[str, Any]] = [
    {"tp": 2, "ep": 2, "etp": 1},
    {"dp": 2, "tp": 2, "ep": 2},
    {"dp": 2, "tp": 2, "etp": 1},
]


@pytest.mark.parametrize(
    "ranks", [{}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}, *EXPERT_RANKS]
)
def test_each_logical_element_counts_once(ranks: dict[str, Any]) -> None:
    """Clipping would depend on the layout: replicas, tied copies or padding counted twice, experts left out."""
    elements = [torch.arange(size, dtype=torch.float64) for size in (24, 24, 6, 64, 40)]
    gradients = torch.cat(elements) % 5
    expected = (gradients.norm().item(), int((gradients == 0).sum()), torch.cat(elements).norm().item())
    per_rank = run_ranks(layout_statistics, **ranks)
    for grad_norm, num_zeros, norm in (found for both in per_rank for found in both):
        assert grad_norm == pytest.approx(expected[0], rel=1e-6)
        assert num_zeros == expected[1]
        assert norm == pytest.approx(expected[2], rel=1e-6)


def overflow_on_one_rank(context: ParallelContext) -> list[tuple[bool, bool, list[str]]]:
    """Whether the step was skipped, whether weights stayed, and what went wrong; replicated and sharded."""
    found = []
    for sharded in (False, True):
        trainer = Trainer(context, Way(sharded=sharded))
        trainer.sync.zero()
        trainer.model(torch.ones(1, WIDTH)).backward()
        if context.mesh.world_rank == 2:
            dict(trainer.model.named_parameters())["layers.1.bias"].main_grad[3] = math.nan  # type: ignore[attr-defined]
        trainer.sync.finish()
        before = [each.detach().clone() for each in trainer.model.parameters()]
        result = trainer.optimizer.update(count=1.0, lr=0.1, weight_decay=0.1)
        unchanged = all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
        found.append((result.skipped, unchanged, nonfinite_gradients(trainer.buffers, context.mesh)))
    return found


@pytest.mark.parametrize("ranks", [{"dp": 3}, {"pp": 3}, {"tp": 3}])
def test_a_nan_on_one_rank_stops_all(ranks: dict[str, Any]) -> None:
    """Ranks would part ways: one skips the step and the others take it; or nobody says which parameter it was."""
    for found in run_ranks(overflow_on_one_rank, **ranks):
        assert found == [(True, True, ["layers.1.bias"])] * 2
