"""Record small checkpoints anew, and the losses with which runs go on from them.

``python -m tests.golden.regenerate_checkpoints``. These checkpoints stand for those that users have: they are only
recorded anew for a train spec that is added, never because they no longer load.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.end_to_end.commands import losses, run
from tests.mock_data import WHOLE

CHECKPOINTS = Path(__file__).with_name("checkpoints")
LOSSES = CHECKPOINTS / "losses.json"

COMMON = (
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 4 --mock-data --vocab-size 60 --num-layers 2 "
    "--hidden-size 16 --num-attention-heads 2 --lr 1e-2 --lr-decay-style cosine --lr-decay-iters 8 --log-interval 1 "
    "--eval-iters 0 --num-workers 0"
)
SAVED_AT, TRAINED_TO = 3, 6
"""The iterations of the checkpoint and of the run that goes on from it."""

NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
"""Ranks of tensor parallelism draw masks of their own, so a run that goes on without it has others."""

RECIPES = {
    "gpt": (NO_DROPOUT, "--tensor-model-parallel-size 2"),
    "gpt-llama-like": (
        "--swiglu --group-query-attention --num-query-groups 1 --position-embedding-type rope --normalization RMSNorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights",
        "--use-distributed-optimizer",
    ),
    "bert": (NO_DROPOUT, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "t5": (
        "--decoder-seq-length 8 --position-embedding-type relative --relu",
        "--pipeline-model-parallel-size 2",
    ),
}
"""Flags of the model, and the layout at which it was saved on two ranks."""


def going_on(name: str, folder: Path, *, layout: str = "", ranks: int = 1) -> list[float]:
    """Losses of the iterations after the checkpoint in ``folder``."""
    family, _, _ = name.partition("-")
    flags = f"{COMMON} {RECIPES[name][0]} {layout} --train-iters {TRAINED_TO}"
    found = losses(run(f"pretrain_{family}.py", flags, "--load", str(folder), ranks=ranks, documents=WHOLE))
    assert list(found) == [*range(SAVED_AT + 1, TRAINED_TO + 1)]
    return [float(loss) for loss in found.values()]


def _record(name: str) -> list[float]:
    model, layout = RECIPES[name]
    family, _, _ = name.partition("-")
    folder = CHECKPOINTS / name
    flags = f"{COMMON} {model} {layout} --train-iters {SAVED_AT}"
    run(f"pretrain_{family}.py", flags, "--save", str(folder), ranks=2, documents=WHOLE)
    return going_on(name, folder, layout=layout, ranks=2)


if __name__ == "__main__":
    recorded = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    for train_spec in RECIPES.keys() - recorded.keys():
        shutil.rmtree(CHECKPOINTS / train_spec, ignore_errors=True)
        recorded[train_spec] = _record(train_spec)
    LOSSES.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
