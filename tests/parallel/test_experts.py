"""Whole runs with experts: replicas that are told apart, checkpoints of one division of experts at any other, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typing_extensions import override

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.models.gpt.train_spec import GPTSpec
from megatron.core.moe import dispatch
from megatron.core.moe.layer import MoELayer
from megatron.core.parallel import exchange
from megatron.core.parallel.activity import Activity
from megatron.core.parallel.collectives import Handle
from megatron.core.parallel.costs import Workload
from megatron.core.parallel.exchange import RankGroup, start_all_to_all_rows
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import StreamKey
from megatron.core.parallel.side_losses import SideLosses
from megatron.core.tensor_parallel.initialize import initialize
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.place import BranchPlace
from megatron.core.transformer.stack import StackConfig
from megatron.training import loop
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver
from megatron.training.run.run import build_run
from tests.end_to_end.commands import assert_same_tensors
from tests.harness import run_ranks
from tests.harness.runs import tiny_config
from tests.unit.moe.test_experts import EXPERTS, HIDDEN, hidden_states, model_config, moe_config

FLAGS = (
    "--mock-data --tokenizer-type NullTokenizer --swiglu --disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 8 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 16 "
    "--moe-aux-loss-coeff 0.01 --hidden-dropout 0 --attention-dropout 0"
)


def train(context: ModelContext, flags: str) -> None:
    config = tiny_config(f"{FLAGS} {flags}", ranks=context.mesh.world_size)
    loop.train_from_start_to_end(config, GPTSpec(), context, started=0.0)


def save_again(context: ModelContext, flags: str) -> None:
    """Load a checkpoint and save what was loaded."""
    config = tiny_config(f"{FLAGS} {flags}", ranks=context.mesh.world_size)
    run = build_run(config, GPTSpec(), context, started=0.0)
    load(run)
    Saver(run).save()


def flags_of(axes: dict[str, Any]) -> str:
    names = {"tp": "--tensor-model-parallel-size", "ep": "--expert-model-parallel-size"}
    names["etp"] = "--expert-tensor-parallel-size"
    return " ".join(f"{names[axis]} {size}" for axis, size in axes.items() if axis in names)


def test_a_run_is_checked_evaluated_and_saved(tmp_path: Path) -> None:
    """Experts counted as replicas are 'a layer that is lost', and experts of other ranks replicas that differ."""
    axes: dict[str, Any] = {"dp": 2, "ep": 2}
    checks = "--check-weight-hash-across-dp-replicas-interval 1 --eval-iters 1 --eval-interval 2"
    run_ranks(train, f"{flags_of(axes)} {checks} --save {tmp_path}", **axes)
    assert find_checkpoint(tmp_path).iteration == 3


def test_checkpoints_load_at_other_layouts(tmp_path: Path) -> None:
    """Weights, biases and optimizer state of experts, saved by any ranks, are found by any others."""
    first: dict[str, Any] = {"dp": 2, "ep": 2}
    run_ranks(train, f"{flags_of(first)} --use-distributed-optimizer --save {tmp_path}/0", **first)
    others: list[dict[str, Any]] = [{}, {"dp": 2, "etp": 2}, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}]
    for number, axes in enumerate(others, start=1):
        sharded = "--use-distributed-optimizer" if number == 3 else ""
        folders = f"--load {tmp_path}/{number - 1} --save {tmp_path}/{number}"
        run_ranks(save_again, f"{flags_of(axes)} {sharded} {folders}", **axes)
        assert_same_tensors(*(Path(str(find_checkpoint(tmp_path / each).path)) for each in ("0", str(number))))


class Calls(Activity):
    """Those of collectives, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    @override
    def waiting(self, collective: str, group: Sequence[int]) -> Any:
        """See ``Activity``."""
        self.names.append(collective)
        return super().waiting(collective, group)


def sent(context: ModelContext, settings: dict[str, Any]) -> tuple[list[int], list[int], int, list[str]]:
    """Bytes that this rank sends away in each all-to-all of a forward and of a backward pass, what is planned, and the
    collectives of both passes, but for those of tensor parallelism.
    """
    counted, calls = list[int](), Calls()

    def counting(x: torch.Tensor, peers: RankGroup, sends: list[int], receives: list[int]) -> Handle[torch.Tensor]:
        away = sum(sends) - sends[peers.rank]
        counted.append(away * x[0].numel() * x.element_size())
        return start_all_to_all_rows(x, peers, sends, receives)

    built = MoELayer(
        moe_config(moe_router_force_load_balancing=True, **settings),
        BranchPlace(StackConfig(model_config(), causal=True), context, 0),
    )
    x = torch.zeros(EXPERTS, 2, HIDDEN, dtype=context.dtype, requires_grad=True)
    with (
        mock.patch.object(dispatch, "start_all_to_all_rows", counting),
        mock.patch.object(exchange, "start_all_to_all_rows", counting),
        mock.patch.object(context.mesh, "activity", calls),
    ):
        out = built(x, LayerInputs(rng_key=StreamKey(0), side_losses=SideLosses()))
        forward = counted.copy()
        torch.autograd.backward(out, torch.ones_like(out))
    workload = Workload(context=context, batch=2, length=EXPERTS, stream_itemsize=4)
    names = [name for name in calls.names if not name.endswith("over tp")]
    return forward, counted[len(forward) :], built.costs(workload).exchanged, names


