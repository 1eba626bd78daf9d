"""Faults in GGUF files: what llama.cpp would compute otherwise, or a reader take for whole."""

from __future__ import annotations

from tests.faults.fault import Fault

FILES, TABLES = "megatron/core/conversion/gguf", "megatron/core/models/gpt/gguf/architectures.py"
MODELS, TOKENS = ("unit/conversion/test_gguf.py",), ("unit/conversion/test_gguf_tokenizers.py",)

FAULTS = (
    Fault(
        "rotary_pairs_stay_halves_in_a_file",
        TABLES,
        old='types=("llama", "mistral", "mixtral"), rules=_TURNED',
        new='types=("llama", "mistral", "mixtral")',
        suffers="A Llama exported to GGUF rotates the wrong pairs of channels in llama.cpp, and answers with nonsense.",
        first=MODELS,
    ),
    Fault(
        "yarn_scales_attention_twice",
        f"{FILES}/rotary.py",
        old='{f"{_SCALING}.attn_factor": wanted / usual}',
        new='{f"{_SCALING}.attn_factor": wanted}',
        suffers="llama.cpp multiplies YaRN's usual factor of attention by the one in a file, which held it already.",
        first=MODELS,
    ),
    Fault(
        "window_forgotten_in_a_file",
        f"{FILES}/writing.py",
        old="longest = min(model.max_position_embeddings, model.window_size[0] + 1)",
        new="longest = model.max_position_embeddings",
        suffers="A file of a Mistral with a window lets llama.cpp attend beyond it, which the model never did.",
        first=MODELS,
    ),
    Fault(
        "texts_begin_without_their_token",
        f"{FILES}/vocabulary.py",
        old="whole[: len(whole) - len(plain)][:1] == [tokenizer.bos] if len(whole) > len(plain) else False",
        new="False",
        suffers="llama.cpp gives a Llama texts without the token that begins all of them, and it answers worse.",
        first=TOKENS,
    ),
    Fault(
        "weights_beyond_the_end_of_a_file",
        f"{FILES}/files.py",
        old="if place.start + _nbytes(place) > size:",
        new="if place.start > size:",
        suffers="A GGUF file whose download stopped is taken for whole until a weight is read, hours later.",
        first=("unit/conversion/test_gguf_files.py",),
    ),
    Fault(
        "window_read_one_longer",
        "megatron/core/models/gpt/gguf/settings.py",
        old='found |= {"window_size": (keys[_WINDOW] - 1, 0)',
        new='found |= {"window_size": (keys[_WINDOW], 0)',
        suffers="A Gemma read from a GGUF file attends to one token more than it was trained with.",
        first=MODELS,
    ),
    Fault(
        "yarn_factor_read_without_the_usual_one",
        f"{FILES}/rotary.py",
        old="None if more is None else more * yarn_attention_factor(factor)",
        new="more",
        suffers="A model with YaRN read from a GGUF file loses the factor of attention that llama.cpp multiplies in.",
        first=MODELS,
    ),
    Fault(
        "keys_of_files_unchecked",
        f"{FILES}/reading.py",
        old="    check_keys(keys, where=where)\n",
        new="",
        suffers="A GGUF file with a text or a huge number for a size ends in a traceback, or takes all memory.",
        first=("unit/conversion/test_gguf_files.py",),
    ),
    Fault(
        "gates_and_values_swapped_in_a_file",
        "megatron/core/models/gpt/gguf/gpt_oss.py",
        old="parts = [tensor[..., first::2] for first in (0, 1)]",
        new="parts = [tensor[..., first::2] for first in (1, 0)]",
        suffers="Experts of a gpt-oss exported to GGUF take values for gates in llama.cpp.",
        first=("unit/conversion/test_gguf.py::gpt_oss",),
    ),
    Fault(
        "expert_width_of_dense_networks",
        "megatron/core/models/gpt/gguf/hybrids.py",
        old='found["ffn_hidden_size"] = keys[_SHARED_WIDTH]',
        new='found["ffn_hidden_size"] = keys[_WIDTHS]',
        suffers="A Granite 4 with experts whose shared expert is wider than the others can't be written or read.",
        first=("unit/conversion/test_gguf.py::granitemoehybrid with experts",),
    ),
    Fault(
        "output_of_t5_unscaled_in_a_file",
        f"{FILES}/writing.py",
        old="tensors[OUTPUT] = _scaled(tensors[EMBEDDING], architecture.output_scale(*exact))",
        new="tensors[OUTPUT] = _scaled(tensors[EMBEDDING], architecture.output_scale(model, groups))",
        suffers="llama.cpp takes the original T5's likeliest word for certain, and samples hardly any other.",
        first=("unit/conversion/test_gguf_t5.py",),
    ),
)
