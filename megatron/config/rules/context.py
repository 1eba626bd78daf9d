"""Rules about context parallelism: the division of the sequence, and the exchange of keys or heads."""

from __future__ import annotations

from math import lcm

from megatron.config.flags import one_of
from megatron.config.rules.sizes import divide, divisors, multiples_near
from megatron.config.run import RunConfig


def sequence_divides_over_context_ranks(run: RunConfig) -> str | None:
    """Each context-parallel rank holds two pieces of the sequence, split again over tensor-parallel ranks with SP."""
    parallel, length = run.parallel, run.data.seq_length
    ranks, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if ranks == 1:
        return None
    unit = lcm(2 * ranks, ranks * tensor) if parallel.sequence_parallel else 2 * ranks
    fits = f"use a length of {multiples_near(length, unit)}"
    if length % (2 * ranks):
        return f"--seq-length {length} is not divisible by 2 x --context-parallel-size {ranks}; {fits}"
    if length % unit:
        return (
            f"--seq-length {length} over --context-parallel-size {ranks} is {length // ranks}, which is not "
            f"divisible by --tensor-model-parallel-size {tensor}, as --sequence-parallel needs; {fits}"
        )
    return None


def exchanges_are_one_or_one_per_layer(run: RunConfig) -> str | None:
    """--cp-comm-type has one value for all layers or one per layer."""
    given, layers = len(run.parallel.cp_comm_type), run.num_layers
    if given in (1, layers):
        return None
    return f"--cp-comm-type has {given} values for {run.layers_asked}; give one for all layers, or {layers}"


def levels_suit_the_exchange(run: RunConfig) -> str | None:
    """The two-level exchange needs the sizes of its levels, and only it; their product is the context-parallel size."""
    sizes, has_levels = run.parallel.hierarchical_context_parallel_sizes, "a2a+p2p" in run.parallel.cp_comm_type
    asked = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes or ()))}"
    if sizes is None and has_levels:
        return (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes, the ranks that exchange heads and "
            f"those of a ring; use {_levels(run)}"
        )
    if sizes is not None and not has_levels:
        return f"{asked} has no effect without --cp-comm-type a2a+p2p; give both or neither"
    ranks = run.parallel.context_parallel_size
    if sizes is None or (len(sizes) == 2 and sizes[0] * sizes[1] == ranks):
        return None
    wrong = f"means {sizes[0] * sizes[1]} ranks" if len(sizes) == 2 else f"has {len(sizes)} sizes instead of two"
    return f"{asked} {wrong}, but --context-parallel-size is {ranks}; use {_levels(run)}"


def heads_divide_over_exchanging_ranks(run: RunConfig) -> str | None:
    """The query heads of a tensor-parallel rank are divisible by the ranks that exchange heads."""
    heads, tensor = run.model.num_attention_heads, run.parallel.tensor_model_parallel_size
    held = heads // tensor
    for kind in run.parallel.cp_comm_types:
        ranks = run.parallel.head_exchange_size(kind)
        if heads % tensor == 0 and held % ranks:
            return (
                f"--cp-comm-type {kind} divides the {held} query heads of a tensor-parallel rank over {ranks} ranks; "
                f"ranks that fit: {_fitting(run)}; or use --cp-comm-type p2p, which does not divide heads"
            )
    return None


def query_groups_fit_exchanging_ranks(run: RunConfig) -> str | None:
    """Ranks that exchange heads hold whole key/value heads, or each such head is held by equally many ranks."""
    model, tensor = run.model, run.parallel.tensor_model_parallel_size
    held = max(model.num_query_groups // tensor, 1)
    for kind in run.parallel.cp_comm_types:
        ranks = run.parallel.head_exchange_size(kind)
        if model.num_attention_heads % (tensor * ranks) == 0 and not divide(held, ranks):
            return (
                f"--cp-comm-type {kind} divides {held} of --num-query-groups {model.num_query_groups} on a "
                f"tensor-parallel rank over {ranks} ranks, and neither number is divisible by the other; ranks that "
                f"fit: {_fitting(run)}; or use --cp-comm-type p2p, which does not divide heads"
            )
    return None


def _fitting(run: RunConfig) -> str:
    """Numbers of ranks that can exchange the heads of a tensor-parallel rank."""
    tensor = run.parallel.tensor_model_parallel_size
    groups = max(run.model.num_query_groups // tensor, 1)
    return one_of(size for size in divisors(run.model.num_attention_heads // tensor) if divide(groups, size))


def _levels(run: RunConfig) -> str:
    """Pairs of level sizes whose product is the context-parallel size."""
    ranks = run.parallel.context_parallel_size
    return one_of(f"{size} {ranks // size}" for size in divisors(ranks))


RULES = (
    sequence_divides_over_context_ranks,
    exchanges_are_one_or_one_per_layer,
    levels_suit_the_exchange,
    heads_divide_over_exchanging_ranks,
    query_groups_fit_exchanging_ranks,
)
