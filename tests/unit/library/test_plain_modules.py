"""A torch module and a map-style data set of a user's own, through ``megatron.pretrain``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from typing_extensions import override

import megatron
from megatron.core.parallel.sharding import Sharding
from megatron.errors import CheckpointError, ConfigError, DataError
from tests.harness.plain import FLAGS, Classifier, Points
from tests.harness.sentences import check_line, expect_error


def losses(module: Any, flags: str = "6", **options: Any) -> list[float]:
    options.setdefault("train_data", Points())
    return megatron.pretrain(module, FLAGS + flags, **options).losses["loss"]


def test_training_is_that_of_a_loop_in_torch() -> None:
    """The same updates as by torch's AdamW: means over the global batch, a weight that is used twice included."""
    data, module, reference = Points(16), Classifier(), Classifier()
    schedule = "8 --lr-decay-style constant --clip-grad 0 --weight-decay 0"
    found = losses(module, schedule, train_data=data)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.05, eps=1e-8, weight_decay=0.0)
    y = (data.x.sum(1) > 0).long()
    expected = []
    for _ in range(8):  # an epoch is one batch, so its order does not matter
        optimizer.zero_grad()
        loss = reference(data.x, y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(module.parameters(), reference.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_the_module_is_the_users_again_afterwards() -> None:
    """Its gradients went on to be collected in the run's buffers, so an own loop trained with sums of all its steps."""
    module = Classifier()
    losses(module)
    losses(module)
    for _ in range(2):
        module.zero_grad()
        module(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)).backward()
        norms = [parameter.grad.norm() for parameter in module.parameters() if parameter.grad is not None]
        assert len(norms) == 6
    fresh = Classifier()
    fresh.load_state_dict(module.state_dict())
    fresh(torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)).backward()
    assert norms == [parameter.grad.norm() for parameter in fresh.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("micro", [1, 4, 16])
def test_a_sum_with_a_count_is_the_mean_over_everything(micro: int) -> None:
    """Means of microbatches' means would weigh rare labels more where their microbatch has few."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        counts = batch["y"] == 1
        each = cross_entropy(model.logits(batch["x"]), batch["y"], reduction="none")  # type: ignore[operator]
        return (each * counts).sum(), counts.sum()

    data = Points(16)
    flags = f"1 --micro-batch-size {micro}"
    found = megatron.pretrain(Classifier(), FLAGS + flags, train_data=data, loss=loss).losses["loss"]
    positive = data.x[data.x.sum(1) > 0]
    expected = cross_entropy(Classifier().logits(positive), torch.ones(len(positive), dtype=torch.int64)).item()
    assert found == [pytest.approx(expected, rel=1e-5)]


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    """Weights, moments, running statistics, dropout, random transforms and the order of the third epoch go on."""
    whole, cut = Classifier(norm=True, dropout=0.3), Classifier(norm=True, dropout=0.3)
    data, schedule = Points(noise=0.1), f"9 --save-interval 5 --save {tmp_path}/"
    expected = losses(whole, f"{schedule}whole", train_data=data)
    first = losses(cut, f"{schedule}cut --exit-interval 5", train_data=data)
    again = Classifier(norm=True, dropout=0.3)
    with torch.no_grad():
        again.first.weight.fill_(7.0)
    torch.manual_seed(99)  # nothing may depend on what the process did before
    second = losses(again, f"{schedule}cut --load {tmp_path}/cut", train_data=data)
    assert first + second == expected
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_module_without_its_training_takes_a_checkpoint(tmp_path: Path) -> None:
    """``megatron.load(folder, module)`` fills a module, buffers included, and names what doesn't fit."""
    trained, fresh = Classifier(norm=True), Classifier(norm=True)
    losses(trained, f"3 --save {tmp_path / 'saved'}")
    assert megatron.load(tmp_path / "saved", fresh) is fresh
    for name, value in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    with expect_error(CheckpointError, "norm.weight", "megatron.load"):
        megatron.load(tmp_path / "saved", Classifier())
    with expect_error(CheckpointError, "megatron.load"):
        megatron.load(tmp_path / "saved")


def test_evaluation_split_and_full_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each validation sample counts once, also where they don't fill the last batch; --split cuts training data."""
    module, held_out = Classifier(), Points(10)
    flags = "2 --eval-iters 1 --full-validation"
    losses(module, flags, valid_data=held_out)
    said = capsys.readouterr().out
    y = (held_out.x.sum(1) > 0).long()
    with torch.no_grad():
        expected = module(held_out.x, y).item()
    assert f"loss value: {expected:.4E}"[:17] in said
    check_line(said, "evaluated")
    losses(Classifier(), "2 --eval-iters 1 --split 3,1,0", train_data=Points(40))
    check_line(capsys.readouterr().out, "training", "16", "1.60")
    with expect_error(ConfigError, "--split 3,1,0"):
        losses(Classifier(), "2 --eval-iters 1 --split 3,1,0", valid_data=held_out)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: str) -> None:
    """Inputs are cast at the module's border, and losses are summed in fp32."""
    seen = []

    class Watched(Classifier):
        @override
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            seen.append(x.dtype)
            return super().forward(x, y)

    found = losses(Watched(), f"12 --{precision} --initial-loss-scale 65536")
    assert found[-1] < 0.8 * found[0]
    assert set(seen) == {torch.bfloat16 if precision == "bf16" else torch.float16}


