"""What of a run's settings decides its pipeline schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.pipeline import chunks_per_rank, schedule_name
from megatron.config.run import RunConfig
from megatron.core.pipeline_parallel.actions import PipelineSchedule, Placement
from megatron.core.pipeline_parallel.schedules import training_placement, training_schedule


@dataclass(frozen=True)
class PipelineSettings:
    """A schedule's name and sizes."""

    name: str
    num_ranks: int
    num_chunks: int
    group_size: int | None
    overlap: bool

    @classmethod
    def of(cls, config: RunConfig) -> PipelineSettings:
        """Those of ``config``."""
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
        """Where the stages are."""
        return training_placement(self.name, num_ranks=self.num_ranks, num_chunks=self.num_chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return self.name in ("zb-h1", "zb-v")

    def schedule(self, num_microbatches: int) -> PipelineSchedule:
        """The training schedule."""
        return training_schedule(
            self.name,
            num_ranks=self.num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=self.num_chunks,
            group_size=self.group_size,
        )
