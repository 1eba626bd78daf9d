"""Convert a model between Hugging Face's format, Megatron-LM's, GGUF and ours, and prove that it is the same.

Also writes ONNX graphs, checkpoints of TensorRT-LLM for the ranks that will serve them, and PEFT folders of adapters.
Runs on a CPU with a few tensors in memory; the architecture comes from the source. Ends by comparing logits of source
and target, and writes nothing when they differ.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

import re
import shutil
import signal
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from megatron.config.flags import COUNT, Settings, flag, one_of, switch
from megatron.config.legacy_flags import legacy_table
from megatron.config.parse import parse_groups
from megatron.core.checkpointing.manifest import MANIFEST
from megatron.core.conversion.programs import GgufType, Program, Quantized, Source
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.models.registry import family_titled
from megatron.errors import ConfigError, kept_on_interrupt, run_command

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.core.conversion.convert import Conversion

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

# What Megatron-LM's converter calls the formats. Its "megatron" is Megatron-LM's, not this project's.
LOADERS = {"hf": "hf", "llama2": "hf", "llama2_hf": "hf", "llama_mistral": "hf", "qwen2_hf": "hf"}
LOADERS |= dict.fromkeys(("megatron", "legacy", "core", "mcore"), "megatron-lm")
SAVERS = {"hf": "hf", "llama2_hf": "hf", "huggingface": "hf"}
SAVERS |= dict.fromkeys(("megatron", "legacy", "core", "mcore"), "megatron")
# Its flags that have no effect here, and why.
LEGACY_FLAGS = legacy_table(
    {},
    {},
    ignored="""
no target is divided over expert-parallel ranks
    target-expert-parallel-size
both kinds of names are read
    loader-transformer-impl
one checkpoint format serves all
    saver-transformer-impl
the formats are read without Megatron-LM
    megatron-path
the architecture comes from the source
    position-embedding-type model-size
the source's tokenizer is copied
    tokenizer-model
the source's tokenizer is copied; --true-vocab-size is the size without padding
    vocab-file
padding is never saved
    make-vocab-size-divisible-by
tensors pass one at a time
    max-queue-size
it saves no time: checks are cheap
    no-checking
tensors keep their type
    bf16 fp16
