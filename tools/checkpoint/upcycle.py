"""Make a mixture of experts of a dense checkpoint, whose logits stay the same, and prove it.

The router's scores must add up to 1 (softmax over the chosen experts, as runs have without --moe-router-pre-softmax).
Train on with --load and --finetune.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from collections.abc import Sequence

from megatron.config.flags import Settings, flag, switch
from megatron.config.parse import parse_groups
from megatron.core.files.remote_path import path_of
from megatron.errors import CheckpointError, kept_on_interrupt, run_command


class UpcycleConfig(Settings):
    """Which checkpoint becomes how many experts."""

    load: str = flag("Folder of the dense checkpoint.")
    load_ema: bool = switch("Take the moving average of the weights that a run with --ema-decay saved.")
    save: str = flag("New folder for the checkpoint with experts.")
    num_experts: int = flag("Experts of each layer.", at_least=2, at_most=4096)
    moe_router_topk: int = flag("Experts that each token is routed to (top-k).", default=2, at_least=1)
    moe_upcycling_granularity: int = flag(
        "Parts into which the dense network is cut; an expert is one of them.", default=1, at_least=1
    )
    seed: int = flag("Seed of the routers.", default=1234, at_least=1)


def main(argv: Sequence[str]) -> int:
    """Upcycle, and say how far the logits are apart."""
    (config,) = parse_groups(argv, UpcycleConfig, prog="upcycle.py", about=__doc__ or "")
    import torch

    from megatron.core.conversion.averaging import read_average
    from megatron.core.conversion.convert import check_target
    from megatron.core.conversion.native import read_native, write_native
    from megatron.core.conversion.proof import TOLERANCE, native_answer
    from megatron.core.conversion.questions import question_for
    from megatron.core.conversion.remote import becoming
    from megatron.core.models.gpt.upcycling import upcycled

    load, save = path_of(config.load), path_of(config.save)
    check_target(save)
    dense = read_average(load) if config.load_ema else read_native(load)
    made = upcycled(
        dense,
        num_experts=config.num_experts,
        granularity=config.moe_upcycling_granularity,
        topk=config.moe_router_topk,
        seed=config.seed,
    )
    question = question_for(dense.model, dense.groups)
    with (
        kept_on_interrupt(lambda: f"nothing is written to --save {save}"),
        becoming(save, say=print, check=lambda: check_target(save)) as aside,
    ):
        write_native(made, aside, final=save)
        expected = native_answer(load, question, averaged=config.load_ema)
        found = native_answer(aside, question)
        furthest = max((found[kind] - logits).abs().max().item() for kind, logits in expected.items())
        scale = max(logits.abs().max().item() for logits in expected.values())
        allowed = max(TOLERANCE, torch.finfo(dense.dtype).eps) * scale  # parts of weights are scaled, and rounded again
        if not furthest <= allowed:
            raise CheckpointError(
                f"the logits of the experts differ by {furthest:.2e}, where rounding explains {allowed:.2e}; "
                f"nothing is written to {save}"
            )
    print(f"proof: largest difference of logits {furthest:.2e}, of logits up to {scale:.2f}")
    print(f"wrote {save}: {made.num_parameters:,} parameters, of {dense.num_parameters:,} in the dense model")
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
