"""A module of a user's own on several ranks takes the steps that it takes on one."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from megatron.config.parse import parse_run
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel.initialize import Normal
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.library.plain.config import DEFAULTS, GROUPS
from megatron.library.plain.train_spec import PlainSpec
from megatron.training.loop import train_from_start_to_end
from tests.harness import run_ranks
from tests.harness.plain import FLAGS, Classifier, Points
from tests.harness.sentences import check_refusals, refusal

Trained = tuple[list[float], dict[str, Tensor]]


def trained(context: ParallelContext, source: Any, data: Any, flags: str) -> Trained:
    """Losses of six steps on this rank, and the module's state afterwards."""
    config = parse_run(
        f"{FLAGS} 6 {flags}".split(), world_size=context.mesh.world_size, extra_groups=GROUPS, defaults=DEFAULTS
    )
    losses, spec = list[float](), PlainSpec(source, {"train": data})
    with contextlib.redirect_stdout(io.StringIO()):
        run = train_from_start_to_end(
            config,
            spec,
            context,
            started=time.monotonic(),
            built=lambda run: run.after_step.append(lambda record: losses.append(record.losses["loss"])),
        )
    return losses, {name: value.clone() for name, value in run.models[0].state_dict().items()}


def replica(context: ParallelContext, flags: str, norm: bool) -> Trained:
    """A module whose initial weights differ between ranks, as those of a script without a seed do."""
    module = Classifier(norm=norm, dropout=0.2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.0 + context.mesh.world_rank)
    return trained(context, module, Points(noise=0.1), flags)


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"])
def test_replicas_take_the_steps_of_one_rank(flags: str) -> None:
    """Means are over all samples of all ranks, whose dropout and random transforms are those of one rank."""
    (alone, weights), *_ = run_ranks(replica, "", False)
    for losses, state in run_ranks(replica, flags, False, dp=2):
        assert losses == pytest.approx(alone, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


class Reader(nn.Module):
    """A stack of layers that reads weights of two of them before those are called, and calls its last one twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.last = nn.Linear(8, 2)

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        first, *between, second, third = self.layers
        assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
        hidden = first((x @ first.weight @ second.weight).relu()).relu()
        for layer in between:
            hidden = layer(hidden)
        return cross_entropy(self.last(third(third(second(hidden)).relu())), y)


def read_early(context: ParallelContext, strategy: str) -> Trained:
    return trained(context, Reader(), Points(), f"--data-parallel-sharding-strategy {strategy}")


def test_gradients_that_come_after_their_layer_are_summed() -> None:
    """With ZeRO 2 they stayed on the rank that had them, and were taken for gradients of the next step. With copies the
    layer's other gradients have been summed over them by then.
    """
    (alone, weights), *_ = run_ranks(read_early, "no_shard")
    copies = "optim_grads --overlap-grad-reduce --num-distributed-optimizer-instances 2"
    found = [*run_ranks(read_early, "optim_grads", dp=2), *run_ranks(read_early, copies, dp=4, copies=2)]
    for losses, state in found:
        assert losses == pytest.approx(alone, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


def test_a_weight_that_is_read_before_its_layer_is_called() -> None:
    """With ZeRO 3 it isn't there, and torch would crash without a word."""
    check_refusals(run_ranks(refusal, read_early, "optim_grads_params", dp=2), "layers.0.weight", "layers.0")


class Rows(nn.Module):
    """Learned vectors, of which it returns a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    @override
    def forward(self) -> Tensor:
        """The second half of them."""
        return self.weight[2:]


class Outside(nn.Module):
    """Layers between modules that are called, changed in place after, return views of weights, or are only read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.rows = nn.Linear(8, 8), Rows()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm, self.aside, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 2)

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        rows = self.rows()
        hidden = self.first(x).relu_() * torch.cat([self.aside.weight[:1]])
        for layer in self.layers:
            hidden = layer(hidden).relu()
        hidden = self.norm(hidden * rows.mean(0)) @ self.aside.weight
        return cross_entropy(linear(hidden, self.last.weight, self.last.bias), y)


