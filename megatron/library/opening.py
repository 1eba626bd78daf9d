"""Models from folders and from the transformers library, whole on one device."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn

from megatron.config.pipeline import Stage
from megatron.config.run import RunConfig
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import MODEL_NAME, load_checkpoint, read_run_state
from megatron.core.checkpointing.manifest import MANIFEST
from megatron.core.conversion.companions import companions_in, tokenizer_in
from megatron.core.conversion.huggingface.hub import model_folder
from megatron.core.conversion.huggingface.reading import CONFIG, read_config, read_huggingface
from megatron.core.conversion.huggingface.reading import from_transformers as read_transformers
from megatron.core.conversion.native import companions_of, run_of
from megatron.core.conversion.portable import PortableModel, load_weights
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.models.registry import all_families, family_of
from megatron.core.parallel.launch import DTYPES
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.end_tokens import end_ids
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.library.language_model import LanguageModel
from megatron.library.plain.placing import assign_shardings
from megatron.library.plain.train_spec import PlainSpec
from megatron.training.checkpoints.loading import where_to_find_weights
from megatron.training.checkpoints.trained_model import PlacedModel, chosen_run, load_model
from megatron.training.run.stages import buffer_state, model_state

Module = TypeVar("Module", bound=nn.Module)


def from_transformers(
    model: Any,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> LanguageModel:
    """A model of this project with the weights of a Hugging Face model.

    ``model``: a model of the transformers library, whose weights are copied, or a folder, or the name of a repository
    of the Hub (``ORG/NAME``, ``ORG/NAME@REVISION``). ``tokenizer``: a tokenizer of transformers, or a folder that has
    one; a model folder's own unless given. ``dtype``: of the weights, such as ``torch.bfloat16`` or ``"bf16"``; the
    source's unless given. ``device``: that of the model in memory, or the CPU, unless given.
    Raises CheckpointError for a model that can't be converted, ConfigError for another ``dtype`` or ``tokenizer``.
    """
    if isinstance(model, (str, Path)):
        folder = model_folder(path_of(str(model)), flag="from_transformers", say=_say_nothing)
        if not isinstance(folder, Path):
            raise CheckpointError(f"from_transformers reads a folder on a disk: copy {model} there first")
        portable, start = read_huggingface(folder), read_config(folder).get("decoder_start_token_id")
    else:
        if not (hasattr(model, "config") and hasattr(model.config, "to_json_string")):
            raise CheckpointError(
                f"from_transformers can't read {type(model).__name__}: give a model of the transformers library, a "
                "folder, or the name of a repository (ORG/NAME)"
            )
        portable, start = read_transformers(model), getattr(model.config, "decoder_start_token_id", None)
        device = model.device if device is None else device
    kept = None
    if tokenizer is not None:
        portable, kept = _with_tokenizer(portable, tokenizer)
    chosen = _dtype(dtype) or portable.dtype
    context = ModelContext.single(dtype=chosen, device=_device(device or "cpu"))
    run = run_of(portable, portable.tokenizer)
    run = _in_type(run, chosen)
    family = family_of(portable.groups)
    built = family.train_spec.build_model(portable.model, portable.groups, context)
    load_weights(built, portable, context.mesh)
    words = build_tokenizer(portable.tokenizer)
    has_text = portable.tokenizer.tokenizer_type != "NullTokenizer"
    stored = () if portable.chat is None else portable.chat.end_tokens
    opened = LanguageModel(
        PlacedModel(
            config=run,
            train_spec=family.train_spec,
            context=context,
            tokenizer=words,
            stages=[Stage(range(run.num_layers), is_first=True, is_last=True)],
            models=[built.eval()],
            chat=portable.chat,
        ),
        companions=portable.companions,
        end_tokens=end_ids(words, portable.chat) if has_text else frozenset(stored),
        decoder_start=start,
    )
    if kept is not None:
        weakref.finalize(opened, shutil.rmtree, kept, ignore_errors=True)
    return opened


@overload
def load(
    folder: str | Path,
    *,
    step: int | None = None,
    ema: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
) -> LanguageModel: ...
@overload
def load(folder: str | Path, module: Module, *, step: int | None = None, ema: bool = False) -> Module: ...


def load(
    folder: str | Path,
    module: nn.Module | None = None,
    *,
    step: int | None = None,
    ema: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The model of a checkpoint of this project, whatever layout saved it, or of a Hugging Face folder.

    ``folder``: what a run's ``--save`` or ``LanguageModel.save`` wrote, or a Hugging Face model. ``module``: one of
    the caller's own, which ``megatron.pretrain`` has trained: it is filled and returned. ``step``: iteration of a
    checkpoint instead of the newest. ``ema``: take the moving average of the weights that a run with ``--ema-decay``
    saved. ``dtype``: of the weights, such as ``torch.float32`` or ``"fp32"``, which takes
    the fp32 master weights where the checkpoint has them; the saved type unless given.
    Raises CheckpointError when nothing usable is there, ConfigError for arguments that don't go together.
    """
    if module is not None:
        if dtype is not None or str(device) != "cpu":
            raise ConfigError("dtype and device are those of the module that megatron.load fills: leave them out")
        return _filled(module, folder, step=step, ema=ema)
    place = path_of(str(folder))
    if not _is_checkpoint(place) and (place / CONFIG).exists():
        if step is not None:
            raise ConfigError(f"step={step} chooses among checkpoints, and {folder} is one Hugging Face model")
        if ema:
            raise ConfigError(f"ema=True takes an average from a checkpoint, and {folder} is a Hugging Face model")
        return from_transformers(str(place), dtype=dtype, device=device)
    return _opened(str(folder), step=step, ema=ema, dtype=_dtype(dtype), device=_device(device))


