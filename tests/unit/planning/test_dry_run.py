"""What --dry-run says, to the letter, and that settings are checked without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config import RunConfig
from megatron.config.parse import parse_run
from megatron.config.report import axes, count, gigabytes, layout_report, stages_report
from megatron.config.vocabulary import vocabulary_size
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.registry import family_of
from megatron.errors import ConfigError
from megatron.planning import dry_run as planning
from tasks.settings import TaskConfig
from tests.harness.sentences import check_line, expect_error
from tests.unit.config.command_lines import parse, words

REPOSITORY = Path(__file__).parents[3]
THOUSAND_RANKS = """--dry-run --world-size 1024 --tensor-model-parallel-size 8 --sequence-parallel --bf16
    --num-layers 48 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --ffn-hidden-size 22016 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 1536 --train-iters 10000 --lr 1e-4
    --mock-data --vocab-size 32000 --device-memory-gb 80 --transformer-impl transformer_engine"""


def dry_run_report(run: RunConfig) -> str:
    return planning.dry_run_report(run, family_of(run.extra).train_spec)


def test_a_thousand_ranks() -> None:
    """The whole report of a 1,024-rank job, as the user reads it."""
    expected = (Path(__file__).parent / "dry_run_1024.txt").read_text()
    assert dry_run_report(parse_run(THOUSAND_RANKS.split(), extra_groups=GPT_GROUPS)) + "\n" == expected


def test_a_rank_that_no_gpu_holds() -> None:
    """A dry run answered a model of a million GB a rank with its figures, and no word about them."""
    said = "more than any GPU has (288 GB); give --device-memory-gb to see what would fit"
    assert said in dry_run_report(parse("--dry-run --hidden-size 400000"))
    assert said not in dry_run_report(parse("--dry-run"))
    assert said not in dry_run_report(parse("--dry-run --hidden-size 400000 --device-memory-gb 80"))


def test_patterns_of_frozen_parameters_are_checked() -> None:
    """A misspelt pattern was found when a thousand ranks had started."""
    check_line(dry_run_report(parse("--dry-run --freeze embedding.* *.bias")), "frozen")
    with expect_error(ConfigError, "--freeze *.bais"):
        dry_run_report(parse("--dry-run --freeze embedding.* *.bais"))


def test_a_rule_of_matrices_needs_a_matrix_that_is_trained() -> None:
    """A run with Muon whose layers are frozen would train everything else with AdamW, and call it Muon."""
    assert "together" in dry_run_report(parse("--dry-run --optimizer muon --freeze embedding.*"))
    with expect_error(ConfigError, "--optimizer muon updates the matrices of layers"):
        dry_run_report(parse("--dry-run --optimizer muon --freeze decoder.layers.*"))


def parsed(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Parse in a fresh process that fails when torch or numpy gets imported, and print the layout."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = sys.modules['yaml'] = None\n"
        "from megatron.config.report import layout_report\n"
        "from megatron.errors import run_command\n"
        "from megatron.training.pretrain import parse\n"
        "def main():\n"
        "    run = parse(sys.argv[1:], prog='pretrain_gpt.py')\n"
        "    print(*layout_report(run, ranks_per_node=run.command.ranks_per_node))\n"
        "run_command(main)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_light() -> None:
    """The settings of a 1,024-rank job are checked without torch, in about the time Python takes to start."""
    done = parsed(THOUSAND_RANKS.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert "1,024 ranks" in done.stdout


def test_help_loads_nothing_heavy() -> None:
    """--help answers before a user wonders only while it imports neither torch nor numpy."""
    done = parsed(["--help"])
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")
    script = "import sys, pretrain_gpt; print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"


def test_failures_exit_with_2_and_no_traceback() -> None:
    """A scheduler sees the exit code, a user the sentences."""
    done = parsed(["--dry-run", "--num-layers", "x"], WORLD_SIZE="4")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    check_line(done.stderr, "--num-layers")


def test_world_size_of_the_environment() -> None:
    """Inside a launcher's environment the number of ranks is known."""
    done = parsed([*THOUSAND_RANKS.replace("--world-size 1024", "").split()], WORLD_SIZE="64")
    check_line(done.stdout, "ranks", "64", "8", "8")


