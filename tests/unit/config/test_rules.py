"""Bad settings, each with what a user reads: which flags and values are wrong, and which would work."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatron.config import RunConfig, rules
from megatron.config.family import CheckedSettings, Rule
from megatron.config.hybrid import HybridConfig
from megatron.config.linear_attention import GatedDeltaNetConfig
from megatron.config.mamba import MambaConfig
from megatron.config.moe import MoEConfig
from megatron.config.rules import (
    RULES,
    check,
    context,
    failures,
    inputs,
    layout,
    model,
    pipeline,
    remarking,
    remarks,
    schedule,
    training,
    zero,
)
from megatron.core.models.bert import config as bert_rules
from megatron.core.models.bert.config import GROUPS, BertConfig, TokenTypesConfig
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.core.models.gpt.config import GPTConfig
from megatron.core.models.t5 import config as t5_rules
from megatron.core.models.t5.config import T5Config
from megatron.core.optimizer.schedule import Schedule
from megatron.errors import ConfigError
from tasks import rules as task_rules
from tasks.settings import FINE_TUNING, FineTunedBertConfig, TaskConfig
from tests.harness.sentences import check_sentence, expect_error
from tests.unit.config.command_lines import parse, run_of

FILES = "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m"
BLOCK = re.compile(r"\$ (?P<ranks>\d+) ranks?(?:: (?P<changes>.*?))?(?: \(without (?P<without>.*)\))?$")


def _read_cases() -> list[tuple[str, str, int, list[str]]]:
    """Changes of the sound command line, flags left out, ranks, and what the sentence names, from the file."""
    cases: list[tuple[str, str, int, list[str]]] = []
    for line in (Path(__file__).parent / "bad_settings.txt").read_text().splitlines():
        if line.startswith("    "):
            cases[-1][-1].extend(line[4:].split(" | "))
        elif match := BLOCK.match(line):
            cases.append((match["changes"] or "", match["without"] or "", int(match["ranks"]), []))
        else:
            assert not line or line.startswith("#"), f"not a command line, facts or a comment: {line}"
    return cases


BAD = _read_cases()


def parsed(changes: str, without: str, ranks: int) -> RunConfig:
    """The run of a transcript; GPT, BERT, T5 and TASK (tasks/main.py) name the script that has it."""
    known: dict[str, tuple[type, ...]] = {
        "GPT": GPT_GROUPS,
        "BERT": GROUPS,
        "T5": (T5Config,),
        "TASK": (TaskConfig, GPTConfig),
    }
    name = changes.partition(" ")[0]
    groups = known.get(name, (GPTConfig,))
    if any(f"--task {task}" in changes for task in FINE_TUNING):
        groups = (TaskConfig, FineTunedBertConfig, TokenTypesConfig)
    given = changes.removeprefix(name) if name in known else changes
    return parse(given, without=without, ranks=ranks, extra_groups=groups)


@functools.cache
def refusal(changes: str, without: str, ranks: int) -> str:
    """The sentence about such a run."""
    with pytest.raises(ConfigError) as caught:
        parsed(changes, without, ranks)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "without", "ranks", "facts"), [pytest.param(*case, id=f"{case[2]}-{case[0]}-{case[1]}") for case in BAD]
)
def test_bad_settings(changes: str, without: str, ranks: int, facts: list[str]) -> None:
    """The sentence that saves somebody a queue."""
    check_sentence(refusal(changes, without, ranks), *facts)


def test_there_are_many() -> None:
    """The file is read as a whole."""
    assert len(BAD) > 100
    assert all(facts for *_, facts in BAD)


def of_tasks() -> set[Rule]:
    """The rules of all tasks."""
    return {rule for task in ("LM", "VQA", "RACE") for rule in TaskConfig(task=task).rules()}


def test_every_rule_has_a_bad_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that no bad configuration meets may be dead."""
    met = set()
    known = {*RULES, *of_tasks(), *BertConfig().rules(), *T5Config().rules(), *MoEConfig().rules()}
    known |= {*HybridConfig().rules(), *MambaConfig().rules(), *GatedDeltaNetConfig().rules()}
    messages = [refusal(changes, without, ranks) for changes, without, ranks, _ in BAD]
    monkeypatch.setattr(rules, "rules_of", lambda run: ())
    for (changes, without, ranks, _), message in zip(BAD, messages, strict=True):
        try:
            run = parsed(changes, without, ranks)
        except ConfigError:
            continue
        own = (rule for group in run.groups() if isinstance(group, CheckedSettings) for rule in group.rules())
        met |= {rule for rule in (*RULES, *own) if (sentence := rule(run)) and sentence in message}
    assert [each.__doc__ or each.__name__ for each in known - met] == []