def outside(context: ParallelContext, flags: str) -> Trained:
    return trained(context, Outside(), Points(), flags)


@pytest.mark.parametrize("flags", ["", "--overlap-grad-reduce --overlap-param-gather"])
def test_modules_outside_of_layers(flags: str) -> None:
    """With ZeRO 3 memory of weights outside of layers is freed after their use: where others read it without a call, or
    kept a view of it, torch would read freed memory.
    """
    (alone, weights), *_ = run_ranks(outside, "--data-parallel-sharding-strategy no_shard")
    sharded = "--data-parallel-sharding-strategy optim_grads_params --global-batch-size 16"
    for losses, state in run_ranks(outside, f"{sharded} {flags}", dp=2):
        assert losses == pytest.approx(alone, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


class Shown(nn.Linear):
    """A layer that looks at its weight with numpy."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[n, 8] -> [n, 8]``."""
        self.seen = self.weight.detach().numpy()
        return super().forward(x)


class Showing(Reader):
    """A stack with such a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Shown(8, 8), nn.Linear(8, 8)])

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        first, second = self.layers
        return cross_entropy(self.last(second(first(x))), y)


def showing(context: ParallelContext) -> Trained:
    return trained(context, Showing(), Points(), "--data-parallel-sharding-strategy optim_grads_params")


def test_a_weight_that_numpy_has_seen() -> None:
    """torch's own words are about a storage that isn't resizable, and name no layer."""
    check_refusals(run_ranks(refusal, showing, dp=2), "layers.0", "weight.detach().clone().numpy()")


class Keeping(nn.Linear):
    """A layer that keeps a part of its weight, and multiplies by it in later calls."""

    kept: Tensor | None = None

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[n, 8] -> [n, 8]``."""
        weight, self.kept = self.weight if self.kept is None else self.kept, self.weight.data[:]
        return super().forward(x) + linear(x, weight.detach())


class Kept(Reader):
    """A stack whose second layer multiplies by what the first one keeps, if it ``shares`` that."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.layers, self._shares = nn.ModuleList([Keeping(8, 8), nn.Linear(8, 8)]), shares

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        first, second = self.layers
        assert isinstance(first, Keeping) and isinstance(second, nn.Linear)
        hidden = first(x)
        assert first.kept is not None and first.kept.shape == (8, 8), "facts stay readable"
        if self._shares:
            hidden = hidden @ first.kept
        return cross_entropy(self.last(second(hidden)), y)


def kept(context: ParallelContext, strategy: str, shares: bool) -> Trained:
    return trained(context, Kept(shares=shares), Points(), f"--data-parallel-sharding-strategy {strategy}")


def test_what_a_module_keeps_of_a_weight_is_guarded() -> None:
    """With ZeRO 3 torch crashed without a word where another layer read ``weight.data`` that one had kept. In the
    layer's own calls it is there.
    """
    (alone, weights), *_ = run_ranks(kept, "no_shard", False)
    for losses, state in run_ranks(kept, "optim_grads_params", False, dp=2):
        assert losses == pytest.approx(alone, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
    check_refusals(run_ranks(refusal, kept, "optim_grads_params", True, dp=2), "layers.0.weight", "while layers.0 is")


class Again(nn.Module):
    """A layer that computes its inside again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inside, self._reentrant = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), reentrant

    @override
    def forward(self, x: Tensor) -> Tensor:
        """``[n, 8] -> [n, 8]``."""
        inside: Tensor = checkpoint(self.inside, x, use_reentrant=self._reentrant)
        return x + inside


