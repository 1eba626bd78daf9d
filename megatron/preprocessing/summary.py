"""What a run says at its end, in lines and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.datasets.journal import Totals
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.files.durable import put_text, write_errors
from megatron.core.files.remote_path import path_of
from megatron.errors import enumeration
from megatron.preprocessing.preparation import Preparation
from megatron.preprocessing.progress import Progress
from megatron.preprocessing.settings import PreprocessConfig

PERCENTILES = (0, 10, 50, 90, 99, 100)


def summarize(
    config: PreprocessConfig,
    prepared: Preparation,
    totals: Totals,
    outputs: Mapping[str, DatasetMetadata],
    *,
    progress: Progress,
    engines: Sequence[str] = (),
) -> None:
    """Print what was written, and store it as JSON. ``outputs``: by key; ``engines``: of other machines."""
    dtype, rules, stamp, engine = prepared.encoding.dtype, prepared.encoding.sentences, prepared.stamp, prepared.engine
    print(f"documents    {totals.documents:,}" + (f" ({totals.empty:,} empty texts)" if totals.empty else ""))
    if totals.bad:
        print(f"bad lines    {totals.bad:,} left out")
    if rules:
        print(f"sentences    by {rules.origin}")
    if engines:
        print(f"joined       {progress.rates(totals)}, encoded by {enumeration(engines)}")
    else:
        print(f"rate         {progress.rates(totals)}, encoded by {engine.name} ({engine.reason})")
    print(f"tokenizer    {stamp.type}, {stamp.vocab_size:,} ids, end of document {stamp.eod}")
    print(f"fingerprint  {stamp.fingerprint}")
    for source, counts in totals.sources.items() if len(totals.sources) > 1 else ():
        found = f"{counts.documents:,} documents, {sum(counts.tokens.values()):,} tokens"
        print(f"source       {source}: {found}" + (f", {counts.bad_lines:,} bad lines" if counts.bad_lines else ""))
    written: dict[str, Any] = {}
    for key, metadata in outputs.items():
        percentiles = dict(zip(PERCENTILES, totals.lengths[key].percentiles(*PERCENTILES)))
        lengths = ", ".join(f"{share}% {length:,}" for share, length in percentiles.items())
        print(
            f"wrote        {config.prefix(key)}.{{bin,idx,meta.json}}: {totals.tokens[key]:,} tokens, {dtype}; "
            f"tokens per document: {lengths}"
        )
        written[config.prefix(key)] = _counts(metadata) | {"tokens_per_document": percentiles}
    path = path_of(f"{config.output_prefix}_summary.json")
    content = {
        "documents": totals.documents,
        "empty_texts": totals.empty,
        "bad_lines": totals.bad,
        "text_bytes": totals.text_bytes,
        "seconds": round(progress.seconds, 3),
        "dtype": dtype,
        "engine": enumeration(engines) if engines else engine.name,
        "sentences": rules.origin if rules else None,
        "tokenizer": dataclasses.asdict(stamp),
        "sources": {source: dataclasses.asdict(counts) for source, counts in totals.sources.items()},
        "outputs": written,
    }
    with write_errors(path):
        put_text(path, json.dumps(content, indent=2) + "\n")


def _counts(metadata: DatasetMetadata) -> dict[str, Any]:
    return {"tokens": metadata.num_tokens, "sequences": metadata.num_sequences, "documents": metadata.num_documents}
