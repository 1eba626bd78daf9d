"""Record the golden loss curves anew: ``python -m tests.golden.regenerate_curves``. Review the change as a diff."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.commands import losses, run
from tests.mock_data import WHOLE

CURVES = Path(__file__).with_name("curves.json")

COMMON = (
    "--seq-length 64 --micro-batch-size 4 --global-batch-size 8 --mock-data --vocab-size 500 --train-iters 30 "
    "--lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 5 --min-lr 3e-4 --log-interval 1 --eval-iters 0 "
    "--num-workers 0"
)
RECIPES = {
    "gpt": f"{COMMON} --num-layers 2 --hidden-size 64 --num-attention-heads 4",
    "gpt, llama-like": (
        f"{COMMON} --num-layers 2 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
        "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
    ),
    "bert": f"{COMMON} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --lr 1e-2",
    "bert, original": (
        f"{COMMON} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --lr 1e-2 --exact-gelu "
        "--apply-residual-connection-post-layernorm --bert-no-binary-head --attention-dropout 0 --hidden-dropout 0 "
        "--init-method-std 0.05"
    ),
    "t5": (
        f"{COMMON} --num-layers 2 --hidden-size 64 --num-attention-heads 4 --decoder-seq-length 32 "
        "--position-embedding-type relative --relu --disable-bias-linear"
    ),
}


def curve(name: str) -> list[float]:
    """Loss of every iteration of a train spec, from the log of its family's command."""
    family, _, _ = name.partition(",")
    return [float(loss) for loss in losses(run(f"pretrain_{family}.py", RECIPES[name], documents=WHOLE)).values()]


if __name__ == "__main__":
    CURVES.write_text(json.dumps({name: curve(name) for name in RECIPES}, indent=1) + "\n")
