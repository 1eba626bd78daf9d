"""A published tokenizer from its folder: the pipeline, and the spellings of its roles."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from megatron.core.tokenizers.published.classes import AS_WRITTEN, CLASSES, Surrounds, TokenizerClass
from megatron.core.tokenizers.published.folder import STANDARD_ROLES, TokenizerFolder, read_folder
from megatron.core.tokenizers.published.library import (
    check_charsmap,
    check_encoding,
    panics_as_errors,
    parsed_pipeline,
)
from megatron.core.tokenizers.published.pipelines import PARTS, parts_of_ranks, parts_of_sentencepiece, role_of
from megatron.core.tokenizers.published.vocabularies import Vocabulary, read_vocabulary
from megatron.core.tokenizers.rust import MOST_HOLES
from megatron.errors import DataError

_PROBES = (
    "A text,  with 12345 words\n\n and\tsigns: it's (we'll see) ``x'' \u00e9e\u0301 \ufb01 \u6f22\u5b57 \U0001f389!  ",
    "x\n",
    "",
)
_PLAIN = TokenizerClass(parts="", model="BPE", vocabulary=(), model_types=())  # adds nothing to what files say


@dataclass(frozen=True)
class Published:
    """A tokenizer as its folder says.

    ``written``: the tokenizer.json as it is, where it gives the same ids, so that one tokenizer has one description.
    ``roles``: spellings in the vocabulary by role. ``unlisted``: roles whose tokens are no others.
    ``cleans_spaces``: whether texts lose spaces before signs.
    """

    pipeline: tokenizers.Tokenizer
    written: tokenizers.Tokenizer | None
    roles: Mapping[str, str]
    unlisted: frozenset[str]
    cleans_spaces: bool
    decoder_start_id: int | None
    remarks: tuple[str, ...] = ()


def build_published(path: Path, pipeline_file: Path | None) -> Published:
    """The tokenizer of the folder ``path``; ``pipeline_file``: its tokenizer.json, if there is one.

    Raises DataError for files that are damaged, missing or of a class that isn't supported.
    """
    folder, where = read_folder(path, pipeline_file), f"--tokenizer-model {pipeline_file or path}"
    described = CLASSES.get(folder.tokenizer_class, _PLAIN)
    vocabulary = None if pipeline_file is not None else read_vocabulary(path, folder.tokenizer_class)
    folder = _with_model_roles(folder, vocabulary)
    if folder.written is not None and folder.tokenizer_class == AS_WRITTEN:
        pipeline = parsed_pipeline(folder.written, where=where)
    else:
        pipeline = parsed_pipeline(json.dumps(_description(folder, described, vocabulary, where)), where=where)
    named = _named(folder, described, pipeline)
    listed = {*pipeline.get_vocab(with_added_tokens=True), *map(str, folder.added), *map(str, folder.further or ())}
    with panics_as_errors(f"{where} has tokens that cannot be added"):
        _add_tokens(pipeline, folder, described, named, vocabulary)
        _surround(pipeline, folder, described, named, where)
        pipeline.encode_special_tokens = folder.switch("split_special_tokens", default=False)
    check_encoding(pipeline, where=where)
    is_same = folder.pipeline is not None and _encodes_alike(pipeline, folder.pipeline)
    is_rebuilt = folder.pipeline is not None and folder.tokenizer_class != AS_WRITTEN
    return Published(
        pipeline=pipeline,
        written=folder.pipeline if is_same else None,
        roles={role: str(token) for role, token in named.items() if pipeline.token_to_id(str(token)) is not None},
        unlisted=frozenset(role for role, token in named.items() if str(token) not in listed),
        cleans_spaces=_cleans_spaces(folder, pipeline),
        decoder_start_id=folder.decoder_start_id,
        remarks=(_other_cut(folder, where),) if is_rebuilt and not is_same else (),
    )


def _with_model_roles(folder: TokenizerFolder, vocabulary: Vocabulary | None) -> TokenizerFolder:
    """The folder with roles and special tokens that its SentencePiece model alone names."""
    found = vocabulary.sentencepiece if vocabulary is not None else None
    if found is None:
        return folder
    if folder.tokenizer_class == AS_WRITTEN:
        folder = replace(folder, roles={**found.roles, **folder.roles})
    if folder.is_older_list:
        special = [piece for piece in found.pieces if piece.is_control or piece.is_symbol]
        tokens = (AddedToken(piece.text, normalized=False, special=piece.is_control) for piece in special)
        folder = replace(folder, further=tuple(tokens))
    return folder


def _description(
    folder: TokenizerFolder, described: TokenizerClass, vocabulary: Vocabulary | None, where: str
) -> dict[str, Any]:
    """The tokenizer.json of a class that builds its own, without tokens outside the vocabulary."""
    charsmap, surrounds = None, None
    if vocabulary is None:
        written = json.loads(folder.written or "{}")
        vocabulary, charsmap = Vocabulary(_model_of(written, folder)), _charsmap_of(written.get("normalizer"))
        surrounds = written.get("post_processor")
    elif vocabulary.sentencepiece is not None and vocabulary.sentencepiece.charsmap:
        charsmap = base64.b64encode(vocabulary.sentencepiece.charsmap).decode()
        check_charsmap(charsmap, where=where)
    if vocabulary.is_ranks:
        parts = parts_of_ranks()
    elif folder.tokenizer_class == AS_WRITTEN:
        parts = parts_of_sentencepiece(vocabulary, charsmap)
    else:
        parts = PARTS[described.parts](folder, charsmap)
    model = {**vocabulary.model, **parts.model}
    if vocabulary.sentencepiece is not None:
        model["vocab"] = _arranged(model["vocab"], folder, described)
    if described.unk_id is not None:
        names = [piece for piece, _ in model["vocab"]] if described.is_unk_by_name else []
        unk = role_of(folder, "unk_token", described.roles["unk_token"])
        model["unk_id"] = names.index(unk) if unk in names else described.unk_id
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": surrounds,
        "decoder": parts.decoder,
        "model": model,
    }


def _model_of(written: Mapping[str, Any], folder: TokenizerFolder) -> dict[str, Any]:
    """Vocabulary and merges of a tokenizer.json; DataError where they are of another kind than its class has."""
    assert folder.pipeline is not None, "there is a tokenizer.json"
    kind, wanted = type(folder.pipeline.model).__name__, CLASSES[folder.tokenizer_class].model
    if kind != wanted:
        raise DataError(
            f"{folder.path} holds a tokenizer.json of {kind}, but its files name {folder.tokenizer_class}, which is a "
            f'{wanted}: to use the file as it is, write "tokenizer_class": "{AS_WRITTEN}" in tokenizer_config.json.'
        )
    return {"type": kind, **{name: written["model"][name] for name in ("vocab", "merges") if name in written["model"]}}


def _charsmap_of(normalizer: Any) -> str | None:
    """The first compiled normalization rules in a tokenizer.json."""
    steps = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    maps = (each.get("precompiled_charsmap") for each in steps if each.get("type") == "Precompiled")
    return next(maps, None)


def _arranged(vocab: Any, folder: TokenizerFolder, described: TokenizerClass) -> Any:
    """The vocabulary of a SentencePiece model with the pieces that its class puts in other places or adds."""
    if described.has_sentinels:
        numbers = reversed(range(folder.num_extra_ids(len(vocab))))
        return [*vocab, *([f"<extra_id_{number}>", 0.0] for number in numbers)]
    if described.arrangement is not None:
        first, last = (
            [[role_of(folder, each, described.roles.get(each, each)), 0.0] for each in pieces]
            for pieces in (described.arrangement.first, described.arrangement.last)
        )
        return [*first, *vocab[described.arrangement.replaced :], *last]
    if folder.tokenizer_class == AS_WRITTEN and "added_tokens_decoder" in folder.settings:
        return _renamed(vocab, folder)
    return vocab


def _renamed(vocab: Any, folder: TokenizerFolder) -> Any:
    """The vocabulary with placeholders spelled as ``added_tokens_decoder`` spells their ids."""
    if not isinstance(vocab, dict):
        return vocab
    spelled = {number: piece for piece, number in vocab.items()}
    for number, token in folder.added_by_id.items():
        if number in spelled and str(token) not in vocab:
            vocab[str(token)] = vocab.pop(spelled[number])
    return vocab


def _named(
    folder: TokenizerFolder, described: TokenizerClass, pipeline: tokenizers.Tokenizer
) -> dict[str, str | AddedToken]:
    """Tokens by role, standard roles first: those that files name, and those of the class that the vocabulary has."""
    listed = set(map(str, folder.added))
    usual = {
        role: word for role, word in described.roles.items() if word in listed or pipeline.token_to_id(word) is not None
    }
    found = {**usual, **folder.roles}
    order = [*STANDARD_ROLES, *(role for role in found if role not in STANDARD_ROLES)]
    return {role: token for role in order if (token := found.get(role)) is not None}


def _add_tokens(
    pipeline: tokenizers.Tokenizer,
    folder: TokenizerFolder,
    described: TokenizerClass,
    named: Mapping[str, str | AddedToken],
    vocabulary: Vocabulary | None,
) -> None:
    """Add listed tokens, then roles, then further special tokens, unless they are tokens already."""
    if vocabulary is not None and vocabulary.is_ranks:
        _fill_ranks(pipeline, folder)
    words = {str(token) for token in named.values()}
    known = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    tokens = list[AddedToken]()
    for token in folder.added:
        tokens.append(_special(token) if not token.special and str(token) in words else token)
        known.add(str(token))
    for each in (*named.values(), *_further(folder, described, pipeline)):
        if str(each) not in known:
            known.add(str(each))
            tokens.append(_special(each) if isinstance(each, str) or str(each) in words else each)
    pipeline.add_tokens(tokens)
    if described.repeats_roles == "plain":
        pipeline.add_tokens([AddedToken(str(each), special=True) for each in named.values()])
    if described.repeats_roles == "special":
        pipeline.add_special_tokens([_special(each) if isinstance(each, str) else each for each in named.values()])


def _special(token: str | AddedToken) -> AddedToken:
    """A token as a special one."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(token.content, special=True, **flags)