@pytest.mark.parametrize(
    "axes", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "etp": 2}, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}]
)
def test_bytes_are_those_of_the_formula(axes: dict[str, Any]) -> None:
    """Two all-to-alls forward and two backward a layer, and one exchange of numbers of rows; what a dry run promises is
    what is sent.
    """
    for forward, backward, planned, names in run_ranks(sent, {}, **axes):
        assert (len(forward), len(backward), len(names)) == (2, 2, 5), names
        assert sum(forward) == sum(backward) == planned


def order_of_events(context: ModelContext) -> list[str]:
    """When rows are sent and awaited, and when the shared experts run, forward and backward."""
    moe = moe_config(moe_shared_expert_intermediate_size=8)
    built = MoELayer(moe, BranchPlace(StackConfig(model_config(), causal=True), context, 0))
    for parameter in built.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    events = list[str]()

    def starting(*sent: Any) -> Handle[torch.Tensor]:
        events.append("send")
        handle = start_all_to_all_rows(*sent)
        wait = handle.wait
        handle.wait = lambda: events.append("receive") or wait()  # type: ignore[func-returns-value, method-assign]
        return handle

    assert built.shared_experts is not None
    built.shared_experts.register_forward_hook(lambda *_: events.append("shared"))
    built.shared_experts.register_full_backward_hook(lambda *_: events.append("shared backward"))
    x = torch.ones(4, 1, HIDDEN, dtype=context.dtype, requires_grad=True)
    with mock.patch.object(dispatch, "start_all_to_all_rows", starting):
        out = built(x, LayerInputs(rng_key=StreamKey(0), side_losses=SideLosses()))
        torch.autograd.backward(out, torch.ones_like(out))
    return events


def test_shared_experts_run_while_rows_travel() -> None:
    """Else they'd take their time after that of the exchange."""
    expected = ["send", "shared", "receive", "send", "shared backward", "receive"]
    assert run_ranks(order_of_events, dp=2, ep=2) == [expected] * 2


def rows_of_one_rank(context: ModelContext) -> list[bool]:
    """All tokens choose the experts of rank 0: the others have no rows, forward and backward."""
    built = MoELayer(moe_config(), BranchPlace(StackConfig(model_config(), causal=True), context, 0))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.fill_(0.1)
        built.router.weight[2:] = -0.1
    x = torch.ones(4, 1, HIDDEN, dtype=context.dtype, requires_grad=True)
    out = built(x, LayerInputs(rng_key=StreamKey(0), side_losses=SideLosses()))
    torch.autograd.backward(out, torch.ones_like(out))
    gradient = built.experts.linear_fc1.weight.grad
    assert gradient is not None
    assert x.grad is not None
    return [bool(gradient.any()), bool(x.grad.isfinite().all())]


def test_ranks_without_rows_take_part() -> None:
    """They would hang the others' backward pass, and an optimizer would find no gradient."""
    assert run_ranks(rows_of_one_rank, dp=4, ep=4) == [[True, True]] + [[False, True]] * 3


def losses_of_a_router(context: ModelContext, kind: str, kept: int) -> tuple[float, torch.Tensor]:
    """A balancing loss of this rank's tokens times their number, and its gradient of the router: the rank's part of
    ``kept`` replicas' tokens.
    """
    moe = moe_config(moe_router_load_balancing_type=(kind,), moe_aux_loss_coeff=(1.0,))
    router = MoELayer(moe, BranchPlace(StackConfig(model_config(), causal=True), context, 0)).router
    initialize(router, context.mesh, seed=3)
    x = hidden_states(batch=4, length=8).detach()
    mesh, given = context.mesh, LayerInputs(rng_key=StreamKey(0), side_losses=SideLosses())
    mine = x.chunk(kept, dim=1)[mesh.rank("dp")].chunk(mesh.size("cp"))[mesh.rank("cp")]
    weights = router(mine, given).weights
    torch.autograd.backward(weights, torch.zeros_like(weights))
    ((total, _),) = given.side_losses.take()[0].values()
    assert router.weight.grad is not None
    return float(total), router.weight.grad


def test_a_global_loss_has_the_counts_of_all_replicas() -> None:
    """Two replicas' losses are those of one rank that has the tokens of both; over a microbatch they are not."""
    whole, gradient = losses_of_a_router(ModelContext.single(dtype=torch.float64), "global_aux_loss", 1)
    found = run_ranks(losses_of_a_router, "global_aux_loss", 2, dp=2, cp=2, dtype=torch.float64)
    assert sum(total for total, _ in found) == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(sum(each for _, each in found), gradient, rtol=0, atol=1e-9)
    alone = [losses_of_a_router(ModelContext.single(dtype=torch.float64), "aux_loss", 1)[0]]
    apart = run_ranks(losses_of_a_router, "aux_loss", 2, dp=2, dtype=torch.float64)
    assert alone[0] == pytest.approx(whole, rel=1e-12)
    assert abs(sum(total for total, _ in apart) - whole) > 1e-3
