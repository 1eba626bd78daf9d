"""Where a pipeline is cut when its layers differ or don't divide."""

from __future__ import annotations

import itertools
import random
from unittest import mock

from megatron.config.pipeline import stage_sizes
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.costs import Costs
from megatron.planning.estimate import stage_costs
from megatron.planning.stages import even_cut, with_stages
from tests.unit.config.command_lines import parse

SIZES = "--vocab-size 100 --hidden-size 64 --num-attention-heads 4 --mock-data"


def test_even_cut() -> None:
    """The costliest part costs as little as in the best of all cuts, tried one by one."""
    drawn = random.Random(7)
    for _ in range(200):
        costs = [drawn.choice([1.0, 2.0, 3.5, 10.0]) for _ in range(drawn.randint(1, 9))]
        for parts in range(1, len(costs) + 1):
            sizes = even_cut(costs, parts)
            assert len(sizes) == parts and sum(sizes) == len(costs) and min(sizes) > 0
            best = min(
                max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
                for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
            )
            ends = [0, *itertools.accumulate(sizes)]
            found = max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))
            assert abs(found - best) < 1e-9 * best, (costs, parts, sizes)
    assert even_cut([1.0] * 10, 4) in ([2, 3, 2, 3], [3, 2, 3, 2], [2, 3, 3, 2], [3, 2, 2, 3])
    assert sum(even_cut([1.0] * 10_000, 700)) == 10_000


def sizes(words: str, family: str = "gpt") -> list[int]:
    groups = FAMILIES[family].groups
    run = parse(f"{SIZES} {words}", ranks=2, extra_groups=groups)
    return stage_sizes(with_stages(run, FAMILIES[family].train_spec))


def test_even_stages_stay() -> None:
    """Layers that are alike and divide, and what flags ask for, are not cut anew, however large the output is."""
    layers = "--num-layers 4 --pipeline-model-parallel-size 2 --vocab-size 10000"
    assert sizes(layers) == [2, 2]
    assert sizes(f"{layers} --decoder-last-pipeline-num-layers 1") == [3, 1]
    assert sizes(f"{layers} --account-for-loss-in-pipeline-split --num-layers 5") == [3, 2]
    assert sizes(f"{layers} --pipeline-model-parallel-layout Et|t*3L") == [1, 3]


def test_layers_that_do_not_divide() -> None:
    """The stage with a large output layer gets fewer layers."""
    layers = "--num-layers 7 --pipeline-model-parallel-size 2"
    assert sizes(layers) == [4, 3]
    assert sizes(f"{layers} --vocab-size 3000") == [5, 2]


def test_decoders_cost_less_than_encoders_of_longer_texts() -> None:
    """A T5 of 4 and 4 layers was cut between them, and the decoder's rank waited for the encoder's."""
    words = "--num-layers 4 --pipeline-model-parallel-size 2 --seq-length 512 --decoder-seq-length 128"
    run = parse(f"{SIZES} {words}", ranks=2, extra_groups=FAMILIES["t5"].groups)
    spec = FAMILIES["t5"].train_spec
    cut = with_stages(run, spec)
    assert stage_sizes(cut) == [3, 5]
    assert cut.parallel.pipeline_model_parallel_layout is None  # which a checkpoint would hand on to other layouts
    slowest = [max(costs.flops for costs in stage_costs(each, spec)) for each in (run, cut)]
    assert slowest[1] < 0.9 * slowest[0]


def test_flags_and_modules_without_costs_keep_the_cut_by_number() -> None:
    """Layers in each virtual stage are what the flag says, also of a T5; layers that tell no costs are not free."""
    words = "--num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 8 --micro-batch-size 1"
    assert sizes(f"{words} --num-layers-per-virtual-pipeline-stage 1", "t5") == [1] * 8
    assert sizes(f"{words} --num-layers 7") == [4, 3]
    with mock.patch("megatron.planning.stages.whole_costs", return_value=Costs(uncounted=frozenset({"Router"}))):
        assert sizes(f"{words} --num-layers 7 --vocab-size 3000") == [4, 3]


def test_frozen_layers_cost_less() -> None:
    """They have no weight gradients, so a stage of them takes more layers."""
    words = "--num-layers 6 --pipeline-model-parallel-size 2"
    frozen = " ".join(f"decoder.layers.{number}.*" for number in range(3))
    assert sizes(words) == [3, 3]
    assert sizes(f"{words} --freeze {frozen}") == [4, 2]
