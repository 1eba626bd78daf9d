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
    with pytest.raises(CheckpointError, match=r"norm\.weight.*; give megatron\.load a Classifier that is built as"):
        megatron.load(tmp_path / "saved", Classifier())
    with pytest.raises(CheckpointError, match="holds a plain module: .*megatron.load\\(FOLDER, MODULE\\)"):
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
    assert "test: no test data were given, so nothing is evaluated on them" in said
    losses(Classifier(), "2 --eval-iters 1 --split 3,1,0", train_data=Points(40))
    assert "valid: the training data (Points): 16 samples, 1.60 epochs" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match="--split 3,1,0 cuts the training data, and there are validation data already"
    ):
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
    assert "99 in the model" in capsys.readouterr().out


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
    ("module", "sentence"),
    [
        (
            Returning(lambda x: x),
            r"Returning returned a tensor of shape \[4, 8\] and type float32 where a loss is needed",
        ),
        (Returning(lambda x: None), "Returning returned nothing where a loss is needed"),
        (Returning(lambda x: x.sum().item()), "Returning returned a float where a loss is needed"),
        (Returning(lambda x: (x.sum(), x)), r"returned 2 values \(a tensor of shape \[\].* \[4, 8\].* where a loss is"),
        (Returning(lambda x: x.sum().detach()), "the loss of Returning has no gradient"),
        (_complex(), "phase of Classifier is complex"),
        (
            _sharded(),
            r"parameter last\.weight of Classifier has the shape \[2, 8\], and its Sharding gives this rank \[4",
        ),
        (nn.LazyLinear(3), "weight of LazyLinear has no shape yet"),
        (nn.Embedding(5, 2, sparse=True), r"Embedding \(Embedding\) makes sparse gradients"),
        (Classifier().to("meta"), "scale of Classifier is on the meta device and has no values"),
        (Classifier().requires_grad_(False), "Classifier has no parameter to train"),
        (nn.DataParallel(Classifier()), "the model is wrapped in DataParallel.* pass model.module"),
        (Classifier, r"the model is the class Classifier: give an instance, Classifier\(…\)"),
        (lambda context: 5, "the model is a int, and must be a torch.nn.Module or make one"),
        (7, "the model is a int; give a torch.nn.Module, a function that makes one, or the name of a family"),
        ("gtp", "^the family of megatron.pretrain cannot be 'gtp' .did you mean GPT"),
        (Naming(), r"Naming.forward\(x, target\) can't be called .* fields are x, y .*'target'"),
        (lambda context: Naming(), r"Naming.forward\(x, target\) can't be called .* fields are x, y .*'target'"),
        ("gpt", "train_data are for a module of your own; the flags of a GPT name its data"),
    ],
)
def test_wrong_modules(module: Any, sentence: str) -> None:
    """One sentence that names the parameter or what was returned, before anything is trained."""
    with pytest.raises(ConfigError, match=sentence):
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
    ("data", "error", "sentence"),
    [
        (None, ConfigError, "train_data is missing"),
        (5, ConfigError, r"the training data \(int\) gives no samples by number"),
        (iter([1]), ConfigError, "gives no samples by number"),
        (Endless(), ConfigError, r"the training data \(Endless\) has no length"),
        ([], DataError, r"the training data \(list\) has no samples: its length is 0; give more data"),
        (["some", "words"], DataError, r"sample 0 of the training data \(list\) is text.*: turn text into token ids"),
        ([{"x": X, "y": "one"}], DataError, "field 'y' of sample 0 of the training data .* is text"),
        ([{"x": [1, [2]], "y": 1}], DataError, "field 'x' of sample 0 .* is a list, which no tensor can be made of"),
        ([{}], DataError, "sample 0 of the training data .* has no fields"),
        ([{"is_padding": 1}], DataError, "has a field 'is_padding', which is a name of the trainer's own"),
        (
            Broken({"x": X[:5], "y": 1}),
            DataError,
            r"sample 3 of .*Points|Broken.* has the shape \[5\] in field 'x', and",
        ),
        (Broken({"x": X.long(), "y": 1}), DataError, "sample 3 of .* has the type int64 in field 'x', and not float32"),
        (Broken({"x": X}), DataError, "sample 3 of .* has the fields x .mapping., and not x, y"),
        (
            Broken(KeyError("z")),
            DataError,
            r"sample 3 of .* can't be read: KeyError: 'z' \(.*test_plain_modules\.py, li",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0])
def test_wrong_data(data: Any, error: type[Exception], sentence: str, workers: int) -> None:
    """One sentence that names the sample and its field."""
    with pytest.raises(error, match=sentence):
        losses(Classifier(), f"3 --num-workers {workers}", train_data=data)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--hidden-size 4 --tokenizer-type NullTokenizer",
            "--hidden-size and --tokenizer-type are not available for a",
        ),
        ("--mock-data", "--mock-data is not available for a module and data sets of your own"),
        (
            "--tensor-model-parallel-size 2 --world-size 2 --dry-run",
            "--tensor-model-parallel-size 2 divides nothing: no",
        ),
        ("--pipeline-model-parallel-size 2 --world-size 2 --dry-run", "cuts a model into stages, and a module of your"),
        ("--context-parallel-size 2 --world-size 2 --dry-run", "cuts sequences into parts"),
        ("--recompute-activations", "--recompute-activations is not available"),
    ],
)
def test_flags_that_would_be_ignored(flags: str, sentence: str) -> None:
    """What describes models and data of this project's own is refused, and so is a layout that a module can't have."""
    with pytest.raises(ConfigError, match=sentence):
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
    assert "two reads of one sample differ" in capsys.readouterr().out
    losses(Classifier(), "1", train_data=Points(noise=0.5))
    assert "two reads of one sample differ" not in capsys.readouterr().out
