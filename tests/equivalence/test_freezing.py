"""The rows of the table with frozen parameters: what stays as it was, and everything else, at layouts of every kind."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from megatron.core.distributed.parameter_policy import matches
from megatron.core.parallel.context import ParallelContext
from megatron.core.transformer.block import RecomputePlan
from megatron.training.evaluation.parity import Observed, logical
from tests.equivalence.test_equivalence import LLAMA, SMALL, STILL, check, train_at
from tests.equivalence.training import Layout, train
from tests.tiers import pairs

FULL, SELECTIVE = RecomputePlan("full"), RecomputePlan("selective")
ZERO: dict[str, Any] = {"dp": 2, "sharded": True, "overlap": True, "bucket_size": 1000}
TENSOR: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
VEE: dict[str, Any] = {"pp": 2, "chunks": 2, "schedule": "zb-v"}
FIVE: dict[str, Any] = {"num_layers": 5}

EMBEDDING = ("embedding.*",)
FIRST_HALF = ("embedding.*", "decoder.layers.[012].*")
LAST_HALF = ("decoder.layers.[34].*", "decoder.final_layernorm.*", "output_layer.*")

"""What is frozen, of which model: ends and middles, whole stages, the tied matrix, and parts of every layer."""
VARIANTS: dict[str, dict[str, Any]] = {
    "embedding": SMALL | STILL | FIVE | {"freeze": EMBEDDING, "untie_embeddings_and_output_weights": True},
    "tied embedding": SMALL | STILL | FIVE | {"freeze": ("embedding.word_embeddings.weight",)},
    "first half": LLAMA | STILL | FIVE | {"freeze": FIRST_HALF},
    "last half": LLAMA | STILL | FIVE | {"freeze": LAST_HALF},
    "matrices": SMALL | STILL | FIVE | {"freeze": ("*.linear_*.weight", "embedding.*")},
    "norms and biases": SMALL | STILL | FIVE | {"freeze": ("*layernorm*", "*.bias")},
    "all but the head": LLAMA | STILL | FIVE | {"freeze": ("[!o]*",)},
    "all but positions": SMALL | STILL | FIVE | {"freeze": ("decoder.*", "embedding.word_embeddings.*")},
    "t5's encoder": SMALL | STILL | {"family": "t5", "num_layers": 3, "freeze": ("encoder.*", "embedding.*")},
    "all but the gates, which have a loss of their own": LLAMA
    | STILL
    | {"family": "gated", "num_layers": 4, "freeze": ("embedding.*", "output_layer.*", "*layernorm*", "*.linear_*")},
    "gates": LLAMA | STILL | {"family": "gated", "num_layers": 4, "freeze": ("embedding.*", "*.gated_mlp.*")},
    "embedding, with other learning rates of layers": LLAMA
    | STILL
    | FIVE
    | {"freeze": EMBEDDING, "lr_multipliers": ("decoder.layers.[02].*=0.3", "*.weight=1.7")},
    "bert's body": SMALL | STILL | FIVE | {"family": "bert", "freeze": ("embedding.*", "encoder.*")},
}
LAYOUTS: dict[str, Layout] = {
    "one rank, recompute full": Layout(recompute=FULL),
    "tp2 sp dp2 zero, recompute full": Layout(**TENSOR, **ZERO, recompute=FULL),
    "cp2 tp2": Layout(cp=2, tp=2, recompute=SELECTIVE),
    "pp4": Layout(pp=4),
    "pp2 vpp2 dp2 zero": Layout(pp=2, chunks=2, schedule="interleaved", **ZERO, recompute=FULL),
    "pp2 zb-h1": Layout(pp=2, schedule="zb-h1", micro_batch_size=1, recompute=FULL),
    "pp2 zb-v dp2 zero": Layout(**VEE, **ZERO),
    "pp2 zb-h1, accumulation fused": Layout(
        pp=2, schedule="zb-h1", micro_batch_size=1, recompute=FULL, fuses_accumulation=True
    ),
    "tp2 sp pp2 dp2 zero": Layout(**TENSOR, pp=2, **ZERO, recompute=FULL),
    "tp2 pp2 zb-h1 dp2 zero": Layout(tp=2, pp=2, schedule="zb-h1", **ZERO, recompute=SELECTIVE),
    "tp2 sp pp2 zb-v dp2 zero": Layout(**TENSOR, **VEE, **ZERO, recompute=FULL),
}


@functools.cache
def reference(variant: str) -> Observed:
    """Three steps on one rank."""
    return train(ParallelContext.single(dtype=torch.float64), VARIANTS[variant], Layout())


@pytest.mark.parametrize(
    ("variant", "layout"),
    pairs(
        VARIANTS,
        LAYOUTS,
        rich=("tp2 sp dp2 zero, recompute full", "pp2 zb-v dp2 zero", "cp2 tp2"),
        # Their parts are above, and the last is the same eight ranks with a harder schedule.
        slow=("tp2 sp pp2 dp2 zero", "tp2 pp2 zb-h1 dp2 zero"),
    ),
)
def test_layouts_train_what_is_not_frozen(variant: str, layout: str) -> None:
    """A frozen weight cut the gradient of what is before it (sequence parallelism gathered without autograd), got a
    gradient of its own, or took part in a collective of some ranks alone.
    """
    freeze, outcomes = VARIANTS[variant]["freeze"], train_at(VARIANTS[variant], LAYOUTS[layout])
    check(outcomes, [reference(variant)])
    initial, weights = logical(outcomes, "initial"), logical(outcomes, "weights")
    frozen = {name for name in initial if matches(name, freeze)}
    assert frozen and frozen.isdisjoint(logical(outcomes, "gradients"))
    assert frozen == {name for name in initial if torch.equal(initial[name], weights[name])}