def test_tuples_single_values_and_outputs_with_a_loss() -> None:
    """Samples as torch's data sets have them, arrays of NumPy, and what models of transformers return."""

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        @override
        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            assert x.dtype == torch.float32
            return Output(mse_loss(x * self.weight, 2 * x if y is None else y))

    pairs = [(np.float64(number / 8), number / 4) for number in range(16)]
    for data in (pairs, [number / 8 for number in range(16)]):
        module = Line()
        found = losses(module, "60 --lr 0.2", train_data=data)
        assert found[-1] < 0.01 * found[0]
        assert module.weight.item() == pytest.approx(2.0, abs=0.1)


def test_frozen_and_unused_parameters() -> None:
    """The first stay as they are; the second get no gradient, and nothing waits for one."""
    module = Classifier()
    module.unused = nn.Parameter(torch.ones(3))
    module.first.bias.requires_grad_(False)
    before = module.first.bias.clone()
    losses(module, "3 --overlap-grad-reduce --use-distributed-optimizer")
    assert torch.equal(module.first.bias, before)
    assert torch.equal(module.unused, torch.ones(3))


def test_a_function_makes_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    """It is called with the rank's context, and for planning on the meta device."""
    result = megatron.pretrain(lambda context: Classifier(), FLAGS + "2", train_data=Points())
    assert isinstance(result.model, Classifier)
    assert result.iteration == 2
    megatron.pretrain(Classifier(), FLAGS + "2 --dry-run --world-size 4", train_data=Points())
    check_line(capsys.readouterr().out, "model", "99")


class Returning(nn.Module):
    """Returns what it is told to."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.returned = returned

    @override
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.returned(x * self.weight)


class Naming(Classifier):
    """Calls the second field of the samples by another name."""

    @override
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x, target)


def _complex() -> nn.Module:
    module = Classifier()
    module.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return module


def _sharded() -> nn.Module:
    module = Classifier()
    module.last.weight.sharding = Sharding((4, 8))  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    "module",
    [
        Returning(lambda x: x),
        Returning(lambda x: None),
        Returning(lambda x: x.sum().item()),
        Returning(lambda x: (x.sum(), x)),
        Returning(lambda x: x.sum().detach()),
        _complex(),
        _sharded(),
        nn.LazyLinear(3),
        nn.Embedding(5, 2, sparse=True),
        Classifier().to("meta"),
        Classifier().requires_grad_(False),
        nn.DataParallel(Classifier()),
        Classifier,
        lambda context: 5,
        7,
        "gtp",
        Naming(),
        lambda context: Naming(),
        "gpt",
    ],
)
def test_wrong_modules(module: Any) -> None:
    """One sentence that names the parameter or what was returned, before anything is trained."""
    with expect_error(ConfigError):
        losses(module, "1")


class Broken(Points):
    """Sample 3 is another one. ``found``: what it is; an error is raised."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    @override
    def __getitem__(self, number: int) -> Any:
        if number == 3 and isinstance(self.found, Exception):
            raise self.found
        return self.found if number == 3 else super().__getitem__(number)


class Endless:
    """An iterable data set."""

    def __getitem__(self, number: int) -> int:
        return number


X = torch.ones(8)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (None, ConfigError),
        (5, ConfigError),
        (iter([1]), ConfigError),
        (Endless(), ConfigError),
        ([], DataError),
        (["some", "words"], DataError),
        ([{"x": X, "y": "one"}], DataError),
        ([{"x": [1, [2]], "y": 1}], DataError),
        ([{}], DataError),
        ([{"is_padding": 1}], DataError),
        (Broken({"x": X[:5], "y": 1}), DataError),
        (Broken({"x": X.long(), "y": 1}), DataError),
        (Broken({"x": X}), DataError),
        (Broken(KeyError("z")), DataError),
    ],
)
@pytest.mark.parametrize("workers", [0])
def test_wrong_data(data: Any, error: type[Exception], workers: int) -> None:
    """One sentence that names the sample and its field."""
    with expect_error(error, hide=[r"line \d+"]):
        losses(Classifier(), f"3 --num-workers {workers}", train_data=data)


def test_options_of_modules_are_refused_for_a_family() -> None:
    """``shuffle=False`` with a family was ignored, and its data shuffled."""
    with expect_error(ConfigError, "shuffle", "GPT"):
        megatron.pretrain("gpt", shuffle=False)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "flags",
    [
        "--hidden-size 4 --tokenizer-type NullTokenizer",
        "--mock-data",
        "--tensor-model-parallel-size 2 --world-size 2 --dry-run",
        "--pipeline-model-parallel-size 2 --world-size 2 --dry-run",
        "--context-parallel-size 2 --world-size 2 --dry-run",
        "--recompute-activations",
    ],
)
def test_flags_that_would_be_ignored(flags: str) -> None:
    """What describes models and data of this project's own is refused, and so is a layout that a module can't have."""
    with expect_error(ConfigError):
        losses(Classifier(), f"1 {flags}")


@pytest.mark.parametrize("flags", ["--train-iters 1", "--train-iters 1 --dry-run"])
def test_reports_count_samples_not_tokens(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They spoke of samples of one token, of 0 model FLOPs and of a vocabulary of 2, which such a model has not."""
    megatron.pretrain(Classifier(), f"--lr 0.1 --micro-batch-size 4 --eval-iters 0 {flags}", train_data=Points())
    said = capsys.readouterr().out
    assert "4 samples" in said
    assert not re.findall("token|vocabulary|FLOPs", said)


def test_data_that_cannot_be_compared_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Randomness of its own makes a resumed run another one, which nobody would notice."""

    class Unseeded(Points):
        @override
        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"x": np.random.default_rng().random(8), "y": 1}

    losses(Classifier(), "1", train_data=Unseeded())
    check_line(capsys.readouterr().out, "sample")
    losses(Classifier(), "1", train_data=Points(noise=0.5))
    assert "two reads of one sample differ" not in capsys.readouterr().out
