"""The commands of examples/evaluate check and run, on one rank and on two, with the same score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks import main as tasks
from tests.end_to_end.commands import run, words_for_python
from tests.harness.evaluation import OPENINGS, WIKITEXT, small_gpt2


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What each script is told: a small model, small data, where the result goes."""
    pytest.importorskip("transformers", reason="converts a model of transformers")
    folder = tmp_path_factory.mktemp("evaluate")
    gpt = str(small_gpt2(folder / "gpt").native)
    (folder / "wiki.test.tokens").write_text(WIKITEXT)
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in OPENINGS))
    return {
        "wikitext": {"LOAD": gpt, "DATA": f"{folder}/wiki.test.tokens", "RESULT": f"{folder}/wikitext.json"},
        "lambada": {"LOAD": gpt, "DATA": f"{folder}/lambada.jsonl", "RESULT": f"{folder}/lambada.json"},
    }


def arguments(name: str, folder: Path, *, ranks: int, **variables: str) -> list[str]:
    """What a script hands tasks/main.py, which it starts on as many ranks."""
    launcher, words = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} tasks/main.py".split(), []
    script = f"examples/evaluate/{name}.sh"
    words = words_for_python(script, "--distributed-backend", "gloo", checkout=folder, **variables)
    assert words[: len(launcher)] == launcher
    return words[len(launcher) :]


@pytest.mark.parametrize(("tp", "pp"), [("1", "1"), ("2", "2")])
@pytest.mark.parametrize("name", ["wikitext", "lambada"])
def test_checks_at_each_layout(
    name: str,
    tp: str,
    pp: str,
    variables: dict[str, dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first thing to do with an example, before a machine is reserved for it."""
    ranks = int(tp) * int(pp)
    flags = arguments(name, tmp_path, ranks=ranks, TP=tp, PP=pp, **variables[name])
    assert tasks.main([*flags, "--dry-run", "--world-size", str(ranks)]) == 0
    said = capsys.readouterr().out
    assert f"{ranks} rank{'s' if ranks > 1 else ''}" in said
    assert "== parameters" in said


def test_the_score_is_the_same_on_two_ranks(
    variables: dict[str, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the head of the script promises, from its first line to the file with the result."""
    path = Path(variables["lambada"]["RESULT"])
    tasks.main(arguments("lambada", tmp_path, ranks=1, **variables["lambada"]))
    alone = json.loads(path.read_text())
    line = next(line for line in capsys.readouterr().out.splitlines() if "validation results" in line)
    said = run("tasks/main.py", "", *arguments("lambada", tmp_path, ranks=2, TP="2", **variables["lambada"]), ranks=2)
    together = json.loads(path.read_text())
    assert said.count(line) == 1
    assert together["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)
    assert [alone["layout"]["tp"], together["layout"]["tp"], together["layout"]["pp"]] == [1, 2, 1]
    for same in ("checkpoint", "data", "code"):
        assert alone[same] == together[same]
    assert alone["data"][0]["path"] == variables["lambada"]["DATA"]
    assert len(alone["checkpoint"]["sha256 of manifest"]) == 64
