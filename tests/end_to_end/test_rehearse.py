"""tools/rehearse.py: a run with shapes and no values, and the faults that it finds."""

from __future__ import annotations

import re

import pytest

from megatron.rehearsal.accelerator import unavailable
from tests.end_to_end.commands import run
from tests.harness import mutated_rehearsals
from tests.harness.sentences import check_line
from tests.tiers import that_run, tiers

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

MODEL = (
    "--mock-data --vocab-size 1000 --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --bf16 "
    "--micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --train-iters 10 --swiglu "
    "--disable-bias-linear --global-batch-size 8 --steps 1"
)
LAYOUTS = {
    "tp2 sp pp2 dp2 zero overlapped": (
        8,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ranks all",
    ),
    "cp2 tp2 ep2": (
        4,
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --num-experts 4 --moe-ffn-hidden-size 128 "
        "--expert-model-parallel-size 2 --num-layers 2 --ranks all",
    ),
    "dp2 zero, masters as remainders, moments in bf16": (
        2,
        "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
        "--ranks all",
    ),
    "dp4 zero overlapped, gradients sent in bf16 and summed in fp32": (
        4,
        "--use-distributed-optimizer --overlap-grad-reduce --grad-reduce-in-bf16 --ddp-bucket-size 500000 "
        "--ddp-reduce-scatter-with-fp32-accumulation --ranks all",
    ),
    "pp2, recomputed": (
        2,
        "--pipeline-model-parallel-size 2 --recompute-granularity full --attention-dropout 0 --hidden-dropout 0 "
        "--ranks all",
    ),
    "pp2, activations in main memory": (
        2,
        "--pipeline-model-parallel-size 2 --cpu-offloading --min-offloaded-tensor-size 10000 --hidden-size 512 "
        "--num-layers 8 --micro-batch-size 2 --seq-length 1024 --ranks all",
    ),
    "norms recomputed": (2, "--recompute-granularity selective --recompute-modules layernorm mlp --ranks all"),
    "tp2 sp, mxfp8": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --fp8-format e4m3 --fp8-recipe mxfp8 --num-layers 1 "
        "--ranks all",
    ),
    "optimizer in main memory": (2, "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --ranks all"),
    "pp2 of 1,024 ranks": (
        1024,
        "--attention-backend flash_attn_3 --pipeline-model-parallel-size 2 --global-batch-size 512 --rank 700",
    ),
}


@pytest.mark.parametrize(
    "layout", tiers(LAYOUTS, first=("dp2 zero, masters as remainders, moments in bf16", "pp2 of 1,024 ranks"))
)
def test_a_layout_runs_and_its_memory_is_what_is_estimated(layout: str) -> None:
    """The estimate is arithmetic; here every tensor is counted that the program makes on its device."""
    ranks, flags = LAYOUTS[layout]
    said = run("tools/rehearse.py", f"{MODEL} --world-size {ranks} {flags}")
    assert "no fault was found" in said
    assert ("; --ranks all compares the other " in said) == (ranks == 1024)  # what was not seen is not claimed
    found = re.findall(r"at most (\S+) MB \(estimated (\S+) MB\), between steps (\S+) MB \((\S+) MB\)", said)
    assert len(found) == (2 if ranks == 1024 else ranks)
    for highest, estimated, held, states in found:
        assert float(highest) == pytest.approx(float(estimated), rel=0.03 if "activations" in layout else 0.12)
        assert float(held) == pytest.approx(float(states), rel=0.02)
    assert ("--attention-backend flash_attn_3 was taken as auto" in said) == (ranks == 1024)  # it isn't installed here
    kinds = re.findall(r"weights (\S+) MB \((\S+) MB\), gradients (\S+) MB \((\S+) MB\), optimizer", said)
    assert len(kinds) == len(found)
    for kind in kinds:
        counted, there = [float(each) for each in kind[::2]], [float(each) for each in kind[1::2]]
        assert counted == pytest.approx(there, rel=0.05)  # buckets are padded, and MB printed with one digit
    sizes = 2 * 2 if "experts" in flags else 0  # of each microbatch's all-to-all in each layer
    chunks = 4 if "--optimizer-cpu-offload" in flags else 0  # of gradients on their way to main memory
    assert f"waits for the device {1 + sizes + chunks} time" in said
    assert "collectives.py" in said
    assert "in on_host" in said  # loss and gradient norm


def test_a_layout_that_cannot_be_is_a_sentence() -> None:
    check_line(run("tools/rehearse.py", f"{MODEL} --world-size 2 --rank 2", expect=2), "--rank 2", "2")


FAULTS = {
    "tensor of the host": "rank 0 fails in the rehearsal: FakeTensorDeviceMismatchError: .*mutated_rehearsals.py",
    "a generator of the host": "rank 0 fails in the rehearsal: RuntimeError: .* generator of the device gpu",
    "scores that are kept": "torch would take the kernel that keeps all scores",
    "logits that are whole": "logsumexp at .*mutated_rehearsals.py.* 2,147,483,648 elements",
    "operations in another order on one rank": "rank 0 asks for all-reduce of 4 .*, rank 1 for all-gather of 4",
    "tensor of the host in a backward pass": "rank 0 fails in the rehearsal: FakeTensorDeviceMismatchError",
    "a value of another thread": "rank 0 fails in the rehearsal: LookupError: .*mutated_rehearsals.py",
    "another operation on one rank": "operations .* of ranks 0, 1: rank 0 asks for",
    "a wait that is forgotten": "rank 0 never waits for all-reduce",
    "a result that is read too soon": "all-gather .* sum at .* reads its result before it is waited for",
    "a tensor that is changed while it is sent": "all-gather .* add_ at .* changes what it uses before it is",
    "another reduction on one rank": r"rank 0 asks for all-reduce .*, rank 1 for all-reduce \(MAX\)",
    "a type that NCCL lacks": "all-reduce of 3 x int16 .*: NCCL does not have this type",
    "a group more on one rank": "to which no other of ranks .* comes",
    "a second thread": "is started by a second thread",
    "a part of a state on the host": "a checkpoint's optimizer.exp_avg.* is on the cpu",
    "a number read in a layer": "the host waits at tests/harness/mutated_rehearsals.py.* in forward",
}


FIRST = (
    "tensor of the host",
    "operations in another order on one rank",
    "a wait that is forgotten",
    "a number read in a layer",
)
"""Each kind of what a rehearsal looks for, once."""


@pytest.fixture(scope="module")
def found_wrong(request: pytest.FixtureRequest) -> dict[str, str]:
    """What rehearsals say of programs with a fault, by fault, from one process."""
    said = re.split(r"^== (.*)$", run(mutated_rehearsals.__file__, "", *that_run(request, FAULTS)), flags=re.MULTILINE)
    return dict(zip(said[1::2], said[2::2]))


@pytest.mark.parametrize("fault", tiers(FAULTS, first=FIRST))
def test_a_fault_is_named(fault: str, found_wrong: dict[str, str]) -> None:
    """Each computes the right numbers on a CPU with gloo."""
    assert re.search(FAULTS[fault], found_wrong[fault]), found_wrong[fault]
