"""A trained model from its checkpoint, at any layout: for tasks, tools and the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.flags import flag_of
from megatron.config.fp8 import Fp8Config
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import Stage
from megatron.config.rules.sizes import divide, divisors, some
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.trained_model import TrainedModelConfig, TrainedModelLayoutConfig
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint
from megatron.core.checkpointing.load import MODEL_NAME, load_checkpoint, read_run_state
from megatron.core.conversion.chat_files import chat_of_checkpoint
from megatron.core.conversion.kept_tokenizer import with_kept_files
from megatron.core.models.registry import Family, family_named, saved_run
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import LaunchEnvironment, errors_once_per_node
from megatron.core.parallel.launch import parallel_context
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import CheckpointError, ConfigError, DataError, enumeration
from megatron.planning.stages import with_stages
from megatron.training.checkpoints.loading import check_same_model, check_same_tokenizer, where_to_find_weights
from megatron.training.run.quantization import round_weights
from megatron.training.run.run import Run
from megatron.training.run.stages import buffer_state, build_stages, model_state, stages_here


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """This rank's part of a model: a module for each of its pipeline ``stages``.

    ``chat``: how it writes conversations and ends answers, where it has learned that.
    """

    config: RunConfig
    train_spec: TrainSpec
    context: ModelContext
    tokenizer: Tokenizer
    stages: list[Stage]
    models: list[nn.Module]
    chat: ChatSettings | None = None


def model_in_training(run: Run) -> PlacedModel:
    """This rank's part of the model that a run trains, with the weights that it has at each time."""
    return PlacedModel(
        config=run.config,
        train_spec=run.train_spec,
        context=run.context,
        tokenizer=run.tokenizer,
        stages=stages_here(run.config, run.context),
        models=run.models,
        chat=run.chat,
    )


@dataclass(frozen=True, kw_only=True)
class TrainedModel(PlacedModel):
    """This rank's part of a trained model, in evaluation mode. ``folder``: the checkpoint with its weights."""

    folder: CheckpointFolder

    @property
    def is_upcast(self) -> bool:
        """Whether the model computes in another type than it was trained in, by ``--fp32``."""
        saved = read_run_state(self.folder)["config"]["precision"]
        return self.context.dtype == torch.float32 and bool(saved.get("bf16") or saved.get("fp16"))

    @property
    def model(self) -> nn.Module:
        """The model of all layers, for a layout without pipeline parallelism, such as that of ``trained_model``."""
        (whole,) = self.models
        return whole


def load_model(
    config: RunConfig, train_spec: TrainSpec, context: ParallelContext, *, has_gradients: bool = False
) -> TrainedModel:
    """The model that ``--load`` or ``--pretrained-checkpoint`` names, at the layout of ``config``. A collective.

    ``has_gradients``: leave its parameters as training has them, for a caller that trains it.

    Raises CheckpointError when nothing usable is there or it is another model, ConfigError and DataError for a
    tokenizer that can't be built.
    """
    settings, mesh = config.checkpoint, context.mesh
    tokenizer = build_tokenizer(config.tokenizer)
    if settings.load:
        folder = find_checkpoint(settings.load, step=settings.ckpt_step, mesh=mesh)
    else:
        assert settings.pretrained_checkpoint is not None, "a rule requires a checkpoint"
        folder = find_checkpoint(settings.pretrained_checkpoint, mesh=mesh, flag="--pretrained-checkpoint")
    state = read_run_state(folder)
    check_same_tokenizer(state, folder, tokenizer)
    vocabulary = state["config"]["model"].get("vocab_size")
    if isinstance(vocabulary, int) and tokenizer.vocab_size > vocabulary:
        raise ConfigError(
            f"{tokenizer.name} has {tokenizer.vocab_size} tokens, and the model in {folder.path} has {vocabulary}: "
            "name the files of the tokenizer that it was trained with"
        )
    config = with_stages(config.with_vocab_size(tokenizer.vocab_size), train_spec)
    check_same_model(state, folder, model_name=train_spec.name, config=config, tokenizer=tokenizer)
    on = ModelContext.plain(context)
    stages, models = build_stages(config, train_spec, on)
    for model in models:
        model.eval()
        if not has_gradients:
            model.requires_grad_(False)
    weights = list(model_state(*models))
    names = where_to_find_weights(weights, averaged_in=folder if settings.load_ema else None)
    load_checkpoint(folder, [*weights, *buffer_state(*models)], mesh, alternatives=names)
    if not has_gradients:
        round_weights(config, models, mesh)
    return TrainedModel(
        config=config,
        train_spec=train_spec,
        context=on,
        tokenizer=tokenizer,
        folder=folder,
        stages=stages,
        models=models,
        chat=chat_of_checkpoint(folder, state, config.tokenizer),
    )


@contextmanager
def trained_model(
    choice: TrainedModelConfig,
    train_specs: Mapping[str, TrainSpec],
    launch: LaunchEnvironment,
    *,
    layout: TrainedModelLayoutConfig | None = None,
) -> Iterator[TrainedModel]:
    """The chosen model, for the length of a ``with`` block; every launched rank holds a part of it. ``layout``: without
    one, ranks divide each layer.

    ``train_specs``: the families the tool can use, by name; those whose train spec inherits from one work, too. Raises
    CheckpointError when nothing usable is there, ConfigError and DataError for a tokenizer that can't be built.
    """
    layout = layout or TrainedModelLayoutConfig()
    with errors_once_per_node():
        layout.check(launch.world_size)
        stages = layout.pipeline_model_parallel_size
        config, train_spec = chosen_run(choice, train_specs, launch.world_size, stages)
    precision, seed = config.precision.params_dtype, config.training.seed
    with parallel_context(config.parallel, launch, params_dtype=precision, seed=seed) as context:
        yield load_model(config, train_spec, context)


