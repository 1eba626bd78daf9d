"""The settings of a pipeline schedule, and the schedule and placement that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.parallel import PipelineScheduleName
from megatron.config.pipeline import chunks_per_rank, schedule_name
from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel.actions import PipelineSchedule, Placement
from megatron.core.pipeline_parallel.schedules import gpipe, interleaved, one_f_one_b
from megatron.core.pipeline_parallel.zero_bubble import zb_h1, zb_v


@dataclass(frozen=True)
class PipelineSettings:
    """A schedule's name, as ``--pipeline-schedule`` has it, and sizes; ``group_size`` is for ``interleaved``."""

    name: PipelineScheduleName
    num_ranks: int
    num_chunks: int = 1
    group_size: int | None = None
    overlap: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> PipelineSettings:
        """The pipeline settings of a run."""
        parallel = config.parallel
        return cls(
            schedule_name(config),
            parallel.pipeline_model_parallel_size,
            chunks_per_rank(config),
            parallel.microbatch_group_size_per_virtual_pipeline_stage,
            parallel.overlap_p2p_communication,
        )

    @property
    def placement(self) -> Placement:
        """Where the stages are, whatever the number of microbatches."""
        return (
            Placement.vee(self.num_ranks) if self.name == "zb-v" else Placement.looped(self.num_ranks, self.num_chunks)
        )

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.name in ("zb-h1", "zb-v")

    def schedule(self, num_microbatches: int) -> PipelineSchedule:
        """The training schedule."""
        if self.name == "interleaved":
            return interleaved(self.num_ranks, num_microbatches, self.num_chunks, group_size=self.group_size)
        build = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v}[self.name]
        return build(self.num_ranks, num_microbatches)
