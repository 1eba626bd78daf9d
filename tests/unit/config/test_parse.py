"""From command lines and files to a run: precedence, provenance, notes, and every failure at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.config import RunConfig, Settings, flag
from megatron.config.parse import parse_run
from megatron.config.pipeline import stage_sizes
from megatron.core.models.gpt.config import GROUPS as GPT_GROUPS
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tests.unit.config.command_lines import parse, run_of, words


def message_of(changes: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(changes, **options)
    return str(caught.value)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_sound_command_line() -> None:
    """The smallest useful command line is a run, and says where each value came from."""
    run = parse("--ffn-hidden-size 128")
    assert (run.model.num_layers, run.model.ffn_hidden_size, run.model.vocab_size) == (4, 128, 101)
    assert run.provenance["num_layers"] == "flag"
    assert run.provenance["kv_channels"] == "derived"
    assert run.provenance["clip_grad"] == "default"
    assert run.provenance["accumulate_allreduce_grads_in_fp32"] == "default"
    assert parse("--bf16").provenance["accumulate_allreduce_grads_in_fp32"] == "derived"
    assert run.notes == ()


def test_precedence_flag_file_checkpoint_default(tmp_path: Path) -> None:
    """An explicit flag beats a file, a file beats the checkpoint, the checkpoint beats the default."""
    saved = run_of(
        model={"hidden_size": 128, "num_layers": 7, "norm_epsilon": 1e-6, "add_bias_linear": False}
    ).to_json()
    path = write(tmp_path / "base.yaml", "num_layers: 6\nhidden_size: 96\nlr: 0.5\n")
    changes = f"--use-checkpoint-args --load here --config {path} --hidden-size 32"
    run = parse(changes, without="--num-layers --lr", checkpoint_config=lambda load, step: saved)
    assert (run.model.hidden_size, run.provenance["hidden_size"]) == (32, "flag")
    assert (run.model.num_layers, run.provenance["num_layers"]) == (6, path)
    assert (run.model.norm_epsilon, run.provenance["norm_epsilon"]) == (1e-6, "checkpoint here")
    assert (run.optimizer.lr, run.provenance["lr"]) == (0.5, path)
    assert not run.model.add_bias_linear
    assert run.provenance["adam_eps"] == "default"


def test_a_flag_beats_a_file_wherever_it_stands(tmp_path: Path) -> None:
    """The order of words must not decide between a flag and a file."""
    arguments = write(tmp_path / "args.txt", "--num-layers 6 --weight-decay 0.3\n")
    run = parse(f"--num-layers 5 @{arguments}")
    assert (run.model.num_layers, run.provenance["num_layers"]) == (5, "flag")
    assert (run.optimizer.weight_decay, run.provenance["weight_decay"]) == (0.3, f"{arguments}:1")


def test_argument_files(tmp_path: Path) -> None:
    """@file reads like a shell script: comments, quotes, continued lines, and other files beside it."""
    write(tmp_path / "sizes.args", "--num-layers 3 # few\n")
    main = write(
        tmp_path / "run.args",
        "# a run\n--hidden-size \\\n  32\n\n--data-path 'a folder/text' \"b\"\n@sizes.args\n--split 1,0,0",
    )
    run = parse(f"--tokenizer-type NullTokenizer @{main}", without="--num-layers --hidden-size --mock-data")
    assert (run.model.num_layers, run.model.hidden_size) == (3, 32)
    assert run.data.data_path == ("a folder/text", "b")
    assert run.provenance["hidden_size"] == f"{main}:2"
    assert run.provenance["num_layers"] == f"{tmp_path / 'sizes.args'}:1"
    assert run.data.split == "1,0,0"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("--lr 'x\n", "run.args:1"),
        ("@run.args\n", "run.args"),
        ("@gone.args\n", "gone.args"),
        ("--hiden-size 3", "run.args:1"),
        ("\n--weight-decay x", "run.args:2"),
    ],
)
def test_bad_argument_files(tmp_path: Path, text: str, fact: str) -> None:
    """A mistake in a file is reported with the file and the line."""
    path = write(tmp_path / "run.args", text)
    with expect_error(ConfigError, fact):
        parse(f"@{path}")


def test_missing_argument_file() -> None:
    """A misspelt @file is one sentence."""
    with expect_error(ConfigError, "nowhere/x.args"):
        parse("@nowhere/x.args")


def test_settings_file_nested_and_flat(tmp_path: Path) -> None:
    """YAML may name groups or not, fields or flags, and may turn switches on and off."""
    text = """
