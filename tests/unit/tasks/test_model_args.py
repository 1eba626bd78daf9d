"""Arguments of lm-evaluation-harness are flags under other names; this needs no harness."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import ConfigError, MegatronError
from tasks.model_args import run_of, words_of
from tests.harness.evaluation import SmallGPT2
from tests.harness.sentences import expect_error


def test_mistakes_are_one_sentence(gpt2: SmallGPT2) -> None:
    load = str(gpt2.native)
    for flags, fact in (
        ({"load": "nowhere"}, "nowhere"),
        ({"load": load, "sizes": 3}, "--sizes"),
        ({"load": load, "data_path": "a"}, "--data-path"),
    ):
        with expect_error(MegatronError, fact, exit_code=2):
            run_of(flags, batch_size=None, device=None)
    with expect_error(ConfigError, "--device mps"):
        run_of({"load": load}, batch_size=None, device="mps")


def test_arguments_are_flags(gpt2: SmallGPT2) -> None:
    """What the harness calls otherwise means the same thing; a flag of ours goes before it."""
    flags = {"load": str(gpt2.native), "bf16": True, "valid": False, "cp_comm_type": ["p2p", "a2a"]}
    assert words_of(flags)[2:] == ["--bf16", "--no-valid", "--cp-comm-type", "p2p", "a2a"]
    load = {"load": str(gpt2.native)}
    assert run_of(load, batch_size="5", device="cpu").training.micro_batch_size == 5
    assert run_of({**load, "micro_batch_size": 2}, batch_size=5, device=None).training.micro_batch_size == 2
    assert run_of(load, batch_size="auto:4", device="cuda:0").training.micro_batch_size == 8
    assert run_of(load, batch_size=None, device="cpu").parallel.distributed_backend == "gloo"
    assert Path(run_of(load, batch_size=None, device=None).checkpoint.load or "") == gpt2.native
