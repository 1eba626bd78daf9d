"""The guard of a run: it looks at each step between its gradients and its update, and may compute it again."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.checkpointing.find import is_unused
from megatron.core.device import is_gpu
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.sharding import ShardedState
from megatron.core.pipeline_parallel.chunk import Microbatch
from megatron.errors import RESTART_CANNOT_HELP, RESULT_REFUSED, RUN_ELSEWHERE
from megatron.training.checkpoints.loading import reload
from megatron.training.checkpoints.saving import Saver
from megatron.training.guards.injection import flip_in, spoiled, spoils
from megatron.training.guards.results import Fingerprint, Kept, differing, place_of
from megatron.training.guards.spikes import LOSS, NORM, large_in, spike_in
from megatron.training.guards.suspect import Suspect, read_suspect, reject, rejected_iterations, write_suspect
from megatron.training.reporting.metrics import StepRecord
from megatron.training.run.agreement import check_replicas_agree
from megatron.training.run.run import Run
from megatron.training.run.stop import NonFiniteError
from megatron.training.step import (
    BatchSums,
    StepNumbers,
    forward_backward,
    leave_weights,
    read_numbers,
    update_weights,
)

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-3  # as Megatron-LM's, for sums that have no fixed order


class ResultError(NonFiniteError):
    """A step's result that the guard of the run does not accept, on every rank alike."""


@dataclass(frozen=True)
class _Computed:
    sums: BatchSums
    numbers: StepNumbers

    @property
    def values(self) -> dict[str, float]:
        """The first loss and the gradient norm."""
        loss, *_ = self.numbers.loss.means.values()
        return {LOSS: loss, NORM: self.numbers.grad_norm}

    @property
    def not_finite(self) -> str | None:
        """Which value is infinite or NaN, in words."""
        found = [f"{name} is {value}" for name, value in self.values.items() if not math.isfinite(value)]
        return " and ".join(found) or None


@dataclass
class _Statistics:
    """Counts of ``--rerun-mode report_stats`` since the last report."""

    steps: int = 0
    differing: int = 0
    largest: float = 0.0


