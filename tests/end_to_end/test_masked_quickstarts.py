"""The quickstarts of BERT and T5: their commands work in any folder, and their models fill gaps at the end."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.commands import quickstart

pytest.importorskip("matplotlib", reason="the quickstart's last step draws a picture")


SHOWN = {  # what guessing by frequency costs, and what is filled in
    "bert": (
        r"Guessing words by how often they occur costs (\S+)\.\n",
        r"^  => return a list .* all the names in the module",
    ),
    "t5": (
        r"Predicting its tokens by their frequency costs (\S+) nats a token\.\n",
        r"^  => return the number .*bytes\.\n(.*\n)+[\d,]+ hidden spans of 1,000 samples: first token right",
    ),
}


@pytest.mark.slow  # the commands are those of examples/quickstart.sh with another family's flags
@pytest.mark.parametrize("family", SHOWN)
def test_quickstart(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run for a few iterations in a folder with a space: loss, entropy, words and picture are there."""
    folder = tmp_path_factory.mktemp("quick start")
    said, out = quickstart(f"examples/{family}/quickstart.sh", folder, iterations=20), folder / "run"
    assert [int(number) for number in re.findall(r"\] iteration +(\d+)/ *20 \|", said)] == list(range(1, 21))
    found = re.search(r"The loss fell: training lm loss from (\S+) \(iteration 1\) to (\S+) \(20\)", said)
    assert found is not None
    assert 7.4 < float(found[1]) < 8.6  # guessing among 2,048 pieces costs ln 2048 = 7.6, and weights are random
    assert float(found[2]) < float(found[1])
    costs, filled = SHOWN[family]
    entropy = re.search(costs, said[said.index("== Done in") :])
    assert entropy is not None and {"bert": 5.5, "t5": 3.5}[family] < float(entropy[1]) < 7.0
    assert re.search(filled, (out / "filled.txt").read_text(), re.MULTILINE)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    for name in ("checkpoints", "tensorboard", "loss.png", "filled.txt"):
        assert f"{out}/{name}" in said[said.index("== Done in") :]
