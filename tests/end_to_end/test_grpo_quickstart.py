"""The quickstart of GRPO: a model that guesses sums learns from rewards alone to add them."""

from __future__ import annotations

import json
import re

import pytest

from tests.end_to_end.commands import quickstart

pytest.importorskip("matplotlib", reason="the quickstart's last step draws a picture")


@pytest.mark.slow  # a minute; the default tier trains on rewards in tests/unit/training/rollouts
def test_quickstart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run whole in a folder with a space: sums become right of which GRPO had no prompt, and the curve says the same as
    a second program that asks for them.
    """
    folder = tmp_path_factory.mktemp("quick start")
    said, out = quickstart("examples/grpo/quickstart.sh", folder, iterations=800), folder / "run"
    shares = dict(re.findall(r"^ *(pretrained|grpo): +(\S+)% right", said[said.index("== Done in") :], re.MULTILINE))
    before, after = (float(shares[name]) / 100 for name in ("pretrained", "grpo"))
    assert before < 0.5 and after > 0.85, shares
    curve = [float(each) for each in re.findall(r"validation loss at iteration \d+ \| reward value: (\S+)", said)]
    assert len(curve) == 11
    assert abs(curve[0] - before) < 0.12 and abs(curve[-1] - after) < 0.08  # 200 answers each, other random numbers
    known, held_out = (
        {json.loads(line)["prompt"] for line in (out / f"{name}.jsonl").read_text().splitlines()}
        for name in ("prompts", "held_out")
    )
    assert len(known) == 80 and len(held_out) == 20 and not held_out & known
    assert (out / "reward.png").exists() and f"{out}/reward.png" in said
