"""A run must leave when asked, save first, and all ranks together; a NaN must be explained before it spreads."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Sequence

import pytest

from megatron.config.training import TrainingConfig
from megatron.errors import MegatronError
from megatron.training.run.stop import ExitWatch, NonFiniteError, check_finite
from tests.harness.sentences import check_sentence


def reason(
    iteration: int, interval: int | None = None, duration: int | None = None, minutes: float = 0, number: int = 0
) -> str | None:
    agreed = [int(minutes * 60), number]
    settings = {"exit_interval": interval, "exit_duration_in_mins": duration, "exit_signal_handler": True}
    return watch(lambda mine: agreed, **settings).reason(iteration)


def test_goes_on_when_nothing_asks_to_stop() -> None:
    assert reason(7) is None
    assert reason(7, interval=5, duration=10, minutes=9.9) is None


def test_every_cause_in_words() -> None:
    check_sentence(reason(10, interval=5), "10")
    check_sentence(reason(7, duration=10, minutes=10.5), "10.5 minutes")
    check_sentence(reason(7, number=signal.SIGTERM), "SIGTERM")


def test_a_stop_is_never_missed_whatever_else_is_asked() -> None:
    """All combinations: there is a reason exactly when at least one condition holds."""
    for interval, duration, minutes, number in itertools.product((None, 4, 5), (None, 3), (2.0, 4.0), (0, 2)):
        for iteration in range(1, 21):
            expected = bool(number) or (duration is not None and minutes > duration)
            expected = expected or (interval is not None and iteration % interval == 0)
            assert (reason(iteration, interval, duration, minutes, number) is not None) == expected


def watch(highest: object = list, **settings: object) -> ExitWatch:
    training = TrainingConfig(micro_batch_size=1, **settings)  # type: ignore[arg-type]
    return ExitWatch(training, highest=highest, clock=lambda: 0.0)  # type: ignore[arg-type]


def test_signal_is_noted_and_acted_on_after_the_step() -> None:
    """SIGUSR1, which Slurm's --signal sends, killed the ranks instead: all work since the last checkpoint was lost."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        before = signal.getsignal(number)
        exit_watch = watch(exit_signal_handler=True)
        with exit_watch.catching_signals():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a launcher that forwards what the terminal already sent
            check_sentence(exit_watch.reason(1), number.name)
        assert signal.getsignal(number) is before


def test_without_the_flag_signals_keep_their_meaning() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with watch().catching_signals():
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_on_another_rank_stops_this_one() -> None:
    """SIGTERM may reach one node only; ranks that went on would wait for it forever."""

    def highest(mine: Sequence[int]) -> Sequence[int]:
        return [max(a, b) for a, b in zip(mine, (0, signal.SIGTERM))]

    check_sentence(watch(highest, exit_signal_handler=True).reason(3), "SIGTERM")


def test_a_slower_clock_on_another_rank_stops_this_one() -> None:
    check_sentence(watch(lambda mine: [61, 0], exit_duration_in_mins=1).reason(3), "1.0 minutes")


def test_nothing_is_communicated_when_nothing_needs_agreement() -> None:
    """The interval is the same on all ranks; a collective at every step would be wasted."""

    def unexpected(mine: Sequence[int]) -> Sequence[int]:
        raise AssertionError("a collective ran")

    check_sentence(watch(unexpected, exit_interval=3).reason(3), "3")


def test_finite_losses_pass() -> None:
    check_finite({"lm loss": 3.0}, iteration=5, consumed_samples=64, global_batch_size=16, learning_rate=1e-3)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_names_iteration_samples_and_what_to_look_at(loss: float) -> None:
    with pytest.raises(NonFiniteError) as caught:
        check_finite({"lm loss": loss}, iteration=5, consumed_samples=64, global_batch_size=16, learning_rate=1e-3)
    message = str(caught.value)
    for part in (
        f"lm loss is {loss}",
        "iteration 5",
        "samples 64 to 79",
        "1.000E-03",
        "--no-check-for-nan-in-loss-and-grad",
    ):
        assert part in message
    assert isinstance(caught.value, MegatronError)
    assert caught.value.exit_code == 1
