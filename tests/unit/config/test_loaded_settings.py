"""Settings that come with a model, from its checkpoint or its folder."""

from __future__ import annotations

from typing import Any

from tests.unit.config.command_lines import parse, run_of


def test_settings_of_a_loaded_model_are_no_flags_without_effect() -> None:
    """Every Llama that was loaded had remarks about --mscale and --mtp-loss-scaling-factor, which nobody had given."""
    saved = run_of(model={"mtp_loss_scaling_factor": 0.3, "position_embedding_type": "rope"}).to_json()
    readers: dict[str, Any] = {
        "checkpoint_config": lambda load, step: saved,
        "published_config": lambda folder, groups, adapter: saved,
    }
    without = "--num-layers --hidden-size --num-attention-heads --seq-length"
    for source in ("--use-checkpoint-args --load runs/a", "--load-hf models/llama --seq-length 32"):
        run = parse(source, without=without, **readers)
        assert not [note for note in run.notes if "no effect" in note]
        run = parse(f"{source} --mtp-loss-scaling-factor 0.2", without=without, **readers)
        assert "--mtp-loss-scaling-factor: no effect without --mtp-num-layers" in run.notes