model:
  num_layers: 3
  disable-bias-linear: true
  rotary_base: 5e5
  position_embedding_type: rope
training: {seed: 7, rampup_batch_size: [2, 2, 10]}
load_optim: false
no_load_rng: true
bf16: true
hidden_dropout: null
train_samples: 100
train_data_path: [a, b]
"""
    path = write(tmp_path / "run.yaml", text)
    changes = f"--config {path} --tokenizer-type NullTokenizer --global-batch-size 8"
    run = parse(changes, without="--num-layers --mock-data --train-iters")
    assert run.model.num_layers == 3
    assert not run.model.add_bias_linear
    assert run.model.rotary_base == 5e5
    assert run.training.seed == 7
    assert run.training.rampup_batch_size == (2, 2, 10)
    assert not run.checkpoint.load_optim
    assert not run.checkpoint.load_rng
    assert run.precision.bf16
    assert run.model.hidden_dropout == 0.1
    assert run.data.train_data_path == ("a", "b")
    assert not parse(f"{changes} --no-bf16", without="--num-layers --mock-data --train-iters").precision.bf16


def test_settings_file_in_json_and_several(tmp_path: Path) -> None:
    """JSON needs no library; a later file wins over an earlier one."""
    first = write(tmp_path / "a.json", json.dumps({"num_layers": 3, "seed": 5}))
    second = write(tmp_path / "b.json", json.dumps({"num_layers": 2}))
    run = parse(f"--config {first} {second}", without="--num-layers")
    assert (run.model.num_layers, run.training.seed) == (2, 5)
    assert run.notes == ("--num-layers is given twice, 3 and 2: the last one is used",)


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("x.yaml", "num_layerz: 3", "num_layerz"),
        ("x.yaml", "scale_output: true", "--scale-output"),
        ("x.yaml", "optimizer: {num_layers: 3}", "num_layers"),
        ("x.yaml", "weight_decay: abc", "'abc'"),
        ("x.yaml", "weight_decay: true", "True"),
        ("x.yaml", "bf16: maybe", "'maybe'"),
        ("x.yaml", "dry_run: true", "dry_run"),
        ("x.yaml", "- 1", "x.yaml"),
        ("x.yaml", "a: [", "x.yaml:1"),
        ("x.json", "{\n1}", "x.json:2"),
        ("x.yaml", "moe_latent_size: 2", "--moe-latent-size 2"),
    ],
)
def test_bad_settings_files(tmp_path: Path, name: str, text: str, fact: str) -> None:
    """A mistake in a settings file is reported with the file, and the line where there is one."""
    path = write(tmp_path / name, text)
    with expect_error(ConfigError, fact):
        parse(f"--config {path}")


def test_unreadable_settings_files(tmp_path: Path) -> None:
    """Missing and binary files are one sentence."""
    with expect_error(ConfigError, "--config", "gone.yaml"):
        parse("--config gone.yaml")
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with expect_error(ConfigError, f"--config {path}"):
        parse(f"--config {path}")


def test_empty_settings_file(tmp_path: Path) -> None:
    """A file of comments settles nothing."""
    path = write(tmp_path / "empty.yaml", "# nothing\n")
    assert parse(f"--config {path}") == parse()


def reader(saved: Mapping[str, Any] | None, calls: list[tuple[str, int | None]]) -> Any:
    def read(load: str, step: int | None) -> Mapping[str, Any] | None:
        calls.append((load, step))
        return saved

    return read


def test_checkpoint_gives_architecture_only() -> None:
    """--use-checkpoint-args takes what the weights mean, not how they were trained."""
    saved = run_of(
        model={"activation": "swiglu", "make_vocab_size_divisible_by": 8, "mtp_loss_scaling_factor": 0.3},
        training={"seed": 99, "micro_batch_size": 4},
    ).to_json()
    saved["parallel"]["tensor_model_parallel_size"] = 4
    calls: list[tuple[str, int | None]] = []
    changes = "--use-checkpoint-args --load runs/a --ckpt-step 5 --micro-batch-size 1"
    sizes = "--num-layers --hidden-size --num-attention-heads --seq-length"
    run = parse(changes, without=sizes, checkpoint_config=reader(saved, calls))
    assert calls == [("runs/a", 5)]
    assert (run.model.num_layers, run.model.activation, run.data.seq_length) == (4, "swiglu", 32)
    assert (run.training.seed, run.training.micro_batch_size) == (1234, 1)
    assert (run.model.make_vocab_size_divisible_by, run.model.mtp_loss_scaling_factor) == (128, 0.3)
    assert run.parallel.tensor_model_parallel_size == 1


def test_checkpoint_gives_model_parallel_sizes_when_asked() -> None:
    """The layout comes along only with its own flag."""
    saved = run_of().to_json()
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"}
    saved["parallel"].update(sizes, pipeline_model_parallel_layout="Et|t*3L")
    changes = "--use-checkpoint-args --use-mp-args-from-checkpoint-args --load a"
    run = parse(changes, ranks=4, checkpoint_config=reader(saved, []))
    assert run.data_parallel_size == 1
    assert {name: getattr(run.parallel, name) for name in sizes} == sizes
    assert stage_sizes(run) == [1, 3]


def test_another_tokenizer_takes_the_place_of_the_checkpoints() -> None:
    """A model converted without tokenizer has NullTokenizer's ids; with real files that was "--vocab-size 50256 is
    smaller", of a value that nobody typed.
    """
    saved = run_of().to_json()
    saved["tokenizer"] = {"tokenizer_type": "NullTokenizer", "vocab_size": 50256, "vocab_extra_ids": 0}
    changes, files = "--use-checkpoint-args --load a", " --vocab-file v.json --merge-file m.txt"
    sizes = "--tokenizer-type --vocab-size"
    for given in (changes + files, changes + files + " --tokenizer-type GPT2BPETokenizer"):
        run = parse(given, without=sizes, checkpoint_config=reader(saved, []))
        assert (run.tokenizer.tokenizer_type, run.model.vocab_size) == ("GPT2BPETokenizer", 50257)
        assert run.with_vocab_size(50257).model.vocab_size == 50257
    saved["tokenizer"] = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "old.json", "merge_file": "old.txt"}
    run = parse(changes + files, without=sizes, checkpoint_config=reader(saved, []))
    assert (run.tokenizer.vocab_file, run.tokenizer.merge_file) == ("v.json", "m.txt")
    given = changes + " --tokenizer-type Llama2Tokenizer --tokenizer-model x.model"
    run = parse(given, without=sizes, checkpoint_config=reader(saved, []))
    assert (run.tokenizer.vocab_file, run.tokenizer.merge_file) == (None, None)


def test_checkpoint_tokenizer_can_be_left() -> None:
    """The path of a tokenizer's model may have moved."""
    saved = run_of().to_json()
    saved["tokenizer"].update(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="old/place")
    changes = "--use-checkpoint-args --load a"
    assert parse(changes, checkpoint_config=reader(saved, [])).tokenizer.tokenizer_model == "old/place"
    changes += " --no-use-tokenizer-model-from-checkpoint-args --tokenizer-model new"
    assert parse(changes, checkpoint_config=reader(saved, [])).tokenizer.tokenizer_model == "new"