MODULES = [layout, pipeline, context, model, training, schedule, inputs]


@pytest.mark.parametrize("module", [*MODULES, remarking])
def test_every_rule_is_listed(module: ModuleType) -> None:
    """A rule that is written but not listed never runs."""
    written = {
        function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and function.__annotations__["return"] == "str | None"
        if not name.startswith("_")
    }
    assert written <= set(module.RULES)


@pytest.mark.parametrize("module", [bert_rules, t5_rules])
def test_every_rule_of_a_kind_of_run_is_listed(module: ModuleType) -> None:
    """As above."""
    written = {
        function
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and "run" in function.__annotations__
    }
    assert written <= {*module.RULES, *getattr(module, "REMARKS", ())}


def test_every_rule_of_tasks_is_listed() -> None:
    """As above."""
    written = {
        function
        for _, function in inspect.getmembers(task_rules, inspect.isfunction)
        if "run" in function.__annotations__
    }
    assert written <= {*of_tasks(), *TaskConfig(task="RACE").remarks()}


GOOD = [
    ("", "", 1),
    ("--tensor-model-parallel-size 8 --sequence-parallel", "", 8),
    ("--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 2", "", 4),
    ("--kv-channels 16 --hidden-size 100", "", 1),
    ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "", 4),
    ("--diloco-ranks-per-worker 2 --global-batch-size 16", "", 4),
    ("--skip-train", "--lr --train-iters", 1),
    ("--geglu --exact-gelu", "", 1),
    ("--position-embedding-type rope --rotary-percent 0.25", "", 1),
    ("--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4", "", 1),
    ("--bf16 --grad-reduce-in-bf16", "", 1),
    (
        "--train-samples 100 --rampup-batch-size 4 4 50 --global-batch-size 16 --lr-warmup-samples 20",
        "--train-iters",
        2,
    ),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2", "", 1),
    ("--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2", "", 1),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 4", "", 1),
    ("--recompute-modules layernorm --cpu-offloading", "", 1),  # without --recompute-granularity it asks for nothing
    (f"--data-path 0.3 a 0.7 b {FILES}", "--mock-data --vocab-size", 1),
    (f"--data-path a b c {FILES}", "--mock-data", 1),
    (f"--data-path a b {FILES} --split 90,5,5", "--mock-data", 1),
    (f"--train-data-path a --valid-data-path 1 b 2 c {FILES}", "--mock-data", 1),
    (f"--valid-data-path b --skip-train {FILES}", "--mock-data", 1),
    ("--save a --save-interval 5 --log-progress --keep-last-checkpoints 3 --save-retain-interval 10", "", 1),
    ("--save a --save-interval 5 --load a --finetune --overwrite-run", "", 1),
    ("--pretrained-checkpoint a --finetune", "", 1),
    ("--load-hf a --finetune --save b --save-interval 5", "", 1),
    ("--load-hf a --load b --save b/ --save-interval 5 --save-hf c --save-hf-interval 10", "", 1),
    ("--load-hf a --skip-train", "", 1),
    ("--split 1", "", 1),
    ("--split .5,.25,.25", "", 1),
    ("--pipeline-model-parallel-size 3 --pipeline-schedule zb-h1 --num-layers 8", "", 3),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout E|t*3|t|L", "", 2),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 7", "", 2),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", "", 2),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", "", 2),
    ("--pipeline-model-parallel-size 2 --num-layers 2 --account-for-loss-in-pipeline-split", "", 2),
]


@pytest.mark.parametrize(("changes", "without", "ranks"), GOOD)
def test_good_settings(changes: str, without: str, ranks: int) -> None:
    """Settings that are sound are not refused."""
    assert failures(parse(changes, without=without, ranks=ranks)) == []