def layout(changes: str, *, ranks: int, ranks_per_node: int = 8) -> list[str]:
    return layout_report(parse(changes, ranks=ranks), ranks_per_node=ranks_per_node)


def test_a_layout_of_any_number_of_ranks_is_reported() -> None:
    """--world-size 1000000000 listed every rank of a group: gigabytes, and a traceback."""
    assert layout("", ranks=10**9)[1].startswith("data     1,000,000,000 ranks: all of them")


def test_layout() -> None:
    """Which ranks form each group, and whether their traffic stays in a node."""
    assert layout("", ranks=1) == ["1 rank on one node"]
    assert layout("--tensor-model-parallel-size 2", ranks=4) == [
        "4 ranks on one node",
        "tensor       2 ranks: 2 groups, the first is 0, 1 (within a node)",
        "data         2 ranks: 2 groups, the first is 0, 2 (within a node)",
    ]
    assert layout("--tensor-model-parallel-size 8", ranks=64)[1:] == [
        "tensor       8 ranks: 8 groups, the first is 0, 1, ... 7 (within a node)",
        "data         8 ranks: 8 groups, the first is 0, 8, ... 56 (across nodes)",
    ]
    assert layout("--tensor-model-parallel-size 8", ranks=8, ranks_per_node=4)[1].endswith("(across nodes)")
    threes = "--tensor-model-parallel-size 3 --num-attention-heads 6 --hidden-size 48 --ffn-hidden-size 96"
    assert layout(threes, ranks=6)[1].endswith("(within a node)")
    assert layout(threes, ranks=24)[1].endswith("(across nodes)"), "ranks 6, 7 and 8 are one group"


def test_stages_in_a_line() -> None:
    """Each one's size where they are few; 48 numbers would say less than how many are alike."""
    few = "--pipeline-model-parallel-size 4"
    assert stages_report(parse(few, ranks=4)) == "1f1b: 4 stages of 1 layers"
    assert stages_report(parse(f"{few} --num-layers 6", ranks=4)) == "1f1b: 4 stages of 1, 2, 2 and 1 layers"
    many = "--num-layers 95 --pipeline-model-parallel-size 16 --num-virtual-stages-per-pipeline-rank 3"
    assert stages_report(parse(many, ranks=16)) == "interleaved: 48 stages of 2 (47 times) and 1 layers"


@pytest.mark.parametrize("order", ["", "--use-tp-pp-dp-mapping"])
def test_axes_cover_all_ranks(order: str) -> None:
    """Sizes and strides number every rank exactly once."""
    run = parse(f"--tensor-model-parallel-size 4 {order}", ranks=16)
    reached = {0}
    for _, size, stride in axes(run):
        reached = {rank + place * stride for rank in reached for place in range(size)}
    assert reached == set(range(16))


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1500, "1.5 k"), (2.5e6, "2.5 M"), (7e9, "7 B"), (1.5e13, "15 T")]
)
def test_count(number: float, text: str) -> None:
    """Large numbers in three digits."""
    assert count(number) == text


def test_gigabytes() -> None:
    """Memory as vendors print it."""
    assert (gigabytes(80e9), gigabytes(12_345_678)) == ("80.00 GB", "12.3 MB")


FILES = "--tokenizer-type {kind} --tokenizer-model {path}"


def size_of(changes: str) -> int:
    return vocabulary_size(parse(changes, without="--vocab-size"))


def test_vocabulary_of_gpt2(tmp_path: Path) -> None:
    """Counted in vocab.json by the highest id, as embeddings are looked up; sentinels come on top."""
    vocab = tmp_path / "vocab.json"
    vocab.write_text(json.dumps({"a": 0, "b": 5}))
    assert size_of(f"--vocab-file {vocab} --merge-file m") == 6
    assert size_of(f"--vocab-file {vocab} --merge-file m --vocab-extra-ids 4") == 10


