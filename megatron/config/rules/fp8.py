"""Rules about training in FP8."""

from __future__ import annotations

from megatron.config.family import Rule
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig


def some_layer_is_in_fp8(run: RunConfig) -> str | None:
    """--first-last-layers-bf16 leaves a layer over."""
    fp8, layers = run.fp8, run.num_layers
    if not fp8.is_on or any(fp8.serves(layer, num_layers=layers) for layer in range(layers)):
        return None
    return (
        f"--num-layers-at-start-in-bf16 {fp8.num_layers_at_start_in_bf16} and --num-layers-at-end-in-bf16 "
        f"{fp8.num_layers_at_end_in_bf16} leave none of the {layers} layers in FP8: give smaller numbers, or leave out "
        "--fp8-format"
    )


RULES: tuple[Rule, ...] = (
    rule(
        "--fp8-format {run.fp8.fp8_format} needs --bf16 or --fp16, the format of everything but the products",
        lambda run: run.fp8.is_on and run.precision.params_dtype == "fp32",
    ),
    rule(
        "--fp8-format hybrid is not available with --fp8-recipe {run.fp8.fp8_recipe}: kernels with block scales don't "
        "multiply E5M2; give --fp8-format e4m3",
        lambda run: run.fp8.fp8_format == "hybrid" and run.fp8.fp8_recipe in ("blockwise", "mxfp8"),
    ),
    some_layer_is_in_fp8,
    rule(
        "--fp8-param-gather has no effect without --fp8-format; give both or neither",
        lambda run: run.fp8.fp8_param_gather and not run.fp8.is_on,
    ),
    rule(
        "--fp8-param-gather needs --use-distributed-optimizer; give both or neither",
        lambda run: run.fp8.fp8_param_gather and run.parallel.zero_stage == 0,
    ),
    rule(
        "--fp8-param-gather saves nothing with --fp8-recipe mxfp8, whose codes of both directions are as many bytes as "
        "bf16; leave it out, or use --fp8-recipe blockwise",
        lambda run: run.fp8.fp8_param_gather and run.fp8.fp8_recipe == "mxfp8",
    ),
)
