"""What a run says at its end, in lines and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.datasets.journal import Totals
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.files.durable import replaced_file, write_errors
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
) -> None:
    """Print what was written, and store it as JSON. ``outputs``: by key."""
    dtype, rules, stamp, engine = prepared.encoding.dtype, prepared.encoding.sentences, prepared.stamp, prepared.engine
    print(f"documents    {totals.documents:,}" + (f" ({totals.empty:,} empty texts)" if totals.empty else ""))
    if totals.bad:
        print(f"bad lines    {totals.bad:,} left out")
    if rules:
        print(f"sentences    by {rules.origin}")
    print(f"rate         {progress.rates(totals)}, encoded by {engine.name} ({engine.reason})")
    print(f"tokenizer    {stamp.type}, {stamp.vocab_size:,} ids, end of document {stamp.eod}")
    print(f"fingerprint  {stamp.fingerprint}")
    written: dict[str, Any] = {}
    for key, metadata in outputs.items():
        percentiles = dict(zip(PERCENTILES, totals.lengths[key].percentiles(*PERCENTILES)))
        lengths = ", ".join(f"{share}% {length:,}" for share, length in percentiles.items())
        print(
            f"wrote        {config.prefix(key)}.{{bin,idx,meta.json}}: {totals.tokens[key]:,} tokens, {dtype}; "
            f"tokens per document: {lengths}"
        )
        written[config.prefix(key)] = _counts(metadata) | {"tokens_per_document": percentiles}
    path = Path(f"{config.output_prefix}_summary.json")
    content = {
        "documents": totals.documents,
        "empty_texts": totals.empty,
        "bad_lines": totals.bad,
        "text_bytes": totals.text_bytes,
        "seconds": round(progress.seconds, 3),
        "dtype": dtype,
        "engine": engine.name,
        "sentences": rules.origin if rules else None,
        "tokenizer": dataclasses.asdict(stamp),
        "outputs": written,
    }
    with write_errors(path), replaced_file(path) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _counts(metadata: DatasetMetadata) -> dict[str, Any]:
    return {"tokens": metadata.num_tokens, "sequences": metadata.num_sequences, "documents": metadata.num_documents}
