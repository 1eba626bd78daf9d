"""A model of ours in Accelerate's loop on two ranks trains as transformers' on one, and loads at another layout."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import megatron
from tests.end_to_end.commands import launch

pytest.importorskip("accelerate", reason="its loop is what is tested")
transformers = pytest.importorskip("transformers", reason="its model is the reference")

LLAMA = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def reference(model: Any) -> list[float]:
    """The losses of the example's loop, written out for one process with batches of both ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    starts = torch.randint(96, (64, 1), generator=torch.Generator().manual_seed(0))
    texts, losses = (starts + torch.arange(17)) % 96, []
    for _ in range(2):
        for ids in (texts[start : start + 16] for start in range(0, 64, 16)):
            loss = cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.slow  # real launchers of four ranks; models from transformers are in tests/unit/library
def test_two_ranks_train_as_transformers_does_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are summed over ranks once, by Accelerate's wrapper; the saved model generates at TP 2."""
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    theirs.save_pretrained(tmp_path / "hf")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    said = launch("examples/accelerate/train.py", f"{tmp_path / 'hf'} {tmp_path / 'out'}", ranks=2)
    losses = [float(number) for number in re.findall(r"epoch \d loss ([\d.]+)", said)]
    assert losses == pytest.approx(reference(theirs), abs=2e-5)

    saved, ids = megatron.load(tmp_path / "out"), torch.arange(12).view(1, 12)
    torch.testing.assert_close(saved(ids), theirs(ids).logits, rtol=1e-3, atol=1e-4)
    flags = f"--load {tmp_path / 'out'} --prompt '5 6 7' --temperature 0 --tokens-to-generate 6"
    said = launch("tools/text_generation_cli.py", "", *shlex.split(flags), ranks=2)
    assert " ".join(map(str, saved.generate([5, 6, 7], temperature=0, max_new_tokens=6))) in said