def _opened(folder: str, *, step: int | None, ema: bool, dtype: torch.dtype | None, device: str) -> LanguageModel:
    """The model of a checkpoint of this project."""
    known = {family.name: family.train_spec for family in all_families()}
    choice = TrainedModelConfig(load=folder, ckpt_step=step, load_ema=ema, fp32=dtype == torch.float32)
    with _named(folder):
        if read_run_state(find_checkpoint(choice.load, step=step, verify=False))[MODEL_NAME] == PlainSpec.name:
            raise CheckpointError(
                f"{folder} holds a plain module: give the module that it was saved from, megatron.load(FOLDER, MODULE)"
            )
        config, train_spec = chosen_run(choice, known, 1, 1)
        config = config if dtype is None else _in_type(config, dtype)
        context = ModelContext.single(dtype=DTYPES[config.precision.params_dtype], device=device)
        trained = load_model(config, train_spec, context, has_gradients=True)
    return LanguageModel(
        trained,
        companions=companions_of(trained.folder, config.tokenizer),
        end_tokens=end_ids(trained.tokenizer, trained.chat),
        decoder_start=getattr(trained.tokenizer, "decoder_start", None),
        iteration=trained.folder.iteration,
    )


def _filled(module: nn.Module, folder: str | Path, *, step: int | None, ema: bool) -> nn.Module:
    """The module with the weights and buffers of a checkpoint; raises CheckpointError, naming what doesn't fit."""
    with _named(folder):
        found = find_checkpoint(str(folder), step=step)
        name = read_run_state(found)[MODEL_NAME]
        if name != PlainSpec.name:
            raise CheckpointError(f"{folder} holds a {name} model of this project: give megatron.load the folder alone")
        assign_shardings(module, ModelContext.single())
        weights = list(model_state(module))
        state = [*weights, *buffer_state(module)]
        names = where_to_find_weights(weights, averaged_in=found if ema else None)
        advice = f"give megatron.load a {type(module).__name__} that is built as the saved one was"
        load_checkpoint(found, state, Mesh.single(), alternatives=names, advice=advice)
    return module


@contextmanager
def _named(folder: str | Path) -> Iterator[None]:
    """Call the folder ``megatron.load(FOLDER)`` in messages, and not by a flag that the caller hasn't given."""
    try:
        yield
    except MegatronError as error:
        said = str(error).replace(f"--load {folder}", f"megatron.load({str(folder)!r})")
        said = said.replace("--load-ema", "ema=True")
        raise type(error)(said, exit_code=error.exit_code) from error


def _is_checkpoint(place: AnyPath) -> bool:
    return (place / MANIFEST).exists() or any(place.glob(f"iter_*/{MANIFEST}"))


def _with_tokenizer(portable: PortableModel, tokenizer: Any) -> tuple[PortableModel, Path | None]:
    """The model with a tokenizer, and the temporary folder that keeps its files, if there is one."""
    kept = None
    if isinstance(tokenizer, (str, Path)):
        folder = Path(tokenizer)
    elif hasattr(tokenizer, "save_pretrained"):
        kept = folder = Path(tempfile.mkdtemp(prefix="megatron-tokenizer-"))
        tokenizer.save_pretrained(kept)
    else:
        raise ConfigError(
            f"tokenizer has type {type(tokenizer).__name__}: give a tokenizer of transformers, or a folder that has one"
        )
    config = tokenizer_in(folder, rows=portable.model.vocab_size or 0)
    if config.tokenizer_type == "NullTokenizer":
        raise ConfigError(f"tokenizer={folder} holds no tokenizer's files: give the folder of the model's tokenizer")
    settings = {name for name in portable.companions if name in ("config.json", "generation_config.json")}
    companions = {**companions_in(folder), **{name: portable.companions[name] for name in settings}}
    return dataclasses.replace(portable, tokenizer=config, companions=companions), kept


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """The type that ``dtype=`` names; raises ConfigError for other types than fp32, bf16 and fp16."""
    if given is None:
        return None
    named = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    found = named.get(given) if isinstance(given, str) else given
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype={given!r}: weights are torch.float32, torch.bfloat16 or torch.float16")
    return found


def _device(given: torch.device | str) -> str:
    """The device as tensors there name it: Accelerate's ``cpu:0`` is ``cpu``, and ``cuda`` the current GPU."""
    return str(torch.empty(0, device=given).device)


def _in_type(run: RunConfig, dtype: torch.dtype) -> RunConfig:
    """The run with weights of this type."""
    precision = dataclasses.replace(run.precision, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)
    return dataclasses.replace(run, precision=precision)


def _say_nothing(line: str) -> None:
    """Which revision of a repository was found is no news in a program of the user's own."""
