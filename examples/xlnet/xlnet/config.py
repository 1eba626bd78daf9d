"""Settings and rules of an XLNet: segments, their memory, and what is predicted. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.config.family import FamilyConfig, Rule
from megatron.config.flags import flag
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig

if TYPE_CHECKING:
    from typing_extensions import Self

MOST_SEGMENTS = 64


class XLNetConfig(FamilyConfig):
    """Flags that only pretrain_xlnet.py has. ``--seq-length`` is the length of a segment."""

    name: ClassVar[str] = "xlnet"
    title: ClassVar[str] = "XLNet"
    position_embedding_types: ClassVar[tuple[str, ...]] = ("relative",)
    usual_tokenizer: ClassVar[str | None] = "GPT2BPETokenizer"
    # Scores have three terms, and heads have keys of their own.
    fields_of_others: ClassVar[tuple[str, ...]] = (
        *(
            "multi_latent_attention",
            "mtp_num_layers",
            "word_embedding_size",
            "parallel_attention",
            "parallel_layernorm",
        ),
        *("group_query_attention", "window_size", "window_attn_skip_freq", "qk_layernorm", "qk_l2_norm", "clip_qkv"),
        *("attn_logit_softcapping", "softmax_type"),
    )

    mem_len: int = flag(
        "Hidden states of the segments before it in a sample that each segment attends to (XLNet's memory).",
        default=0,
        at_least=0,
        from_checkpoint=True,
    )
    segments_per_sample: int = flag(
        "Consecutive segments of --seq-length tokens in a sample; the first has no memory.",
        derived="the segments that --mem-len reaches back, and one more",
        follows=("mem_len", "seq_length"),
        at_least=1,
        at_most=MOST_SEGMENTS,
        from_checkpoint=True,
    )
    num_predict: int = flag(
        "Tokens of each segment that are predicted: the last of its factorization order.",
        derived="a sixth of --seq-length",
        follows=("seq_length",),
        at_least=1,
        from_checkpoint=True,
    )
    max_gram: int = flag(
        "Longest span of predicted tokens; a span of n tokens is drawn with a probability in proportion to 1/n.",
        default=5,
        at_least=1,
        at_most=64,
    )

    @property
    @override
    def sequences_per_sample(self) -> int:
        """Segments in a sample."""
        return self.segments_per_sample

    @override
    def resolved(self, model: ModelConfig, data: DataConfig) -> Self:
        """The group with as many segments as the memory spans, and a sixth of their tokens predicted."""
        segments, count = self.segments_per_sample, self.num_predict
        if segments is None:
            segments = min(1 - -self.mem_len // data.seq_length, MOST_SEGMENTS)
        return dataclasses.replace(
            self,
            segments_per_sample=segments,
            num_predict=max(data.seq_length // 6, 1) if count is None else count,
        )

    @override
    def rules(self) -> Sequence[Rule]:
        """Rules of this family, checked with those of every run before anything starts."""
        return (no_flags_of_other_samples, *RULES)

    @override
    def shrunk(self, model: ModelConfig, *, num_layers: int, seq_length: int, multiple: int) -> tuple[int, Self]:
        """Short segments, as many of them, with as much memory as they can have."""
        memory = min(self.mem_len, seq_length * (self.segments_per_sample - 1))
        small = dataclasses.replace(self, mem_len=memory, num_predict=max(multiple // 2, 1))
        return min(model.num_layers, num_layers), small


def no_flags_of_other_samples(run: RunConfig) -> str | None:
    """A sample is consecutive segments of the stream of documents, and each rank reads whole ones."""
    given = run.data.given_document_flags()
    given += ["--context-parallel-size"] if run.parallel.context_parallel_size > 1 else []
    return f"XLNet reads whole segments of a stream of documents; leave {', '.join(given)} out" if given else None


def _own(run: RunConfig) -> XLNetConfig:
    return run.group(XLNetConfig)


def memory_is_in_the_sample(run: RunConfig) -> str | None:
    """Memory comes from the earlier segments of the same sample."""
    own, length = _own(run), run.data.seq_length
    most = length * (own.segments_per_sample - 1)
    if own.mem_len <= most:
        return None
    needed = 1 - -own.mem_len // length
    wider = f"--segments-per-sample {needed}, or " if needed <= MOST_SEGMENTS else ""
    return (
        f"--mem-len {own.mem_len} reaches back further than the earlier segments of a sample, {most} tokens with "
        f"--segments-per-sample {own.segments_per_sample} and --seq-length {length}; use {wider}a smaller --mem-len"
    )


def segments_divide(run: RunConfig) -> str | None:
    """Sequence parallelism divides the rows of both streams together."""
    own, length, ranks = _own(run), run.data.seq_length, run.parallel.tensor_model_parallel_size
    rows = length + own.num_predict
    if not run.parallel.sequence_parallel or rows % ranks == 0:
        return None
    fitting = [own.num_predict - rows % ranks, own.num_predict - rows % ranks + ranks]
    return (
        f"--seq-length {length} and --num-predict {own.num_predict} make {rows} rows, which are not divisible by "
        f"--tensor-model-parallel-size {ranks} as --sequence-parallel needs; use --num-predict "
        + " or ".join(str(each) for each in fitting if each > 0)
    )


def some_tokens_are_given(run: RunConfig) -> str | None:
    """Predicted tokens are predicted from the others."""
    count, length = _own(run).num_predict, run.data.seq_length
    if count < length:
        return None
    return f"--num-predict {count} leaves none of --seq-length {length} tokens given; use at most {length - 1}"


RULES: tuple[Rule, ...] = (memory_is_in_the_sample, segments_divide, some_tokens_are_given)
GROUPS: tuple[type, ...] = (XLNetConfig,)