def test_checkpoint_args_need_a_checkpoint() -> None:
    """No checkpoint is an error, never the defaults."""
    with expect_error(ConfigError, "--use-checkpoint-args", "--load"):
        parse("--use-checkpoint-args")
    with expect_error(ConfigError, "--load"):
        parse("--use-checkpoint-args --load a", checkpoint_config=reader(None, []))


def published(model: dict[str, Any], calls: list[str]) -> Any:
    """A reader of Hugging Face models; ``calls`` receives their folders."""

    def read(folder: str, groups: Sequence[type], adapter: str | None) -> dict[str, Any]:
        calls.append(folder)
        return run_of(model=model).to_json()

    return read


def test_a_published_model_gives_the_architecture() -> None:
    """--load-hf alone says what is built. A flag may repeat it, and change what does not alter the weights' meaning."""
    calls: list[str] = []
    sizes = "--num-layers --hidden-size --num-attention-heads --vocab-size"
    more = "--load-hf hf --swiglu --rotary-base 5e5 --attention-dropout 0 --seq-length 16 --max-position-embeddings 512"
    model = {"activation": "swiglu", "position_embedding_type": "rope", "norm_epsilon": 1e-6}
    run = parse(more, without=sizes, published_config=published(model, calls))
    assert (run.model.num_layers, run.model.activation, run.model.norm_epsilon) == (4, "swiglu", 1e-6)
    assert (run.model.rotary_base, run.model.max_position_embeddings, run.data.seq_length) == (5e5, 512, 16)
    assert run.model.vocab_size == 100
    assert run.provenance["num_layers"] == "hf/config.json"
    assert calls == ["hf"]


