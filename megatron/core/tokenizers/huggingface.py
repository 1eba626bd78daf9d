"""A tokenizer in a form that Hugging Face publishes: a folder, or a tokenizer.json. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors
from typing_extensions import override

from megatron.core.tokenizers.base import extra_id_tokens, refuse_url
from megatron.core.tokenizers.published.building import build_published
from megatron.core.tokenizers.published.vocabularies import VOCABULARY_FILES
from megatron.core.tokenizers.rust import RustTokenizer
from megatron.errors import ConfigError, DataError
from megatron.small_files import has_file, read_json

KIND = "HuggingFaceTokenizer"
_SPACES = ("\u2581", "\u0120")  # the space before a word, in SentencePiece's models and in byte-level BPE
# What ``clean_up_tokenization_spaces`` replaces in texts, in this order.
_CLEANED = (
    *((f" {sign}", sign) for sign in ".?!,"),
    (" ' ", "'"),
    *((f" {ending}", ending) for ending in ("n't", "'m", "'s", "'ve", "'re")),
)
KNOWN_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class HuggingFaceTokenizer(RustTokenizer):
    """The pipeline of a tokenizer.json, and the ids of its vocabulary for masked samples.

    ``cls``, ``sep`` and ``mask`` exist where all three are named. Its own ``<extra_id_N>`` are sentinels as well as
    those of ``--vocab-extra-ids``. A decoder begins as config.json says, else with ``bos``, or with padding
    where there is none. ``cleans_spaces``: texts lose spaces before signs. ``remarks``: what a user should know about
    the folder.
    """

    cls: int
    sep: int
    mask: int
    separators: int

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        *,
        roles: Mapping[str, int],
        eod: int,
        bos: int | None,
        extra_ids: int,
        written: tokenizers.Tokenizer | None = None,
        cleans_spaces: bool = False,
        decoder_start: int | None = None,
        remarks: Sequence[str] = (),
    ) -> None:
        pad = roles.get("pad_token")
        super().__init__(pipeline, name=KIND, eod=eod, pad=pad, bos=bos, eos=eod, extra_ids=extra_ids, written=written)
        usual = pad if bos is None else bos
        self.decoder_start = decoder_start if decoder_start in range(self.vocab_size) else usual
        self._cleans_spaces, self.remarks = cleans_spaces, tuple(remarks)
        if roles.keys() >= {"cls_token", "sep_token", "mask_token"}:
            self.cls, self.sep, self.mask = (roles[f"{name}_token"] for name in ("cls", "sep", "mask"))
            self.separators = max(pipeline.num_special_tokens_to_add(is_pair=True) - 2, 1)  # RoBERTa has two
        own = pipeline.get_vocab(with_added_tokens=True)
        mark = "" if extra_id_tokens(1)[0] in own else _SPACES[0]  # mT5's are spelled with a space before
        names = takewhile(own.__contains__, (f"{mark}{name}" for name in extra_id_tokens(len(own))))
        self.sentinels = tuple(own[name] for name in names)

    @override
    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included; without spaces before signs where the folder says so."""
        text = super().detokenize(ids)
        if self._cleans_spaces:
            for before, after in _CLEANED:
                text = text.replace(before, after)
        return text

    @override
    def detokenize_part(self, ids: Sequence[int]) -> str:
        """Text of ids that others may follow, with all its spaces: a sign that follows would take one away."""
        return super().detokenize(ids) if self._cleans_spaces else self.detokenize(ids)

    def continuations(self) -> Sequence[bool]:
        """Whether each id continues the previous word, judged by its spelling; added tokens never do."""
        own = self.pipeline.get_vocab(with_added_tokens=False)
        added = self.pipeline.get_added_tokens_decoder()
        prefix = json.loads(self.pipeline.to_str())["model"].get("continuing_subword_prefix")
        space = next((mark for mark in _SPACES if any(piece.startswith(mark) for piece in own)), None)
        found = [False] * self.vocab_size
        for piece, number in own.items():
            if number not in added:
                found[number] = piece.startswith(prefix) if prefix else space is not None and piece[0] != space
        return found


def load(tokenizer_model: str | None, *, extra_ids: int, adds_tokens: bool = True) -> HuggingFaceTokenizer:
    """Ids as transformers 5 computes them from the same folder, with the tokens that belong around a text.

    ``adds_tokens``: False leaves those out. Roles of special tokens come from tokenizer_config.json and
    special_tokens_map.json.
    Raises ConfigError when the flag is missing, DataError when the files are missing or are something else.
    """
    folder, file = _find(tokenizer_model)
    found = build_published(folder, file)
    named, pipeline = {**found.roles, **special_tokens(folder)}, found.pipeline

    def token_id(role: str, fallbacks: Sequence[str] = ()) -> int | None:
        names = [named[role]] if role in named else fallbacks
        return next((found for name in names if (found := pipeline.token_to_id(name)) is not None), None)

    eos = token_id("eos_token", KNOWN_ENDS)
    if eos is None and "eos_token" not in named:  # [SEP] ends documents as it ends texts
        eos = token_id("sep_token")
    if eos is None or "eos_token" in found.unlisted:
        problem = (
            f"eos_token {named['eos_token']!r} is not one of its tokens" if "eos_token" in named else "none is named"
        )
        raise DataError(
            f"--tokenizer-model {file or folder} needs a token that ends documents, but {problem}: give one of its "
            f'tokens as "eos_token" in {folder / "tokenizer_config.json"}.'
        )
    known = {role: number for role in named if (number := token_id(role)) is not None}
    if not adds_tokens:
        pipeline.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return HuggingFaceTokenizer(
        pipeline,
        roles=known,
        eod=eos,
        bos=known.get("bos_token"),
        extra_ids=extra_ids,
        written=found.written if adds_tokens else None,
        cleans_spaces=found.cleans_spaces,
        decoder_start=found.decoder_start_id,
        remarks=found.remarks,
    )


def _find(tokenizer_model: str | None) -> tuple[Path, Path | None]:
    """The folder that the flag names, and its tokenizer.json if there is one."""
    if tokenizer_model is None:
        raise ConfigError(f"{KIND} needs --tokenizer-model: the path of a tokenizer.json or of its folder.")
    refuse_url(tokenizer_model, flag="--tokenizer-model")
    path = Path(tokenizer_model)
    if has_file(path, error=DataError):
        return (path.parent, path) if path.name not in VOCABULARY_FILES else (path.parent, None)
    if not path.is_dir():
        raise DataError(
            f"--tokenizer-model {tokenizer_model} does not exist, and nothing is downloaded from the Hugging Face hub: "
            "fetch it (hf download NAME --local-dir FOLDER) and give the folder."
        )
    file = path / "tokenizer.json"
    return path, file if has_file(file, error=DataError) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """Role -> spelling, e.g. ``eos_token`` -> ``</s>``; tokenizer_config.json takes precedence."""
    roles: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not has_file(path, error=DataError):
            continue
        for role, value in read_json(path, dict[str, Any], error=DataError).items():
            word = value.get("content") if isinstance(value, dict) else value
            if isinstance(word, str):
                roles[role] = word
    return roles
