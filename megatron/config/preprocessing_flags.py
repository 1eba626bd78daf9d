"""Flags of other programs' preprocessing (Megatron-LM's older versions, Megatron-DeepSpeed, GPT-NeoX, NeMo).

Each is taken as another flag, ignored with a remark, or refused with the reason.
"""

from __future__ import annotations

from megatron.config.legacy_flags import LegacyFlag, legacy_table

_MMAP = LegacyFlag("ignored", "mmap is the only format")

PREPROCESSING_FLAGS = legacy_table(
    {
        "vocab_file": "vocab",
        "tokenizer_model": "tokenizer-name-or-path tokenizer-model-path",
        "json_keys": "jsonl-keys json-key",
        "merge_file": "bpe-merge-file",
    },
    {
        "dataset-impl": LegacyFlag(
            "refused",
            "only the mmap format is written and read; leave it out",
            values={"mmap": _MMAP, "infer": _MMAP},
        )
    },
    ignored="""
workers get about half a megabyte of text at a time
    chunk-size
progress is counted in bytes of input
    num-docs
--tokenizer-type says which library reads the tokenizer
    tokenizer-library
the output does not depend on it
    mmap-warmup no-mmap need-pad-id
the data does not depend on vocabulary padding, which training does
    make-vocab-size-divisible-by pad-vocab-size-to padded-vocab-size extra-vocab-size tensor-model-parallel-size
    model-parallel-size
--input may name a folder
    preproc-folder
the default of --workers is one per core
    find-optimal-num-workers workers-to-check max-documents
""",
    refused="""
text is tokenized unchanged; transform it before preprocessing
    ftfy apply-ftfy
give a glob in quotes as --input
    files-filter
HuggingFaceTokenizer adds these tokens if its tokenizer.json says so
    append-bos prepend-bos append-bod prepend-space
give lines of JSON, and --split-sentences to split sentences
    presplit-sentences
""",
)