def test_other_rotary_positions_leave_those_of_a_published_model() -> None:
    """A flag for other positions was refused for settings of the model's own that nobody had typed."""
    sizes, scaled = "--num-layers --hidden-size --num-attention-heads --vocab-size", "original_max_position_embeddings"
    yarn = {"position_embedding_type": "yarn", scaled: 4096, "rotary_scaling_factor": 4.0, "yarn_beta_fast": 16.0}
    llama3 = {"position_embedding_type": "rope", "use_rope_scaling": True, scaled: 4096, "rope_scaling_factor": 32.0}
    for model, flags, expected in (
        (yarn, "rope --rotary-base 5e5", ("rope", None, 1, False, 5e5)),
        (yarn, "rope --use-rope-scaling", ("rope", 4096, 1, True, 2e4)),
        (yarn, "dynamic_ntk", ("dynamic_ntk", 4096, 4, False, 2e4)),
        (llama3, "yarn --rotary-scaling-factor 8", ("yarn", 4096, 8, False, 2e4)),
        (llama3, "rope", ("rope", 4096, 1, True, 2e4)),
    ):
        read = published({**model, "rotary_base": 2e4}, [])
        found = parse(f"--load-hf hf --position-embedding-type {flags}", without=sizes, published_config=read).model
        fields = ("position_embedding_type", scaled, "rotary_scaling_factor", "use_rope_scaling", "rotary_base")
        assert tuple(getattr(found, field) for field in fields) == expected, flags


def test_flags_that_contradict_a_published_model_are_one_sentence() -> None:
    """Training would start with tensors that do not fit, or, worse, that fit and mean something else."""
    said = message_of(
        "--load-hf hf --num-layers 6 --swiglu --softmax-scale 0.5 --hidden-size 64 --hidden-dropout 0",
        without="--num-attention-heads --vocab-size",
        published_config=published({}, []),
    )
    assert said == (
        "--num-layers 6 (4 there), --activation swiglu (gelu_tanh there), --softmax-scale 0.5 (not set there): the "
        "architecture comes from hf/config.json of --load-hf; leave the flags out"
    )


