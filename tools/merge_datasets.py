"""Join all data sets of a folder, in the order of their names, into one.

Data for fine-tuning, of tools/preprocess_sft.py, are joined with their targets.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.core.datasets.build import targets_prefix
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.indexed_format import bin_path, idx_path
from megatron.core.datasets.metadata import DatasetMetadata, TokenizerStamp
from megatron.core.tokenizers.chat_settings import ChatSettings, common_settings
from megatron.errors import DataError, run_command
from megatron.small_files import has_file


def main(argv: Sequence[str]) -> int:
    """Merge, and print counts."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", type=Path, required=True, metavar="DIR", help="folder of .bin and .idx pairs")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="start of the names of the new files")
    parser.add_argument("--multimodal", action="store_true", help="the data sets hold a mode for each sequence")
    arguments = parser.parse_args(argv)
    found = find_prefixes(arguments.input, output_prefix=arguments.output_prefix)
    for prefix in found:
        metadata = DatasetMetadata.read(prefix)
        if metadata is not None and metadata.num_images is not None:
            raise DataError(
                f"{prefix} in --input has places of images, which are not merged: blend such data in training, with "
                "--data-path PREFIX PREFIX ..."
            )
    targets = [targets_prefix(prefix) for prefix in found if targets_prefix(prefix) in found]
    prefixes = [prefix for prefix in found if prefix not in targets]
    lacking = [prefix for prefix in prefixes if targets and targets_prefix(prefix) not in targets]
    if lacking:
        raise DataError(
            f"{', '.join(lacking)} in --input has no targets, and the others have: data for fine-tuning are merged "
            "with their _targets files; copy those, or move what is other data out of the folder"
        )
    merged = merge(prefixes, arguments.output_prefix, multimodal=arguments.multimodal)
    if targets:
        merge(targets, targets_prefix(arguments.output_prefix), multimodal=False)
    print(
        f"wrote {arguments.output_prefix}.{{bin,idx,meta.json}}{' and their targets' if targets else ''}: "
        f"{len(prefixes)} data sets, {merged.num_documents:,} documents, {merged.num_sequences:,} sequences, "
        f"{merged.num_tokens:,} tokens"
    )
    return 0


def find_prefixes(folder: Path, *, output_prefix: str) -> list[str]:
    """Prefixes of all pairs in ``folder``, sorted; DataError when there are none or a pair is incomplete."""
    if not folder.is_dir():
        raise DataError(f"--input {folder} is not a folder: give the folder of the .bin and .idx files to merge")
    found = sorted({str(path.with_suffix("")) for path in folder.iterdir() if path.suffix in (".bin", ".idx")})
    if not found:
        raise DataError(f"--input {folder} holds no .bin and .idx files: give the folder of the data sets to merge")
    paths = [path for prefix in found for path in (bin_path(prefix), idx_path(prefix))]
    lacking = [path for path in paths if not has_file(path, error=DataError)]
    if lacking:
        raise DataError(
            f"{', '.join(map(str, lacking))} missing from --input: a data set is a .bin and an .idx file; "
            "copy what is missing, or move the other half out of the folder"
        )
    if Path(output_prefix).resolve() in [Path(prefix).resolve() for prefix in found]:
        raise DataError(f"--output-prefix {output_prefix} is one of the data sets to merge: choose another name")
    return found


def merge(prefixes: Sequence[str], output_prefix: str, *, multimodal: bool) -> DatasetMetadata:
    """Write the documents of all ``prefixes`` end to end; DataError when types or tokenizers differ."""
    datasets = [IndexedDataset(prefix, multimodal=multimodal) for prefix in prefixes]
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{dataset.prefix} holds {dataset.dtype} tokens and {first.prefix} {first.dtype}: "
                "only data sets of one type can be merged; preprocess one of them again with the other's tokenizer"
            )
        metadata = DatasetMetadata.read(dataset.prefix)
        if metadata is not None and metadata.sha256 is not None:  # damaged data must not get a new digest
            metadata.check_content(dataset.prefix, dataset.digests())
    chat = common_chat(prefixes)
    with IndexedDatasetWriter(
        output_prefix, first.dtype, multimodal=multimodal, tokenizer=common_tokenizer(prefixes)
    ) as writer:
        writer.chat = chat
        for dataset in datasets:
            writer.add_dataset(dataset)
    return writer.metadata()


def common_chat(prefixes: Sequence[str]) -> ChatSettings | None:
    """How the conversations of all data sets are written; None for other data; DataError when two differ.

    Of two with one format, some answers of one may end otherwise, as with the mark of another turn: all ends are kept.
    """
    settings = {prefix: found.chat for prefix in prefixes if (found := DatasetMetadata.read(prefix)) is not None}
    templates = {prefix: each.template for prefix, each in settings.items() if each and each.template is not None}
    first = next(iter(templates), "")
    for prefix, template in templates.items():
        if template != templates[first]:
            raise DataError(
                f"{first} and {prefix} have conversations in two chat formats: preprocess one of them again with the "
                "other's --chat-template, or --turn-start and --turn-end (tools/inspect_dataset.py shows the formats)"
            )
    return common_settings(settings)[0]


def common_tokenizer(prefixes: Sequence[str]) -> TokenizerStamp | None:
    """The tokenizer that all data sets name; None when some name none; DataError when two differ."""
    stamps = {}
    for prefix in prefixes:
        metadata = DatasetMetadata.read(prefix)
        stamps[prefix] = metadata.tokenizer if metadata else None
    known = {prefix: stamp for prefix, stamp in stamps.items() if stamp is not None}
    if not known:
        return None
    (first, stamp), *others = known.items()
    for prefix, other in others:
        if other.fingerprint != stamp.fingerprint:
            raise DataError(
                f"{first} was tokenized with {stamp} and {prefix} with {other}: ids of two tokenizers can't be mixed; "
                "preprocess one of them again"
            )
    unknown = [prefix for prefix, each in stamps.items() if each is None]
    if unknown:
        print(f"the tokenizer of {', '.join(unknown)} is not known, so the merged data has none", file=sys.stderr)
    return None if unknown else stamp


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
