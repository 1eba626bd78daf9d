"""The HTML report of runs: what is on the page, and what is refused."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typing_extensions import override

from megatron.errors import DataError
from tests.harness.sentences import expect_error
from tools.report import main

_VOID = {"meta", "path", "use", "br", "link", "img"}


class Page(HTMLParser):
    """Checks that elements are closed in their order; keeps texts, and addresses that a browser would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.texts, self.loads = list[str](), list[str](), list[str]()
        self.feed(text)

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loaded = (str(value) for name, value in attrs if name in ("src", "href"))
        self.loads += [value for value in loaded if not value.startswith("#")]
        if tag not in _VOID:
            self.open.append(tag)

    @override
    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def run(folder: Path, *, rate: str, sample: str = "once upon") -> Path:
    """A --save folder with the events of a run."""
    folder.mkdir()
    settings = [f"--lr {rate}  command line", "--swiglu"]
    start = {"iteration": 0, "world_size": 2, "layout": {"tp": 2}, "settings": settings, "data": ["train: 100% web"]}
    steps = {"event": "steps", "iterations": 1, "seconds": 1.0}
    events = [
        {"event": "start", "time": 100.0, "setup_seconds": 5.0, **start},
        *({**steps, "time": 100.0 + i, "iteration": i, "losses": {"lm loss": 5 / i}} for i in range(1, 5)),
        {"event": "validation", "time": 105.0, "where": "iteration 4", "iteration": 4, "losses": {"lm loss": 1.5}},
        {"event": "sample", "time": 106.0, "iteration": 4, "prompt": "<b>", "text": sample},
        {"event": "numbers", "time": 106.0, "iteration": 4, "values": {"LAMBADA accuracy": 0.25}},
        {"event": "end", "time": 107.0, "iteration": 4, "state": "failed", "error": "the disk is full"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People compare runs by curves, settings that differ, lost time and samples; the page loads nothing."""
    pytest.importorskip("matplotlib", reason="the matplotlib package is optional")
    first = run(tmp_path / "first", rate="0.1", sample="<script>alert(1)</script>")
    main([str(first), str(run(tmp_path / "second", rate="0.2")), "--output", str(tmp_path / "page.html")])
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert "<script" not in text
    assert text.count("<svg") >= 2
    assert 'class="differs"><th>--lr</th>' in text
    assert 'class="differs"><th>--swiglu</th>' not in text
    title, kept = "first and second", "steps that are kept"
    for said in (title, kept, "1.5 (iteration 4)", "0.25 (iteration 4)", "train: 100% web"):
        assert said in page.texts, said
    assert any("the disk is full" in each for each in page.texts)
    assert "failed at iteration 4" in capsys.readouterr().out


def test_what_has_no_events_is_named(tmp_path: Path) -> None:
    """A wrong folder was a traceback of Python's."""
    with expect_error(DataError, tmp_path, exit_code=2):
        main([str(tmp_path)])
    with expect_error(DataError, tmp_path / "gone", exit_code=2):
        main([str(tmp_path / "gone")])


def test_names_that_matplotlib_would_read_as_formulas(tmp_path: Path) -> None:
    """A loss or folder with a dollar ended the report with a traceback, and a first underscore hid its label."""
    words = ["$\\frac{$", "_x", "\ud800\x1b", ""]
    losses = dict(zip(words, (1e308, "inf", 10**300, "nan")))
    steps = {"time": 1.0, "event": "steps", "iteration": 1, "iterations": 1, "seconds": 1.0, "losses": losses}
    folder = tmp_path / "_$\\a{$"
    folder.mkdir()
    (folder / "events.jsonl").write_text(json.dumps(steps) + "\n")
    assert main([str(folder), str(run(tmp_path / "_other", rate="1")), "--output", str(tmp_path / "page.html")]) == 0
    Page((tmp_path / "page.html").read_text(encoding="utf-8"))
