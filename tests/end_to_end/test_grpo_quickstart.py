"""The quickstart of GRPO: a model that guesses sums learns from rewards alone to add in steps."""

from __future__ import annotations

import json
import re

import pytest

from tests.end_to_end.commands import quickstart

pytest.importorskip("matplotlib", reason="the quickstart's last step draws a picture")


@pytest.mark.slow  # a minute; the default tier trains on rewards in tests/unit/training/rollouts
def test_quickstart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run whole in a folder with a space: sums that nothing was learned from become right, and the curve says the same
    as a second program that asks for them.
    """
    folder = tmp_path_factory.mktemp("quick start")
    said, out = quickstart("examples/grpo/quickstart.sh", folder, iterations=600), folder / "run"
    shares = dict(re.findall(r"^ *(pretrained|grpo): +(\S+)% right", said[said.index("== Done in") :], re.MULTILINE))
    before, after = (float(shares[name]) / 100 for name in ("pretrained", "grpo"))
    assert before < 0.5 and after > 0.9, shares
    curve = [float(each) for each in re.findall(r"validation loss at iteration \d+ \| reward value: (\S+)", said)]
    assert len(curve) == 11
    assert abs(curve[0] - before) < 0.12 and abs(curve[-1] - after) < 0.06  # 200 answers each, other random numbers
    known, held_out = ((out / f"{name}.jsonl").read_text().splitlines() for name in ("prompts", "held_out"))
    texts = [json.loads(line)["text"] for line in (out / "text.jsonl").read_text().splitlines()]
    asked = {json.loads(line)["prompt"] for line in held_out}
    assert len(asked) == 200 and not asked & {json.loads(line)["prompt"] for line in known}
    assert not any(text.startswith(tuple(asked)) for text in texts)
    assert (out / "reward.png").exists() and f"{out}/reward.png" in said
