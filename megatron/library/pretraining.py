"""``megatron.pretrain``: a family of models by its flags, or a module and data sets of the caller's own."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from torch import nn
from typing_extensions import override

from megatron.config.flags import subject
from megatron.core.models.registry import FAMILIES, Family, family_titled, register
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.model_context import ModelContext
from megatron.errors import ConfigError
from megatron.library.plain.config import DEFAULTS
from megatron.library.plain.train_spec import Loss, PlainSpec
from megatron.training.pretrain import start
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run.run import Run

Model = TypeVar("Model", bound="nn.Module | None")


@dataclass(frozen=True)
class TrainingResult(Generic[Model]):
    """What a training run leaves on this rank.

    ``model``: the caller's module with its trained weights; None for a family, whose model ``megatron.load`` opens.
    ``iteration``: optimizer steps since the run's first start. ``losses``: means over the global batch of each step of
    this call, by name.
    """

    model: Model
    iteration: int = 0
    losses: dict[str, list[float]] = field(default_factory=dict)


@overload
def pretrain(
    model: nn.Module,
    argv: str | Sequence[str] = (),
    *,
    train_data: Any,
    valid_data: Any = None,
    test_data: Any = None,
    loss: Loss | None = None,
    shuffle: bool = True,
) -> TrainingResult[nn.Module]: ...
@overload
def pretrain(
    model: Callable[[ModelContext], nn.Module],
    argv: str | Sequence[str] = (),
    *,
    train_data: Any,
    valid_data: Any = None,
    test_data: Any = None,
    loss: Loss | None = None,
    shuffle: bool = True,
) -> TrainingResult[nn.Module]: ...
@overload
def pretrain(model: str | Family, argv: str | Sequence[str] = ()) -> TrainingResult[None]: ...


def pretrain(
    model: nn.Module | Callable[[ModelContext], nn.Module] | str | Family,
    argv: str | Sequence[str] = (),
    *,
    train_data: Any = None,
    valid_data: Any = None,
    test_data: Any = None,
    loss: Loss | None = None,
    shuffle: bool = True,
) -> TrainingResult[Any]:
    """Train a model on the ranks that torchrun or srun started, or on one rank without a launcher.

    ``model``: a family such as ``"gpt"``, whose flags describe model and data, or a ``torch.nn.Module``, or a function
    that makes one from this rank's ``ModelContext``. ``argv``: flags, as on a command line. The rest is for modules:

    - ``train_data``, ``valid_data``, ``test_data``: map-style data sets, whose samples are dictionaries or tuples of
      arrays, tensors or numbers, all of one form. The model is called with a batch's fields: ``model(**batch)``,
      ``model(*batch)``, or ``model(batch)`` for single values.
    - ``loss``: a function ``loss(model, batch)``, for a model that doesn't return its loss. A loss is a scalar tensor,
      the mean over the samples of a microbatch; or a pair of a sum and the count to divide it by, where samples differ
      in what counts; or an object with such a ``loss``.
    - ``shuffle``: training data are read in another random order in each epoch.

    Raises a MegatronError for a user's mistake.
    """
    flags = shlex.split(argv) if isinstance(argv, str) else list(argv)
    data = {"train_data": train_data, "valid_data": valid_data, "test_data": test_data, "loss": loss}
    if isinstance(model, (str, Family)):
        family = family_titled(model, where="the family of megatron.pretrain") if isinstance(model, str) else model
        given = [name for name, value in data.items() if value is not None] + ([] if shuffle else ["shuffle"])
        if given:
            raise ConfigError(
                f"{subject(given, 'is', 'are')} for a module of your own; a {family.title} reads the data that its "
                "flags name"
            )
        register(family)
        return _run(family, flags, result=TrainingResult(None))
    if not callable(model):
        raise ConfigError(
            f"the model has type {type(model).__name__}: give a torch.nn.Module, a function that makes one, or the "
            f"name of a family: {', '.join(FAMILIES)}"
        )
    if isinstance(model, type):
        raise ConfigError(f"the model is the class {model.__name__}: give an instance, {model.__name__}(…)")
    if train_data is None:
        raise ConfigError("train_data is missing: give a map-style data set, with __len__ and __getitem__")
    spec = PlainSpec(model, {"train": train_data, "valid": valid_data, "test": test_data}, loss=loss, shuffle=shuffle)
    return _run(
        PlainFamily("plain", "megatron.library.plain", spec),
        flags,
        result=TrainingResult(model if isinstance(model, nn.Module) else None),
    )


@dataclass(frozen=True)
class PlainFamily(Family):
    """The family of one module: its ``spec`` holds the module and its data. No checkpoint leads to it by name."""

    spec: PlainSpec

    @property
    @override
    def train_spec(self) -> TrainSpec:
        """Model, data and loss of the caller."""
        return self.spec


def _run(family: Family, flags: Sequence[str], *, result: TrainingResult[Any]) -> TrainingResult[Any]:
    runs, losses = list[Run](), dict[str, list[float]]()

    def built(run: Run) -> None:
        runs.append(run)
        run.after_step.append(note)

    def note(record: StepRecord) -> None:
        for name, loss in record.losses.items():
            losses.setdefault(name, []).append(loss)

    defaults = DEFAULTS if isinstance(family, PlainFamily) else None
    try:
        start(family, flags, prog=os.path.basename(sys.argv[0]), defaults=defaults, built=built)
    finally:
        for run in runs:
            run.release()
    for run in runs:
        trained = run.models[0] if isinstance(family, PlainFamily) else None
        return TrainingResult(trained, run.progress.iteration, losses)
    return result
