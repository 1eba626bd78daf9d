"""Our own checkpoints as portable models, and portable models as our checkpoints."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.config.data import DataConfig
from megatron.config.lora import is_adapter
from megatron.config.precision import PrecisionConfig
from megatron.config.quantization_training import QuantizationTrainingConfig
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig
from megatron.core.checkpointing.find import CheckpointFolder, find_checkpoint
from megatron.core.checkpointing.load import CHAT, MODEL_NAME, read_run_state
from megatron.core.checkpointing.save import save_streamed
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.checkpointing.streamed import StreamedBox
from megatron.core.conversion.adapters import merged
from megatron.core.conversion.chat_files import chat_entry, chat_of_checkpoint
from megatron.core.conversion.companions import (
    FOLDER,
    SETTINGS,
    companions_in,
    copied_tokenizer,
    copy_files,
    tokenizer_files,
    tokenizer_of,
)
from megatron.core.conversion.kept_tokenizer import files_to_keep, with_kept_files
from megatron.core.conversion.portable import (
    LazyTensor,
    PortableModel,
    check_shapes,
    parameters_of,
    refuse_more_layers,
)
from megatron.core.conversion.quantized_checkpoints import (
    FILE,
    boxes_of_scales,
    notes_about,
    read_quantization,
    settings_file,
)
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import family_of, saved_run
from megatron.core.optimizer.weight_average import AVERAGES, lacks_average
from megatron.errors import CheckpointError

PREFIX = "model."


def read_native(
    root: AnyPath, *, step: int | None = None, averaged: bool = False, merges: bool = True
) -> PortableModel:
    """The model of a checkpoint; of its tensors only the table of contents is read now. Adapters are merged, unless
    ``merges`` is off.

    ``averaged``: with the moving average of the weights in place of those that were trained, in its own type, which is
    wider; ``read_average`` rounds it.

    Raises CheckpointError when nothing usable is there, or a model of a family that this version doesn't know.
    """
    folder = find_checkpoint(root, step=step)
    state, where = read_run_state(folder), str(folder.path)
    run = saved_run(state["config"], name=state[MODEL_NAME], where=where)
    stored = StoredTensors(folder.path)
    vocab_size = run.model.vocab_size or stored.model["embedding.word_embeddings.weight"].shape[0]
    model = dataclasses.replace(run.model, vocab_size=vocab_size)
    refuse_more_layers(model, run.extra, stored.model, where=where)
    expected = {name: sharding.shape for name, sharding in parameters_of(model, run.extra).items()}
    check_shapes({name: entry.shape for name, entry in stored.model.items()}, expected, where=where)
    held = {name: PREFIX + name for name in expected}
    if averaged:
        averages = {name: AVERAGES + name for name in expected}
        held |= {name: average for name, average in averages.items() if average in stored.entries}
        if not any(name in stored.entries for name in averages.values()):
            raise CheckpointError(lacks_average(where))
    tokenizer = with_kept_files(run.tokenizer, folder.path)
    progress = state.get("progress") or {}
    quantization = None if averaged else read_quantization(folder, stored)
    portable = PortableModel(
        model=model,
        groups=run.extra,
        tensors={
            name: LazyTensor(shape, stored.model[name].dtype, partial(stored.read, held[name]))
            for name, shape in expected.items()
        },
        tokenizer=tokenizer,
        seq_length=run.data.seq_length,
        companions=companions_of(folder, tokenizer),
        iteration=folder.iteration,
        consumed_samples=int(progress.get("consumed_samples", 0)),
        chat=chat_of_checkpoint(folder, state, tokenizer),
        quantization=quantization,
        notes=(
            *QuantizationTrainingConfig.among(run.extra).notes,
            *(() if quantization is None else notes_about(quantization)),
        ),
    )
    return merged(portable) if merges else portable


@dataclass(frozen=True)
class Training:
    """What trained the adapters of a checkpoint. ``base``: the published model (``--load-hf``) beside which it did;
    None where there was none. ``others``: names of the parameters that were trained beside the adapters.
    """

    base: str | None
    others: frozenset[str]


def training_of(root: AnyPath, portable: PortableModel, *, step: int | None = None) -> Training:
    """What trained the adapters of the checkpoint that ``portable`` was read from."""
    folder = find_checkpoint(root, step=step, verify=False)
    state = read_run_state(folder)
    run = saved_run(state["config"], name=state[MODEL_NAME], where=str(folder.path))
    trained = run.optimizer.trained
    others = frozenset(name for name in portable.tensors if name in trained and not is_adapter(name))
    return Training(run.checkpoint.load_hf, others)


def companions_of(folder: CheckpointFolder, tokenizer: TokenizerConfig) -> dict[str, AnyPath]:
    """Files that travel with the model of a checkpoint, by name: settings of the published model that it comes from,
    and those of its ``tokenizer``.
    """
    own = {name: path for name, path in tokenizer_files(tokenizer).items() if name not in SETTINGS}
    return {**companions_in(folder.path.parent / FOLDER), **own}


def run_of(portable: PortableModel, tokenizer: TokenizerConfig) -> RunConfig:
    """Settings of a run that could go on from the model. ``tokenizer``: with paths where that run finds its files."""
    return RunConfig(
        model=portable.model,
        training=TrainingConfig(micro_batch_size=1),
        data=DataConfig(seq_length=portable.seq_length),
        precision=PrecisionConfig(bf16=portable.dtype == torch.bfloat16, fp16=portable.dtype == torch.float16),
        tokenizer=tokenizer,
        extra=portable.groups,
    )


def write_native(portable: PortableModel, root: Path, *, final: AnyPath) -> None:
    """Write the model as a checkpoint into the new folder ``root``, which will be moved to ``final``.

    The settings stored are those of a run that could go on from it; a run takes them with ``--use-checkpoint-args``.
    """
    root.mkdir(parents=True)
    copy_files(portable.companions, root / FOLDER)
    tokenizer = tokenizer_of(portable.tokenizer)
    has_words = tokenizer is not None and portable.tokenizer.tokenizer_type != "NullTokenizer"
    moved = portable.tokenizer
    if portable.companions and tokenizer is not None:
        moved = copied_tokenizer(portable.tokenizer, final / FOLDER)
    boxes, files = boxes_of(portable), files_to_keep(portable.tokenizer) if tokenizer is not None else {}
    if portable.quantization is not None:
        boxes += boxes_of_scales(portable.quantization)
        files |= {FILE: settings_file(portable.quantization)}
    fingerprint = tokenizer.fingerprint if tokenizer is not None and has_words else None
    state = state_of(
        portable, moved, name=tokenizer.name if tokenizer else moved.tokenizer_type, fingerprint=fingerprint
    )
    save_streamed(root, portable.iteration, boxes, state, files=files)


def state_of(
    portable: PortableModel, settings: TokenizerConfig, *, name: str | None, fingerprint: str | None
) -> dict[str, Any]:
    """What ``run.json`` holds of a model without a run. ``settings``: of its tokenizer, whose ``name`` and
    ``fingerprint`` they are.
    """
    return {
        MODEL_NAME: family_of(portable.groups).name,
        "config": run_of(portable, settings).to_json(),
        "progress": {
            "iteration": portable.iteration,
            "consumed_samples": portable.consumed_samples,
            "scheduled_samples": portable.consumed_samples,
        },
        "schedule": None,
        "optimizer": None,
        "random_seed": None,
        "tokenizer": {"name": name, "fingerprint": fingerprint},
        CHAT: chat_entry(portable.chat),
    }


def boxes_of(portable: PortableModel) -> list[StreamedBox]:
    """The tensors of a model as a checkpoint holds them, each made when it is written."""
    return [
        StreamedBox.whole(PREFIX + name, tensor.shape, tensor.dtype, tensor.make)
        for name, tensor in portable.tensors.items()
    ]
