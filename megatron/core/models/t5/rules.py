"""Rules about T5: its decoder, and its relative positions."""

from __future__ import annotations

from math import lcm

from megatron.config.family import Rule, rule
from megatron.config.flags import changed
from megatron.config.rules.positions import beyond_positions
from megatron.config.rules.sizes import multiples_near
from megatron.config.run import RunConfig
from megatron.core.models.t5.config import T5Config


def decoder_fits_positions(run: RunConfig) -> str | None:
    """--decoder-seq-length is at most --max-position-embeddings."""
    return beyond_positions(run, "--decoder-seq-length", run.group(T5Config).decoder_seq_length)


def decoder_divides_over_ranks(run: RunConfig) -> str | None:
    """The decoder's sequence is divisible by the ranks that split the encoder's."""
    t5, parallel = run.group(T5Config), run.parallel
    context, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    pieces = 1 if context == 1 else 2 * context
    parts = context * tensor if parallel.sequence_parallel else 1
    length = t5.decoder_seq_length
    asked = []
    if length % pieces:
        asked.append(f"2 x --context-parallel-size {context}")
    if length % parts:
        asked.append(f"the {parts} ranks that --sequence-parallel divides it over")
    if not asked:
        return None
    return (
        f"--decoder-seq-length {length} is not divisible by {' and by '.join(asked)}; use a length of "
        f"{multiples_near(length, lcm(pieces, parts))}"
    )


def relative_settings_need_relative_positions(run: RunConfig) -> str | None:
    """Settings of relative positions need relative positions."""
    t5 = run.group(T5Config)
    if run.model.position_embedding_type == "relative":
        return None
    named = [spec.positive for spec in changed(t5) if spec.field.startswith("relative")]
    if not named:
        return None
    verb = "has" if len(named) == 1 else "have"
    return (
        f"{' and '.join(named)} {verb} no effect with --position-embedding-type {run.model.position_embedding_type}; "
        "use --position-embedding-type relative"
    )


def distances_fill_buckets(run: RunConfig) -> str | None:
    """Each direction has half of the buckets, and the maximum distance exceeds the buckets of single distances."""
    t5 = run.group(T5Config)
    if run.model.position_embedding_type != "relative":
        return None
    buckets, distance = t5.relative_attention_num_buckets, t5.relative_attention_max_distance
    if buckets % 2:
        return (
            f"--relative-attention-num-buckets {buckets} must be even, half of them for each direction; use "
            f"{multiples_near(buckets, 2)}"
        )
    if distance <= buckets // 2:
        return (
            f"--relative-attention-max-distance {distance} is not above half of --relative-attention-num-buckets "
            f"{buckets}, as one bucket per short distance needs; use more than {buckets // 2}"
        )
    return None


def relative_positions_exchange_keys(run: RunConfig) -> str | None:
    """Relative positions exclude exchanges of heads: a rank has the bias of its own queries only."""
    if run.model.position_embedding_type != "relative":
        return None
    kinds = [kind for kind in dict.fromkeys(run.parallel.cp_comm_types) if "a2a" in kind]
    if not kinds:
        return None
    return (
        f"--cp-comm-type {kinds[0]} exchanges heads, which --position-embedding-type relative does not allow; use p2p "
        "or all_gather"
    )


RULES: tuple[Rule, ...] = (
    rule(  # a token beside the two that samples leave free
        "--seq-length {run.data.seq_length} leaves no room for a text; use 3 at least",
        lambda run: run.data.seq_length < 3,
    ),
    decoder_fits_positions,
    decoder_divides_over_ranks,
    rule(
        "T5 replaces masked spans by sentinel tokens, but the tokenizer has none: give --vocab-extra-ids 100",
        lambda run: (
            run.tokenizer.vocab_extra_ids == 0
            and not run.data.mock_data
            and run.tokenizer.tokenizer_type != "HuggingFaceTokenizer"  # which may have its own
        ),
    ),
    relative_settings_need_relative_positions,
    distances_fill_buckets,
    relative_positions_exchange_keys,
    rule(
        "--attention-backend sdpa cannot be combined with --position-embedding-type relative; use --attention-backend "
        "auto",
        lambda run: run.model.position_embedding_type == "relative" and run.model.attention_backend == "sdpa",
    ),
)
