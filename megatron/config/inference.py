"""Memory, batches and shortcuts of text generation."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import Settings, flag, switch


class InferenceConfig(Settings):
    """Limits of the generation tools; training does not read them."""

    inference_max_seq_length: int | None = flag(
        "Maximum tokens of a prompt and its generated text together, at most the model's own.", default=None, at_least=1
    )
    inference_max_requests: int = flag(
        "Maximum number of texts that are generated at once; others wait.",
        default=32,
        aliases=("--inference-dynamic-batching-max-requests",),
        at_least=1,
        at_most=4096,
    )
    inference_dynamic_batching_buffer_size_gb: float = flag(
        "Memory of each rank for cached keys and values, in GiB; no more is taken than the longest texts need.",
        default=4.0,
        above=0,
        at_most=100_000,
    )
    inference_dynamic_batching_block_size: int = flag(
        "Tokens of a block, the unit in which cache memory is given to texts and shared between them.",
        default=64,
        at_least=1,
        at_most=65_536,
    )
    inference_dynamic_batching_max_tokens: int = flag(
        "Maximum tokens of a step: one of each running text, and parts of new prompts. More tokens read prompts "
        "faster, but running texts wait longer for each step.",
        default=512,
        at_least=1,
    )
    disable_chunked_prefill: bool = switch(
        "Read each prompt in one step, however long it is, instead of parts that fit into "
        "--inference-dynamic-batching-max-tokens."
    )
    inference_dynamic_batching_prefix_caching: bool = switch(
        "Compute each prompt from its beginning, instead of using cached keys and values of an equal beginning.",
        off="--no-inference-dynamic-batching-prefix-caching",
    )
    lora_modules: tuple[str, ...] = flag(
        "Adapters (LoRA) beside the model, NAME=FOLDER each: PEFT folders, or checkpoints of adapters. Each text uses "
        "the adapter that its request names, or none.",
        default=(),
    )
    num_speculative_tokens: int = flag(
        "Speculative decoding: tokens that are guessed for each text and verified in one step; texts stay the same. "
        "Guesses come from --draft-load, or repeat what followed the last tokens earlier in the text.",
        default=0,
        at_least=0,
        at_most=64,
    )
    draft_load: str | None = flag(
        "Folder of checkpoints of a smaller model (draft model) with the same vocabulary, which guesses the tokens of "
        "--num-speculative-tokens.",
        default=None,
    )
    batch_invariant: bool = switch(
        "Compute a text's logits with the same bits whatever else is in the batch. This is the default in bf16 and "
        "fp16 on a CPU; in fp32 it takes up to 1.5 times as long for small batches.",
        aliases=("--batch-invariant-mode",),
    )
    quantization: Literal["int8", "stored"] | None = flag(
        "int8: round weights to 8 bits with a scale for each output, for a bf16 or fp32 model on a CPU: half the "
        "memory traffic of bf16, which limits the speed of small batches. Logits change a little. stored: keep the "
        "weights of a quantized checkpoint in its own bits (int8, int4, fp8), on a CPU; nothing is rounded again.",
        default=None,
    )
