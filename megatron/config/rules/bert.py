"""Rules about BERT."""

from __future__ import annotations

from megatron.config.run import RunConfig

_SHORTEST = 5  # [CLS] A [SEP] B [SEP]


def samples_have_room(run: RunConfig) -> str | None:
    """Two texts of one token at least."""
    if not run.outline.token_types or run.data.seq_length >= _SHORTEST:
        return None
    return (
        f"--seq-length {run.data.seq_length} leaves no room for two texts between [CLS] and [SEP]; use {_SHORTEST} at "
        "least"
    )


RULES = (samples_have_room,)
