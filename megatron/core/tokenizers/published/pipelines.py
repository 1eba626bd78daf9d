"""How each class of published tokenizers cuts text: a tokenizer.json made of its vocabulary and settings.

Such a class has the same parts whatever else a tokenizer.json beside it says; of that it takes the vocabulary, compiled
normalization rules and what surrounds a text. As everywhere in this package transformers 5 is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.tokenizers.published.folder import TokenizerFolder
from megatron.core.tokenizers.published.vocabularies import TIKTOKEN_PATTERN, Vocabulary

Part = dict[str, Any]
_SPACE = "\u2581"
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_3_5 = (
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


@dataclass(frozen=True)
class Surrounds:
    """Roles of the tokens before and behind a text. ``separators``: how many of the latter stand between two texts.

    ``always``: also beside a tokenizer.json that says something else.
    """

    before: str | None = None
    behind: str | None = None
    separators: int = 1
    always: bool = True

    def template(self, words: Mapping[str, str]) -> tuple[str, str]:
        """What becomes of one text and of two, in the library's words. ``words``: spellings of the roles."""
        first = [words[self.before]] if self.before else []
        last = [words[self.behind]] if self.behind else []
        return " ".join([*first, "$A", *last]), " ".join([*first, "$A", *last * self.separators, "$B", *last])


@dataclass(frozen=True)
class TokenizerClass:
    """A class of tokenizers.

    ``parts``: from a folder and its compiled normalization rules. ``roles``: spellings that count where no file names
    a role, if the vocabulary has them. ``surrounds``: what it puts around texts; None: as the tokenizer.json or
    ``add_bos_token`` and ``add_eos_token`` say. ``begins``: whether texts begin with BOS unless settings say no.
    ``resets``: what a tokenizer.json puts around texts doesn't count. ``further``: special tokens without a role where
    no file lists any, if the vocabulary has them. ``model``: kind of its vocabulary.
    """

    parts: Callable[[TokenizerFolder, str | None], Parts]
    roles: Mapping[str, str] = field(default_factory=dict)
    surrounds: Surrounds | None = None
    begins: bool = False
    resets: bool = False
    further: tuple[str, ...] = ()
    model: str = "BPE"


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


def _llama(folder: TokenizerFolder, _: str | None) -> Parts:
    begins = folder.switch("add_prefix_space", default=True)
    scheme = ("always" if folder.switch("legacy", default=False) else "first") if begins else "never"
    return _spaced_bpe(scheme, strips=begins, unk_token=None)


def _code_llama(folder: TokenizerFolder, _: str | None) -> Parts:
    scheme = "first" if folder.switch("add_prefix_space", default=True) else "never"
    return _spaced_bpe(scheme, strips=True, unk_token=role_of(folder, "unk_token", "<unk>"))


