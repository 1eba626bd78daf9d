"""A module and data sets of a user's own, as a train spec."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.core.datasets.build import DatasetSplits
from megatron.core.datasets.map_style import PADDING, MapStyleDataset, SampleForm, length_of
from megatron.core.datasets.splits import SplitName, SplitSizes, parse_split
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.rng import seed_global_generators
from megatron.core.pipeline_parallel.chunk import LossSum, Microbatch, StageInputs
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.block import RecomputePlan
from megatron.errors import ConfigError
from megatron.library.plain.losses import sum_and_count
from megatron.library.plain.placing import (
    ModuleMaker,
    assign_shardings,
    broadcast_buffers,
    make_module,
    meta_twin,
    place,
)

Loss = Callable[[nn.Module, Any], Any]
"""``loss(model, batch)``: calls the model on a batch, in the form of the samples, and returns a loss."""
LOSS = "loss"
_NAMES: dict[SplitName, str] = {"train": "training data", "valid": "validation data", "test": "test data"}


class PlainSpec(TrainSpec):
    """What ``megatron.pretrain`` trains when it is given a module.

    ``source``: the module, or a function that makes it. ``data``: map-style data sets by split. ``loss``: None where
    the module returns its loss. ``shuffle``: training data have another order in each epoch.
    """

    name = "plain"

    def __init__(
        self,
        source: nn.Module | ModuleMaker,
        data: Mapping[SplitName, Any],
        *,
        loss: Loss | None = None,
        shuffle: bool = True,
    ) -> None:
        self._source, self._loss, self._shuffle = source, loss, shuffle
        self._data = {split: each for split, each in data.items() if each is not None}
        self._form = self._samples("train", seed=0).form
        self.batch_fields = dict.fromkeys((*self._form.shapes, PADDING))
        self._contexts: weakref.WeakKeyDictionary[nn.Module, ParallelContext] = weakref.WeakKeyDictionary()

    @override
    def loss_names(self, run: RunConfig) -> tuple[str, ...]:
        """One loss."""
        return (LOSS,)

    @override
    def fields(self, run: RunConfig, stages: Sequence[Stage]) -> frozenset[str]:
        """All fields of a sample."""
        return frozenset(self.batch_fields)

    @override
    def build_model(
        self,
        model: ModelConfig,
        groups: Sequence[object],
        context: ModelContext,
        *,
        stage: Stage | None = None,
        recompute: RecomputePlan | None = None,
        seed: int | None = None,
    ) -> nn.Module:
        """The module on this rank; on the meta device a tree of its modules, with parameters and without code."""
        if context.device.type != "meta":
            module = place(self._made(context, seed=seed), context, seed=seed)
            self._contexts[module] = context
            return module
        with torch.device("meta"):
            module = self._made(context, seed=None)
        module = meta_twin(module) if isinstance(self._source, nn.Module) else module
        assign_shardings(module, context)
        return module

    def _made(self, context: ModelContext, *, seed: int | None) -> nn.Module:
        """The user's module; raises ConfigError for one that can't be called with the fields of a sample."""
        module = make_module(self._source, context, seed=seed)
        if self._loss is None:
            check_call(module, self._form)
        return module

    @override
    def forward(self, model: nn.Module, stage_inputs: StageInputs, microbatch: Microbatch) -> Any:
        """The loss of a microbatch, as the user's code returns it, and the number of its samples.

        Global generators are seeded by the run's seed and the first sample, so that dropout is the same in a resumed
        run. Replicas take the first one's buffers after each microbatch of training, as torch's data parallelism does.
        """
        context, tensors = self._contexts[model], dict(microbatch.tensors)
        padding = tensors.pop(PADDING)
        if not model.training and bool(padding.any()):  # the end of --full-validation
            tensors = {name: tensor[~padding] for name, tensor in tensors.items()}
        samples = len(next(iter(tensors.values())))
        if samples == 0:
            return (padding.new_zeros((), dtype=torch.float32), 0), 0
        seed_global_generators(context.rng.seed, microbatch.rng_key.split, microbatch.rng_key.sample)
        batch = self._in_form(tensors)
        if self._loss is not None:
            returned = self._loss(model, batch)
        elif isinstance(batch, dict):
            returned = model(**batch)
        else:
            returned = model(*batch) if isinstance(batch, tuple) else model(batch)
        if model.training:
            broadcast_buffers(model, context.mesh, "dc", "dp", "cp")
        return returned, samples

    @override
    def loss(self, output: Any, microbatch: Microbatch) -> LossSum:
        """Sum and count of the loss."""
        returned, samples = output
        who = "the function loss=" if self._loss is not None else _title(self._source)
        device = microbatch.tensors[PADDING].device
        return LossSum.single(LOSS, *sum_and_count(returned, samples=samples, who=who, device=device))

    @override
    def counts(self, microbatch: Microbatch, context: ParallelContext) -> dict[str, Tensor]:
        """Samples: an estimate of the count that the loss will return, for the scale of fp16's gradients."""
        return {LOSS: (~microbatch.tensors[PADDING]).sum()}

    @override
    def build_datasets(self, run: RunConfig, tokenizer: Tokenizer, sizes: SplitSizes) -> DatasetSplits:
        """The user's data sets; ``--split`` cuts the training data where it is given and they are alone."""
        cyclic, seed = run.data.dataloader_type == "cyclic", run.training.seed
        train = self._samples(
            "train", seed=seed, size=None if cyclic else sizes.train, shuffle=self._shuffle and not cyclic
        )
        found: dict[SplitName, MapStyleDataset | None] = {"train": train if sizes.train else None}
        shares = parse_split(run.data.split) if run.given("split") else {}
        if shares and len(self._data) > 1:
            raise ConfigError(
                f"--split {run.data.split} cuts the training data, and there are "
                f"{' and '.join(_NAMES[each] for each in self._data if each != 'train')} already: leave one of them out"
            )
        remarks = []
        for split, share in shares.items():
            count = length_of(self._data["train"], self._named("train"))
            size = None if cyclic and split == "train" else sizes.of(split)
            if share is not None and sizes.of(split) != 0:
                found[split] = self._samples(split, seed=seed, size=size, units=share.units(count), of="train")
        held_out: tuple[SplitName, ...] = () if shares else ("valid", "test")
        for split in held_out:
            if split in self._data and sizes.of(split) != 0:
                size = None if split == "valid" and run.data.full_validation else sizes.of(split)
                found[split] = self._samples(split, seed=seed, size=size)
            elif sizes.of(split) != 0:
                remarks.append(f"{split}: no {_NAMES[split]} were given, so nothing is evaluated on them")
        for split, each in found.items():
            if each is not None and (difference := self._form.difference(each.form)) is not None:
                raise ConfigError(f"a sample of the {split} data {difference}, as the training data have")
        return DatasetSplits(found["train"], found.get("valid"), found.get("test"), remarks=remarks)

    def _samples(
        self,
        split: SplitName,
        *,
        seed: int,
        size: int | None = None,
        units: range | None = None,
        of: SplitName | None = None,
        shuffle: bool | None = None,
    ) -> MapStyleDataset:
        return MapStyleDataset(
            self._data[of or split],
            name=self._named(of or split),
            split=split,
            seed=seed,
            shuffle=(self._shuffle and split == "train") if shuffle is None else shuffle,
            units=units,
            num_samples=size,
        )

    def _named(self, split: SplitName) -> str:
        return f"the {_NAMES[split]} ({type(self._data[split]).__name__})"

    def _in_form(self, tensors: Mapping[str, Tensor]) -> Any:
        """A batch as the samples are: a dictionary, a tuple, or a tensor."""
        if self._form.kind == "mapping":
            return dict(tensors)
        ordered = tuple(tensors[str(place)] for place in range(len(tensors)))
        return ordered if self._form.kind == "sequence" else ordered[0]


def check_call(module: nn.Module, form: SampleForm) -> None:
    """Raise a ConfigError for a module whose ``forward`` can't take a batch of such samples."""
    try:
        signature, fields = inspect.signature(module.forward), form.shapes
    except (TypeError, ValueError):  # code that isn't Python's has none
        return
    try:
        if form.kind == "mapping":
            signature.bind(**fields)
        else:
            signature.bind(*fields)
    except TypeError as error:
        raise ConfigError(
            f"{_title(module)}.forward({', '.join(signature.parameters)}) can't be called with a batch of the training "
            f"data, whose fields are {', '.join(fields)} ({form.kind}): {error}; make parameters and fields the same, "
            "or pass loss=FUNCTION to megatron.pretrain, which is called with the model and the batch"
        ) from None


def _title(source: object) -> str:
    return type(source).__name__ if isinstance(source, nn.Module) else "the module"
