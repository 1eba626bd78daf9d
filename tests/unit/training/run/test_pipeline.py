"""What a run's settings mean for its schedule, and what the reports say about it."""

from __future__ import annotations

import pytest

from megatron.config.pipeline import Stage, model_stages
from megatron.core.parallel.context import ParallelContext
from megatron.core.pipeline_parallel.actions import Action
from megatron.core.pipeline_parallel.lower import lower
from megatron.core.pipeline_parallel.schedules import interleaved
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.errors import ParallelError
from megatron.planning.schedule import schedule_facts
from megatron.training.run.agreement import check_stages
from megatron.training.run.pipeline import Plans, routes
from tests.harness.sentences import check_line, expect_error
from tests.unit.config.command_lines import parse
from tests.unit.planning.test_dry_run import dry_run_report
from tests.unit.planning.test_estimate import memory_estimate

SCHEDULES = {
    "1f1b": "",
    "gpipe": "--pipeline-schedule gpipe",
    "interleaved": "--num-virtual-stages-per-pipeline-rank 2",
    "zb-h1": "--pipeline-schedule zb-h1",
    "zb-v": "--pipeline-schedule zb-v",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_settings_and_schedules_agree_on_stages(name: str) -> None:
    """The estimate would be of other ranks than those that are built."""
    run = parse(f"--num-layers 9 --pipeline-model-parallel-size 3 {SCHEDULES[name]}", ranks=3)
    settings = PipelineSettings.of(run)
    assert settings.name == name
    assert [shape.rank for shape in model_stages(run)] == [location.rank for location in settings.placement.locations]
    assert settings.schedule(4).placement == settings.placement


def test_settings_say_how_microbatches_take_turns_and_messages_move() -> None:
    """Any group and either way compute the same numbers, so nobody would notice a flag that does nothing."""
    flags = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    grouped = f"{flags} --microbatch-group-size-per-virtual-pipeline-stage 3"
    assert PipelineSettings.of(parse(flags, ranks=2)).schedule(6) == interleaved(2, 6, 2, group_size=2)
    assert PipelineSettings.of(parse(grouped, ranks=2)).schedule(6) == interleaved(2, 6, 2, group_size=3)
    for more, overlap in (("", True), ("--no-overlap-p2p-communication", False)):
        settings = PipelineSettings.of(parse(f"{flags} {more}", ranks=2))
        assert Plans(settings, rank=1).training(4) == lower(settings.schedule(4), overlap=overlap)[1]


@pytest.mark.parametrize(
    "stages",
    [
        [Stage(range(3), True, True)],
        [Stage(range(4), True, False)],
        [Stage(range(3), True, False), Stage(range(2, 4), False, True)],
    ],
    ids=["a layer lost", "no output", "a layer twice"],
)
def test_lost_layers_stop_the_run(stages: list[Stage]) -> None:
    """A smaller model than asked for would train without a word."""
    context = ParallelContext.single()
    check_stages(parse(), [Stage(range(4), True, True)], context)
    with expect_error(ParallelError):
        check_stages(parse(), stages, context)


def test_plans_follow_the_number_of_microbatches() -> None:
    """Batch ramp-up changes it during a run."""
    plans = Plans(PipelineSettings("1f1b", 2, 1, None, overlap=True), rank=1)
    for count in (1, 4, 1):
        plan = [each for each in plans.training(count) if isinstance(each, Action)]
        assert len(plan) == 2 * count
    assert plans.training(4) is plans.training(4)
    assert {str(each)[1] for each in plans.evaluation(2) if isinstance(each, Action)} == {"F"}


def test_routes_are_between_neighbours() -> None:
    """Connections that are made in another order on two ranks would hang at the start."""
    looped = PipelineSettings("interleaved", 3, 2, None, overlap=True).placement
    assert routes(looped) == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)}
    assert routes(PipelineSettings("zb-v", 3, 2, None, overlap=True).placement) == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_memory_is_that_of_the_fullest_rank() -> None:
    """1F1B's first rank keeps as many microbatches as there are stages; GPipe's keep all."""
    flags = "--num-layers 8 --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16"
    run, all_at_once = parse(flags, ranks=4), parse(f"{flags} --pipeline-schedule gpipe", ranks=4)
    assert schedule_facts(run, [10.0] * 4).peaks == (40.0, 30.0, 20.0, 10.0)
    assert schedule_facts(run, [10.0] * 4).bubble == pytest.approx(3 / 16)
    one, other = (memory_estimate(each) for each in (run, all_at_once))
    assert one.kept * 3 < other.kept


def test_dry_runs_describe_the_pipeline() -> None:
    """Which layers are where, and what waiting costs, before a cluster is booked."""
    flags = "--dry-run --num-layers 7 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    report = dry_run_report(parse(f"{flags} --global-batch-size 8", ranks=2))
    check_line(report, "interleaved", "4", "2", "2", "2", "1")
    check_line(report, "compute", "12.5")
    check_line(report, "rank 0")
    check_line(report, "rank 1")
    check_line(report, "fullest")
