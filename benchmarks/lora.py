"""A training step of adapters (LoRA) beside a frozen model against peft, on the CPU.

    python -m benchmarks.lora --dtype bf16
    python -m benchmarks.lora --quick

Rank 16 on all linear layers of a Qwen 2, whose other weights have no gradient. It is ``benchmarks.training_step`` with
``--model-type qwen2-adapters``, and takes its options. In bf16 peft enters twice: with bf16 weights, and with fp32
weights under autocast.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # started as a script: take megatron and the like from this checkout, whatever is installed
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from benchmarks import training_step


def main() -> None:
    sys.argv[1:1] = ["--model-type", "qwen2-adapters"]
    training_step.main()


if __name__ == "__main__":
    main()
