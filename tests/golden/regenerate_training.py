"""Record how megatron-core trains two small GPTs: its own data set, model, gradients, optimizer and schedule.

Needs ``MEGATRON_CORE_PATH`` (see tests/harness/megatron_core.py): ``python -m tests.golden.regenerate_training``.
The file names the versions. Everything runs in fp64: fp32 rounding depends on the processor, and a difference smaller
than it, as that of an epsilon, would go unseen.
"""

from __future__ import annotations

import inspect
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from tests.harness.megatron_core import run_megatron_core

RECORDED = Path(__file__).with_name("training_megatron_core.json")

STEPS, BATCH, MICRO_BATCH, LENGTH, WORDS = 20, 8, 4, 16, 64
FLAGS = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} --max-position-embeddings {LENGTH} "
    f"--micro-batch-size {MICRO_BATCH} --global-batch-size {BATCH} --train-iters {STEPS} "
    "--hidden-dropout 0 --attention-dropout 0 "
    f"--tokenizer-type NullTokenizer --vocab-size {WORDS - 1} --make-vocab-size-divisible-by 32 "
    "--data-order megatron --split 1 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 4 "
    "--weight-decay 0.1 --clip-grad 1 --adam-beta2 0.95"
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "classic": ("", {}),
    "llama": (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --eod-mask-loss "
        "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --ffn-hidden-size 48",
        {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "num_query_groups": 2,
            "ffn_hidden_size": 48,
            "calculate_per_token_loss": True,
        },
    ),
}
"""Flags, and the settings of megatron-core that they stand for.

The vocabulary needs no padding: megatron-core's softmax includes padding, ours leaves it out.
"""


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """The weight that a parameter starts from, a function of its name: matrices around 0, weights of norms around 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return drawn + 1 if name.endswith("norm.weight") else drawn


def write_documents(prefix: str) -> None:
    """Short documents, several to a sample, each ending in the tokenizer's last id."""
    drawn = np.random.RandomState(3)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in drawn.randint(2, 20, 100):
            writer.add_document([*drawn.randint(0, WORDS - 1, length), WORDS - 1])


SCRIPT = (
    f"""
import zlib
from torch import Tensor

{inspect.getsource(weight)}
"""
    + """
import importlib.metadata
from torch.overrides import TorchFunctionMode
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig


class DoubleOnCpu(TorchFunctionMode):
    # Tensors that megatron-core creates on the GPU are created on the CPU, and those in fp32 are fp64.

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = dict(named or {})
        if named.get("device") == "cuda":
            named["device"] = "cpu"
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        if function is torch.Tensor.float:
            return arguments[0].double()
        if function is torch.Tensor.type and len(arguments) == 1:  # only an assertion asks for it
            return "torch.cuda.FloatTensor"
        return function(*arguments, **named)


class Tokenizer:
    eod, pad, unique_identifiers = words - 1, -1, {"class": "Tokenizer"}


def samples(llama):
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=length, blend=([prefix], None), split="1", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=llama, create_attention_mask=False,
    )
    data = BlendedMegatronDatasetBuilder(GPTDataset, [steps * batch, 0, 0], lambda: True, config).build()[0]
    return [{name: value.clone() for name, value in data[number].items()} for number in range(steps * batch)]


def build(settings):
    llama = bool(settings)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, bias_activation_fusion=True, layernorm_epsilon=1e-5,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu, **settings,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(normalization=config.normalization), vocab_size=words,
        max_sequence_length=length, share_embeddings_and_output_weights=not llama,
        position_embedding_type="rope" if llama else "learned_absolute",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight(name, tuple(parameter.shape)))
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def loss_of(losses, mask):
    total = torch.sum(losses.view(-1) * mask.view(-1))
    count = mask.sum().to(torch.int)
    return total, count, {"sum": total.item(), "count": count.item()}


def forward_step(microbatches, model):
    given = next(microbatches)
    losses = model(given["tokens"], given["position_ids"], None, labels=given["labels"])
    return losses, lambda losses: loss_of(losses, given["loss_mask"])


def train(settings):
    model = build(settings)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, min_lr=1e-3, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.95), [model]
    )
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=4 * batch, lr_decay_steps=steps * batch,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=steps * batch, wd_incr_style="constant",
    )
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.finalize_model_grads_func = finalize_model_grads
    data = samples(bool(settings))
    microbatches = (torch.utils.data.default_collate(data[first:first + micro]) for first in range(0, len(data), micro))
    found = {"losses": [], "grad_norms": [], "rates": []}
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=microbatches, model=[model], num_microbatches=batch // micro,
            seq_length=length, micro_batch_size=micro, forward_only=False,
        )
        found["losses"].append(sum(part["sum"] for part in parts) / sum(part["count"] for part in parts))
        found["rates"].append(optimizer.param_groups[0]["lr"])
        found["grad_norms"].append(optimizer.step()[1])
        schedule.step(increment=batch)
    return found


torch._dynamo.config.disable = True  # functions under torch.compile run as written, without a C++ compiler
torch.set_default_dtype(torch.float64)
torch.distributed.init_process_group("gloo", init_method=f"file://{prefix}.store", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
with DoubleOnCpu():
    curves = {name: train(settings) for name, settings in variants.items()}
answer({"version": importlib.metadata.version("megatron-core"), "torch": torch.__version__, "curves": curves})
"""
)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        write_documents(prefix)
        recorded = run_megatron_core(
            SCRIPT,
            prefix=prefix,
            steps=STEPS,
            batch=BATCH,
            micro=MICRO_BATCH,
            length=LENGTH,
            words=WORDS,
            variants={name: settings for name, (_, settings) in VARIANTS.items()},
        )
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
