"""Which iterations are profiled, on which ranks and how."""

from __future__ import annotations

from megatron.config.flags import COUNT, Settings, flag, switch


class ProfilingConfig(Settings):
    """Profiles of time and of GPU memory."""

    profile: bool = switch(
        "Profile the iterations after --profile-step-start, up to --profile-step-end: with CUDA's profiler under "
        "nsys, or with --use-pytorch-profiler."
    )
    profile_step_start: int = flag("Iterations before the first profiled one.", default=10, at_least=0, at_most=COUNT)
    profile_step_end: int = flag("The last profiled iteration.", default=12, at_least=1, at_most=COUNT)
    profile_ranks: tuple[int, ...] = flag("Ranks that are profiled.", default=(0,), at_least=0)
    use_pytorch_profiler: bool = switch(
        "Profile with torch's profiler: a trace per rank in --tensorboard-dir, and a summary in the log."
    )
    pytorch_profiler_collect_shapes: bool = switch("Keep the shapes of operators' inputs.")
    pytorch_profiler_collect_callstack: bool = switch("Keep the Python stack of each operator.")
    nvtx_ranges: bool = switch("Mark the parts of an iteration as NVTX ranges, for nsys.")
    record_memory_history: bool = switch(
        "Record GPU allocations of --profile-ranks; write them at the end or when memory runs out."
    )
    memory_snapshot_path: str = flag(
        "File for --record-memory-history, to open at pytorch.org/memory_viz.", default="snapshot.pickle"
    )

    @property
    def with_torch(self) -> bool:
        """Whether torch's profiler runs, rather than CUDA's or none."""
        return self.profile and self.use_pytorch_profiler
