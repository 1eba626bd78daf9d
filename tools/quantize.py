"""Quantize the weights of a checkpoint to 8, 4 or 3 bits: round to the nearest (rtn), or calibrate on texts.

GPTQ, AWQ and SmoothQuant run the model on texts, one layer at a time. The result is a checkpoint with quantized weights
and their scales: convert.py --to hf exports exactly these. Under torchrun ranks divide the texts and the matrices; each
has one layer in memory, and any number of ranks writes the same bytes.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from megatron.config.flags import COUNT, Settings, flag, switch
from megatron.config.legacy_flags import LegacyFlag, legacy_table, taken_as
from megatron.config.parse import parse_groups
from megatron.core.files.remote_path import path_of
from megatron.core.parallel.environment import errors_once_per_node, launch_environment
from megatron.errors import CheckpointError, ConfigError, exit_code_of, kept_on_interrupt, run_command

if TYPE_CHECKING:  # torch is imported when flags are known to be right
    from megatron.core.conversion.portable import PortableModel
    from megatron.core.conversion.quantizing.recipe import Recipe
    from megatron.core.conversion.quantizing.texts import CalibrationTexts

_TAKEN = {
    "FP8_DEFAULT_CFG": ("fp8-tensor", "rtn"),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": ("fp8", "rtn"),
    "INT8_SMOOTHQUANT_CFG": ("w8a8", "smoothquant"),
    "INT8_WEIGHT_ONLY_CFG": ("int8", "rtn"),
    "INT4_BLOCKWISE_WEIGHT_ONLY_CFG": ("int4", "rtn"),
    "INT4_AWQ_CFG": ("int4", "awq"),
    "fp8": ("fp8-tensor", "rtn"),
    "int8_sq": ("w8a8", "smoothquant"),
    "int4_awq": ("int4", "awq"),
}
_KNOWN = f"known are {', '.join(_TAKEN)}"
_NO_4_BITS = (
    "4-bit floats are rounded by an export: give convert.py --to hf --quantize nvfp4 or mxfp4; the nearest here, with "
    "calibration, are INT4_AWQ_CFG and FP8_DEFAULT_CFG"
)
_BLOCKS = "FP8 in blocks is rounded by an export: give convert.py --to hf --quantize fp8-block"
# Recipes of ModelOpt that have no counterpart, by the nearest.
_NEAREST = {
    "it has one scale for all inputs of a layer; the nearest is --scheme w8a8, with one for each token": """
        INT8_DEFAULT_CFG int8""",
    _BLOCKS: "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG fp8_blockwise",
    "inputs of 4-bit weights stay in 16 bits here; the nearest is INT4_AWQ_CFG": "W4A8_AWQ_BETA_CFG w4a8_awq",
    _NO_4_BITS: """
        NVFP4_DEFAULT_CFG NVFP4_AWQ_LITE_CFG NVFP4_AWQ_CLIP_CFG NVFP4_AWQ_FULL_CFG NVFP4_SVDQUANT_DEFAULT_CFG
        NVFP4_MLP_ONLY_CFG NVFP4_MLP_WEIGHT_ONLY_CFG NVFP4_FP8_MHA_CONFIG NVFP4_KV_CFG nvfp4 nvfp4_awq
        MXFP4_DEFAULT_CFG MXFP4_MLP_WEIGHT_ONLY_CFG W4A8_MXFP4_FP8_CFG W4A8_NVFP4_FP8_CFG mxfp4""",
    "there are no 6-bit floats here; the nearest are INT8_WEIGHT_ONLY_CFG and INT4_AWQ_CFG": "MXFP6_DEFAULT_CFG mxfp6",
    "mxfp8 is rounded by an export: give convert.py --to hf --quantize mxfp8; the nearest here is "
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": """
        MXFP8_DEFAULT_CFG mxfp8""",
    "there is no int8 in groups of 32 inputs here; the nearest is INT8_WEIGHT_ONLY_CFG": "MXINT8_DEFAULT_CFG",
    "scales of keys and values come only with quantized weights: give --scheme int8 --kv-cache-scales fp8": """
        FP8_KV_CFG FP8_AFFINE_KV_CFG INT8_KV_CFG""",
}
LEGACY_FLAGS = legacy_table(
    {"samples": "calib-size", "save": "export-dir"},
    {
        "export-quant-cfg": LegacyFlag(
            "refused",
            f"there is no recipe of that name here; {_KNOWN}",
            values={
                **{
                    name: taken_as(f"--scheme {scheme} --method {method}", scheme=scheme, method=method)
                    for name, (scheme, method) in _TAKEN.items()
                },
                **{name: LegacyFlag("refused", word) for word, names in _NEAREST.items() for name in names.split()},
            },
        ),
        "export-kv-cache-quant": LegacyFlag(
            "refused",
            "keys and values have FP8 scales here, or none; give fp8 or none",
            values={
                "fp8": taken_as("--kv-cache-scales fp8", kv_cache_scales="fp8"),
                "fp8_cast": taken_as("--kv-cache-scales fp8, with calibrated scales and not 1", kv_cache_scales="fp8"),
                "none": taken_as("--kv-cache-scales none", kv_cache_scales="none"),
                "fp8_affine": LegacyFlag("refused", "FP8 scales have no zero points here; the nearest is fp8"),
                **{
                    name: LegacyFlag("refused", "scales of keys and values are for 8 bits only; the nearest is fp8")
                    for name in ("nvfp4", "nvfp4_affine", "nvfp4_rotate", "nvfp4_cast")
                },
            },
        ),
        "export-real-quant-cfg": LegacyFlag(
            "refused",
            "codes are written when a checkpoint is exported; give None, or leave it out",
            harmless=("None",),
            values={
                "fp8_real_quant": LegacyFlag(
                    "ignored", "the checkpoint keeps numbers and scales, and exports write their codes"
                ),
                "fp8_blockwise_real_quant": LegacyFlag("refused", _BLOCKS),
            },
        ),
        "auto-quantize-bits auto-quantize-formats auto-quantize-method auto-quantize-score-size": LegacyFlag(
            "refused",
            "all layers have one scheme here; leave single ones out with --quantize-ignore 'decoder.layers.0.*'",
        ),
        "weight-only": LegacyFlag(
            "refused", "--scheme says it: int8 and int4 round weights alone, w8a8 and fp8 activations, too"
        ),
    },
    ignored="""
