"""Models from folders and from the transformers library, whole on one device."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron.config.pipeline import Stage
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.manifest import MANIFEST
from megatron.core.conversion.companions import companions_in, tokenizer_in
from megatron.core.conversion.huggingface.hub import model_folder
from megatron.core.conversion.huggingface.reading import CONFIG, read_config, read_huggingface
from megatron.core.conversion.huggingface.reading import from_transformers as read_transformers
from megatron.core.conversion.native import companions_of, run_of
from megatron.core.conversion.portable import PortableModel, load_weights
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.models.registry import all_families, family_of
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.launch import DTYPES
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.end_tokens import end_ids
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.library.language_model import LanguageModel
from megatron.training.checkpoints.trained_model import PlacedModel, chosen_run, load_model


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
    Raises CheckpointError for a model that can't be converted.
    """
    if isinstance(model, (str, Path)):
        folder = model_folder(path_of(str(model)), flag="from_transformers", say=_say_nothing)
        if not isinstance(folder, Path):
            raise CheckpointError(f"from_transformers reads a folder on a disk: copy {model} there first")
        portable, start = read_huggingface(folder), read_config(folder).get("decoder_start_token_id")
    else:
        if not (hasattr(model, "config") and hasattr(model.config, "to_json_string")):
            raise CheckpointError(
                f"from_transformers takes a model of the transformers library, a folder or ORG/NAME, and not a "
                f"{type(model).__name__}"
            )
        portable, start = read_transformers(model), getattr(model.config, "decoder_start_token_id", None)
        device = model.device if device is None else device
    kept = None
    if tokenizer is not None:
        portable, kept = _with_tokenizer(portable, tokenizer)
    chosen = _dtype(dtype) or portable.dtype
    context = ParallelContext.single(dtype=chosen, device=str(device or "cpu"))
    run = run_of(portable, portable.tokenizer)
    run = dataclasses.replace(run, precision=dataclasses.replace(run.precision, **_precision(chosen)))
    family = family_of(portable.groups)
    built = family.train_spec.build_model(portable.model, portable.groups, context)
    load_weights(built, portable, context.mesh)
    words = build_tokenizer(portable.tokenizer)
    has_text = portable.tokenizer.tokenizer_type != "NullTokenizer"
    stored = () if portable.chat is None else portable.chat.end_tokens
    return LanguageModel(
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
        keeps=kept,
    )


def load(
    folder: str | Path,
    *,
    step: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
) -> LanguageModel:
    """The model of a checkpoint of this project, whatever layout saved it, or of a Hugging Face folder.

    ``folder``: what a run's ``--save`` or ``LanguageModel.save`` wrote, or a Hugging Face model. ``step``: iteration of
    a checkpoint instead of the newest. ``dtype``: of the weights, such as ``torch.float32`` or ``"fp32"``, which takes
    the fp32 master weights where the checkpoint has them; the saved type unless given.
    Raises CheckpointError when nothing usable is there.
    """
    place = path_of(str(folder))
    if not _is_checkpoint(place) and (place / CONFIG).exists():
        if step is not None:
            raise ConfigError(f"step={step} chooses among checkpoints, and {folder} is one Hugging Face model")
        return from_transformers(place if isinstance(place, Path) else str(place), dtype=dtype, device=device)
    chosen, known = _dtype(dtype), {family.name: family.train_spec for family in all_families()}
    choice = TrainedModelConfig(load=str(folder), ckpt_step=step, fp32=chosen == torch.float32)
    with _named(folder):
        config, train_spec = chosen_run(choice, known, 1, 1)
        if chosen is not None:
            config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, **_precision(chosen)))
        context = ParallelContext.single(dtype=DTYPES[config.precision.params_dtype], device=str(device))
        trained = load_model(config, train_spec, context, has_gradients=True)
    return LanguageModel(
        trained,
        companions=companions_of(trained.folder, config.tokenizer),
        end_tokens=end_ids(trained.tokenizer, trained.chat),
        decoder_start=getattr(trained.tokenizer, "decoder_start", None),
        iteration=trained.folder.iteration,
    )


@contextmanager
def _named(folder: str | Path) -> Iterator[None]:
    """Call the folder ``megatron.load(FOLDER)`` in messages, and not by a flag that the caller hasn't given."""
    try:
        yield
    except MegatronError as error:
        said = str(error).replace(f"--load {folder}", f"megatron.load({str(folder)!r})")
        raise type(error)(said, exit_code=error.exit_code) from error


def _is_checkpoint(place: AnyPath) -> bool:
    return (place / MANIFEST).exists() or any(place.glob(f"iter_*/{MANIFEST}"))


def _with_tokenizer(portable: PortableModel, tokenizer: Any) -> tuple[PortableModel, object]:
    """The model with a tokenizer, and the temporary folder that keeps its files, if there is one."""
    kept = None
    if isinstance(tokenizer, (str, Path)):
        folder = Path(tokenizer)
    elif hasattr(tokenizer, "save_pretrained"):
        kept = tempfile.TemporaryDirectory(prefix="megatron-tokenizer-")
        tokenizer.save_pretrained(kept.name)
        folder = Path(kept.name)
    else:
        raise ConfigError(
            f"tokenizer is a {type(tokenizer).__name__}: give a tokenizer of transformers, or a folder that has one"
        )
    config = tokenizer_in(folder, rows=portable.model.vocab_size or 0)
    if config.tokenizer_type == "NullTokenizer":
        raise ConfigError(f"tokenizer={folder} holds no tokenizer's files: give the folder of the model's tokenizer")
    companions = {**companions_in(folder), **{name: portable.companions[name] for name in _settings(portable)}}
    return dataclasses.replace(portable, tokenizer=config, companions=companions), kept


def _settings(portable: PortableModel) -> list[str]:
    return [name for name in portable.companions if name in ("config.json", "generation_config.json")]


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """The type that ``dtype=`` names; ConfigError for another one."""
    if given is None:
        return None
    named = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    found = named.get(given) if isinstance(given, str) else given
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype={given!r}: weights are torch.float32, torch.bfloat16 or torch.float16")
    return found


def _precision(dtype: torch.dtype) -> dict[str, bool]:
    return {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}


def _say_nothing(line: str) -> None:
    """Which revision of a repository was found is no news in a program of the user's own."""
