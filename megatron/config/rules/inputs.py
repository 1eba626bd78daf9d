"""Rules about data, tokenizer, checkpoints and reports."""

from __future__ import annotations

import math
import re

from megatron.config.checkpoint import place_of
from megatron.config.data import DEFAULT_SPLIT
from megatron.config.eval_tasks import eval_tasks_of
from megatron.config.family import Purpose, Rule
from megatron.config.flags import flag_of
from megatron.config.rules.sentence import rule
from megatron.config.rules.sizes import multiples_near
from megatron.config.run import RunConfig

# fields that a kind of tokenizer needs; the others need tokenizer_model
_TOKENIZER_FILES = {
    "NullTokenizer": ("vocab_size",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
}


def one_data_source(run: RunConfig) -> str | None:
    """There is exactly one source of data."""
    data = run.data
    per_split = [flag for flag, paths in _per_split(run).items() if paths]
    named = [
        *["--data-path"] * bool(data.data_path),
        *["--data-args-path"] * bool(data.data_args_path),
        *["--per-split-data-args-path"] * bool(data.per_split_data_args_path),
        *per_split[:1],
        *["--mock-data"] * data.mock_data,
    ]
    if len(named) > 1:
        return f"{' and '.join(named)} are mutually exclusive; keep one"
    if not (named or run.purpose.reads_own_data or any(part.makes_samples for part in run.parts)):
        return "there is no data: give --data-path PREFIX (of PREFIX.bin and PREFIX.idx), or --mock-data"
    return None


def training_data_is_given(run: RunConfig) -> str | None:
    """Data given per split includes training data."""
    paths = _per_split(run)
    given = [flag for flag, each in paths.items() if each]
    if not given or paths["--train-data-path"] or run.training.skip_train:
        return None
    return f"{' and '.join(given)} without --train-data-path leaves nothing to train on; give it, or --skip-train"


def split_needs_one_data_set(run: RunConfig) -> str | None:
    """--split divides --data-path only."""
    given = [flag for flag, each in _per_split(run).items() if each]
    given += ["--per-split-data-args-path"] * bool(run.data.per_split_data_args_path)
    if given and run.data.split != DEFAULT_SPLIT:
        return f"--split {run.data.split!r} has no effect with {given[0]}; leave it out, or use --data-path"
    return None


def split_is_sound(run: RunConfig) -> str | None:
    """--split is one to three shares, and the first is more than 0."""
    text = run.data.split
    shares = re.findall(r"[^,\s]+", text)
    numbers = [float(share) for share in shares if re.fullmatch(r"\d*\.?\d+|\d+\.", share)]
    if len(numbers) != len(shares) or not 1 <= len(numbers) <= 3 or sum(numbers) == 0:
        return (
            f"--split {text!r} must be one to three shares for training, validation and test, as in {DEFAULT_SPLIT!r}"
        )
    if numbers[0] == 0 and not run.training.skip_train:
        return f"--split {text!r} leaves nothing to train on; give the first share more than 0"
    return None


def blends_are_sound(run: RunConfig) -> str | None:
    """A blend is prefixes, or weights each followed by a prefix."""
    for flag, words in {"--data-path": run.data.data_path, **_per_split(run)}.items():
        weights = [_number(word) for word in words[::2]]
        known = [weight for weight in weights if weight is not None]
        if not known:
            continue
        if len(known) < len(weights) or len(words) % 2:
            return f"{flag} {' '.join(words)}: give a weight before each prefix, or no weight"
        stray = next((word for word in words[1::2] if _number(word) is not None), None)
        if stray is not None:
            return f"{flag} {' '.join(words)}: a prefix is missing before the weight {stray}"
        if not (all(0 <= weight < math.inf for weight in known) and any(known)):
            return f"{flag} {' '.join(words)}: weights must be 0 or more, and at least one of them more than 0"
    return None


def tokenizer_has_files(run: RunConfig) -> str | None:
    """The files and sizes that a kind of tokenizer reads are given."""
    tokenizer = run.tokenizer
    kind = tokenizer.tokenizer_type
    if kind is None:
        return f"a {run.family.title} has no usual tokenizer; give --tokenizer-type"
    needed = _TOKENIZER_FILES.get(kind, ("tokenizer_model",))
    lacking = [flag_of(field) for field in needed if getattr(tokenizer, field) is None]
    if not lacking:
        return None
    chosen = "" if run.given("tokenizer_type") else " (the default)"
    return f"--tokenizer-type {kind}{chosen} needs {' and '.join(lacking)}, or choose another --tokenizer-type"


def retained_checkpoints_exist(run: RunConfig) -> str | None:
    """--save-retain-interval is a multiple of --save-interval."""
    kept, written = run.checkpoint.save_retain_interval, run.checkpoint.save_interval
    if kept is None or written is None or kept % written == 0:
        return None
    return (
        f"--save-retain-interval {kept} is not divisible by --save-interval {written}; use "
        f"{multiples_near(kept, written)}"
    )


def samples_have_an_interval(run: RunConfig) -> str | None:
    """Settings of samples come with --generate-samples-interval."""
    fields = [f"generate_samples_{name}" for name in ("prompts", "tokens", "temperature")]
    given = [flag_of(field) for field in fields if run.given(field)]
    if not given or run.reporting.generate_samples_interval is not None:
        return None
    listed = " and ".join(given)
    return f"{listed} without --generate-samples-interval: no samples are written; give it, or leave {listed} out"


def eval_tasks_are_known(run: RunConfig) -> str | None:
    """--eval-tasks names tasks with their files."""
    try:
        eval_tasks_of(run.reporting.eval_tasks)
    except ValueError as error:
        return f"--eval-tasks {' '.join(run.reporting.eval_tasks)}: {error}"
    return None


def exports_are_at_checkpoints(run: RunConfig) -> str | None:
    """--save-hf-interval is a multiple of --save-interval: a model in --save-hf is then one that a restart has, too."""
    checkpoint = run.checkpoint
    written, saved = checkpoint.save_hf_interval, checkpoint.save_interval
    if written is None or (checkpoint.save and checkpoint.save_hf and saved and written % saved == 0):
        return None
    lacking = [flag_of(name) for name in ("save_hf", "save", "save_interval") if getattr(checkpoint, name) is None]
    if lacking:
        return f"--save-hf-interval {written} needs {' and '.join(lacking)}: models are written at checkpoints"
    assert saved is not None, "else it is lacking"
    near = multiples_near(written, saved)
    return f"--save-hf-interval {written} is not divisible by --save-interval {saved}; use {near}"


def exports_are_beside_checkpoints(run: RunConfig) -> str | None:
    """--save-hf is a new folder, which checkpoints must not fill before the model is written."""
    save, save_hf = run.checkpoint.save, run.checkpoint.save_hf
    if save is None or save_hf is None:
        return None
    one, other = (f"{place_of(each).rstrip('/')}/" for each in (save, save_hf))
    if not (one.startswith(other) or other.startswith(one)):
        return None
    return f"--save-hf {save_hf} and --save {save} must be two folders, neither inside the other"


def published_weights_are_the_start(run: RunConfig) -> str | None:
    """With --load-hf, --load is where the run itself saves, and --finetune is not given beside it."""
    checkpoint = run.checkpoint
    hf, load = f"--load-hf {checkpoint.load_hf}", f"--load {checkpoint.load}"
    if checkpoint.load_hf is None or checkpoint.load is None:
        return None
    if not checkpoint.resumes_own:
        return (
            f"{hf} with {load}: give the --save folder as --load, so that a restart resumes what was saved; without a "
            f"checkpoint there the run starts from {checkpoint.load_hf}"
        )
    if checkpoint.finetune:
        return (
            f"--finetune with {hf} and {load} would begin at iteration 0 again whenever the command is restarted; "
            "leave --finetune out: weights of --load-hf always start at iteration 0"
        )
    return None


def published_weights_are_for_pretraining(run: RunConfig) -> str | None:
    """Commands that do something else with a model read checkpoints."""
    checkpoint = run.checkpoint
    given = {"--load-hf": checkpoint.load_hf, "--save-hf": checkpoint.save_hf}
    named = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    if not named or run.find(Purpose) is None:
        return None
    return f"{' and '.join(named)}: only pretraining has this; convert the model with tools/checkpoint/convert.py"


def _per_split(run: RunConfig) -> dict[str, tuple[str, ...]]:
    data = run.data
    return {
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


RULES: tuple[Rule, ...] = (
    rule(
        "--padded-vocab-size {run.tokenizer.padded_vocab_size} is not divisible by --tensor-model-parallel-size "
        "{run.parallel.tensor_model_parallel_size}, whose ranks divide the rows; give a multiple of it",
        lambda run: (run.tokenizer.padded_vocab_size or 0) % run.parallel.tensor_model_parallel_size,
    ),
    eval_tasks_are_known,
    one_data_source,
    training_data_is_given,
    split_needs_one_data_set,
    split_is_sound,
    rule(
        "--log-json {run.reporting.log_json} is a URL, and lines are appended to it: name a place on this machine's "
        "disks",
        lambda run: "://" in (run.reporting.log_json or ""),
    ),
    rule(
        "--log-dir {run.reporting.log_dir} is a URL, and lines are appended to it: name a place on this machine's "
        "disks",
        lambda run: "://" in (run.reporting.log_dir or ""),
    ),
    rule(
        "--data-cache-path {run.data.data_cache_path} is a URL; give a folder of this machine or a shared one",
        lambda run: "://" in (run.data.data_cache_path or ""),  # caches are memory-mapped
    ),
    blends_are_sound,
    rule(
        "--multiple-validation-sets needs data files; leave it out with --mock-data, or give --valid-data-path",
        lambda run: run.data.multiple_validation_sets and run.data.mock_data,
    ),
    rule(
        "--full-validation reads all validation data, and --mock-data generates millions of samples; keep one",
        lambda run: run.data.full_validation and run.data.mock_data,
    ),
    rule(
        "--verify-data compares files with their digests; leave it out with --mock-data",
        lambda run: run.data.verify_data and run.data.mock_data,
    ),
    rule(
        "--packing {run.data.packing} and --data-order megatron are mutually exclusive: Megatron-LM packs a stream",
        lambda run: run.data.packing != "stream" and run.data.data_order == "megatron",
    ),
    rule(
        "--fim-rate {run.data.fim_rate} rearranges a stream of documents; leave --packing {run.data.packing} out",
        lambda run: run.data.packing != "stream" and run.data.fim_rate,
    ),
    rule(
        "--fim-rate {run.data.fim_rate} and --sft are mutually exclusive: answers are not rearranged; keep one",
        lambda run: run.data.sft and run.data.fim_rate,
    ),
    rule(
        "--sft needs data made by tools/preprocess_sft.py; leave it out with --mock-data",
        lambda run: run.data.sft and run.data.mock_data,
    ),
    tokenizer_has_files,
    rule(
        "--keep-last-checkpoints {run.checkpoint.keep_last_checkpoints} needs --save",
        lambda run: run.checkpoint.keep_last_checkpoints and run.checkpoint.save is None,
    ),
    rule(
        "--save-retain-interval {run.checkpoint.save_retain_interval} needs --save",
        lambda run: run.checkpoint.save_retain_interval and run.checkpoint.save is None,
    ),
    rule(
        "--async-save needs --save: the folder to write checkpoints into",
        lambda run: run.checkpoint.async_save and run.checkpoint.save is None,
    ),
    retained_checkpoints_exist,
    rule(
        "--overwrite-run needs --save: the folder whose run is overwritten",
        lambda run: run.checkpoint.overwrite_run and run.checkpoint.save is None,
    ),
    rule(
        "--overwrite-run starts a new run in --save {run.checkpoint.save}, and --load {run.checkpoint.load} goes on "
        "with the one there; keep one",
        lambda run: run.checkpoint.overwrite_run and run.checkpoint.resumes_own and not run.checkpoint.finetune,
    ),
    rule(
        "--ckpt-step {run.checkpoint.ckpt_step} needs --load: the folder of the checkpoint",
        lambda run: run.checkpoint.ckpt_step is not None and run.checkpoint.load is None,
    ),
    rule(
        "--load-ema takes other weights than those that the optimizer goes on from; give --finetune or --skip-train as "
        "well",
        lambda run: (
            run.checkpoint.load_ema
            and not (run.checkpoint.finetune or run.training.skip_train or run.checkpoint.pretrained_checkpoint)
            and not run.purpose.only_reads
        ),
    ),
    rule(
        "--exit-on-missing-checkpoint needs --load: the folder of the checkpoint",
        lambda run: run.checkpoint.exit_on_missing_checkpoint and run.checkpoint.load is None,
    ),
    rule(
        "--finetune has no weights to start from; give --load or --pretrained-checkpoint",
        lambda run: (
            run.checkpoint.finetune
            and not (run.checkpoint.load or run.checkpoint.pretrained_checkpoint or run.checkpoint.load_hf)
        ),
    ),
    rule(
        "--load-hf {run.checkpoint.load_hf} and --pretrained-checkpoint {run.checkpoint.pretrained_checkpoint} both "
        "name weights to start from; keep one",
        lambda run: run.checkpoint.load_hf and run.checkpoint.pretrained_checkpoint,
    ),
    rule(
        "--load-peft {run.checkpoint.load_peft} needs the published model that the adapters belong to: name it with "
        "--load-hf, or make one checkpoint of both with tools/checkpoint/convert.py --load-peft",
        lambda run: run.checkpoint.load_peft is not None and run.checkpoint.load_hf is None,
    ),
    published_weights_are_the_start,
    published_weights_are_for_pretraining,
    exports_are_at_checkpoints,
    exports_are_beside_checkpoints,
    rule(
        "--save-hf-ema chooses the weights that --save-hf writes; give --save-hf, a new folder",
        lambda run: run.checkpoint.save_hf_ema and run.checkpoint.save_hf is None,
    ),
    rule(
        "--save-hf-ema writes a moving average of the weights, which only a run with --ema-decay keeps; give "
        "--ema-decay, such as 0.999",
        lambda run: run.checkpoint.save_hf_ema and run.checkpoint.save_hf and run.optimizer.ema_decay is None,
    ),
    rule(
        "--save-hf {run.checkpoint.save_hf} writes the trained model, and --skip-train trains nothing; leave one out",
        lambda run: run.checkpoint.save_hf and run.training.skip_train and run.find(Purpose) is None,
    ),
    samples_have_an_interval,
    rule(
        "--use-mp-args-from-checkpoint-args needs --use-checkpoint-args",
        lambda run: run.checkpoint.use_mp_args_from_checkpoint_args and not run.checkpoint.use_checkpoint_args,
    ),
)