class Recomputed(nn.Module):
    """Layers that compute their inside again, and one of them is computed again as a whole, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList([Again(reentrant=False), Again(reentrant=True), nn.Linear(8, 8)])

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        hidden = self.first(x)
        for layer in self.layers[:2]:
            hidden = layer(hidden)
        for reentrant in (False, True):
            hidden = checkpoint(self.layers[2], hidden, use_reentrant=reentrant)
        return cross_entropy(self.last(hidden), y)


def recomputed(context: ParallelContext, flags: str) -> Trained:
    return trained(context, Recomputed(), Points(), flags)


def test_layers_that_use_torchs_checkpoint() -> None:
    """torch computes a layer's inside again in the backward pass: its weights must still be there, and its gradients be
    summed once.
    """
    (alone, weights), *_ = run_ranks(recomputed, "--data-parallel-sharding-strategy no_shard")
    sharded = "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather"
    for losses, state in run_ranks(recomputed, sharded, dp=2):
        assert losses == pytest.approx(alone, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


class Recurrent(nn.Module):
    """Two layers with one weight; with ``in_place`` each changes its input."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=in_place), nn.Linear(8, 8)) for _ in range(2))
        self.layers[1].get_submodule("1").weight = self.layers[0].get_parameter("1.weight")

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return cross_entropy(self.last(hidden), y)


def recurrent(context: ParallelContext, strategy: str, in_place: bool) -> Trained:
    flags = f"--data-parallel-sharding-strategy {strategy}"
    return trained(context, Recurrent(in_place=in_place), Points(), flags)


def test_layers_that_share_a_weight() -> None:
    """With ZeRO 3 it came and went with the first of them, and the second couldn't read it."""
    (alone, weights), *_ = run_ranks(recurrent, "no_shard", True)
    for losses, state in run_ranks(recurrent, "optim_grads_params", False, dp=2):
        assert losses == pytest.approx(alone, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)


def test_a_layer_that_changes_its_input() -> None:
    """torch's own words are about views and custom functions, which nobody finds in their model."""
    check_refusals(run_ranks(refusal, recurrent, "optim_grads", True, dp=2), "nn.ReLU(inplace=True)")


def test_replicas_have_the_buffers_of_the_first() -> None:
    """Checkpoints hold one copy, so a resumed run would not go on as the ranks were."""
    (_, first), (_, second) = run_ranks(replica, "--check-weight-hash-across-dp-replicas-interval 1", True, dp=2)
    assert first["norm.num_batches_tracked"].item() == 12
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


class Divided(nn.Module):
    """A layer that tensor-parallel ranks divide between two that each of them has."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 2)
        self.wide = ColumnParallelLinear(8, 32, context, init=Normal(0.2), bias=True)
        self.narrow = RowParallelLinear(32, 8, context, init=Normal(0.2), bias=True)

    @override
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch."""
        hidden = self.narrow(self.wide(self.before(x)[None]).relu())[0]
        return cross_entropy(self.after(hidden), y)


def divided(context: ParallelContext) -> Trained:
    """The module made by a function of the rank's context."""
    return trained(context, Divided, Points(), f"--tensor-model-parallel-size {context.mesh.size('tp')}")


def test_parameters_with_a_sharding_are_divided() -> None:
    """Replicated parameters on both sides of a divided layer have their whole gradient on each rank."""
    (alone, weights), *_ = run_ranks(divided)
    for losses, state in run_ranks(divided, tp=2):
        assert losses == pytest.approx(alone, rel=1e-5)
        for name in ("before.weight", "after.bias", "narrow.bias"):
            torch.testing.assert_close(state[name], weights[name], rtol=1e-4, atol=1e-5)


def differing(context: ParallelContext) -> Trained:
    """Ranks whose data have another length."""
    return trained(context, Classifier(), Points(40 + context.mesh.world_rank), "")


def test_ranks_with_other_data_are_told() -> None:
    """Each would train on samples that no other has in its place."""
    said = run_ranks(refusal, differing, dp=2)
    check_refusals(said, "ParallelError", "rank 1", "rank 0", hide=[r"\b[0-9a-f]{12}\b"])
