"""The proof at the end of a conversion: source and target give the same logits for the same tokens, in fp32.

The sides are computed by different code from different files: Hugging Face folders by transformers, our checkpoints by
our model (a layer in memory at a time), Megatron-LM's by a forward pass written for their shards as they lie on disk.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.config.pipeline import Stage
from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import MODEL_NAME, load_checkpoint, read_run_state
from megatron.core.checkpointing.stored_tensors import StoredTensors
from megatron.core.conversion.huggingface.formats import format_of
from megatron.core.conversion.huggingface.quantized import QUANTIZED, stated_type, widened
from megatron.core.conversion.huggingface.reading import CONFIG, read_config, tensors_in
from megatron.core.conversion.portable import PortableModel, fill, layers_of
from megatron.core.conversion.questions import Answer, Question
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import family_of, saved_run
from megatron.core.parallel.mesh import Mesh
from megatron.core.parallel.model_context import ModelContext
from megatron.core.parallel.sharding import ShardedState, sharded_parameters
from megatron.errors import RESTART_CANNOT_HELP, CheckpointError, MegatronError
from megatron.small_files import read_json

TOLERANCE = 1e-4
"""Largest difference allowed, as a part of the largest logit: fp32 leaves about 1e-6; a mapping that is wrong, 1."""


_DEQUANTIZING = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config"}


class ProofError(MegatronError):
    """Source and target of a conversion disagree."""


@dataclass(frozen=True)
class Proof:
    """Result of comparing logits. ``difference``: the largest of any logit. ``largest``: the largest logit of the
    source.
    """

    difference: float
    largest: float

    @override
    def __str__(self) -> str:
        return f"largest difference {self.difference:.3g} between logits of up to {self.largest:.3g}"


def compare(source: Answer, target: Answer, *, skip: str = "--skip-proof") -> Proof:
    """The proof of two answers to a question; ProofError when logits of any kind differ by more than rounding, or are
    not finite in the source. ``skip``: the flag that does without a proof.
    """
    assert source.keys() == target.keys(), "both were asked the same"
    if not all(logits.isfinite().all() for logits in source.values()):
        raise ProofError(
            "the source's logits are not all finite, so nothing can be compared: its weights hold NaN, infinity or "
            f"very large numbers; take other weights, or skip the proof with {skip}",
            exit_code=RESTART_CANNOT_HELP,
        )
    proofs = {
        kind: Proof((source[kind] - target[kind]).abs().max().item(), source[kind].abs().max().item())
        for kind in source
    }
    for proof in proofs.values():
        if not proof.difference <= TOLERANCE * proof.largest:
            raise ProofError(
                f"source and target are different models: {proof}, where {TOLERANCE:g} of the largest is allowed. "
                "Nothing was written; please report the source"
            )
    return max(proofs.values(), key=lambda proof: proof.difference / (proof.largest or 1.0))


def native_answer(root: AnyPath, question: Question, *, step: int | None = None, averaged: bool = False) -> Answer:
    """Logits of our checkpoint in ``root``, computed by our model with one layer in memory at a time.

    ``averaged``: those of the moving average of the weights, rounded to their type.
    """
    folder = find_checkpoint(root, step=step, verify=False)
    saved = read_run_state(folder)
    run = saved_run(saved["config"], name=saved[MODEL_NAME], where=str(folder.path))

    types = {name: entry.dtype for name, entry in StoredTensors(folder.path).entries.items()} if averaged else {}
    names = {
        name: (f"optimizer.ema.{name.removeprefix('model.')}", name) for name in types if name.startswith("model.")
    }

    def load(state: Sequence[ShardedState], mesh: Mesh) -> None:
        load_checkpoint(folder, state, mesh, exhaust=(), alternatives=names)
        for each in state if averaged else ():
            each.tensor.copy_(each.tensor.to(types[each.name]))

    return _layer_by_layer(run.model, run.extra, question, load)


def portable_answer(portable: PortableModel, question: Question) -> Answer:
    """Logits of a portable model, computed in the same way."""

    def load(state: Sequence[ShardedState], mesh: Mesh) -> None:
        fill(state, portable, mesh)

    return _layer_by_layer(portable.model, portable.groups, question, load)


@torch.no_grad()
def _layer_by_layer(
    model: ModelConfig,
    groups: Sequence[object],
    question: Question,
    load: Callable[[Sequence[ShardedState], Mesh], None],
) -> Answer:
    """Our model's answer. ``load`` fills the parameters of a layer."""
    build_model, num_layers = family_of(groups).train_spec.build_model, layers_of(model, groups)
    context = ModelContext.single()
    handed: Mapping[str, Tensor] = {}
    for number in range(num_layers):
        stage = Stage(range(number, number + 1), is_first=number == 0, is_last=number == num_layers - 1)
        layer = build_model(model, groups, context, stage=stage).eval().requires_grad_(False)
        state = [
            ShardedState(f"model.{sharding.tied or name}", parameter.detach(), sharding)
            for name, parameter, sharding in sharded_parameters(layer)
        ]
        load(state, context.mesh)
        handed = question.ask_ours(layer, handed)
    return handed