def test_vocabulary_of_hugging_face(tmp_path: Path) -> None:
    """Counted in tokenizer.json, the added tokens included, for vocabularies written as a mapping or as a list."""
    for vocab in ({"a": 0, "b": 1}, [["a", 0.0], ["b", -1.0]]):
        content = {"model": {"vocab": vocab}, "added_tokens": [{"id": 2, "content": "</s>"}]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            assert size_of(FILES.format(kind="HuggingFaceTokenizer", path=path)) == 3


def test_vocabulary_of_tiktoken(tmp_path: Path) -> None:
    """Ranks and special tokens, up to the size that Megatron-LM defaults to."""
    model = tmp_path / "vocab.json"
    model.write_text(json.dumps([{"rank": rank} for rank in range(300)]))
    changes = FILES.format(kind="TikTokenizer", path=model)
    assert size_of(changes) == 1300
    assert size_of(f"{changes} --tiktoken-num-special-tokens 10") == 310


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        (
            "--vocab-file gone --merge-file m",
            "--vocab-file",
        ),
        (
            "--vocab-file {folder}/bad --merge-file m",
            "--vocab-file",
        ),
        (
            "--vocab-file {folder}/list --merge-file m",
            "--vocab-file",
        ),
        (
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/list",
            "--tokenizer-model",
        ),
        (
            "--tokenizer-type SentencePieceTokenizer --tokenizer-model m",
            "--vocab-size",
        ),
    ],
)
def test_unknown_vocabulary(tmp_path: Path, changes: str, fact: str) -> None:
    """What cannot be counted is said in one sentence, with the way out."""
    (tmp_path / "bad").write_text("{")
    (tmp_path / "list").write_text("[1]")
    with expect_error(ConfigError, fact):
        size_of(changes.format(folder=tmp_path))


def test_given_vocabulary_needs_no_files() -> None:
    """On a laptop without the cluster's files the size can be given."""
    assert vocabulary_size(parse("--vocab-file gone --merge-file m")) == 100


def test_ramp_and_evaluation_only() -> None:
    """Runs that grow their batch, and runs that train nothing, are described as such."""
    grown = parse("--train-samples 100 --global-batch-size 8 --rampup-batch-size 2 2 20", without="--train-iters")
    check_line(dry_run_report(grown), "samples", "2", "2", "20")
    stepped = parse("--train-samples 100 --step-batch-size-schedule 0:4,640:8,1.28K:2", without="--train-iters")
    lines = [line.strip() for line in dry_run_report(stepped).splitlines()]
    begin = lines.index("8 samples a step from sample 20 on (640 tokens)")
    assert lines[begin - 1] == "4 samples a step from sample 0 on (0 tokens)"
    assert lines[begin + 2].startswith("36 steps, 100 samples, ")
    evaluated = parse("--skip-train", without="--train-iters --lr")
    assert " steps, " not in dry_run_report(evaluated)


def test_a_model_that_is_only_asked_is_only_weights() -> None:
    """Who evaluates a large model would be told that it doesn't fit, for gradients and moments that nobody makes."""
    flags = words("--task LM --load x --valid-data a --tokenizer-type NullTokenizer", without="--mock-data --lr")
    report = dry_run_report(parse_run(flags, world_size=1, extra_groups=(TaskConfig, *GPT_GROUPS)))
    memory = report.partition("== memory of one rank")[2]
    assert "weights" in memory
    check_line(memory, "working")
    assert not [part for part in ("gradients", "moments", "activations", "backward") if part in memory]
    assert "moments" in dry_run_report(parse("--dry-run"))


def test_verdicts() -> None:
    """A run fits, or not and what would, or nothing does."""
    check_line(dry_run_report(parse("--dry-run --device-memory-gb 1")), "fits", "1")
    hopeless = dry_run_report(parse("--dry-run --device-memory-gb 0.0001"))
    check_line(hopeless, "recomputation")
    assert "fit" not in dry_run_report(parse("--dry-run"))