FP8 = "--bf16 --fp8-format e4m3"
REMARKS = [
    (
        "--use-nccl-ub --data-parallel-sharding-strategy optim_grads",
        "",
        "--use-nccl-ub registers what stays in memory: not the whole gradients of ZeRO 2 and 3, nor the whole weights "
        "of ZeRO 3, which come and go",
    ),
    (
        "--outer-dp-sharding-strategy optim --use-megatron-fsdp",
        "",
        "--outer-dp-sharding-strategy: no effect without --num-distributed-optimizer-instances",
    ),
    ("--muon-momentum 0.95", "", "--muon-momentum: no effect without --optimizer muon"),
    ("--muon-no-split-qkv", "", "--muon-no-split-qkv: no effect without --optimizer muon, adafactor or soap"),
    ("--lion-beta1 0.9", "", "--lion-beta1: no effect without --optimizer lion"),
    (
        "--spike-window 64 --spike-threshold 5 --spike-limit 2",
        "",
        "--spike-window, --spike-threshold, --spike-limit: no effect without --spike-action",
    ),
    ("--straggler-threshold 0.9", "", "--straggler-threshold: no effect without --log-straggler"),
    ("--preflight-threshold 0.7", "", "--preflight-threshold: no effect without --preflight"),
    (
        "--error-injection-type transient_error",
        "",
        "--error-injection-type: no effect without --error-injection-rate",
    ),
    ("--eval-tasks-interval 5", "", "--eval-tasks-interval: no effect without --eval-tasks"),
    ("--metrics-host 0.0.0.0", "", "--metrics-host: no effect without --metrics-port"),
    ("--mlflow-run-name a", "", "--mlflow-run-name: no effect without --mlflow-experiment"),
    ("--ademamix-alpha 5", "", "--ademamix-alpha: no effect without --optimizer ademamix"),
    ("--adafactor-decay 0.7", "", "--adafactor-decay: no effect without --optimizer adafactor"),
    ("--soap-shampoo-beta 0.9", "", "--soap-shampoo-beta: no effect without --optimizer soap"),
    (
        "--diloco-sync-interval 50",
        "",
        "--diloco-sync-interval: no effect without --diloco-workers",
    ),
    (
        "--optimizer sgd --weight-decay 0.1",
        "",
        "--optimizer sgd: --weight-decay 0.1 times the weight is added to its gradient (L2 regularization) and goes "
        "through the momentum, as in Megatron-LM; the other optimizers decouple it",
    ),
    (
        "--lr-decay-iters 6",
        "",
        "the learning rate is --min-lr 0 from iteration 6 to 10, as --lr-decay-iters is shorter than the run; without "
        "it the decay takes the whole run",
    ),
    (
        "--multi-latent-attention --position-embedding-type rope --mscale-all-dim 1.0",
        "",
        "--mscale-all-dim: no effect without a --rotary-scaling-factor",
    ),
    ("GPT --expert-tensor-parallel-size 4", "", "--expert-tensor-parallel-size: no effect without --num-experts"),
    ("--extra-vocab-size 4", "", "--extra-vocab-size: no effect with --vocab-size"),
    (
        "--padded-vocab-size 4096 --make-vocab-size-divisible-by 64",
        "",
        "--make-vocab-size-divisible-by: no effect with --padded-vocab-size",
    ),
    (
        "--min-offloaded-tensor-size 5",
        "",
        "--min-offloaded-tensor-size: no effect without --cpu-offloading",
    ),
    (
        "--optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d",
        "",
        "--optimizer-offload-fraction, --overlap-cpu-optimizer-d2h-h2d: no effect without --optimizer-cpu-offload",
    ),
    ("--sequence-parallel", "", "--sequence-parallel: off, because --tensor-model-parallel-size is 1"),
    ("--loss-scale 8 --bf16", "", "--loss-scale: no effect without --fp16"),
    (
        "--log-timers-to-tensorboard --tensorboard-queue-size 5",
        "",
        "--tensorboard-queue-size, --log-timers-to-tensorboard: no effect without --tensorboard-dir",
    ),
    (
        "--wandb-exp-name a --wandb-save-dir b",
        "",
        "--wandb-exp-name, --wandb-save-dir: no effect without --wandb-project",
    ),
    ("--use-pytorch-profiler", "", "--use-pytorch-profiler: no effect without --profile"),
    (
        "--multi-latent-attention --position-embedding-type rope --kv-channels 64",
        "",
        "--kv-channels: no effect with --multi-latent-attention: heads are --qk-head-dim + --qk-pos-emb-head-dim wide",
    ),
    ("--fp8-recipe mxfp8 --no-fp8-wgrad", "", "--fp8-recipe, --no-fp8-wgrad: no effect without --fp8-format"),
    (f"{FP8} --fp8-recipe mxfp8 --fp8-margin 1", "", "--fp8-margin: no effect without --fp8-recipe delayed"),
    (
        f"{FP8} --num-layers-at-end-in-bf16 2",
        "",
        "--num-layers-at-end-in-bf16: no effect without --first-last-layers-bf16",
    ),
    ("--mtp-loss-scaling-factor 0.3", "", "--mtp-loss-scaling-factor: no effect without --mtp-num-layers"),
    ("--decoupled-min-lr 1e-5", "", "--decoupled-min-lr: no effect without --decoupled-lr"),
    ("--profile-ranks 1", "", "--profile-ranks: no effect without --profile or --record-memory-history"),
    ("--memory-snapshot-path a", "", "--memory-snapshot-path: no effect without --record-memory-history"),
    (
        "--pytorch-profiler-collect-callstack --pytorch-profiler-collect-shapes --profile --profile-step-start 1",
        "",
        "--pytorch-profiler-collect-callstack: no effect without --use-pytorch-profiler",
    ),
    (
        "--profile --use-pytorch-profiler --tensorboard-dir a --profile-step-start 10 --profile-step-end 20",
        "",
        "--profile: no iteration is profiled, because --profile-step-start is 10 and the run ends at iteration 10",
    ),
    ("--nvtx-ranges --dry-run", "", "--nvtx-ranges needs a GPU; on a CPU leave it out"),
    ("--inference-max-seq-length 8", "", "--inference-max-seq-length: no effect on training"),
    ("--save-interval 5", "", "--save-interval: no effect without --save"),
    (
        "--rampup-batch-size 2 2 8 --global-batch-size 8",
        "",
        "--rampup-batch-size with --train-iters 10: the run takes 64 samples; lengths of the schedule in iterations "
        "count batches of --global-batch-size 8",
    ),
    ("--recompute-modules mlp", "", "--recompute-modules: no effect without --recompute-granularity selective"),
    ("--recompute-num-layers 1", "", "--recompute-num-layers: no effect without --recompute-granularity full"),
    (
        "--account-for-loss-in-pipeline-split",
        "",
        "--account-for-loss-in-pipeline-split: no effect, because --pipeline-model-parallel-size is 1",
    ),
    ("--save runs", "", "--save runs without --save-interval: the only checkpoint is saved when the run ends"),
    ("--load-hf-proof required", "", "--load-hf-proof: no effect without --load-hf"),
    ("--save a --overwrite-run --skip-train --eval-iters 1", "", "--overwrite-run: no effect with --skip-train"),
    ("--log-progress", "", "--log-progress: no effect without --save, the folder of progress.txt"),
    (
        "--train-samples 100 --lr-decay-iters 50 --lr-warmup-iters 5",
        "--train-iters",
        "--lr-decay-iters 50, --lr-warmup-iters 5 with --train-samples: taken as --lr-decay-samples 100, "
        "--lr-warmup-samples 10, at 2 samples an iteration",
    ),
    ("--manual-gc-interval 5", "", "--manual-gc-interval: no effect without --manual-gc"),
    (
        f"--data-path a {FILES}",
        "--mock-data",
        "--split: '969, 30, 1' of --data-path for training, validation and test, because it is not given",
    ),
    (
        "--fp16",
        "",
        "the check for losses that are not finite is off: with --fp16 and a dynamic loss scale they are skipped",
    ),
    (
        "--reset-position-ids --position-embedding-type none",
        "",
        "--reset-position-ids: no effect with --position-embedding-type none",
    ),
    ("--fim-spm-rate 0.3 --fim-prefix-token x", "", "--fim-spm-rate, --fim-prefix-token: no effect without --fim-rate"),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        "",
        "--microbatch-group-size-per-virtual-pipeline-stage: no effect without virtual stages",
    ),
    ("--cp-comm-type a2a", "", "--cp-comm-type: no effect, because --context-parallel-size is 1"),
    (
        "--no-overlap-p2p-communication",
        "",
        "--no-overlap-p2p-communication: no effect, because --pipeline-model-parallel-size is 1",
    ),
    (
        "TASK --task RACE --epochs 1 --train-data a --load x --eval-interval 9 --keep-last --vocab-file v",
        "--mock-data --train-iters",
        "--eval-interval, --keep-last: no effect with --task RACE: each epoch ends with scores of all --valid-data, "
        "and no sample is dropped",
    ),
    (
        "--disable-bias-linear",
        "",
        "--disable-bias-linear: GELU is the tanh approximation; Megatron-LM's is exact then, as with --exact-gelu",
    ),
    (
        "BERT",
        "",
        "GELU in the head for masked tokens is the tanh approximation; Megatron-LM's is exact, as with "
        "--exact-gelu-head",
    ),
    (
        "--eod-mask-loss --global-batch-size 6",
        "",
        "the loss of a step is the mean over all its tokens, as with Megatron-LM's --calculate-per-token-loss; "
        "without that flag Megatron-LM averages the means of the 3 microbatches, which differs with --eod-mask-loss",
    ),
    (
        f"{FP8} --recompute-granularity selective --recompute-modules layernorm",
        "",
        "--recompute-modules layernorm: no effect on layers in FP8, which keep their inputs in 8 bits",
    ),
]


