"""Rules about the flags of tasks/main.py."""

from __future__ import annotations

from megatron.config.run import RunConfig
from megatron.config.vision import VisionConfig
from megatron.errors import enumeration
from tasks.settings import FINE_TUNING, OF_IMAGES, TaskConfig

_ONE_FILE = ("WIKITEXT103", "LAMBADA")
_WINDOWS = ("WIKITEXT103", "LM")


def tasks_read_their_own_data(run: RunConfig) -> str | None:
    """Data sets for pretraining are refused."""
    data = run.data
    given = {
        "--data-path": data.data_path,
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
        "--data-args-path": data.data_args_path,
        "--per-split-data-args-path": data.per_split_data_args_path,
        "--mock-data": data.mock_data,
        "--verify-data": data.verify_data,
    }
    named = [*(flag for flag, value in given.items() if value), *data.given_document_flags()]
    if not named:
        return None
    return f"tasks make their samples of --valid-data and --train-data; leave {' and '.join(named)} out"


def flags_of_other_tasks(run: RunConfig) -> str | None:
    """A flag that only another task reads is refused."""
    task = run.group(TaskConfig)
    asked = {
        f"--overlapping-eval {task.overlapping_eval}": (task.overlapping_eval is not None, _WINDOWS),
        "--strict-lambada": (task.strict_lambada, ("LAMBADA",)),
        f"--json-key {task.json_key}": (task.json_key != "text", ("LM",)),
        "--keep-last": (task.keep_last, tuple(FINE_TUNING)),
        f"--predictions-dir {task.predictions_dir}": (task.predictions_dir is not None, (*FINE_TUNING, *OF_IMAGES)),
        f"--image-folder {task.image_folder}": (task.image_folder is not None, OF_IMAGES),
        "--without-images": (task.without_images, OF_IMAGES),
        f"--tokens-to-generate {task.tokens_to_generate}": (run.given("tokens_to_generate"), OF_IMAGES),
        f"--chat-template {task.chat_template}": (task.chat_template is not None, OF_IMAGES),
    }
    for text, (given, tasks) in asked.items():
        if given and task.task not in tasks:
            return f"{text} is for --task {enumeration(tasks)} and has no effect with {task.task}; leave it out"
    return None


def zero_shot_needs_a_model(run: RunConfig) -> str | None:
    """Random weights are not evaluated."""
    checkpoint = run.checkpoint
    if checkpoint.load or checkpoint.pretrained_checkpoint or checkpoint.use_checkpoint_args:  # which reports it
        return None
    task = run.group(TaskConfig).task
    return f"--task {task} measures a trained model: give --load, the folder of its checkpoints"


def zero_shot_has_data(run: RunConfig) -> str | None:
    """A task has the files that it reads."""
    task, count = run.group(TaskConfig), len(run.group(TaskConfig).valid_data)
    if count == 1 or (count and task.task not in _ONE_FILE):
        return None
    wanted = "one file" if task.task in _ONE_FILE else f"files of {'questions' if task.task in OF_IMAGES else 'text'}"
    given = f", not {count}: {' '.join(task.valid_data)}" if count else ""
    return f"--task {task.task} needs {wanted}{given}; give --valid-data"


def zero_shot_trains_nothing(run: RunConfig) -> str | None:
    """Flags of training are refused."""
    task = run.group(TaskConfig)
    named = ["--train-data"] * bool(task.train_data) + [f"--epochs {task.epochs}"] * bool(task.epochs)
    return f"--task {task.task} trains nothing; leave {' and '.join(named)} out" if named else None


def the_model_reads_images(run: RunConfig) -> str | None:
    """Questions about images are for a model with an encoder of them."""
    checkpoint, task = run.checkpoint, run.group(TaskConfig).task
    named = checkpoint.load or checkpoint.pretrained_checkpoint
    if not named or VisionConfig.among(run.extra).has_vision:
        return None
    return (
        f"--task {task} asks about images, and the model in {named} reads texts alone: name the checkpoint of a model "
        "with a vision encoder, or choose LM or LAMBADA"
    )


