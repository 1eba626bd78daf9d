"""RoBERTa, and the types that differ from it in name alone: the original BERT's layers, and a head of its own.

Positions are counted from the padding id on, so that id says which row of the table is position 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from megatron.config.model import ModelConfig
from megatron.core.conversion.bounds import Count
from megatron.core.conversion.huggingface.config_reader import ConfigReader
from megatron.core.conversion.tables import Row
from megatron.core.models.bert.huggingface import bert
from megatron.small_files import Between


def _read(reader: ConfigReader) -> dict[str, int]:
    """The positions, and the rows before them."""
    offset, rows = reader("pad_token_id") + 1, reader("max_position_embeddings")
    if rows <= offset:
        raise reader.refuse(
            "max_position_embeddings", f"positions begin at row pad_token_id + 1 = {offset} of the table"
        )
    return {"position_embedding_offset": offset, "max_position_embeddings": rows - offset}


def _written(model: ModelConfig) -> dict[str, Any]:
    """Rows of the table, and the padding id."""
    offset = model.position_embedding_offset
    return {"max_position_embeddings": model.max_position_embeddings + offset, "pad_token_id": offset - 1}


_ORIGINAL = bert.TYPES["bert"]
ROBERTA = replace(
    _ORIGINAL,
    architecture="Roberta",
    table=(
        *bert.body("roberta", pre_norm=False),
        Row("lm_head.dense", "lm_head.dense"),
        Row("lm_head.layer_norm", "lm_head.layer_norm"),
    ),
    settings={ours: theirs for ours, theirs in _ORIGINAL.settings.items() if ours != "max_position_embeddings"},
    by_code=("position_embedding_offset",),
    defaults={**_ORIGINAL.defaults, "pad_token_id": 1},
    kinds={
        **_ORIGINAL.kinds,
        "max_position_embeddings": Count,
        "pad_token_id": Annotated[int, Between(0, 1023)],
    },
    read=_read,
    write=_written,
    refuse=lambda model: [] if model.position_embedding_offset else ["positions begin at the first row of their table"],
    prefix="roberta.",
    heads=("lm_head.",),
    about=(
        "RoBERTa, here with --apply-residual-connection-post-layernorm --bert-no-binary-head --num-tokentypes 1; tied "
        "or not"
    ),
    example="FacebookAI/roberta-base",
    **bert.output("lm_head"),
)
TYPES = {
    "roberta": ROBERTA,
    "xlm-roberta": replace(
        ROBERTA, architecture="XLMRoberta", about="XLM-RoBERTa, as roberta", example="FacebookAI/xlm-roberta-base"
    ),
    "camembert": replace(
        ROBERTA, architecture="Camembert", about="CamemBERT, as roberta", example="almanach/camembert-base"
    ),
}
