"""A resumed run goes on exactly as one that was never interrupted, in a new process."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import TINY, assert_same_tensors, command, environment, losses, run, tensors
from tests.harness.sentences import check_line
from tests.tiers import tiers

RUNS = {
    "dropout and accumulation": (1, "--train-iters 8"),
    "bf16, ramp-up of the batch": (1, "--bf16 --train-samples 60 --rampup-batch-size 4 2 30"),
    "fp16 with a loss scale that moves": (
        1,
        "--fp16 --train-iters 8 --initial-loss-scale 1048576 --loss-scale-window 3",
    ),
    "two ranks, sharded optimizer, overlap": (
        2,
        "--train-iters 8 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "context parallel, sharded optimizer": (
        2,
        "--train-iters 8 --context-parallel-size 2 --use-distributed-optimizer",
    ),
    "zero-bubble pipeline in bf16, ramp-up of the batch": (
        2,
        "--train-samples 60 --rampup-batch-size 4 2 30 --bf16 --num-layers 4 --pipeline-model-parallel-size 2 "
        "--pipeline-schedule zb-v",
    ),
    "virtual pipeline stages with tensor parallelism, recompute": (
        4,
        "--train-iters 8 --num-layers 5 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--tensor-model-parallel-size 2 --recompute-granularity full",
    ),
    "tensor and sequence parallel, recompute": (
        2,
        "--train-iters 8 --tensor-model-parallel-size 2 --sequence-parallel --recompute-activations",
    ),
    "layers of Gemma 2 and 3, with YaRN and sinks": (
        2,
        "--train-iters 5 --tensor-model-parallel-size 2 --normalization RMSNorm --apply-layernorm-1p --geglu "
        "--disable-bias-linear --norm-placement both --qk-layernorm --qk-layernorm-kind all_heads "
        "--group-query-attention --num-query-groups 2 --kv-channels 16 --softmax-scale 0.3 --window-size 7,0 "
        "--window-attn-skip-freq 2 --attn-logit-softcapping 5 --final-logit-softcapping 10 --embedding-multiplier 5.7 "
        "--position-embedding-type yarn --original-max-position-embeddings 16 --rotary-scaling-factor 2 "
        "--rotary-base-local 500 --softmax-type learnable --add-attention-output-bias --add-mlp-bias",
    ),
    "layers of Falcon and Phi, with LongRoPE": (
        2,
        "--train-iters 5 --tensor-model-parallel-size 2 --sequence-parallel --parallel-attention --parallel-layernorm "
        "--group-query-attention --num-query-groups 1 --disable-bias-linear --add-qkv-bias "
        "--add-output-layer-bias --exact-gelu --qk-layernorm --qk-layernorm-kind per_head --norm-parameters weight "
        "--position-embedding-type longrope --original-max-position-embeddings 16 --rotary-scaling-factor 2 "
        "--longrope-short-factors 1 1 1 1 --longrope-long-factors 1 2 3 4 --no-rope-freq [1,0] "
        "--untie-embeddings-and-output-weights --use-distributed-optimizer",
    ),
    "layers of BLOOM and OLMo 1, with multipliers": (
        2,
        "--train-iters 5 --tensor-model-parallel-size 2 --position-embedding-type alibi --embedding-norm "
        "--norm-parameters none --clip-qkv 1 --softmax-type off-by-one --qk-l2-norm --residual-multiplier 0.5 "
        "--logits-multiplier 2 --recompute-granularity full",
    ),
}
FIRST = (
    "fp16 with a loss scale that moves",
    "two ranks, sharded optimizer, overlap",
    "zero-bubble pipeline in bf16, ramp-up of the batch",
)
"""tests/parallel/test_resume.py resumes at the other layouts in the default tier."""


@pytest.mark.parametrize("name", tiers(RUNS, first=FIRST))
def test_resume_is_bitwise_the_uninterrupted_run(name: str, tmp_path: Path) -> None:
    """A run that stops at iteration 3 and resumes would otherwise be another run from there on."""
    ranks, flags = RUNS[name]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    flags = f"{TINY} {flags} --save-interval 100"
    uninterrupted = run("pretrain_gpt.py", flags, f"--save={whole}", ranks=ranks)
    first = run("pretrain_gpt.py", flags, f"--save={halves}", f"--load={halves}", "--exit-interval=3", ranks=ranks)
    check_line(first, "iteration 3")
    second = run("pretrain_gpt.py", flags, f"--save={halves}", f"--load={halves}", ranks=ranks)
    assert losses(first) | losses(second) == losses(uninterrupted)
    (last,) = whole.glob("iter_*")
    assert_same_tensors(last, halves / last.name)


def test_other_layout_continues_the_same_run(tmp_path: Path) -> None:
    """A checkpoint of two tensor-parallel ranks loads on two of another kind, and on one."""
    flags = f"{TINY} --save-interval 100 --hidden-dropout 0 --attention-dropout 0 --train-iters 6"
    saved = tmp_path / "saved"
    run("pretrain_gpt.py", f"{flags} --exit-interval 3 --tensor-model-parallel-size 2", f"--save={saved}", ranks=2)
    one = run("pretrain_gpt.py", flags, f"--load={saved}")
    two = run("pretrain_gpt.py", f"{flags} --use-distributed-optimizer", f"--load={saved}", ranks=2)
    sliced = run("pretrain_gpt.py", f"{flags} --context-parallel-size 2", f"--load={saved}", ranks=2)
    staged = run("pretrain_gpt.py", f"{flags} --pipeline-model-parallel-size 2", f"--load={saved}", ranks=2)
    assert list(losses(one)) == list(losses(two)) == list(losses(sliced)) == list(losses(staged)) == [4, 5, 6]
    for iteration, loss in losses(one).items():
        for other in (two, sliced, staged):
            assert float(losses(other)[iteration]) == pytest.approx(float(loss), rel=1e-5)


def test_a_run_that_is_done_says_so(tmp_path: Path) -> None:
    """Whoever starts it again, with the flags it had, would wonder why nothing happens."""
    flags = f"{TINY} --train-iters 2 --save-interval 2"
    run("pretrain_gpt.py", flags, f"--save={tmp_path}")
    again = run("pretrain_gpt.py", flags, f"--load={tmp_path}")
    check_line(again, "iteration 2", "--train-iters 2")
    assert losses(again) == {}


def test_sigterm_saves_first(tmp_path: Path) -> None:
    """A job that its scheduler ends would lose everything since its last checkpoint."""
    flags = f"{TINY} --train-iters 100000 --save-interval 100000 --exit-signal-handler"
    words = command("pretrain_gpt.py", flags, f"--save={tmp_path}")
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "iteration        3/" in line:
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=600) == 0
    check_line(rest, "receiving")
    assert len(list(tmp_path.glob("iter_*"))) == 1


@pytest.mark.slow  # torchrun alone takes seconds; test_sigterm_saves_first has the ranks
def test_sigterm_to_the_launcher_saves_first(tmp_path: Path) -> None:
    """torchrun hands SIGTERM on to everything below it, data workers too: their death took the run down unsaved."""
    flags = f"{TINY} --num-workers 1 --train-iters 100000 --save-interval 100000 --exit-signal-handler"
    words = command("pretrain_gpt.py", flags, f"--save={tmp_path}", ranks=2)
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        log = []
        for line in process.stdout:
            log.append(line)
            # torchrun's handler raises, and Python discards what is raised in a destructor: then it is asked again.
            if (found := re.search(r"iteration +(\d+)/", line)) and int(found[1]) % 2000 == 3:
                process.send_signal(signal.SIGTERM)
        process.wait(timeout=600)
    assert "exiting program after receiving SIGTERM." in "".join(log)
    assert len(list(tmp_path.glob("iter_*"))) == 1


def test_skip_train_evaluates_a_checkpoint_without_training_flags(tmp_path: Path) -> None:
    """Evaluating needs no learning rate, no length of training and no optimizer state."""
    flags = TINY.replace("--eval-iters 0", "--eval-iters 2")
    trained = run(
        "pretrain_gpt.py", f"{flags} --train-iters 4 --save-interval 100 --no-save-optim", f"--save={tmp_path}"
    )
    log = run("pretrain_gpt.py", flags.replace("--lr 1e-2", "--skip-train"), f"--load={tmp_path}")
    (wanted,) = re.findall(r"iteration 4 on test set \| lm loss value: (\S+)", trained)
    assert re.findall(r"iteration 4 on test set \| lm loss value: (\S+)", log) == [wanted]


def test_masters_survive_a_change_of_precision(tmp_path: Path) -> None:
    """A bf16 checkpoint holds fp32 masters; fp32 training that starts from the rounded weights would lose them."""
    flags = f"{TINY} --save-interval 100"
    run("pretrain_gpt.py", f"{flags} --bf16 --train-iters 2", f"--save={tmp_path}/bf16")
    again = [
        "--override-opt_param-scheduler",
        "--no-load-optim",
        f"--load={tmp_path}/bf16",
        "--lr=0",
        "--train-iters=3",
    ]
    run("pretrain_gpt.py", flags, *again, f"--save={tmp_path}/fp32")
    run("pretrain_gpt.py", f"{flags} --bf16", *again, f"--save={tmp_path}/bf16 again")
    trained = tensors(tmp_path / "bf16" / "iter_0000002")
    continued = tensors(tmp_path / "fp32" / "iter_0000003")
    rounded = tensors(tmp_path / "bf16 again" / "iter_0000003")
    for name, master in trained.items():
        if name.startswith("optimizer.fp32_param."):
            assert torch.equal(continued[name.replace("optimizer.fp32_param", "model")], master)
            assert torch.equal(rounded[name], master)


def test_overlapped_gather_and_replica_check(tmp_path: Path) -> None:
    """Weights that are still on their way must not be taken for a broken device."""
    flags = "--train-iters 4 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    run("pretrain_gpt.py", f"{TINY} {flags} --check-weight-hash-across-dp-replicas-interval 1", ranks=2)


def test_finetune_takes_weights_alone(tmp_path: Path) -> None:
    """Fine-tuning starts at iteration 0 with a fresh optimizer and schedule."""
    flags = f"{TINY} --train-iters 4 --save-interval 100"
    run("pretrain_gpt.py", flags, f"--save={tmp_path}")
    log = run("pretrain_gpt.py", f"{TINY} --train-iters 2 --lr 1e-4", "--finetune", f"--load={tmp_path}")
    assert list(losses(log)) == [1, 2]
    log = run(
        "pretrain_gpt.py",
        f"{TINY} --train-iters 6 --override-opt_param-scheduler --no-load-optim",
        f"--load={tmp_path}",
    )
    assert list(losses(log)) == [5, 6]