def _spaced_bpe(scheme: str, *, strips: bool, unk_token: str | None) -> Parts:
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if strips else []
    return Parts(
        model={"unk_token": unk_token, "fuse_unk": True, "byte_fallback": True},
        pre_tokenizer=_metaspace(scheme, split=False),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _gemma(folder: TokenizerFolder, _: str | None) -> Parts:
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    return Parts(
        model={"unk_token": role_of(folder, "unk_token", "<unk>"), "fuse_unk": True, "byte_fallback": True},
        normalizer=_replace(" ", _SPACE),
        pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _t5(folder: TokenizerFolder, charsmap: str | None) -> Parts:
    return _words_of_unigrams("always", unk_id=2, normalizer=_precompiled(charsmap) if charsmap else None)


def _camembert(folder: TokenizerFolder, charsmap: str | None) -> Parts:
    scheme = "always" if folder.switch("add_prefix_space", default=True) else "never"
    return _words_of_unigrams(scheme, unk_id=None, normalizer=_precompiled(charsmap) if charsmap else None)


def _xlm_roberta(folder: TokenizerFolder, charsmap: str | None) -> Parts:
    scheme = "always" if folder.switch("add_prefix_space", default=True) else "never"
    return _words_of_unigrams(scheme, unk_id=3, normalizer=_precompiled(charsmap) if charsmap else None)


def _albert(folder: TokenizerFolder, charsmap: str | None) -> Parts:
    steps = [_replace("``", '"'), _replace("''", '"')]
    if not folder.switch("keep_accents", default=False):
        steps += [{"type": "NFKD"}, {"type": "StripAccents"}]
    steps += [{"type": "Lowercase"}] if folder.switch("do_lower_case", default=True) else []
    steps += [_precompiled(charsmap)] if charsmap else []
    scheme = "always" if folder.switch("add_prefix_space", default=True) else "never"
    return _words_of_unigrams(scheme, unk_id=1, normalizer={"type": "Sequence", "normalizers": steps})


def _words_of_unigrams(scheme: str, *, unk_id: int | None, normalizer: Part | None) -> Parts:
    model: Part = {"byte_fallback": False} | ({} if unk_id is None else {"unk_id": unk_id})
    steps = [{"type": "WhitespaceSplit"}, _metaspace(scheme)]
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
    return Parts(model=model, normalizer=normalizer, pre_tokenizer=pre_tokenizer, decoder=_metaspace(scheme))


def _deberta(folder: TokenizerFolder, _: str | None) -> Parts:
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


def _bert(folder: TokenizerFolder, _: str | None) -> Parts:
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


def _gpt2(folder: TokenizerFolder, _: str | None) -> Parts:
    return _byte_level(_bytes(folder.switch("add_prefix_space", default=False)), None)


def _gpt_neox(folder: TokenizerFolder, _: str | None) -> Parts:
    return _byte_level(_bytes(folder.switch("add_prefix_space", default=False)), {"type": "NFC"})


def _cohere(folder: TokenizerFolder, _: str | None) -> Parts:
    steps = [{"type": "Digits", "individual_digits": True}, _bytes(folder.switch("add_prefix_space", default=False))]
    return _byte_level({"type": "Sequence", "pretokenizers": steps}, {"type": "NFC"})


def _qwen2(folder: TokenizerFolder, _: str | None) -> Parts:
    cuts = _split_then_bytes(_QWEN_2, folder.switch("add_prefix_space", default=False))
    return _byte_level(cuts, {"type": "NFC"})


def _qwen3_5(folder: TokenizerFolder, _: str | None) -> Parts:
    cuts = _split_then_bytes(_QWEN_3_5, folder.switch("add_prefix_space", default=False))
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


def _roles(**spelled: str) -> dict[str, str]:
    return {f"{role}_token": word for role, word in spelled.items()}


_BERT_ROLES = _roles(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]")
_ROBERTA_ROLES = _roles(bos="<s>", eos="</s>", sep="</s>", cls="<s>", unk="<unk>", pad="<pad>", mask="<mask>")
_GPT2_ROLES = _roles(unk="<|endoftext|>", bos="<|endoftext|>", eos="<|endoftext|>")
_QWEN_ROLES = _roles(unk="<|endoftext|>", eos="<|endoftext|>", pad="<|endoftext|>")
_LLAMA_ROLES = _roles(unk="<unk>", bos="<s>", eos="</s>")
_CLS_TO_SEP = Surrounds("cls_token", "sep_token")
_BOS_TO_EOS = Surrounds("bos_token", "eos_token", separators=2)

CLASSES: Mapping[str, TokenizerClass] = {
    "AlbertTokenizer": TokenizerClass(
        _albert,
        _roles(bos="[CLS]", eos="[SEP]", unk="<unk>", sep="[SEP]", pad="<pad>", cls="[CLS]", mask="[MASK]"),
        model="Unigram",
        surrounds=Surrounds("cls_token", "sep_token", always=False),
    ),
    "BertTokenizer": TokenizerClass(_bert, _BERT_ROLES, model="WordPiece", surrounds=_CLS_TO_SEP),
    "CamembertTokenizer": TokenizerClass(
        _camembert,
        _ROBERTA_ROLES,
        model="Unigram",
        surrounds=_BOS_TO_EOS,
        further=("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
    ),
    "CodeGenTokenizer": TokenizerClass(_gpt2, _GPT2_ROLES),
    "CodeLlamaTokenizer": TokenizerClass(
        _code_llama,
        _LLAMA_ROLES | _roles(prefix="▁<PRE>", middle="▁<MID>", suffix="▁<SUF>", eot="▁<EOT>", fill="<FILL_ME>"),
        begins=True,
        resets=True,
    ),
    "CohereTokenizer": TokenizerClass(
        _cohere,
        _roles(unk="<UNK>", bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", pad="<PAD>", cls="<CLS>", sep="<SEP>")
        | _roles(mask="<MASK_TOKEN>"),
    ),
    "DebertaV2Tokenizer": TokenizerClass(
        _deberta, _BERT_ROLES | _roles(bos="[CLS]", eos="[SEP]"), model="Unigram", surrounds=_CLS_TO_SEP
    ),
    "GPT2Tokenizer": TokenizerClass(_gpt2, _GPT2_ROLES),
    "GPTNeoXTokenizer": TokenizerClass(_gpt_neox, _GPT2_ROLES | _roles(pad="<|padding|>"), resets=True),
    "GemmaTokenizer": TokenizerClass(_gemma, _roles(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>", mask="<mask>")),
    "LlamaTokenizer": TokenizerClass(_llama, _LLAMA_ROLES),
    "Qwen2Tokenizer": TokenizerClass(_qwen2, _QWEN_ROLES),
    "Qwen3_5Tokenizer": TokenizerClass(_qwen3_5, _QWEN_ROLES),
    "RobertaTokenizer": TokenizerClass(
        _gpt2, _ROBERTA_ROLES, surrounds=Surrounds("cls_token", "sep_token", separators=2)
    ),
    "T5Tokenizer": TokenizerClass(
        _t5, _roles(eos="</s>", unk="<unk>", pad="<pad>"), model="Unigram", surrounds=Surrounds(behind="eos_token")
    ),
    "XLMRobertaTokenizer": TokenizerClass(_xlm_roberta, _ROBERTA_ROLES, model="Unigram", surrounds=_BOS_TO_EOS),
}
