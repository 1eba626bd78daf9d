"""Faults in files for servers that run on GPUs alone: checkpoints of TensorRT-LLM, scales of keys and values."""

from __future__ import annotations

from tests.faults.fault import Fault

ROOM, TESTS = "megatron/core/conversion/tensorrt_llm", ("unit/conversion/test_tensorrt_llm.py",)

FAULTS = (
    Fault(
        "fc_is_the_linear_half",
        f"{ROOM}/cuts.py",
        old="return {activated: _divided(first, ranks, 0), linear: _divided(second, ranks, 0)}",
        new="return {activated: _divided(second, ranks, 0), linear: _divided(first, ranks, 0)}",
        suffers="TensorRT-LLM applies SiLU to the wrong half of every MLP: it builds, and answers with nonsense.",
        first=TESTS,
    ),
    Fault(
        "four_bits_in_the_other_half_of_a_byte",
        f"{ROOM}/few_bits.py",
        old="return (low & 15) | (high << 4)",
        new="return (high & 15) | (low << 4)",
        suffers="Each two neighbouring outputs of a layer in 4 bits are exchanged in TensorRT-LLM.",
        first=TESTS,
    ),
    Fault(
        "scales_of_keys_and_values_left_out",
        "megatron/core/conversion/huggingface/quantizing.py",
        old="return {**found, **self.cache}",
        new="return found",
        suffers="A folder says that keys and values are kept in FP8, and servers find no scales: they take 1 for them.",
        first=("unit/conversion/test_cache_scales.py",),
    ),
    Fault(
        "pairs_of_small_floats_exchanged",
        "megatron/core/conversion/huggingface/micro_scales.py",
        old="return codes[:, ::2] | (codes[:, 1::2] << 4)",
        new="return codes[:, 1::2] | (codes[:, ::2] << 4)",
        suffers="Each two neighbouring inputs of a weight in NVFP4 or MXFP4 are exchanged, and the model is noise.",
        first=("unit/conversion/test_micro_scales.py",),
    ),
)
