"""Guards: spikes of the loss, results that hardware got wrong, ranks that are slow, nodes that fail often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.config.flags import COUNT, Settings, flag, switch

RerunMode = Literal["disabled", "validate_results", "report_stats"]
SpikeAction = Literal["warn", "skip", "rollback"]
FLIPS = ("weight", "gradient")
"""Where ``--inject-bit-flip`` changes a bit."""


class GuardsConfig(Settings):
    """What watches losses, gradients and hardware in each step, and what happens when it sees something."""

    spike_action: SpikeAction | None = flag(
        "What to do when loss or gradient norm is far above those of the last steps. warn: a line in the log; skip: "
        "no update by this batch; rollback: load the last checkpoint of --save, and pass over the batches since.",
        default=None,
    )
    spike_window: int = flag("Steps whose losses and gradient norms say what is usual.", default=128, at_least=8)
    spike_threshold: float = flag(
        "A spike is this many deviations above the median of the window; a deviation is 1.4826 times the median "
        "absolute deviation, and at least 1 percent of the median.",
        default=10.0,
        above=0,
    )
    spike_limit: int = flag(
        "Stop when there are more spikes than this within the length of a window that were skipped or rolled back.",
        default=3,
        at_least=1,
    )
    rerun_mode: RerunMode = flag(
        "validate_results: a step whose loss or gradient is not finite, or a spike, is computed again from the same "
        "inputs: another result is a fault of the hardware, the same one of data, model or a device that is always "
        "wrong. report_stats: every step is computed twice, and the log says whether bits differ.",
        default="disabled",
    )
    check_replay_interval: int | None = flag(
        "Iterations between steps that are computed twice and compared bit by bit: errors that make no loss infinite.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    check_for_spiky_loss: bool = switch("A loss 10 times the largest of the first 100 steps is suspicious.")
    check_for_large_grads: bool = switch("A gradient norm 10 times the largest of the first 100 steps is suspicious.")
    result_rejected_tracker_filename: str | None = flag(
        "File that lists the iterations whose results were rejected; a run passes over those that are in it.",
        default=None,
    )
    error_injection_rate: int = flag(
        "For tests: with --rerun-mode validate_results, spoil the result of one step in this many; 0: none.",
        default=0,
        at_least=0,
        at_most=COUNT,
    )
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = flag(
        "Kind of --error-injection-rate: gone when the step is computed again, gone on other nodes, or never.",
        default="transient_error",
    )
    inject_bit_flip: tuple[str, ...] = flag(
        "For tests: WHERE:RANK:ITERATION or WHERE:RANK:ITERATION:BIT, such as weight:1:20 or gradient:0:7:30: flip a "
        "bit of a weight or gradient of a rank before that step. Without BIT the highest one that is 0.",
        default=(),
    )

    log_straggler: bool = switch(
        "Compare the time that each rank computes, without waiting for others, and name slow ranks in the log."
    )
    straggler_minmax_count: int = flag("Ranks that --log-straggler lists at each end.", default=1, at_least=1)
    straggler_threshold: float = flag(
        "With --log-straggler: a rank is slow when it has less than this share of the speed of its stage's median.",
        default=0.85,
        above=0,
        below=1,
    )
    disable_straggler_on_startup: bool = switch("Begin --log-straggler when --straggler-ctrlr-port is asked to.")
    straggler_ctrlr_port: int | None = flag(
        "Port of rank 0 on the loopback interface; each request to it turns --log-straggler off or on.",
        default=None,
        at_least=1,
        at_most=65535,
    )
    preflight: Literal["warn", "stop"] | None = flag(
        "Before training, test products, copies and links of every rank for a few seconds. warn: name ranks that are "
        "slow; stop: end the run because of them. Wrong results always end it.",
        default=None,
    )
    preflight_threshold: float = flag(
        "With --preflight: a rank is slow when it has less than this share of the median rank's speed.",
        default=0.5,
        above=0,
        below=1,
    )
    node_ledger: bool = switch(
        "Keep ledger.jsonl in --save: starts, ends and faults by node; each start names nodes that have failed often."
    )
    max_starts_without_progress: int = flag(
        "With --node-ledger: end with exit code 2 when this many starts in a row have failed without a new checkpoint; "
        "0: never.",
        default=0,
        at_least=0,
    )

    elastic: bool = switch(
        "The number of data-parallel ranks may change between starts, as with torchrun --nnodes MIN:MAX: "
        "--global-batch-size is kept, and --micro-batch-size lowered where it does not fit."
    )

    @property
    def replays(self) -> bool:
        """Whether some step may be computed again."""
        return self.rerun_mode != "disabled" or self.check_replay_interval is not None

    @property
    def judges_steps(self) -> bool:
        """Whether anything looks at a step between its gradients and its update."""
        return self.replays or self.spike_action is not None or bool(self.inject_bit_flip) or self.looks_for_large

    @property
    def looks_for_large(self) -> bool:
        """Whether a value 10 times the largest one is suspicious."""
        return self.check_for_spiky_loss or self.check_for_large_grads

    @property
    def flips(self) -> tuple[BitFlip, ...]:
        """Each of ``inject_bit_flip``. Raises ValueError for what isn't one."""
        return tuple(map(BitFlip.read, self.inject_bit_flip))


@dataclass(frozen=True)
class BitFlip:
    """A bit that a test changes before the step ``iteration``. ``bit``: None for the highest one that is 0."""

    where: str
    rank: int
    iteration: int
    bit: int | None = None

    @classmethod
    def read(cls, text: str) -> BitFlip:
        """The flip that ``text`` describes. Raises ValueError."""
        where, *numbers = text.split(":")
        if where not in FLIPS or len(numbers) not in (2, 3) or not all(each.isdecimal() for each in numbers):
            raise ValueError(text)
        flip = cls(where, *map(int, numbers))
        if flip.iteration < 1 or (flip.bit or 0) > 63:
            raise ValueError(text)
        return flip