each rank has one whole layer in memory, and ranks divide texts and matrices: a layout changes nothing
    tensor-model-parallel-size pipeline-model-parallel-size expert-model-parallel-size expert-tensor-parallel-size
    context-parallel-size sequence-parallel data-parallel-size
the architecture comes from the checkpoint
    export-model-type export-te-mcore-model export-legacy-megatron export-default-te-spec export-force-local-attention
""",
    refused="",
)


class QuantizeConfig(Settings):
    """The checkpoint to quantize, the scheme and the method, and the texts for calibration."""

    load: str = flag("Folder of the checkpoint.")
    save: str = flag("New folder for the quantized checkpoint.")
    scheme: Literal["int8", "int4", "int4-asym", "int3", "w8a8", "fp8", "fp8-tensor", "fp8-block"] = flag(
        "Number format of the weights: int8, w8a8 and fp8 with a scale per output; int4, int4-asym and int3 with one "
        "per group of inputs; w8a8 and fp8 with activations in 8 bits, too; fp8-tensor with one scale per weight, and "
        "a calibrated one for its inputs."
    )
    group_size: int | None = flag(
        "With int4, int4-asym and int3: inputs that share a scale; 128 unless given.", default=None, at_least=1
    )
    method: Literal["rtn", "gptq", "awq", "smoothquant"] = flag(
        "rtn: round to the nearest. gptq: later columns make up for errors of earlier ones. awq: scale channels that "
        "matter, cut large weights. smoothquant: scale channels so that activations round well (w8a8).",
        default="rtn",
    )
    data_path: str | None = flag(
        "Texts for calibration: the prefix of a .bin and .idx file, or JSON lines, or text (.txt).", default=None
    )
    json_key: str = flag("Key of the text in JSON lines.", default="text")
    samples: int = flag("Sequences for calibration.", default=128, at_least=1, at_most=COUNT)
    seq_length: int | None = flag(
        "Tokens of a sequence; that of training unless given, at most 2048.", default=None, at_least=1
    )
    seed: int = flag("Seed of the choice of sequences.", default=1234, at_least=0, at_most=2**32 - 1)
    act_order: bool = switch(
        "GPTQ rounds columns in their order, and finds the scales of a group when its turn comes.", off="--no-act-order"
    )
    smoothquant_alpha: float = flag(
        "SmoothQuant's exponent: how much of the range of activations moves to the weights.",
        default=0.5,
        at_least=0,
        at_most=1,
    )
    kv_cache_scales: Literal["none", "fp8"] = flag(
        "Find FP8 scales of keys and values, for servers that keep them in 8 bits.", default="none"
    )
    quantize_ignore: tuple[str, ...] = flag(
        "Quoted patterns of further weights that stay as they are, such as 'decoder.layers.0.*'.", default=()
    )
    ckpt_step: int | None = flag("Iteration to quantize instead of the newest.", default=None, at_least=0)
    load_ema: bool = switch("Take the checkpoint's moving average of the weights.")


def main(argv: Sequence[str]) -> int:
    """Quantize, and say what was done."""
    with errors_once_per_node():
        (config,) = parse_groups(argv, QuantizeConfig, prog="quantize.py", about=__doc__ or "", legacy=LEGACY_FLAGS)
        from megatron.core.conversion.averaging import read_average
        from megatron.core.conversion.convert import check_target
        from megatron.core.conversion.native import read_native
        from megatron.core.conversion.quantizing.recipe import described

        launch, save = launch_environment(), path_of(config.save)
        check_target(save)
        reads = read_average if config.load_ema else read_native
        portable = reads(path_of(config.load), step=config.ckpt_step)
        recipe = recipe_of(config)
        names = recipe.parameters(portable)
        texts = texts_of(config, recipe, portable)
    say: Callable[[str], None] = print if launch.rank == 0 else lambda line: None
    for note in portable.notes:
        say(note)
    say(f"{config.load}: {described(recipe, [*names])}")
    try:
        with kept_on_interrupt(lambda: f"nothing is written to --save {save}"):
            quantize(config, portable, recipe, texts, say=say)
    except OSError as error:
        where = error.filename or save
        said = f"{where}: {error.strerror or error}; nothing was left in {save.parent}"
        raise CheckpointError(said, exit_code=exit_code_of(error)) from error
    say(f"wrote {save}: export it with convert.py --from megatron --load {save} --to hf --save FOLDER")
    return 0


def recipe_of(config: QuantizeConfig) -> Recipe:
    """What the flags ask for."""
    from megatron.core.conversion.quantizing.recipe import Recipe
    from megatron.core.quantization.scheme import scheme_named

    return Recipe(
        scheme_named(config.scheme, group_size=config.group_size),
        config.method,
        orders=config.act_order,
        exponent=config.smoothquant_alpha,
        ignore=config.quantize_ignore,
        cache=config.kv_cache_scales == "fp8",
    )


def texts_of(config: QuantizeConfig, recipe: Recipe, portable: PortableModel) -> CalibrationTexts | None:
    """The texts for calibration, None where none are needed; ConfigError where they are missing."""
    from megatron.core.conversion.quantizing.recipe import check_length
    from megatron.core.conversion.quantizing.texts import calibration_texts

    if not recipe.needs_texts:
        return None
    if config.data_path is None:
        asked = f"--method {recipe.method}" if recipe.method != "rtn" else f"--scheme {recipe.scheme.name}"
        asked = asked if recipe.method != "rtn" or recipe.scheme.needs_calibration else "--kv-cache-scales fp8"
        raise ConfigError(
            f"{asked} is calibrated on texts: name some with --data-path, such as a part of the training data"
        )
    length = config.seq_length or min(2048, portable.seq_length)
    learned = any(name.startswith("embedding.position") for name in portable.tensors)
    check_length(portable, samples=config.samples, length=length, learned=learned)
    return calibration_texts(
        portable, config.data_path, key=config.json_key, samples=config.samples, length=length, seed=config.seed
    )


def quantize(
    config: QuantizeConfig,
    portable: PortableModel,
    recipe: Recipe,
    texts: CalibrationTexts | None,
    *,
    say: Callable[[str], None],
) -> None:
    """Quantize on all ranks, and write on the first. A collective."""
    import tempfile
    from pathlib import Path

    from megatron.config.parallel import ParallelConfig
    from megatron.core.conversion.convert import check_target
    from megatron.core.conversion.native import write_native
    from megatron.core.conversion.quantizing.calibrate import calibrated
    from megatron.core.conversion.remote import becoming
    from megatron.core.parallel.launch import parallel_context

    launch, save = launch_environment(), path_of(config.save)
    calibration = (
        {}
        if texts is None
        else {
            "data": config.data_path,
            "samples": len(texts.tokens),
            "seq_length": texts.tokens.shape[1],
            "seed": config.seed,
            "sha256": texts.digest,
        }
    )
    with ExitStack() as stack:
        aside, spool = Path(tempfile.gettempdir()), Path(tempfile.gettempdir())
        if launch.rank == 0:
            aside = stack.enter_context(becoming(save, say=say, check=lambda: check_target(save)))
            spool = aside.with_name("layers")
        with parallel_context(ParallelConfig(), launch, params_dtype="fp32", seed=config.seed) as context:
            made = calibrated(
                portable,
                recipe,
                None if texts is None else texts.tokens,
                calibration=calibration,
                context=context,
                spool=spool,
                say=say,
            )
        if launch.rank == 0:
            write_native(made, aside, final=save)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