def files_have_names_of_their_own(run: RunConfig) -> str | None:
    """Predictions of two files don't go into one."""
    task = run.group(TaskConfig)
    names = [path.rpartition("/")[2].partition(".")[0] for path in task.valid_data]
    twice = next((name for name in names if names.count(name) > 1), None)
    if task.predictions_dir is None or twice is None:
        return None
    return f"--predictions-dir {task.predictions_dir} would have {twice}.jsonl twice: rename a file of --valid-data"


def windows_overlap(run: RunConfig) -> str | None:
    """Windows skip no token."""
    task, length = run.group(TaskConfig), run.data.seq_length
    if task.overlapping_eval is None or task.overlapping_eval <= length:
        return None
    return f"--overlapping-eval {task.overlapping_eval} is beyond --seq-length {length}; give at most {length}"


def epochs_and_data_are_given(run: RunConfig) -> str | None:
    """There are files to train on, or files to score."""
    task = run.group(TaskConfig)
    if task.epochs is None:
        return f"--task {task.task} needs --epochs: how often to read --train-data, or 0 to score --valid-data alone"
    if task.epochs and not task.train_data:
        return f"--task {task.task} with --epochs {task.epochs} needs --train-data"
    if task.epochs == 0 and not task.valid_data:
        return f"--task {task.task} with --epochs 0 only scores --valid-data; give it"
    return None


def predictions_are_of_a_finished_model(run: RunConfig) -> str | None:
    """Predictions and scores are of the same model."""
    task = run.group(TaskConfig)
    if task.predictions_dir is None or not task.epochs:
        return None
    return (
        f"--predictions-dir {task.predictions_dir} writes the predictions of a fine-tuned model: give it with "
        f"--epochs 0 after --epochs {task.epochs}"
    )


def a_trained_model_is_named(run: RunConfig) -> str | None:
    """Neither fine-tuning nor scoring starts from random weights."""
    task, checkpoint = run.group(TaskConfig), run.checkpoint
    if checkpoint.load is not None:
        return None
    if task.epochs == 0:
        return (
            f"--task {task.task} with --epochs 0 scores a model that was fine-tuned: give --load, its folder of "
            "checkpoints"
        )
    if checkpoint.pretrained_checkpoint is None:
        return (
            f"--task {task.task} fine-tunes a pretrained BERT: give --pretrained-checkpoint, its folder of checkpoints"
        )
    return None


def epochs_are_the_length(run: RunConfig) -> str | None:
    """Other flags of length, batch size or order are refused."""
    training = run.training
    given = {
        "--train-iters": training.train_iters is not None,
        "--train-samples": training.train_samples is not None,
        "--rampup-batch-size": training.rampup_batch_size is not None,
        "--step-batch-size-schedule": training.step_batch_size_schedule is not None,
        "--dataloader-type cyclic": run.data.dataloader_type == "cyclic",
        "--data-order megatron": run.data.data_order == "megatron",
    }
    named = " and ".join(flag for flag, is_given in given.items() if is_given)
    task = run.group(TaskConfig).task
    return f"--task {task} trains for --epochs, each in an order of its own; leave {named} out" if named else None


def epochs_set_the_pace(run: RunConfig) -> str | None:
    """Fine-tuning evaluates after each epoch, on all data, and drops no sample."""
    task, fields = run.group(TaskConfig), ("eval_interval", "eval_iters")
    named = [f"--{field.replace('_', '-')}" for field in fields if run.given(field)] + ["--keep-last"] * task.keep_last
    if not named:
        return None
    return (
        f"{', '.join(named)}: no effect with --task {task.task}: each epoch ends with scores of all --valid-data, and "
        "no sample is dropped"
    )


TASK_RULES = (tasks_read_their_own_data, flags_of_other_tasks)
ZERO_SHOT_RULES = (zero_shot_needs_a_model, zero_shot_has_data, zero_shot_trains_nothing, windows_overlap)
IMAGE_RULES = (
    zero_shot_needs_a_model,
    zero_shot_has_data,
    zero_shot_trains_nothing,
    the_model_reads_images,
    files_have_names_of_their_own,
)
FINE_TUNING_RULES = (
    epochs_and_data_are_given,
    predictions_are_of_a_finished_model,
    a_trained_model_is_named,
    epochs_are_the_length,
)
