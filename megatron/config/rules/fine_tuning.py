"""Rules about the tasks that fine-tune: what they read, what they start from, and what sets their length."""

from __future__ import annotations

from megatron.config.run import RunConfig
from megatron.config.task import TaskConfig


def epochs_are_given(run: RunConfig) -> str | None:
    """How often the training data are read, or that nothing is trained."""
    task = run.find(TaskConfig)
    if task is None or task.answers is None or task.epochs is not None:
        return None
    return f"--task {task.task} needs --epochs: how often to read --train-data, or 0 to score --valid-data alone"


def data_are_given(run: RunConfig) -> str | None:
    """Something to train on, or something to score."""
    task = run.find(TaskConfig)
    if task is None or task.answers is None:
        return None
    if task.epochs and not task.train_data:
        return f"--task {task.task} with --epochs {task.epochs} needs --train-data"
    if task.epochs == 0 and not task.valid_data:
        return f"--task {task.task} with --epochs 0 scores --valid-data and nothing else; give it"
    return None


def predictions_are_of_a_finished_model(run: RunConfig) -> str | None:
    """What is written down is what the model answers that the scores are of."""
    task = run.find(TaskConfig)
    if task is None or task.answers is None or task.predictions_dir is None or not task.epochs:
        return None
    return (
        f"--predictions-dir {task.predictions_dir} is for the answers of a model that was fine-tuned: give it with "
        f"--epochs 0 once --epochs {task.epochs} are over"
    )


def a_trained_model_is_named(run: RunConfig) -> str | None:
    """Nothing is fine-tuned, and nothing scored, that starts from random weights."""
    task, checkpoint = run.find(TaskConfig), run.checkpoint
    if task is None or task.answers is None or checkpoint.load is not None:
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
    task, training = run.find(TaskConfig), run.training
    if task is None or task.answers is None:
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


RULES = (
    epochs_are_given,
    data_are_given,
    predictions_are_of_a_finished_model,
    a_trained_model_is_named,
    epochs_are_the_length,
)
