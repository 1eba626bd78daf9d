"""The programs between whose formats models are converted."""

from __future__ import annotations

from typing import Literal

Program = Literal["hf", "megatron", "megatron-lm", "gguf", "tensorrt-llm", "onnx", "peft"]
"""Names of ``--to``: Hugging Face, this project, Megatron-LM, llama.cpp, TensorRT-LLM, onnxruntime, adapters alone."""
Source = Literal["hf", "megatron", "megatron-lm", "gguf"]
"""Names of ``--from``: formats that are read."""
TITLES: dict[Program, str] = {
    "hf": "Hugging Face",
    "megatron": "this project's",
    "megatron-lm": "Megatron-LM's",
    "gguf": "GGUF",
    "tensorrt-llm": "TensorRT-LLM's",
    "onnx": "ONNX",
    "peft": "PEFT",
}
GgufType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k_m", "q5_k_m", "q6_k"]
"""Values of ``--gguf-type``."""
Quantized = Literal["int8", "int4", "int4-asym", "w8a8", "fp8", "fp8-block", "nvfp4", "mxfp4", "mxfp8"]
"""Values of ``--quantize``: schemes that need no texts and have a reader."""