def test_a_schedule_in_the_other_unit_is_the_same_curve() -> None:
    """--lr-decay-iters beside --train-samples was refused, though the curve needs no other unit."""
    iterations = parse("--train-samples 100 --lr-decay-iters 40 --lr-warmup-iters 5", without="--train-iters")
    samples = parse("--train-samples 100 --lr-decay-samples 80 --lr-warmup-samples 10", without="--train-iters")
    curves = [
        Schedule.from_config(run.optimizer, train_samples=run.train_samples, samples_per_iteration=2)
        for run in (iterations, samples)
    ]
    assert curves[0] == curves[1]
    assert curves[0].lr_decay_steps == 80


@pytest.mark.parametrize(("changes", "without", "remark"), REMARKS)
def test_remarks(changes: str, without: str, remark: str) -> None:
    """A setting without effect is not refused, but it is not silent either."""
    assert parsed(changes, without, 1).notes == (remark,)


@pytest.mark.parametrize(
    "changes",
    [
        "--disable-bias-linear --exact-gelu",
        "--disable-bias-linear --swiglu",
        "--disable-bias-linear --squared-relu",
        "--disable-bias-linear --relu",
        "BERT --exact-gelu-head",
        "BERT --exact-gelu",
        "--eod-mask-loss",
        "GPT --preference-loss dpo --load a --global-batch-size 6",
    ],
)
def test_nothing_is_said_where_megatron_lm_computes_the_same(changes: str) -> None:
    """A remark that is always there is not read."""
    assert parsed(changes, "", 1).notes == ()