def _further(
    folder: TokenizerFolder, described: TokenizerClass, pipeline: tokenizers.Tokenizer
) -> Iterator[str | AddedToken]:
    """Special tokens without a role: those of the files, or those of the class that the vocabulary has."""
    listed = folder.further or ()
    yield from listed
    usual = described.further if folder.further is None else ()
    if described.has_sentinels and folder.is_older_list and not any("<extra_id_" in str(each) for each in listed):
        usual = tuple(f"<extra_id_{number}>" for number in range(folder.num_extra_ids(0)))
    yield from (each for each in usual if pipeline.token_to_id(each) is not None)


def _fill_ranks(pipeline: tokenizers.Tokenizer, folder: TokenizerFolder) -> None:
    """Add the tokens behind a tiktoken file's ranks, with placeholders for ids that no file names."""
    size, by_id = pipeline.get_vocab_size(), {number: str(token) for number, token in folder.added_by_id.items()}
    if (last := max(by_id, default=0)) > size + MOST_HOLES:
        raise DataError(
            f"{folder.path / 'tokenizer_config.json'} gives {by_id[last][:40]!r} the id {last}, but the vocabulary has "
            f"{size} tokens: the id is wrong, or the vocabulary's file is another model's."
        )
    words = [by_id.get(number, f"<|reserved_token_{number}|>") for number in range(size, last + 1)]
    words += [str(each) for each in folder.further or () if str(each) not in words]
    pipeline.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in words])


