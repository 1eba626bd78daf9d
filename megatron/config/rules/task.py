"""Rules about tasks: each says which of the flags of tasks/main.py it has a use for."""

from __future__ import annotations

from megatron.config.run import RunConfig
from megatron.config.task import FINE_TUNING, ZERO_SHOT, OwnDataConfig, TaskConfig

_ONE_FILE = ("WIKITEXT103", "LAMBADA")
_WINDOWS = ("WIKITEXT103", "LM")


def zero_shot_needs_a_model(run: RunConfig) -> str | None:
    """Nothing is measured on random weights."""
    task, checkpoint = run.find(TaskConfig), run.checkpoint
    if task is None or task.task not in ZERO_SHOT or checkpoint.load or checkpoint.pretrained_checkpoint:
        return None
    if checkpoint.use_checkpoint_args:  # which says so itself
        return None
    return f"--task {task.task} measures a trained model: give --load, the folder of its checkpoints"


def zero_shot_has_data(run: RunConfig) -> str | None:
    """A task that trains nothing has something to read, and as much of it as the task takes."""
    task = run.find(TaskConfig)
    if task is None or task.task not in ZERO_SHOT or (task.valid_data and task.task not in _ONE_FILE):
        return None
    if len(task.valid_data) == 1:
        return None
    wanted = "one file" if task.task in _ONE_FILE else "files of text"
    given = f", not {len(task.valid_data)}: {' '.join(task.valid_data)}" if task.valid_data else ""
    return f"--task {task.task} is measured on {wanted}{given}; give --valid-data"


def zero_shot_trains_nothing(run: RunConfig) -> str | None:
    """Flags of training are refused by name, never ignored."""
    task = run.find(TaskConfig)
    if task is None or task.task not in ZERO_SHOT:
        return None
    named = ["--train-data"] * bool(task.train_data) + [f"--epochs {task.epochs}"] * bool(task.epochs)
    return f"--task {task.task} trains nothing; leave {' and '.join(named)} out" if named else None


def flags_of_other_tasks(run: RunConfig) -> str | None:
    """A flag that only another task reads is refused."""
    task = run.find(TaskConfig)
    if task is None:
        return None
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
    task, length = run.find(TaskConfig), run.data.seq_length
    if task is None or task.overlapping_eval is None or task.overlapping_eval <= length:
        return None
    return f"--overlapping-eval {task.overlapping_eval} is beyond --seq-length {length}; give at most {length}"


def tasks_read_their_own_data(run: RunConfig) -> str | None:
    """Data sets for training are no data of tasks."""
    if run.find(OwnDataConfig) is None:
        return None
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


RULES = (
    zero_shot_needs_a_model,
    zero_shot_has_data,
    zero_shot_trains_nothing,
    flags_of_other_tasks,
    windows_overlap,
    tasks_read_their_own_data,
)