@torch.no_grad()
def huggingface_answer(folder: Path, question: Question) -> Answer:
    """Logits of a Hugging Face folder, computed by transformers in fp32, with eager attention unless that is wrong.

    Experts are eager, too: the kernel that transformers 5 prefers refuses rows that don't begin at multiples of 16
    bytes.
    """
    model = loaded_by_transformers(folder, question, dequantize=True)
    _round_dequantized(model, folder)
    return answer_of(model, folder, question)


def _round_dequantized(model: Any, folder: Path) -> None:
    """Round weights that were dequantized in fp32 to the type that config.json names, in which they are read here, too,
    and in which transformers has them unless it is asked for fp32.
    """
    config = read_config(folder)
    if not config.get("quantization_config") or is_read_by_us_alone(config):
        return
    published, dtype = format_of(config["model_type"]), stated_type(config)
    assert published is not None, "its settings were read"
    aliases = published.types[config["model_type"]].aliases
    whole = {
        aliases.get(name, name) for name, tensor in tensors_in(folder).items() if tensor.dtype not in QUANTIZED.values()
    }
    for name, parameter in model.named_parameters():
        if name not in whole:
            parameter.data = parameter.data.to(dtype).float()


def loaded_by_transformers(folder: Path, question: Question, *, dequantize: bool = False) -> Any:
    """The model of a Hugging Face folder in fp32, as transformers loads it; CheckpointError where it doesn't.

    ``dequantize``: quantized weights are, while they are loaded; else when they are first used.
    """
    config = read_config(folder)
    published = format_of(config["model_type"])
    assert published is not None, "the folder was read or written"
    version = transformers_version()
    import transformers

    name, source = _source(folder, question)
    load: Any = getattr(transformers, name).from_pretrained
    try:
        with _quiet_transformers():
            model, report = load(
                **source,
                **_options(version),
                **(_dequantizing(config.get("quantization_config")) if dequantize else {}),
                attn_implementation=published.types[config["model_type"]].attention,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises anything for folders that it doesn't like
        raise CheckpointError(f"transformers cannot load {folder}: {_reason(error)}") from error
    if missing := sorted(report["missing_keys"])[:5]:
        raise CheckpointError(f"transformers misses tensors in {folder}: {', '.join(missing)}")
    return (model.float() if dequantize else model).eval()  # experts may be left in the type of their scales


def is_read_by_us_alone(config: Mapping[str, Any]) -> bool:
    """Whether weights are quantized in a way that transformers doesn't dequantize on a CPU (GPTQ, AWQ, FP8 without
    blocks): it then computes with the numbers that this program reads.
    """
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method")
    return method in ("gptq", "awq", "fbgemm_fp8", "modelopt") or (
        method == "fp8" and not settings.get("weight_block_size")
    )


def _dequantizing(settings: Any) -> dict[str, Any]:
    """How transformers is asked to dequantize a model with these settings; nothing for one that isn't quantized."""
    import transformers

    kind = _DEQUANTIZING.get((settings or {}).get("quant_method", ""))
    return {} if kind is None else {"quantization_config": getattr(transformers, kind)(dequantize=True)}


@torch.no_grad()
def answer_of(model: Any, folder: Path, question: Question) -> Answer:
    """The answer of a model that transformers loaded from ``folder``."""
    try:
        with _InFP32(), _quiet_transformers():
            return {kind: logits.float() for kind, logits in question.ask_theirs(model).items()}
    except Exception as error:  # some settings it looks at when it computes
        raise CheckpointError(f"transformers loads {folder}, and cannot compute with it: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}"


def _source(folder: Path, question: Question) -> tuple[str, dict[str, Any]]:
    """The class of transformers and what it loads: the folder, or where the settings are those of a model's authors,
    or weights are quantized in a way that transformers doesn't read here, settings and tensors by transformers' names.
    """
    import transformers

    config, tensors = read_config(folder), None
    if is_read_by_us_alone(config):
        tensors = widened(config, tensors_in(folder), where=str(folder)).tensors
        config = {name: value for name, value in config.items() if name != "quantization_config"}
    elif "model_type" in read_json(folder / CONFIG, dict[str, Any], error=CheckpointError):
        return question.auto_class, {"pretrained_model_name_or_path": folder}
    published = format_of(config["model_type"])
    assert published is not None, "its settings were read"
    names = published.types[config["model_type"]].aliases
    state = {names.get(name, name): tensor.make() for name, tensor in (tensors or tensors_in(folder)).items()}
    settings = transformers.AutoConfig.for_model(**config)
    return config["architectures"][0], {
        "pretrained_model_name_or_path": None,
        "config": settings,
        "state_dict": state,
    }


def _options(version: str) -> dict[str, Any]:
    """What a ``version`` of transformers calls the type of weights and the implementation of experts."""
    if version.startswith("4."):
        return {"torch_dtype": torch.float32}
    return {"dtype": torch.float32, "experts_implementation": "eager"}


class _InFP32(TorchFunctionMode):
    """Nothing is rounded to bf16: whatever the model's type, transformers does that to Falcon's ALiBi, and by absolute
    positions, so that in 2048 tokens eight neighbouring keys have one bias.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``func``, or its fp32 counterpart."""
        called = torch.Tensor.float if func is torch.Tensor.bfloat16 else func
        return called(*args, **(kwargs or {}))


def transformers_version(*, skip: str = "--skip-proof") -> str:
    """Installed release of transformers; CheckpointError without one. ``skip``: the flag that skips the proof."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            "the proof computes logits with transformers, which is not installed: pip install transformers, or skip "
            f"the proof with {skip}"
        ) from None
    return transformers.__version__


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Turn off progress bars and advice of transformers, and of packages that it calls, inside the block."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def memory_needed(portable: PortableModel, formats: set[str]) -> int:
    """Bytes that the proof holds at most: transformers and onnxruntime need the whole model in fp32, the others a few
    layers.
    """
    whole = 4 * portable.num_parameters
    return whole if formats & {"hf", "onnx"} else whole // portable.num_layers * 2


def check_memory(needed: int, *, skip: str = "--skip-proof") -> None:
    """Raise CheckpointError before any work when the proof can't fit in this machine's memory. ``skip``: as above."""
    free = _free_memory()
    if free is not None and needed > free:
        raise CheckpointError(
            f"the proof needs about {needed / 1e9:.1f} GB of memory to compute logits in fp32, and {free / 1e9:.1f} "
            f"GB are free: use a larger machine, or skip the proof with {skip}"
        )


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    amounts = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return amounts.get("MemAvailable")
