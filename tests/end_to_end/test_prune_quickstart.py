"""The quickstart of pruning goes from a trained model to a smaller one, and shows its loss beside one from nothing."""

from __future__ import annotations

import re

import pytest

from megatron.core.conversion.native import read_native
from tests.end_to_end.commands import quickstart

pytest.importorskip("matplotlib", reason="the quickstart's last step draws pictures")


@pytest.mark.slow  # its commands are those of other tests, one after the other
def test_quickstart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run for a few iterations in a folder with a space: a table, both losses, and the paths of all."""
    folder = tmp_path_factory.mktemp("quick start")
    said, out = quickstart("examples/prune/quickstart.sh", folder, iterations=40), folder / "run"
    large, small = (read_native(out / name) for name in ("large", "distilled"))
    assert re.search(r"^layers +4 +3  without \d$", (out / "pruned.txt").read_text(), re.MULTILINE)
    assert small.model == read_native(out / "scratch").model and small.model.hidden_size == 96
    assert small.num_parameters < 0.7 * large.num_parameters
    end = said[said.index("== Done in") :]
    found = dict(re.findall(r"^(distilled|scratch): training lm loss from (\S+) ", end, re.MULTILINE))
    assert {*found} == {"distilled", "scratch"}, end
    for name in ("large", "distilled", "pruned.txt", "loss.png"):
        assert f"{out}/{name}" in end and (out / name).exists()
