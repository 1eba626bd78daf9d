"""Turn text into the token files that training reads.

Every key of --json-keys becomes PREFIX_KEY_document.bin, .idx and .meta.json (PREFIX_KEY_sentence with
--split-sentences). The files appear when they are complete, with the same bytes for any number of workers; memory does
not grow with the input. After an interruption, the same command continues from its last finished shard. Several
machines write the same bytes: with --shard and --merge-shards (a Slurm job array), or with --ray.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import dataclasses
import signal
from collections.abc import Sequence

from megatron.config.parse import parse_groups
from megatron.config.preprocessing_flags import PREPROCESSING_FLAGS
from megatron.config.tokenizer import TokenizerConfig
from megatron.errors import run_command
from megatron.preprocessing.run import preprocess
from megatron.preprocessing.settings import PreprocessConfig


def main(argv: Sequence[str]) -> int:
    """Tokenize the input that the command line names."""
    config, tokenizer_config = parse_groups(
        argv,
        PreprocessConfig,
        TokenizerConfig,
        prog="preprocess_data.py",
        about=__doc__ or "",
        legacy=PREPROCESSING_FLAGS,
    )
    if tokenizer_config.tokenizer_type is None:
        tokenizer_config = dataclasses.replace(tokenizer_config, tokenizer_type="GPT2BPETokenizer")
    kind = tokenizer_config.tokenizer_type
    if tokenizer_config.vocab_size and not (kind or "").startswith(("Null", "Tik", "BertWordPiece")):
        print(f"--vocab-size has no effect: {kind} knows its own", file=sys.stderr)
    preprocess(config, tokenizer_config)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that unfinished files are removed
    run_command(lambda: main(sys.argv[1:]))
