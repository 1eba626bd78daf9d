"""Flags of other programs' preprocessing (Megatron-LM's older versions, Megatron-DeepSpeed, GPT-NeoX, NeMo).

Each is taken as another flag, ignored with a remark, or refused with the reason.
"""

from __future__ import annotations

from megatron.config.legacy_flags import LegacyFlag

_OLD_FORMAT = "only the mmap format is written and read; leave it out"
_PADDED_LATER = "the data does not depend on vocabulary padding, which training does"
_CHANGES_TEXT = "text is tokenized unchanged; transform it before preprocessing"

# field -> flags that set it
_RENAMED = {
    "vocab_file": "vocab",
    "tokenizer_model": "tokenizer-name-or-path tokenizer-model-path",
    "json_keys": "jsonl-keys json-key",
    "merge_file": "bpe-merge-file",
}
# flags without dashes, and why they have no effect
_IGNORED = (
    ("chunk-size", "workers get about half a megabyte of text at a time"),
    ("num-docs", "progress is counted in bytes of input"),
    ("tokenizer-library", "--tokenizer-type says which library reads the tokenizer"),
    ("mmap-warmup no-mmap need-pad-id", "the output does not depend on it"),
    (
        "make-vocab-size-divisible-by pad-vocab-size-to padded-vocab-size extra-vocab-size "
        "tensor-model-parallel-size model-parallel-size",
        _PADDED_LATER,
    ),
    ("preproc-folder", "--input may name a folder"),
    ("find-optimal-num-workers workers-to-check max-documents", "the default of --workers is one per core"),
)
_REFUSED = (
    ("ftfy apply-ftfy", _CHANGES_TEXT),
    ("files-filter", "give a glob in quotes as --input"),
    (
        "append-bos prepend-bos append-bod prepend-space",
        "HuggingFaceTokenizer adds these tokens if its tokenizer.json says so",
    ),
    ("presplit-sentences", "give lines of JSON, and --split-sentences to split sentences"),
    ("dataset-impl", _OLD_FORMAT),
)


def _table() -> dict[str, LegacyFlag]:
    renamed = {
        name: LegacyFlag("renamed", sets={field: None}) for field, names in _RENAMED.items() for name in names.split()
    }
    ignored = {name: LegacyFlag("ignored", word) for names, word in _IGNORED for name in names.split()}
    refused = {name: LegacyFlag("refused", word) for names, word in _REFUSED for name in names.split()}
    mmap = LegacyFlag("ignored", "mmap is the only format")
    refused["dataset-impl"] = LegacyFlag("refused", _OLD_FORMAT, values={"mmap": mmap, "infer": mmap})
    return {f"--{name}": legacy for name, legacy in {**renamed, **ignored, **refused}.items()}


PREPROCESSING_FLAGS: dict[str, LegacyFlag] = _table()
