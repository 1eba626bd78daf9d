"""Weights that are gathered and kept in 8 bits: what ranks send, what they hold, and what they can read."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megatron.config.fp8 import Fp8Config
from megatron.config.run import RunConfig
from megatron.core.distributed import param_gather, unit_memory
from megatron.core.distributed.buffers import build_buffers
from megatron.core.distributed.param_gather import ParamGather
from megatron.core.ops.quantize import bytes_of, tensorwise
from megatron.core.parallel.collectives import all_gather_into_async
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.low_precision import LowPrecision
from megatron.core.parallel.model_context import ModelContext
from megatron.core.tensor_parallel.fp8_linear import Fp8Quantizer, Operand, weight_quantizers
from megatron.core.tensor_parallel.initialize import Normal, initialize
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.planning.communication import sent_bytes
from megatron.training.step import train_step
from tests.harness import run_ranks
from tests.harness.runs import GPT, tiny_run

WIDTH, OUTPUTS = 96, 40


def gathered(context: ModelContext) -> dict[str, Any]:
    """Of a layer whose weights were gathered in 8 bits and whose bias was not, and then made whole."""
    fp8 = Fp8Config(fp8_format="e4m3", fp8_recipe="tensorwise", fp8_param_gather=True)
    context = dataclasses.replace(context, low_precision=LowPrecision(fp8, 2))
    layers = [
        ColumnParallelLinear(WIDTH, OUTPUTS, context.in_layer(each), init=Normal(0.5), bias=True) for each in range(2)
    ]
    model = nn.ModuleList(layers)
    initialize(model, context.mesh, seed=1)
    weights = [layer.weight.detach().clone() for layer in layers]
    buffers = build_buffers(
        model.named_parameters(), context, grad_dtype=torch.float32, quantizers=weight_quantizers([model])
    )
    gather, sent, send = (
        ParamGather(buffers, context, context.low_precision),
        dict[torch.dtype, int](),
        all_gather_into_async,
    )

    def noted(whole: Tensor, *others: Any) -> Any:
        sent[whole.dtype] = sent.get(whole.dtype, 0) + whole.numel()
        return send(whole, *others)

    found: dict[str, Any] = {"sent": sent}
    with mock.patch.object(param_gather, "all_gather_into_async", noted):
        gather.release()
        found["sent first"] = dict(sent)
        gather.release()  # nothing is left to release
        assert sent == found["sent first"]
    parameters = [layer.weight for layer in layers]
    found["bytes held"] = sum(each.untyped_storage().nbytes() for each in parameters)
    found["reads"] = [bool(torch.isnan(each).all()) for each in parameters]
    found["codes"] = []
    for weight, parameter in zip(weights, parameters):
        codes = context.low_precision.gathered[parameter]
        ((matrix,), _), expected = codes, tensorwise(weight, matrix_format(codes))
        same = torch.equal(bytes_of(matrix.data), bytes_of(expected.data)) and torch.equal(
            matrix.scales, expected.scales
        )
        found["codes"].append(same)
    gather.make_whole()
    found["whole"] = [torch.equal(parameter, weight) for parameter, weight in zip(parameters, weights)]
    found["gathered afterwards"] = [context.low_precision.gathered.get(each) for each in parameters]
    return found


def matrix_format(codes: Any) -> torch.dtype:
    found: torch.dtype = codes[0][0].data.dtype
    return found


def test_ranks_send_and_hold_codes_alone() -> None:
    """Half of the bytes of bf16 for weights; biases stay as they are. Who reads a released weight must not find one."""
    for found in run_ranks(gathered, dp=2, dtype=torch.bfloat16):
        biases = found["sent first"].pop(torch.bfloat16)
        padded = found["sent first"].pop(torch.uint8)
        assert not found["sent first"] and biases < 512 and 2 * WIDTH * OUTPUTS <= padded < 2 * WIDTH * OUTPUTS + 128
        assert found["bytes held"] <= 2 * 2 and found["reads"] == [True, True]
        assert found["codes"] == found["whole"] == [True, True] and found["gathered afterwards"] == [None, None]


BY_UNIT = (
    "--mock-data --tokenizer-type NullTokenizer --bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather "
    "--zero-stage 3 --hidden-size 64 --disable-bias-linear --overlap-grad-reduce --overlap-param-gather"
)


def gathered_in_a_step(context: ParallelContext) -> tuple[dict[torch.dtype, int], RunConfig, int]:
    """Bytes that a step with ZeRO 3 gathers on this rank, by type; the run, and its weights in 8 bits."""
    run, sent = tiny_run(context, BY_UNIT), dict[torch.dtype, int]()
    batches, send = run.data.training_batches(0), all_gather_into_async
    train_step(run, next(batches))

    def noted(whole: Tensor, own: Tensor, *others: Any) -> Any:
        sent[whole.dtype] = sent.get(whole.dtype, 0) + whole.nbytes - own.nbytes
        return send(whole, own, *others)

    with mock.patch.object(unit_memory, "all_gather_into_async", noted):
        train_step(run, next(batches))
    weights = weight_quantizers(run.models)
    assert all(torch.isnan(each).all() for each in weights), "nobody finds another weight than that of the step"
    return sent, run.config, sum(each.numel() for each in weights)


def test_units_are_gathered_in_8_bits() -> None:
    """ZeRO 3 gathers weights twice for each microbatch: in bf16 twice the bytes."""
    for sent, config, elements in run_ranks(gathered_in_a_step, dp=2, dtype=torch.bfloat16):
        assert sent[torch.uint8] == 2 * config.num_microbatches() * elements // 2
        stated = sent_bytes(config, GPT.train_spec, 0)
        assert sent.keys() == {torch.uint8, torch.bfloat16} and sum(sent.values()) == stated.weights


def copies_in_memory(context: ParallelContext) -> dict[str, int]:
    """Weights of which there are copies in 8 bits when the last of three layers begins, and is reached again."""
    run = tiny_run(context, f"{BY_UNIT.replace('--fp8-param-gather', '')} --num-layers 3")
    copies, seen, quantize = dict[Tensor, weakref.ref[Tensor]](), dict[str, int](), Fp8Quantizer.quantize_weights

    def noted(quantizer: Fp8Quantizer, weight: Tensor) -> list[Operand]:
        found = quantize(quantizer, weight)
        assert found[0].across is not None
        copies[weight] = weakref.ref(found[0].across.data)
        return found

    def count(when: str) -> None:
        seen[when] = sum(copy() is not None for copy in copies.values())

    def begin(module: nn.Module, inputs: Any) -> None:
        count("forward")
        inputs[0].register_hook(lambda grad: count("backward"))

    run.models[0].get_submodule("decoder.layers.2").register_forward_pre_hook(begin)
    with mock.patch.object(Fp8Quantizer, "quantize_weights", noted):
        train_step(run, next(run.data.training_batches(0)))
    return {**seen, "all": len(copies)}


def test_copies_in_8_bits_go_with_their_unit() -> None:
    """Autograd kept the copies of every layer's weights from the forward pass to the backward pass: two bytes of each,
    as many as the whole model in bf16, which ZeRO 3 divides.
    """
    for seen in run_ranks(copies_in_memory, dp=2, dtype=torch.bfloat16):
        assert seen == {"forward": 0, "backward": 4, "all": 12}


def test_one_rank_keeps_its_weights() -> None:
    """It sends nothing, so there is nothing to save."""
    (found,) = run_ranks(gathered_alone, dtype=torch.bfloat16)
    assert found == ([None], 0)


def gathered_alone(context: ModelContext) -> tuple[list[Any], int]:
    context = dataclasses.replace(context, low_precision=LowPrecision(Fp8Config(fp8_format="e4m3"), 1))
    layer = ColumnParallelLinear(WIDTH, OUTPUTS, context.in_layer(0), init=Normal(0.5), bias=False)
    initialize(layer, context.mesh, seed=1)
    buffers = build_buffers(
        layer.named_parameters(), context, grad_dtype=torch.float32, quantizers=weight_quantizers([layer])
    )
    ParamGather(buffers, context, context.low_precision).release()
    return [context.low_precision.gathered.get(layer.weight)], int(torch.isnan(layer.weight).sum())