""",
    refused="",
)


class ConvertConfig(Settings):
    """What is converted into what."""

    list_types: bool = switch(
        "Print the published types of models that --from hf and --to hf convert, and nothing else.", name="--list"
    )
    source: Source | None = flag(
        "Format of --load: Hugging Face, this project's, Megatron-LM's (torch or torch_dist), a GGUF file.",
        name="--from",
        default=None,
    )
    load: str | None = flag(
        "Folder of the model or of checkpoints; with --from hf also a repository, ORG/NAME or ORG/NAME@REVISION, and "
        "with --from gguf also a file.",
        default=None,
    )
    target: Program | None = flag(
        "Format of --save. peft writes the adapters (LoRA) of --from megatron alone.", name="--to", default=None
    )
    load_peft: str | None = flag(
        "PEFT folder with adapters (LoRA) for the model of --load: kept beside its weights with --to megatron, merged "
        "into them for other formats.",
        default=None,
    )
    peft_base: str | None = flag(
        "Name of the model that --to peft names as the base of the adapters, such as ORG/NAME; the published model "
        "that the run started from unless given.",
        default=None,
    )
    save: str | None = flag("New folder for the converted model.", default=None)
    ckpt_step: int | None = flag("Iteration to convert instead of the newest.", default=None, at_least=0)
    load_ema: bool = switch("Convert the moving average of the weights that a run with --ema-decay saved.")
    max_shard_size: str | None = flag(
        "Largest weight file of a Hugging Face target, such as 200MB, 5GB unless given; of a GGUF target 50GB.",
        default=None,
    )
    gguf_type: GgufType | None = flag(
        "Number format of a GGUF target's weights; as the model's own unless given. q4_0 to q8_0 are blocks of 32 with "
        "a scale each; q4_k_m, q5_k_m and q6_k (K-quants) of 256, whose scales are quantized, too.",
        default=None,
    )
    ckpt_format: Literal["torch_dist", "torch"] | None = flag(
        "Format of a Megatron-LM target: torch_dist (unless given) loads there at any layout, torch on one rank.",
        default=None,
    )
    true_vocab_size: int | None = flag(
        "Vocabulary size of a Megatron-LM source before padding, if its tokenizer's files are missing.",
        default=None,
        at_least=1,
    )
    ignore_saved_args: tuple[str, ...] = flag(
        "Saved arguments of a Megatron-LM source, unknown here, that do not change what its model computes.",
        default=(),
    )
    target_tensor_parallel_size: int | None = flag(
        "Ranks that divide each layer of a TensorRT-LLM target; 1 unless given. Other targets are not divided.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    target_pipeline_parallel_size: int | None = flag(
        "Pipeline stages of a TensorRT-LLM target; 1 unless given. Other targets are not divided.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    skip_proof: bool = flag(
        "Do not compare the logits of source and target; the conversion is then unproven.", default=False
    )
    quantize: Quantized | None = flag(
        "Quantize the linear layers of a Hugging Face target, rounding to the nearest. Weights alone: int8, int4, "
        "int4-asym (with zero points), nvfp4, mxfp4, mxfp8 (floats in small groups). Activations, too: w8a8 (int8), "
        "fp8, fp8-block. A TensorRT-LLM target takes int8 and int4.",
        default=None,
    )
    group_size: int | None = flag(
        "Inputs that share a scale with --quantize int4 and int4-asym; 128 unless given.", default=None, at_least=1
    )
    quantize_ignore: tuple[str, ...] = flag(
        "Linear layers that --quantize leaves unquantized. For a Hugging Face target: names there, or re: and a "
        "regular expression. For a TensorRT-LLM target: patterns of this project's names, such as "
        "'decoder.layers.*.linear_fc2'.",
        default=(),
    )
    model_type: str | None = flag(
        "Expected family of the model; only checked, since the source names it.", default=None
    )
    loader: str | None = flag("Megatron-LM's spelling of --from: mcore, megatron, llama_mistral.", default=None)
    saver: str | None = flag("Megatron-LM's spelling of --to.", default=None)
    load_dir: str | None = flag("Megatron-LM's spelling of --load.", default=None)
    save_dir: str | None = flag("Megatron-LM's spelling of --save.", default=None)
    checkpoint_type: Literal["hf"] | None = flag(
        "Format that --loader llama_mistral reads.",
        default=None,
        refused_values={"meta": "only hf is read; convert Meta's files to Hugging Face's first"},
    )


def main(argv: Sequence[str]) -> int:
    """Convert, and say what was done."""
    (config,) = parse_groups(argv, ConvertConfig, prog="convert.py", about=__doc__ or "", legacy=LEGACY_FLAGS)
    if config.list_types:
        if config != ConvertConfig(list_types=True):
            raise ConfigError("--list prints the types that convert, and converts nothing: leave out the other flags")
        print_types()
        return 0
    job = job_of(config)
    from megatron.core.conversion.convert import convert

    with kept_on_interrupt(lambda: f"nothing is written to --save {job.save}"):
        convert(job, say=print)
    return 0


def print_types() -> None:
    """A row for each published type: ``model_type``, our family, transformers' classes and what converts."""
    from megatron.core.conversion.huggingface.listing import published_types

    rows = [(["model_type"], ["family"], ["class in transformers"], ["what converts"])]
    for each in published_types():
        only = f"; only with {', '.join(each.only)}" if each.only else ""
        rows.append(([each.model_type], [each.family], list(each.classes), [each.converts + only]))
    widths = [max(len(line) for row in rows for line in row[column]) for column in range(3)]
    room = max(40, shutil.get_terminal_size((160, 0)).columns - sum(widths) - 6)
    for *cells, text in rows:
        for parts in zip_longest(*cells, textwrap.wrap(text[0], room, break_on_hyphens=False), fillvalue=""):
            print("  ".join(part.ljust(width) for part, width in zip(parts, [*widths, 0])).rstrip())


def job_of(config: ConvertConfig) -> Conversion:
    """The conversion that the flags describe; ConfigError for formats that are missing, unknown or the same."""
    source: Source = config.source or _their_name("--loader", config.loader, LOADERS, "--from")
    target: Program = config.target or _their_name("--saver", config.saver, SAVERS, "--to")
    load = path_of(_given("--load", config.load, config.load_dir))
    save = path_of(_given("--save", config.save, config.save_dir))
    if target == "peft" and source != "megatron":
        raise ConfigError(f"--to peft writes the adapters of a run, so it needs --from megatron, not --from {source}")
    if source == "megatron-lm" and is_ours(load):
        if config.source is not None:
            raise ConfigError(f"--from megatron-lm: {load} is a checkpoint of this project; give --from megatron")
        source = "megatron"
    if source == target and config.quantize is None and config.load_peft is None:
        instead = "; --quantize writes such a model in few bits" if target == "hf" else ""
        raise ConfigError(f"--from {source} --to {target}: source and target formats are the same{instead}")
    _check_effect(config, source, target)
    if target != "tensorrt-llm":
        _say_what_needs_no_layout(config, target)
    max_shard_size = bytes_of(config.max_shard_size or ("50GB" if target == "gguf" else "5GB"))
    from megatron.core.conversion.convert import Conversion
    from megatron.core.conversion.huggingface.quantizing import Rounding
    from megatron.core.conversion.tensorrt_llm.cuts import Layout
    from megatron.core.quantization.scheme import scheme_named

    rounding = None
    if config.quantize is not None:
        scheme = scheme_named(config.quantize, group_size=config.group_size)
        rounding = Rounding(scheme, config.quantize_ignore)
    return Conversion(
        source=source,
        load=load,
        target=target,
        save=save,
        step=config.ckpt_step,
        averaged=config.load_ema,
        max_shard_size=max_shard_size,
        gguf_type=config.gguf_type,
        dist=config.ckpt_format != "torch",
        true_vocab_size=config.true_vocab_size,
        ignored=config.ignore_saved_args,
        skip_proof=config.skip_proof,
        family=None if config.model_type is None else family_titled(config.model_type).title,
        rounding=rounding,
        layout=Layout(config.target_tensor_parallel_size or 1, config.target_pipeline_parallel_size or 1),
        adapter=None if config.load_peft is None else Path(config.load_peft),
        base_name=config.peft_base,
    )