def test_nothing_is_said_of_means_where_the_flag_asks_for_ours() -> None:
    """Who gave --calculate-per-token-loss was told what Megatron-LM does without it."""
    run = parsed("--eod-mask-loss --global-batch-size 6 --calculate-per-token-loss", "", 1)
    assert run.notes == (
        "--calculate-per-token-loss has no effect: the loss is always the mean over all tokens of the global batch",
    )


def test_iterations_of_a_batch_size_schedule() -> None:
    """Who gives iterations with batches of several sizes would not know how many samples that is."""
    assert rules.remarks(parse("--step-batch-size-schedule 0:2,128:4")) == [
        "--step-batch-size-schedule with --train-iters 10: the run takes 36 samples; lengths of the schedule in "
        "iterations count batches of --global-batch-size 4"
    ]


def test_every_remark_is_tested() -> None:
    """A remark that no settings cause may be dead."""
    of_one_rank = (each for each in zero.REMARKS if each is not zero.copies_of_single_ranks)  # that is in test_zero
    of_others = (*TaskConfig(task="RACE").remarks(), *bert_rules.REMARKS, *of_one_rank)
    assert len(REMARKS) == len(remarking.RULES) + len(of_others) + len(remarking.NEEDS) + 1  # two of one flag
    assert len({remark for *_, remark in REMARKS}) == len(REMARKS)


def test_runs_built_in_code_are_checked_too() -> None:
    """Tools and tests that build a run without a command line can ask for the same rules."""
    broken = run_of(model={"num_layers": 0, "num_attention_heads": 5})
    with expect_error(ConfigError, "--num-layers is 0"):
        check(broken)
    assert not remarks(run_of())


def test_bounds_do_not_stop_other_rules() -> None:
    """Numbers that would divide by zero are replaced before other rules run, and nothing is reported twice."""
    sentences = failures(run_of(model={"num_attention_heads": 0, "hidden_size": -1}, training={"eval_interval": 0}))
    assert sentences[0].startswith("--hidden-size is -1")
    check_sentence("\n".join(sentences), "--num-attention-heads is 0", "--eval-interval is 0")


def test_what_follows_from_a_flag_is_declared() -> None:
    """A value that follows from a wrong flag, unknown to the rules as such, would be reported as a second mistake."""
    for family in ("", "T5 "):
        base = parsed(family, "", 16)
        followers = [spec for spec in base.flags() if spec.options.derived and not base.given(spec.field)]
        for spec in base.flags():
            value = {int: "4", float: "0.25", bool: ""}.get(spec.kind, "x")
            try:
                changed = parsed(f"{family}{spec.spelling} {value}", "", 16)
            except ConfigError:
                continue
            moved = [each for each in followers if each != spec and base.value(each) != changed.value(each)]
            assert [each.field for each in moved if spec.field not in each.options.follows] == [], spec.field
