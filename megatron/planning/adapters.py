"""Checks of the layers that get low-rank adapters, against the model built without values."""

from __future__ import annotations

from difflib import get_close_matches

from megatron.config.lora import LAYERS, LoraConfig
from megatron.config.run import RunConfig
from megatron.core.models.train_spec import TrainSpec
from megatron.core.tensor_parallel.low_rank import Adaptable
from megatron.core.transformer.layer import TransformerLayer
from megatron.errors import ConfigError
from megatron.planning.estimate import parameter_sizes
from megatron.planning.model import whole_model


def check_adapters(run: RunConfig, train_spec: TrainSpec) -> None:
    """Raise ConfigError for a target of ``--lora-targets`` that no layer of the model has, with those that it has."""
    lora = run.part(LoraConfig)
    if not lora.is_on:
        return
    layers = {
        name.rpartition(".")[2]
        for layer in whole_model(run, train_spec).modules()
        if isinstance(layer, TransformerLayer)
        for name, module in layer.named_modules()
        if isinstance(module, Adaptable)
    }
    for target in lora.targets:
        if target in layers or LAYERS.get(target, ("",))[0] in layers:
            continue
        known = sorted(layers | {name for name, (layer, _) in LAYERS.items() if layer in layers})
        near = get_close_matches(target, known, n=1)
        raise ConfigError(
            f"--lora-targets {target}: no layer of the model has a linear layer of this name; "
            f"{f'did you mean {near[0]}? There are' if near else 'there are'} {', '.join(sorted(layers))}"
        )
    fresh = tuple(prefix for prefixes in train_spec.starts_from.values() for prefix in prefixes)
    heads = [name for name in parameter_sizes(run, train_spec) if fresh and name.startswith(fresh)]
    frozen = sorted({name.partition(".")[0] for name in heads if name not in run.optimizer.trained})
    if frozen:
        patterns = " ".join(f"'{head}.*'" for head in frozen)
        raise ConfigError(
            f"--lora-rank {lora.rank} trains adapters alone, and {' and '.join(frozen)} may start from random weights: "
            f"train what is new as well, with --train-only {patterns}"
        )