def _say_what_needs_no_layout(config: ConvertConfig, target: Program) -> None:
    """Megatron-LM's converter needs a layout for every target."""
    loads_anywhere = target == "megatron" or (target == "megatron-lm" and config.ckpt_format != "torch")
    why = "loads at any layout" if loads_anywhere else "is not divided over ranks"
    for kind in ("tensor", "pipeline"):
        name = f"target_{kind}_parallel_size"
        if (size := getattr(config, name)) is not None:
            flag_name = f"--{name.replace('_', '-')} {size}"
            print(f"note: {flag_name} has no effect: what --to {target} writes {why}", file=sys.stderr)


def _check_effect(config: ConvertConfig, source: Source, target: Program) -> None:
    """Raise ConfigError for a flag that has no effect on this pair of formats."""
    effects = (
        (
            "--ckpt-step",
            config.ckpt_step,
            source not in ("hf", "gguf"),
            "chooses among checkpoints; a published model is one",
        ),
        ("--load-ema", config.load_ema or None, source == "megatron", "is for --from megatron"),
        ("--true-vocab-size", config.true_vocab_size, source == "megatron-lm", "is for --from megatron-lm"),
        (
            "--ignore-saved-args",
            " ".join(config.ignore_saved_args) or None,
            source == "megatron-lm",
            "is for --from megatron-lm",
        ),
        ("--max-shard-size", config.max_shard_size, target in ("hf", "gguf"), "is for --to hf and --to gguf"),
        ("--gguf-type", config.gguf_type, target == "gguf", "is for --to gguf"),
        ("--quantize", config.quantize, target in ("hf", "tensorrt-llm"), "is for --to hf and --to tensorrt-llm"),
        ("--group-size", config.group_size, config.quantize is not None, "is for --quantize int4 and int4-asym"),
        (
            "--quantize-ignore",
            " ".join(config.quantize_ignore) or None,
            config.quantize is not None,
            "names layers for --quantize to leave out",
        ),
        ("--peft-base", config.peft_base, target == "peft", "is for --to peft"),
        ("--load-peft", config.load_peft, target != "peft", "adds adapters to a model, and --to peft writes no model"),
        ("--ckpt-format", config.ckpt_format, target == "megatron-lm", "is for --to megatron-lm"),
    )
    for name, value, has_effect, why in effects:
        if value is not None and not has_effect:
            given = name if value is True else f"{name} {value}"
            raise ConfigError(f"{given} has no effect: it {why}; leave it out")


def _given(flag: str, ours: str | None, theirs: str | None) -> str:
    given = [path for path in (ours, theirs) if path is not None]
    if len(given) != 1:
        raise ConfigError(f"{flag} and {flag}-dir mean the same: give one" if given else f"missing: {flag} (a folder)")
    return given[0]


def is_ours(load: AnyPath) -> bool:
    """Whether this project's training saved what is there."""
    return (load / MANIFEST).exists() or any(load.glob(f"iter_*/{MANIFEST}"))


def _their_name(flag: str, name: str | None, known: dict[str, str], ours: str) -> Source:
    names = one_of(get_args(Program if ours == "--to" else Source))
    if name is None:
        raise ConfigError(f"missing: {ours} ({names})")
    format_name = known.get(name.removeprefix("loader_").removeprefix("saver_"))
    if format_name is None:
        raise ConfigError(f"{flag} {name} is not supported; use {ours} {names} ({', '.join(known)})")
    return format_name  # type: ignore[return-value]


def bytes_of(text: str) -> int:
    """``5GB`` in bytes; ConfigError for what is no size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise ConfigError(f"--max-shard-size {text!r} is not a size; write 5GB or 200MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an exit that cleans up
    run_command(lambda: main(sys.argv[1:]))
