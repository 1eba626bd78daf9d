"""The tiers: which cases are in the default one, the order of tests, when none begins, and what folders may take."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import budget, selection
from tests.harness.sentences import check_sentence
from tests.tiers import WHOLE_TIER_ALONE, pairs


def first(cases: list[Any]) -> set[tuple[str, str]]:
    """Cases of the default tier."""
    return {case.values for case in cases if not case.marks}


def test_each_variant_and_each_layout_is_in_the_default_tier() -> None:
    """A variant that no pair of the default tier has would be seen broken in a run of an hour alone."""
    cases = pairs("abcde", "1234567", rich="12", more={"e": "7"}, slow=("b", "6"))
    assert len(cases) == 5 * 7
    assert first(cases) == {
        ("a", "1"),
        ("c", "2"),
        ("d", "1"),
        ("e", "2"),
        ("e", "7"),
        ("a", "3"),
        ("c", "4"),
        ("d", "5"),
    }


def test_every_module_has_a_test_in_the_default_tier(request: pytest.FixtureRequest) -> None:
    """What a module proves would be seen broken in a run of an hour alone. Of the modules that this run collects."""
    count = request.config.stash[selection.DEFAULT_TESTS]
    slow = {module for module, tests in count.items() if not tests}
    listed = {*WHOLE_TIER_ALONE}
    assert slow - listed == set(), "mark a test as no slow one, or say why not in tests/tiers.py"
    assert (listed & count.keys()) - slow == set(), "have tests in the default tier, and need no reason"
    assert [module for module in listed if not (budget.ROOT / module).is_file()] == []


def items(*modules: int) -> list[Any]:
    """Tests of modules with so many each."""
    return [
        SimpleNamespace(path=Path(str(number)), name=n) for number, tests in enumerate(modules) for n in range(tests)
    ]


def test_an_order_is_a_function_of_its_seed() -> None:
    """A failure that depends on the order could not be seen again; and processes must agree on it."""
    tests = items(3, 50, 1)
    one, again, other = (selection.shuffled(tests, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert sorted(map(id, one)) == sorted(map(id, other)) == sorted(map(id, tests))


def test_neighbours_share_what_their_module_makes_once() -> None:
    """In an order without any neighbours a trained model would be trained for each of the tests that use it."""
    order = [test.path for test in selection.shuffled(items(*[10] * 30), 0)]
    assert sum(one == other for one, other in itertools.pairwise(order)) >= 30 * 9


def test_no_test_begins_when_the_time_is_up() -> None:
    """Continuous integration would be stopped from outside, and report nothing."""
    item: Any = SimpleNamespace(config=SimpleNamespace(option=SimpleNamespace(all=0.0)))
    with pytest.raises(pytest.skip.Exception, match=selection.OUT_OF_TIME):
        selection.pytest_runtest_setup(item)
    for seconds in (None, float("inf")):
        item.config.option.all = seconds
        selection.pytest_runtest_setup(item)


def test_a_folder_above_its_share_is_named() -> None:
    """A default tier that grows by a little with each change takes half an hour after a year."""
    granted = {"tests/equivalence": 4.0, "tests/unit": 3.0, "tests/parallel": 1.0, "tests/gpu": 0.0}
    within = {folder: 60 * each for folder, each in granted.items()}
    assert budget.over(within, granted) == []
    assert budget.over({folder: 3 * seconds for folder, seconds in within.items()}, granted) == [], "a slower machine"
    (found,) = budget.over(within | {"tests/parallel": 150.0}, granted)
    check_sentence(found, "tests/parallel", "150 of 570 CPU seconds", "26%", "12%", "python -m tests.budget")
    assert budget.over(within | {"tests/parallel": 100.0}, granted) == []
    (found,) = budget.over(within | {"tests/new": 1.0}, granted)
    check_sentence(found, "tests/new", "tests/budget.py")


def test_tests_count_for_their_most_specific_folder() -> None:
    """Those of conversion have a budget of their own."""
    assert budget.folder_of("tests/unit/conversion/test_hub.py::test_x[tests/parallel/]") == "tests/unit/conversion"
    assert budget.folder_of("tests/unit/ops/test_norm.py::test_x") == "tests/unit"
    assert budget.folder_of("tests/new/test_norm.py::test_x") == "tests/new"
    folders = {f"tests/{path.parent.name}" for path in (budget.ROOT / "tests").glob("*/test_*.py")}
    assert folders <= budget.FOLDERS.keys()


def test_the_document_has_the_table_of_the_budget() -> None:
    """Folders, shares and the sum are those of its minutes; all of them fit into eight minutes on two slow cores."""
    document = budget.DOCUMENT.read_text(encoding="utf-8")
    minutes = budget.minutes(document)
    assert budget.rewritten(document, minutes) == document, "run python -m tests.budget"
    assert 0 < sum(minutes.values()) <= budget.MOST


def test_what_was_measured_is_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document and the shares had copies of their own: who wrote one as told had a red test."""
    document, last = tmp_path / "CONTRIBUTING.md", tmp_path / "cpu_seconds"
    document.write_text(f"before\n\n{budget.table({'tests/unit': 2.0, 'tests/parallel': 2.0})}\nafter\n")
    seconds = {folder: 62.0 + 7 * place for place, folder in enumerate(budget.FOLDERS)} | {"tests/unit": 600.0}
    last.write_text(json.dumps(seconds))
    monkeypatch.setattr(budget, "DOCUMENT", document)
    monkeypatch.setattr(budget, "LAST_RUN", last)
    assert budget.over(seconds, budget.minutes(document.read_text())) != []
    assert budget.main() == 0
    written = document.read_text()
    assert written.startswith("before\n\n") and written.endswith("|\n\nafter\n")
    minutes = budget.minutes(written)
    assert minutes["tests/unit"] == 10.0 and minutes.keys() == budget.FOLDERS.keys()
    assert budget.rewritten(written, minutes) == written
    assert budget.over(seconds, minutes) == []