def test_a_resumed_run_reads_no_published_model() -> None:
    """Its folder may be gone, and the checkpoint's vocabulary may have been resized."""
    saved, calls = run_of(model={"vocab_size": 133}).to_json(), list[str]()
    saved["tokenizer"]["vocab_size"] = 132
    changes = "--load-hf hf --load runs --save runs --save-interval 5"
    sizes = "--num-layers --hidden-size --num-attention-heads --vocab-size"
    run = parse(changes, without=sizes, checkpoint_config=reader(saved, []), published_config=published({}, calls))
    assert (run.model.vocab_size, run.provenance["num_layers"], calls) == (133, "checkpoint runs", [])
    run = parse(changes, without=sizes, checkpoint_config=reader(None, []), published_config=published({}, calls))
    assert (run.model.vocab_size, calls) == (100, ["hf"])


def test_a_tokenizer_with_more_ids_than_a_published_model_has_rows() -> None:
    """The sentence named --vocab-size, which nobody had given."""
    for given, source, more in (
        ("--load-hf hf", "hf/config.json", "; or give --vocab-size 120 to add rows, each the mean of those there"),
        ("--use-checkpoint-args --load a", "checkpoint a", ""),
    ):
        readers: Any = {"checkpoint_config": reader(run_of().to_json() if "--load a" in given else None, [])}
        run = parse(given, without="--vocab-size", published_config=published({}, []), **readers)
        with expect_error(ConfigError, source, more, "120", "100"):
            run.with_vocab_size(120)
    resized = parse("--load-hf hf --vocab-size 119", published_config=published({}, []))
    assert resized.with_vocab_size(120).model.vocab_size == 120


def test_ids_as_numbers_for_a_model_with_a_tokenizer() -> None:
    """NullTokenizer adds an id; the model kept one row too few for it, and could not be loaded."""
    saved = run_of().to_json()
    saved["tokenizer"] = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "folder", "vocab_size": 100}
    for given in ("--use-checkpoint-args --load a", "--load-hf hf"):
        readers: Any = {"checkpoint_config": reader(saved if "--load a" in given else None, [])}
        readers["published_config"] = lambda folder, groups, adapter: saved
        run = parse(f"{given} --tokenizer-type NullTokenizer", without="--vocab-size", **readers)
        assert (run.tokenizer.tokenizer_type, run.model.vocab_size) == ("NullTokenizer", 100)
        run = parse(f"{given} --vocab-file v --merge-file m", without="--vocab-size", **readers)
        assert (run.tokenizer.tokenizer_type, run.tokenizer.tokenizer_model) == ("GPT2BPETokenizer", None)


def test_checkpoint_is_not_read_unasked() -> None:
    """Without the flag nothing is read: the callback may be expensive."""
    calls: list[tuple[str, int | None]] = []
    parse("--load a", checkpoint_config=reader({}, calls))
    assert calls == []


def test_every_failure_at_once() -> None:
    """One attempt shows all mistakes: spelling, values, missing flags, bounds, and rules between flags."""
    text = "--num-layers 0 --hidden-size 100 --num-attention-heads 12 --lr abc --moe-latent-size 8 --hiden-size 4"
    with expect_error(ConfigError, "8", "--lr", "'abc'"):
        parse_run([*text.split(), "--bf16", "--fp16", "--mock-data", "--train-iters", "5"], extra_groups=GPT_GROUPS)


def test_nothing_given() -> None:
    """An empty command line says what a run needs."""
    with expect_error(ConfigError, "--num-layers", "--hidden-size", "--num-attention-heads"):
        parse_run([])


def test_a_faulty_flag_is_reported_once() -> None:
    """Rules say nothing more about a flag whose value is already known to be wrong."""
    with expect_error(ConfigError, "--hidden-size", "'x'"):
        parse("--hidden-size x")
    with expect_error(ConfigError, "--seq-length", "0", "1"):
        parse("--seq-length 0")