def another_trained_model(beside: TrainedModel, choice: TrainedModelConfig) -> TrainedModel:
    """A further model of the same family, on the same ranks and of the same type. A collective; raises as above."""
    mesh, known = beside.context.mesh, {beside.train_spec.name: beside.train_spec}
    return load_model(*chosen_run(choice, known, mesh.world_size, mesh.size("pp")), beside.context)


def chosen_run(
    choice: TrainedModelConfig, train_specs: Mapping[str, TrainSpec], world_size: int, pipeline_stages: int
) -> tuple[RunConfig, TrainSpec]:
    """The saved settings of the chosen model, at a layout for inference, and its family's train spec.

    Raises CheckpointError when nothing usable is there, ConfigError and DataError for a layout or tokenizer that can't
    be used.
    """
    folder = find_checkpoint(choice.load, step=choice.ckpt_step, verify=False)
    state = read_run_state(folder)
    family = usable_family(folder, train_specs)
    saved = saved_run(state["config"], name=family.name, where=str(folder.path))
    saved = dataclasses.replace(saved, tokenizer=with_kept_files(saved.tokenizer, folder.path))
    return _for_inference(saved, choice, world_size, pipeline_stages), train_specs.get(family.name, family.train_spec)


def usable_family(folder: CheckpointFolder, train_specs: Mapping[str, TrainSpec]) -> Family:
    """The family of the checkpoint's model: one of ``train_specs`` by name, or one whose train spec inherits from them.

    Raises CheckpointError for another family, and for one that isn't known.
    """
    name = read_run_state(folder)[MODEL_NAME]
    family = family_named(name, where=str(folder.path))
    if name not in train_specs and not isinstance(family.train_spec, tuple(map(type, train_specs.values()))):
        raise CheckpointError(f"{folder.path} holds a {name} model; this tool works with {', '.join(train_specs)}")
    return family


def _for_inference(saved: RunConfig, choice: TrainedModelConfig, world_size: int, pipeline_stages: int) -> RunConfig:
    layers = saved.model.num_layers
    if world_size % pipeline_stages or layers < pipeline_stages:
        raise ConfigError(
            f"--pipeline-model-parallel-size is {pipeline_stages}; it must divide the {world_size} ranks that were "
            f"started, and be at most the {layers} layers of the model in {choice.load}"
        )
    parts = world_size // pipeline_stages
    if wrong := _undivided(saved, parts):
        fits = (
            pipeline_stages * each for each in divisors(saved.model.num_attention_heads) if not _undivided(saved, each)
        )
        raise ConfigError(
            f"{world_size} ranks were started for the model in {choice.load}, and {enumeration(wrong)} are not "
            f"divisible by {parts}, the ranks that divide each layer: start {some(fits, near=world_size)}"
        )
    return dataclasses.replace(
        saved,
        world_size=world_size,
        parallel=ParallelConfig(tensor_model_parallel_size=parts, pipeline_model_parallel_size=pipeline_stages),
        checkpoint=CheckpointConfig(load=choice.load, ckpt_step=choice.ckpt_step, load_ema=choice.load_ema),
        precision=dataclasses.replace(saved.precision, bf16=False, fp16=False) if choice.fp32 else saved.precision,
        fp8=Fp8Config() if choice.fp32 else saved.fp8,
        tokenizer=_chosen_tokenizer(saved, choice),
    )


def _undivided(saved: RunConfig, parts: int) -> list[str]:
    """What tensor-parallel ranks can't divide into equal ``parts``."""
    model = saved.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    found = []
    if heads % parts or not divide(groups, parts):
        found.append(f"the {heads} heads ({groups} for keys and values)")
    widths = {"MLPs": model.ffn_hidden_size}
    for part in saved.parts:
        widths |= part.columns
    found += [f"the {width} columns of its {name}" for name, width in widths.items() if width % parts]
    return found


def _chosen_tokenizer(saved: RunConfig, choice: TrainedModelConfig) -> TokenizerConfig:
    """The checkpoint's tokenizer with the files that are given, or one of another kind that is given."""
    own, fields = saved.tokenizer, ("vocab_file", "merge_file", "tokenizer_model", "vocab_extra_ids")
    given = {field: getattr(choice, field) for field in fields if getattr(choice, field) is not None}
    if choice.tokenizer_type not in (None, own.tokenizer_type):
        return TokenizerConfig(tokenizer_type=choice.tokenizer_type, vocab_size=saved.model.vocab_size, **given)
    if own.tokenizer_type == "NullTokenizer" and given:
        raise ConfigError(f"the checkpoint in {choice.load} keeps no tokenizer: give its --tokenizer-type, too")
    for field in fields[:3]:
        path, flag = getattr(own, field), flag_of(field)
        if path is not None and field not in given and not Path(path).exists():
            raise DataError(
                f"the checkpoint in {choice.load} keeps no tokenizer, and its file {path} is missing: give its path "
                f"with {flag}"
            )
    return dataclasses.replace(own, **given)
