"""How each class of published tokenizers cuts text: a tokenizer.json made of its vocabulary and settings.

Such a class has the same parts whatever else a tokenizer.json beside it says; of that it takes the vocabulary, compiled
normalization rules and what surrounds a text. As everywhere in this package transformers 5 is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.tokenizers.published.folder import TokenizerFolder
from megatron.core.tokenizers.published.vocabularies import TIKTOKEN_PATTERN, Vocabulary

Part = dict[str, Any]
_SPACE = "\u2581"
_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS_AND_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Parts:
    """Parts of a tokenizer.json. ``model``: settings of the model, beside its vocabulary."""

    model: Part
    pre_tokenizer: Part | None
    decoder: Part
    normalizer: Part | None = None


def parts_of_sentencepiece(vocabulary: Vocabulary, charsmap: str | None) -> Parts:
    """Parts for a SentencePiece model in a folder of no particular class."""
    found = vocabulary.sentencepiece
    assert found is not None, "the vocabulary is of a SentencePiece model"
    normalizers = [_precompiled(charsmap)] if charsmap else []
    decoders = [_replace(_SPACE, " ")]
    if found.byte_fallback:
        decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    model: Part = {"byte_fallback": found.byte_fallback}
    if vocabulary.model["type"] == "BPE":
        model |= {"unk_token": found.unk_piece, "fuse_unk": True}
    return Parts(
        model=model,
        normalizer={"type": "Sequence", "normalizers": [*normalizers, _replace(" ", _SPACE)]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
    )


def parts_of_ranks() -> Parts:
    """Parts for a tiktoken file of tokens and ranks."""
    return Parts(model={}, pre_tokenizer=_split_then_bytes(TIKTOKEN_PATTERN, False), decoder=_bytes())


def _spaced_bpe_by_age(folder: TokenizerFolder, _: str | None) -> Parts:
    begins = _begins_with_space(folder)
    scheme = ("always" if folder.switch("legacy", default=False) else "first") if begins else "never"
    return _spaced_bpe(scheme, strips=begins, unk_token=None)


def _spaced_bpe_first(folder: TokenizerFolder, _: str | None) -> Parts:
    scheme = "first" if _begins_with_space(folder) else "never"
    return _spaced_bpe(scheme, strips=True, unk_token=role_of(folder, "unk_token", "<unk>"))


def _begins_with_space(folder: TokenizerFolder) -> bool:
    """Whether a space is put before a text; null, which transformers 4 writes for every Llama, is no false."""
    return folder.settings.get("add_prefix_space") is not False


def _spaced_bpe(scheme: str, *, strips: bool, unk_token: str | None) -> Parts:
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strips else []
    return Parts(
        model={"unk_token": unk_token, "fuse_unk": True, "byte_fallback": True},
        pre_tokenizer=_metaspace(scheme, split=False),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _spaced_bpe_alone(folder: TokenizerFolder, _: str | None) -> Parts:
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    return Parts(
        model={"unk_token": role_of(folder, "unk_token", "<unk>"), "fuse_unk": True, "byte_fallback": True},
        normalizer=_replace(" ", _SPACE),
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _unigram_words(folder: TokenizerFolder, charsmap: str | None) -> Parts:
    return _words_of_unigrams("always", normalizer=_precompiled(charsmap) if charsmap else None)


def _unigram_words_by_switch(folder: TokenizerFolder, charsmap: str | None) -> Parts:
    scheme = "always" if folder.switch("add_prefix_space", default=True) else "never"
    return _words_of_unigrams(scheme, normalizer=_precompiled(charsmap) if charsmap else None)


def _unigram_words_without_accents(folder: TokenizerFolder, charsmap: str | None) -> Parts:
    steps = [_replace("``", '"'), _replace("''", '"')]
    if not folder.switch("keep_accents", default=False):
        steps += [{"type": "NFKD"}, {"type": "StripAccents"}]
    steps += [{"type": "Lowercase"}] if folder.switch("do_lower_case", default=True) else []
    steps += [_precompiled(charsmap)] if charsmap else []
    scheme = "always" if folder.switch("add_prefix_space", default=True) else "never"
    return _words_of_unigrams(scheme, normalizer={"type": "Sequence", "normalizers": steps})


def _words_of_unigrams(scheme: str, *, normalizer: Part | None) -> Parts:
    steps = [{"type": "WhitespaceSplit"}, _metaspace(scheme)]
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
    return Parts(
        model={"byte_fallback": False},
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizer,
        decoder=_metaspace(scheme),
    )


def _unigram_lines(folder: TokenizerFolder, _: str | None) -> Parts:
    steps: list[Part] = [{"type": "Lowercase"}] if folder.switch("do_lower_case", default=False) else []
    steps += [
        {"type": "Replace", "pattern": {"Regex": r"\s{2,}|[\n\r\t]"}, "content": " "},
        {"type": "NFC"},
        {"type": "Strip", "strip_left": False, "strip_right": True},
    ]
    scheme = "always" if folder.switch("add_prefix_space", default=True) else "first"
    cuts: list[Part] = []
    if folder.switch("split_by_punct", default=False):
        cuts = [{"type": "Punctuation", "behavior": "Isolated"}]
    return Parts(
        model={"byte_fallback": False},
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*cuts, _metaspace(scheme)]},
        decoder=_metaspace(scheme),
    )


def _word_pieces(folder: TokenizerFolder, _: str | None) -> Parts:
    return Parts(
        model={
            "unk_token": role_of(folder, "unk_token", "[UNK]"),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": folder.switch("tokenize_chinese_chars", default=True),
            "strip_accents": folder.settings.get("strip_accents"),
            "lowercase": folder.switch("do_lower_case", default=True),
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )


def _byte_level_alone(folder: TokenizerFolder, _: str | None) -> Parts:
    return _byte_level(_bytes(folder.switch("add_prefix_space", default=False)), None)


def _byte_level_composed(folder: TokenizerFolder, _: str | None) -> Parts:
    return _byte_level(_bytes(folder.switch("add_prefix_space", default=False)), {"type": "NFC"})


def _byte_level_digits(folder: TokenizerFolder, _: str | None) -> Parts:
    steps = [{"type": "Digits", "individual_digits": True}, _bytes(folder.switch("add_prefix_space", default=False))]
    return _byte_level({"type": "Sequence", "pretokenizers": steps}, {"type": "NFC"})


def _byte_level_letters(folder: TokenizerFolder, _: str | None) -> Parts:
    cuts = _split_then_bytes(_LETTERS, folder.switch("add_prefix_space", default=False))
    return _byte_level(cuts, {"type": "NFC"})


def _byte_level_letters_and_marks(folder: TokenizerFolder, _: str | None) -> Parts:
    cuts = _split_then_bytes(_LETTERS_AND_MARKS, folder.switch("add_prefix_space", default=False))
    return _byte_level(cuts, {"type": "NFC"})


def _byte_level(pre_tokenizer: Part, normalizer: Part | None) -> Parts:
    model = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False}
    return Parts(model=model, normalizer=normalizer, pre_tokenizer=pre_tokenizer, decoder=_bytes())


def _bytes(add_prefix_space: bool = True, *, use_regex: bool = True) -> Part:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def _split_then_bytes(pattern: str, add_prefix_space: bool) -> Part:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _bytes(add_prefix_space, use_regex=False)]}


def _metaspace(scheme: str, *, split: bool = True) -> Part:
    return {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": split}


def _replace(text: str, content: str) -> Part:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def _precompiled(charsmap: str) -> Part:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


def role_of(folder: TokenizerFolder, role: str, otherwise: str) -> str:
    """Spelling of a role in a folder's files, ``otherwise`` where they don't name it."""
    return str(folder.roles.get(role, otherwise))


PARTS: Mapping[str, Callable[[TokenizerFolder, str | None], Parts]] = {
    "byte_level": _byte_level_alone,
    "byte_level_composed": _byte_level_composed,
    "byte_level_digits": _byte_level_digits,
    "byte_level_letters": _byte_level_letters,
    "byte_level_letters_and_marks": _byte_level_letters_and_marks,
    "spaced_bpe": _spaced_bpe_by_age,
    "spaced_bpe_alone": _spaced_bpe_alone,
    "spaced_bpe_first": _spaced_bpe_first,
    "unigram_lines": _unigram_lines,
    "unigram_words": _unigram_words,
    "unigram_words_by_switch": _unigram_words_by_switch,
    "unigram_words_without_accents": _unigram_words_without_accents,
    "word_pieces": _word_pieces,
}
"""Parts by the names that classes.json has for them, from a folder and its compiled normalization rules."""
