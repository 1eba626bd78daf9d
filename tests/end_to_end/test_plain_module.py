"""examples/plain_module: a module of one's own as a script, on one rank and on two, and as a notebook."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.commands import ROOT, run

SCRIPT = "examples/plain_module/train.py"
CELLS = json.loads((ROOT / "examples/plain_module/notebook.ipynb").read_text(encoding="utf-8"))["cells"]


def losses(said: str) -> dict[int, str]:
    """The loss of each iteration as it was printed."""
    return {int(number): loss for number, loss in re.findall(r"iteration +(\d+)/.*?\| loss: (\S+)", said)}


def test_the_script_has_forty_lines_and_resumes(tmp_path: Path) -> None:
    """A run that stopped goes on with the losses of one that didn't, on two ranks with those of one."""
    assert (ROOT / SCRIPT).read_text(encoding="utf-8").count("\n") <= 40
    flags = "--train-iters 4 --log-interval 1 --eval-iters 0 --global-batch-size 32"
    whole = losses(run(SCRIPT, flags))
    saves = f"{flags} --save {tmp_path} --load {tmp_path}"
    stopped = losses(run(SCRIPT, f"{saves} --exit-interval 2"))
    assert {**stopped, **losses(run(SCRIPT, saves))} == whole
    assert len(whole) == 4
    two = losses(run(SCRIPT, f"{flags} --distributed-backend gloo --use-distributed-optimizer", ranks=2))
    assert list(map(float, two.values())) == pytest.approx(list(map(float, whole.values())), rel=1e-4)


def test_a_mistake_is_a_sentence() -> None:
    """Exit code 2, and no traceback."""
    said = run(SCRIPT, "--seq-lenght 3", expect=2)
    assert "--seq-length" in said
    assert "Traceback" not in said


def test_the_notebook_shows_what_its_cells_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells run in order; those with outputs in the file have these."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(CELLS):
        if cell["cell_type"] != "code":
            continue
        *body, last = ast.parse("".join(cell["source"])).body
        capsys.readouterr()
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        found = None
        if isinstance(last, ast.Expr):
            found = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        else:
            exec(compile(ast.Module([last], []), f"cell {number}", "exec"), names)
        for output in cell["outputs"]:
            shown = output.get("text") or output["data"]["text/plain"]
            assert "".join(shown) in (capsys.readouterr().out, repr(found)), f"cell {number}"