class StepGuard:
    """Takes the steps of a run as ``train_step`` does, with what ``GuardsConfig`` asks for. Collectives."""

    def __init__(self, run: Run, saver: Saver) -> None:
        self._run, self._saver, self._settings = run, saver, run.config.guards
        self._statistics = _Statistics()
        in_order = run.config.training.deterministic_mode or not is_gpu(run.context.device)
        self._tolerance = 0.0 if in_order else _TOLERANCE
        save, tracker = run.config.checkpoint.save, self._settings.result_rejected_tracker_filename
        self._suspect: Suspect | None = run_on_first(lambda: read_suspect(save), run.context.mesh)
        for iteration in run_on_first(lambda: rejected_iterations(tracker), run.context.mesh):
            run.guards.passed_over.append([iteration, iteration])

    def step(self, microbatches: Sequence[Microbatch]) -> StepRecord | None:
        """Take one step on a global batch. None: the run is that of its last checkpoint now, and passes over the data
        since.

        Raises ResultError for a result that isn't accepted, before any weight changes.
        """
        run, settings, iteration = self._run, self._settings, self._run.progress.iteration + 1
        self._flip("weight", iteration)
        kept = Kept(self._changed_by_passes()) if settings.replays else None
        computed = self._compute(microbatches, flips=True)
        why = self._suspicious(computed)
        if kept is not None and self._is_replayed(iteration, why):
            kept.restore()
            computed, why = self._replay(computed, microbatches, why)
        spike = None if computed.not_finite else spike_in(computed.values, run.guards, settings)
        if spike is not None:
            return self._on_spike(computed, spike)
        return self._take(computed)

    def _compute(self, microbatches: Sequence[Microbatch], *, flips: bool = False) -> _Computed:
        sums = forward_backward(self._run, microbatches)
        if flips:
            self._flip("gradient", self._run.progress.iteration + 1)
        return self._spoil(_Computed(sums, read_numbers(self._run, sums)), is_first=flips)

    def _take(self, computed: _Computed) -> StepRecord:
        record = update_weights(self._run, computed.sums, computed.numbers)
        if not record.skipped:
            self._run.guards.take(computed.values, size=self._settings.spike_window)
        return record

    def _changed_by_passes(self) -> Iterator[ShardedState]:
        yield from self._run.buffer_state()
        if self._run.scaling is not None:
            yield from self._run.scaling.state()

    def _suspicious(self, computed: _Computed) -> str | None:
        """Why a result is to be computed again, in words."""
        if computed.not_finite is not None:
            return computed.not_finite if self._run.config.training.check_for_nan_in_loss_and_grad else None
        large = large_in(computed.values, self._run.guards, self._settings)
        return spike_in(computed.values, self._run.guards, self._settings) or large

    def _is_replayed(self, iteration: int, why: str | None) -> bool:
        settings, interval = self._settings, self._settings.check_replay_interval
        if settings.rerun_mode == "report_stats" or (interval is not None and iteration % interval == 0):
            return True
        return settings.rerun_mode == "validate_results" and (why is not None or self._is_suspect)

    @property
    def _is_suspect(self) -> bool:
        """Whether the coming step is the one that an earlier start of the run has left to this one."""
        suspect, progress = self._suspect, self._run.progress
        return suspect is not None and (suspect.iteration, suspect.consumed_samples) == (
            progress.iteration + 1,
            progress.consumed_samples,
        )

    def _replay(
        self, first: _Computed, microbatches: Sequence[Microbatch], why: str | None
    ) -> tuple[_Computed, str | None]:
        """Compute the step again, and say whose fault it is that ``why`` holds, if it does."""
        run, mesh = self._run, self._run.context.mesh
        before = Fingerprint.of(first.sums, first.numbers, run.buffers)
        second = self._compute(microbatches)
        after = Fingerprint.of(second.sums, second.numbers, run.buffers)
        everyone = gather_objects((before, after, place_of(run.context)), mesh)
        befores, afters = [each[0] for each in everyone], [each[1] for each in everyone]
        ranks = differing(befores, afters, tolerance=self._tolerance)
        again = self._suspicious(second)
        places = [each[2] for each in everyone]
        if self._settings.rerun_mode == "report_stats":
            self._count(max(each[0].distance(each[1]) for each in everyone), ranks)
        elif ranks:
            self._transient(ranks, places, why or "nothing looked wrong", second)
        elif why is not None:
            self._reproduced(first, why, places)
        else:
            self._settle(places)
        return second, again

    def _transient(self, ranks: list[int], places: list[str], why: str, second: _Computed) -> None:
        """Handle another result of the same inputs: a fault of the hardware, which has passed if it is finite now."""
        again, iteration = second.not_finite, self._run.progress.iteration + 1
        named = ", ".join(f"rank {rank} ({places[rank]})" for rank in ranks[:8]) + (" …" if len(ranks) > 8 else "")
        self._fault([places[rank] for rank in ranks], f"transient fault at iteration {iteration}")
        if again is not None and self._run.config.training.check_for_nan_in_loss_and_grad:
            raise ResultError(
                f"iteration {iteration}: {why}; computed again, {named} got a different result, and {again}: their "
                "devices can't be trusted; resume from the last checkpoint without them",
                exit_code=RESULT_REFUSED,
            )
        if self._is_suspect:
            self._judged()
        self._run.reporter.say(
            f"guard: iteration {iteration}: {why}; computed again, {named} got a different result: a transient "
            "hardware fault; training continues with the second result"
        )

    def _reproduced(self, computed: _Computed, why: str, places: list[str]) -> None:
        """Handle a bad result that was the same twice: replicas that differ, a device that is always wrong, or data or
        model. A spike is left to ``--spike-action``.
        """
        run, iteration = self._run, self._run.progress.iteration + 1
        state = chain(run.whole_model_state(), run.buffer_state())
        check_replicas_agree(state, run.context, iteration=iteration - 1, fault=run.fault)
        if computed.not_finite is None:
            run.reporter.say(
                f"guard: iteration {iteration}: {why}; computed again, the result has the same bits: it comes from "
                "data or model, or from a device that is always wrong"
            )
            return
        if self._is_suspect and self._suspect is not None and self._suspect.places != places:
            self._judged()
            tracker = self._settings.result_rejected_tracker_filename
            run_on_first(lambda: reject(tracker, iteration, why), run.context.mesh)
            raise ResultError(
                f"iteration {iteration}: {why}, on other devices as well ({places[0]}, …): the result is correct, so "
                f"data or model are at fault; look at samples {run.progress.consumed_samples} and following, lower "
                f"--lr, or pass over them with --iterations-to-skip {iteration}",
                exit_code=RESULT_REFUSED,
            )
        save = run.config.checkpoint.save
        if save is not None:
            self._saver.make_durable()
            if self._saver.saved_at != run.progress.iteration:
                self._saver.save()
                self._saver.make_durable()
            suspect = Suspect(iteration, run.progress.consumed_samples, why, places)
            run_on_first(lambda: write_suspect(save, suspect), run.context.mesh)
        raise ResultError(
            f"iteration {iteration}: {why}; computed again, the result is the same, so data or model are at fault, or "
            "a device that is always wrong: start the same command on other nodes to tell which, or pass over the data "
            f"with --iterations-to-skip {iteration}",
            exit_code=RUN_ELSEWHERE,
        )

    def _settle(self, places: list[str]) -> None:
        """Nothing is wrong with the step, which may be one that an earlier start found bad twice."""
        if not self._is_suspect or self._suspect is None:
            return
        then, iteration = self._suspect, self._run.progress.iteration + 1
        self._judged()
        moved = sorted(set(then.places) - set(places))
        if not moved:
            self._run.reporter.say(
                f"guard: iteration {iteration}: {then.what} in an earlier start, and not in this one, on the same "
                "devices: a fault of the hardware that has passed"
            )
            return
        self._fault(moved, f"persistent fault at iteration {iteration}")
        self._run.reporter.say(
            f"guard: iteration {iteration}: {then.what} in an earlier start, and not on these devices: a persistent "
            f"fault of {', '.join(moved)}; keep them out"
        )

    def _fault(self, places: Sequence[str], what: str) -> None:
        if self._run.context.mesh.world_rank == 0:
            self._run.fault(places, what)

    def _judged(self) -> None:
        save = self._run.config.checkpoint.save
        assert save is not None, "a suspect lies in --save"
        run_on_first(lambda: write_suspect(save, None), self._run.context.mesh)
        self._suspect = None

    def _on_spike(self, computed: _Computed, spike: str) -> StepRecord | None:
        run, settings, state = self._run, self._settings, self._run.guards
        iteration, samples = run.progress.iteration + 1, run.progress.consumed_samples
        last = samples + run.config.global_batch_size_at(samples) - 1
        what = f"guard: iteration {iteration} (samples {samples} to {last}): {spike}"
        if settings.spike_action == "warn":
            run.reporter.say(what)
            return self._take(computed)
        state.acted = [each for each in state.acted if each > iteration - settings.spike_window]
        if len(state.acted) >= settings.spike_limit:
            raise ResultError(
                f"{what}; that is spike {len(state.acted) + 1} in {settings.spike_window} iterations, after those at "
                f"{', '.join(map(str, state.acted))}: lower --lr or look at those samples; --spike-limit "
                f"{settings.spike_limit} and --spike-threshold {settings.spike_threshold:g} set what is allowed",
                exit_code=RESTART_CANNOT_HELP,
            )
        state.acted.append(iteration)
        save = run.config.checkpoint.save
        is_rolled_back = settings.spike_action == "rollback" and save is not None
        if is_rolled_back:
            self._saver.drop_waiting()
        if not is_rolled_back or run_on_first(lambda: is_unused(save or ""), run.context.mesh):
            nothing = " (there is no checkpoint yet to roll back to)" if is_rolled_back else ""
            run.reporter.say(f"{what}: the weights are not changed by this batch{nothing}")
            return leave_weights(run, computed.numbers)
        run.reporter.say(f"{what}: rolling back")
        reload(run)
        first = run.progress.iteration + 1
        run.guards.acted = state.acted
        run.guards.passed_over.append([first, iteration])
        run.reporter.say(f"guard: the data of iterations {first} to {iteration} are passed over")
        return None

    def _count(self, distance: float, ranks: Sequence[int]) -> None:
        """Note a step that was computed twice, and report at each ``--log-interval``."""
        found, run = self._statistics, self._run
        found.steps += 1
        found.differing += bool(ranks)
        found.largest = max(found.largest, distance)
        if (run.progress.iteration + 1) % run.config.reporting.log_interval == 0:
            run.reporter.say(
                f"guard: {found.steps} steps computed twice; other bits in {found.differing} of them, loss and "
                f"gradient norm differ by up to {found.largest:.2g} of their value"
            )
            self._statistics = _Statistics()

    def _flip(self, where: str, iteration: int) -> None:
        for flip in self._settings.flips:
            here = self._run.context.mesh.world_rank
            if (flip.where, flip.iteration, flip.rank) == (where, iteration, here):
                flip_in(self._run.buffers, flip)
                logger.warning("--inject-bit-flip: a bit of a %s of rank %d is flipped", where, here)

    def _spoil(self, computed: _Computed, *, is_first: bool) -> _Computed:
        """The result as ``--error-injection-rate`` spoils it."""
        settings, iteration = self._settings, self._run.progress.iteration + 1
        if not spoils(settings, iteration, seed=self._run.config.training.seed):
            return computed
        moved = self._suspect is not None and place_of(self._run.context) not in self._suspect.places
        lasts = {
            "transient_error": is_first and not self._is_suspect,
            "persistent_error": not (self._is_suspect and moved),
            "correct_result": True,
        }
        is_bad = lasts[settings.error_injection_type]
        return _Computed(computed.sums, spoiled(computed.numbers)) if is_bad else computed