def test_short_forms_of_a_choice(tmp_path: Path) -> None:
    """``--swiglu`` and its like stand for a value of ``--activation``, on the command line and in files."""
    file = write(tmp_path / "x.yaml", "model: {swiglu: true, geglu: false}")
    gate, plain = write(tmp_path / "y.yaml", "geglu: true"), write(tmp_path / "z.yaml", "activation: geglu_tanh")
    other, wrong = write(tmp_path / "o.yaml", "training: {swiglu: true}"), write(tmp_path / "w.yaml", "swiglu: 1")
    for given, activation in (
        ("", "gelu_tanh"),
        ("--swiglu", "swiglu"),
        ("--activation geglu", "geglu"),
        ("--geglu", "geglu_tanh"),
        ("--geglu --exact-gelu", "geglu"),
        ("--exact-gelu --geglu", "geglu"),
        ("--relu --relu", "relu"),
        ("--activation relu --relu", "relu"),
        ("--exact-gelu --glu-activation geglu", "geglu"),
        ("--glu-activation geglu --exact-gelu", "geglu"),
        ("--geglu --exact-gelu --geglu", "geglu"),
        ("--exact-gelu --geglu --exact-gelu", "geglu"),
        (f"--config {plain} --activation gelu", "gelu"),
        (f"--config {file}", "swiglu"),
        (f"--squared-relu --config {file}", "squared_relu"),
        (f"--exact-gelu --config {gate}", "geglu"),
    ):
        run = parse(given)
        assert run.model.activation == activation, given
        assert "--glu-activation" in given or not run.notes, given
    for given in (
        "--swiglu --relu",
        "--activation geglu --relu",
        "--swiglu --activation gelu",
        "--activation gelu --swiglu",
        "--swiglu 1",
        "--no-swiglu",
        f"--config {other}",
        f"--config {wrong}",
    ):
        with expect_error(ConfigError, given.removeprefix("--config ").split()[0]):
            parse(given)


def test_a_flag_given_twice_is_noted() -> None:
    """Launch scripts override earlier flags by later ones; which won is said."""
    run = parse("--seed 1 --seed 2")
    assert (run.training.seed, run.notes) == (2, ("--seed is given twice, 1 and 2: the last one is used",))
    assert parse("--seed 2 --seed 2").notes == ()


def test_world_size() -> None:
    """Ranks come from the launcher, or, for a dry run only, from the flag."""
    assert parse_run(words()).world_size == 1
    assert parse(ranks=4).world_size == 4
    assert parse("--dry-run", ranks=4).world_size == 4
    assert parse("--dry-run --world-size 16", ranks=2).world_size == 16


class MaskingConfig(Settings):
    """A train spec's own settings."""

    mask_prob: float = flag("Share of tokens that are masked.", default=0.15, at_least=0, at_most=1)


def test_groups_of_a_train_spec() -> None:
    """A train spec's flags are parsed, checked, saved and read back like the core's, which alone refuses the name."""
    run = parse("--mask-prob 0.5", extra_groups=(MaskingConfig,))
    assert run.group(MaskingConfig).mask_prob == 0.5
    assert run.provenance["mask_prob"] == "flag"
    assert run.to_json()["masking"] == {"mask_prob": 0.5}
    assert RunConfig.from_json(run.to_json()).extra == ()  # a tool's; a family's come back
    with expect_error(ConfigError, "--mask-prob", "2.0", "1"):
        parse("--mask-prob 2", extra_groups=(MaskingConfig,))
    with pytest.raises(KeyError, match="no MaskingConfig"):
        parse().group(MaskingConfig)


def test_help_leaves_before_anything_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """--help works on any command line and shows every group."""
    with pytest.raises(SystemExit) as caught:
        parse_run(["--nonsense", "--help"], prog="pretrain_gpt.py")
    assert caught.value.code in (0, None)
    text = capsys.readouterr().out
    for group in (
        "model",
        "parallel",
        "precision",
        "optimizer",
        "training",
        "data",
        "tokenizer",
        "checkpoint",
        "command",
    ):
        assert f"\n{group}: " in text
    assert "--tensor-model-parallel-size N" in text
    assert max(map(len, text.splitlines())) <= 120
