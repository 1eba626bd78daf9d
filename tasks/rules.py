"""Rules about tasks: each says which of the flags of tasks/main.py it has a use for."""

from __future__ import annotations

from megatron.config.run import RunConfig
from tasks.settings import FINE_TUNING, ZERO_SHOT, TaskConfig

_ONE_FILE = ("WIKITEXT103", "LAMBADA")
_WINDOWS = ("WIKITEXT103", "LM")


def zero_shot_needs_a_model(run: RunConfig) -> str | None:
    """Nothing is measured on random weights."""
    task, checkpoint = run.group(TaskConfig), run.checkpoint
    if task.task not in ZERO_SHOT or checkpoint.load or checkpoint.pretrained_checkpoint:
        return None
    if checkpoint.use_checkpoint_args:  # which says so itself
        return None
    return f"--task {task.task} measures a trained model: give --load, the folder of its checkpoints"


def zero_shot_has_data(run: RunConfig) -> str | None:
    """A task that trains nothing has something to read, and as much of it as the task takes."""
    task = run.group(TaskConfig)
    if task.task not in ZERO_SHOT or (task.valid_data and task.task not in _ONE_FILE):
        return None
    if len(task.valid_data) == 1:
        return None
    wanted = "one file" if task.task in _ONE_FILE else "files of text"
    given = f", not {len(task.valid_data)}: {' '.join(task.valid_data)}" if task.valid_data else ""
    return f"--task {task.task} needs {wanted}{given}; give --valid-data"


def zero_shot_trains_nothing(run: RunConfig) -> str | None:
    """Flags of training are refused by name, never ignored."""
    task = run.group(TaskConfig)
    if task.task not in ZERO_SHOT:
        return None
    named = ["--train-data"] * bool(task.train_data) + [f"--epochs {task.epochs}"] * bool(task.epochs)
    return f"--task {task.task} trains nothing; leave {' and '.join(named)} out" if named else None


def flags_of_other_tasks(run: RunConfig) -> str | None:
    """A flag that only another task reads is refused."""
    task = run.group(TaskConfig)
    asked = {
        f"--overlapping-eval {task.overlapping_eval}": (task.overlapping_eval is not None, _WINDOWS),
        "--strict-lambada": (task.strict_lambada, ("LAMBADA",)),
        f"--json-key {task.json_key}": (task.json_key != "text", ("LM",)),
        "--keep-last": (task.keep_last, tuple(FINE_TUNING)),
        f"--predictions-dir {task.predictions_dir}": (task.predictions_dir is not None, tuple(FINE_TUNING)),
    }
    for text, (given, tasks) in asked.items():
        if given and task.task not in tasks:
            return f"{text} is for --task {' and '.join(tasks)} and has no effect with {task.task}; leave it out"
    return None


def windows_overlap(run: RunConfig) -> str | None:
    """Windows leave no token out."""
    task, length = run.group(TaskConfig), run.data.seq_length
    if task.overlapping_eval is None or task.overlapping_eval <= length:
        return None
    return f"--overlapping-eval {task.overlapping_eval} is beyond --seq-length {length}; give at most {length}"


def tasks_read_their_own_data(run: RunConfig) -> str | None:
    """Data sets for training are no data of tasks."""
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
    return (
        f"tasks make their samples of --valid-data and --train-data; leave {' and '.join(named)} out" if named else None
    )


def epochs_are_given(run: RunConfig) -> str | None:
    """How often the training data are read, or that nothing is trained."""
    task = run.group(TaskConfig)
    if task.answers is None or task.epochs is not None:
        return None
    return f"--task {task.task} needs --epochs: how often to read --train-data, or 0 to score --valid-data alone"


def data_are_given(run: RunConfig) -> str | None:
    """Something to train on, or something to score."""
    task = run.group(TaskConfig)
    if task.answers is None:
        return None
    if task.epochs and not task.train_data:
        return f"--task {task.task} with --epochs {task.epochs} needs --train-data"
    if task.epochs == 0 and not task.valid_data:
        return f"--task {task.task} with --epochs 0 only scores --valid-data; give it"
    return None


def predictions_are_of_a_finished_model(run: RunConfig) -> str | None:
    """What is written down is what the model answers that the scores are of."""
    task = run.group(TaskConfig)
    if task.answers is None or task.predictions_dir is None or not task.epochs:
        return None
    return (
        f"--predictions-dir {task.predictions_dir} writes the predictions of a fine-tuned model: give it with "
        f"--epochs 0 after --epochs {task.epochs}"
    )


def a_trained_model_is_named(run: RunConfig) -> str | None:
    """Nothing is fine-tuned, and nothing scored, that starts from random weights."""
    task, checkpoint = run.group(TaskConfig), run.checkpoint
    if task.answers is None or checkpoint.load is not None:
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
    """Whole epochs of a fixed batch size are iterations enough, in an order of their own."""
    task, training = run.group(TaskConfig), run.training
    if task.answers is None:
        return None
    given = {
        "--train-iters": training.train_iters is not None,
        "--train-samples": training.train_samples is not None,
        "--rampup-batch-size": training.rampup_batch_size is not None,
        "--step-batch-size-schedule": training.step_batch_size_schedule is not None,
        "--dataloader-type cyclic": run.data.dataloader_type == "cyclic",
        "--data-order megatron": run.data.data_order == "megatron",
    }
    named = [flag for flag, is_given in given.items() if is_given]
    if not named:
        return None
    return f"--task {task.task} trains for --epochs, each in an order of its own; leave {' and '.join(named)} out"


def epochs_set_the_pace(run: RunConfig) -> str | None:
    """A fine-tuning is evaluated after each epoch, on all data, and drops no sample."""
    task = run.group(TaskConfig)
    if task.answers is None:
        return None
    fields = ("eval_interval", "eval_iters")
    named = [f"--{field.replace('_', '-')}" for field in fields if run.given(field)] + ["--keep-last"] * task.keep_last
    if not named:
        return None
    return (
        f"{', '.join(named)}: no effect with --task {task.task}: each epoch ends with scores of all --valid-data, and "
        "no sample is dropped"
    )


RULES = (
    tasks_read_their_own_data,
    zero_shot_needs_a_model,
    zero_shot_has_data,
    zero_shot_trains_nothing,
    flags_of_other_tasks,
    windows_overlap,
    epochs_are_given,
    data_are_given,
    predictions_are_of_a_finished_model,
    a_trained_model_is_named,
    epochs_are_the_length,
)
REMARKS = (epochs_set_the_pace,)