def _surround(
    pipeline: tokenizers.Tokenizer,
    folder: TokenizerFolder,
    described: TokenizerClass,
    named: Mapping[str, str | AddedToken],
    where: str,
) -> None:
    """Set what stands before and behind each text, where settings or the class say it."""
    is_set = folder.settings.keys() & {"add_bos_token", "add_eos_token"}
    surrounds = described.surrounds
    if surrounds is not None and not surrounds.always and (pipeline.post_processor is not None or is_set):
        surrounds = None
    if surrounds is None:
        if not (is_set or described.resets or pipeline.post_processor is None):
            return
        begins = folder.switch("add_bos_token", default=described.begins) and "bos_token" in named
        ends = folder.switch("add_eos_token", default=False) and "eos_token" in named
        surrounds = Surrounds("bos_token" if begins else None, "eos_token" if ends else None)
    needed = [role for role in (surrounds.before, surrounds.behind) if role is not None]
    words = {role: str(named[role]) for role in needed if role in named}
    for role in needed:
        if role not in words or pipeline.token_to_id(words[role]) is None:
            raise DataError(f"{where} is of {folder.tokenizer_class}, which needs a {role} in its vocabulary.")
    single, pair = surrounds.template(words)
    ids = [(word, pipeline.token_to_id(word)) for word in dict.fromkeys(words.values())]
    pipeline.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def _encodes_alike(pipeline: tokenizers.Tokenizer, written: tokenizers.Tokenizer) -> bool:
    """Whether two pipelines give the same ids to texts without special tokens and without a space before them."""
    try:
        found, expected = (each.encode_batch_fast(list(_PROBES)) for each in (pipeline, written))
    except Exception:  # a word that one of them cannot encode
        return False
    return [each.ids for each in found] == [each.ids for each in expected]


def _other_cut(folder: TokenizerFolder, where: str) -> str:
    return (
        f"{where} cuts text otherwise than {folder.tokenizer_class}, which its folder names: the latter counts, as for "
        f'transformers 5; to use the file as it is, write "tokenizer_class": "{AS_WRITTEN}" in tokenizer_config.json'
    )


def _cleans_spaces(folder: TokenizerFolder, pipeline: tokenizers.Tokenizer) -> bool:
    """Whether decoded texts lose spaces before signs; those of BPE keep them unless a second setting insists."""
    insists = folder.switch("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", default=False)
    is_bpe = isinstance(pipeline.model, tokenizers.models.BPE)
    return folder.switch("clean_up_tokenization_spaces", default=False) and (insists or not is_bpe)
