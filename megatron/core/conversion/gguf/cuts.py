"""How byte-level BPE cuts texts into words before it merges bytes, by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.errors import CheckpointError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PLAIN, _BYTES, _DIGITS, _NUMBERS, _PUNCTUATION = "GPT-2's words", "bytes", "digits", "numbers", "punctuation"
_ALIKE = {
    "llama-bpe": "dbrx",
    "llama3": "dbrx",
    "smaug-bpe": "dbrx",
    "default": "gpt-2",
    "olmo": "gpt-2",
    "mpt": "gpt-2",
    "phi-2": "gpt-2",
    "refact": "starcoder",
    "command-r": "starcoder",
    "smollm": "starcoder",
    "codeshell": "starcoder",
    "stablelm2": "qwen2",
    "o200k": "gpt-4o",
    "llama4": "gpt-4o",
}
"""Other names of llama.cpp's for the same cuts."""
_OF_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMES: Mapping[tuple[str, ...], str] = {
    (_PLAIN,): "gpt-2",
    (_DIGITS, _PLAIN): "starcoder",
    (_WORDS + r"\p{N}{1,3}" + _SIGNS, _BYTES): "dbrx",
    (_WORDS + r"\p{N}" + _SIGNS, _BYTES): "qwen2",
    (_CASED % (_ENDINGS, _ENDINGS) + r"\p{N}{1,3}" + _SLASHES, _BYTES): "gpt-4o",
    (_CASED % ("", "") + r"\p{N}" + _SLASHES, _BYTES): "tekken",
    (_PUNCTUATION, _PLAIN, _NUMBERS, "[0-9][0-9][0-9]"): "falcon",
    (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _OF_DEEPSEEK, _BYTES): "deepseek-v3",
    (r" ?[^(\s|[.,!?…。，、।۔،])]+", _BYTES): "bloom",
}
"""llama.cpp's name of each sequence of cuts."""

WHOLE_WORDS = ("llama-bpe", "llama3", "tekken")
"""Cuts whose words are taken whole where the vocabulary has them, and whose texts begin with a token unless a file
denies it.
"""


def cut_name(spec: Mapping[str, Any]) -> str:
    """llama.cpp's name for how the pipeline ``spec`` cuts texts; CheckpointError for a way that it doesn't know."""
    cuts = tuple(_cuts(spec["pre_tokenizer"]))
    name = NAMES.get(cuts)
    if name is None:
        raise CheckpointError(
            f"llama.cpp cuts texts before BPE in ways of its own, and none is known for this tokenizer's "
            f"({', then '.join(cuts)}); GGUF files are written with those of {', '.join(NAMES.values())}"
        )
    return "llama-bpe" if name == "dbrx" and spec["model"].get("ignore_merges") else name


def pre_tokenizer(name: str) -> dict[str, Any]:
    """The tokenizers library's description of a way to cut; CheckpointError for one that isn't read."""
    name = _ALIKE.get(name, name)
    cuts = next((cuts for cuts, each in NAMES.items() if each == name), None)
    if cuts is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}: this way to cut texts is not read here; those of "
            f"{', '.join([*NAMES.values(), *_ALIKE])} are"
        )
    parts = [_part(cut) for cut in cuts]
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


def _cuts(part: Mapping[str, Any] | None) -> Iterator[str]:
    """The cuts of a pre-tokenizer, in their order."""
    match part or {}:
        case {"type": "Sequence", "pretokenizers": parts}:
            for each in parts:
                yield from _cuts(each)
        case {"type": "ByteLevel", "add_prefix_space": False, **rest}:
            yield _PLAIN if rest.get("use_regex", True) else _BYTES
        case {"type": "Digits", "individual_digits": single}:
            yield _DIGITS if single else _NUMBERS
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            yield _PUNCTUATION
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            yield pattern
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}:
            yield pattern
        case other:
            yield str(other.get("type", "none"))


def _part(cut: str) -> dict[str, Any]:
    """The tokenizers library's description of a cut."""
    known: dict[str, dict[str, Any]] = {
        _PLAIN: {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        _BYTES: {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        _DIGITS: {"type": "Digits", "individual_digits": True},
        _NUMBERS: {"type": "Digits", "individual_digits": False},
        _PUNCTUATION: {"type": "Punctuation", "behavior": "Contiguous"},
    }
    split = {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
    return known.get(cut, split)
