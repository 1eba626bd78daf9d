"""The training loop: flat, from the first step to the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain

from megatron.config.run import RunConfig
from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.checkpointing.lease import StillHeld
from megatron.core.datasets.splits import SplitName
from megatron.core.models.train_spec import TrainSpec
from megatron.core.ops.compiled import compile_bodies
from megatron.core.parallel.context import ParallelContext
from megatron.core.tokenizers.end_tokens import describe_chat
from megatron.errors import kept_on_interrupt
from megatron.training.checkpoints.earlier_run import check_save_folder
from megatron.training.checkpoints.huggingface_folders import HuggingFaceFolders
from megatron.training.checkpoints.loading import load
from megatron.training.checkpoints.saving import Saver, holding_save_folder, saving
from megatron.training.evaluation.evaluate import evaluate
from megatron.training.evaluation.first_pass import before_training
from megatron.training.evaluation.samples import Samples
from megatron.training.evaluation.task_scores import TaskScores
from megatron.training.guards.guard import StepGuard
from megatron.training.guards.hardware import hardware
from megatron.training.guards.stragglers import Timed, watching_stragglers
from megatron.training.reporting.health import health_file
from megatron.training.reporting.metrics import Evaluation
from megatron.training.reporting.observing import observed, tell_start
from megatron.training.reporting.profiling import Profiled, profiling
from megatron.training.reporting.startup import startup_report
from megatron.training.rollouts.collecting import training_batches
from megatron.training.rollouts.held_out import evaluate_held_out
from megatron.training.rollouts.rated import kept_if_answers_fail
from megatron.training.run.agreement import check_parameter_count, check_ranks_agree, check_replicas_agree
from megatron.training.run.gc import (
    collect_garbage,
    collect_garbage_around_evaluation,
    deterministic_algorithms,
    garbage_on_schedule,
    release_memory,
)
from megatron.training.run.run import Run, build_run, startup_facts
from megatron.training.step import pass_over, train_step


def train_from_start_to_end(
    config: RunConfig,
    train_spec: TrainSpec,
    context: ParallelContext,
    *,
    started: float,
    evaluated: Callable[[Run, Mapping[str, Evaluation]], None] | None = None,
    built: Callable[[Run], None] = lambda run: None,
) -> Run:
    """Build the run, load its checkpoint, train, and evaluate at the end.

    ``evaluated``: that of ``Run``. ``built``: called with the run before anything is loaded.
    """
    check_ranks_agree(config, context)
    compile_bodies(config.training.compile, context.device)
    run = build_run(config, train_spec, context, started=started)
    run.evaluated = evaluated or run.evaluated
    built(run)
    parameters = check_parameter_count(run.config, run.train_spec, run.layout(), context)
    with ExitStack() as stack:
        stack.enter_context(health_file(run))
        still_held = stack.enter_context(holding_save_folder(run.config, context))
        stack.enter_context(observed(run))
        run.reporter.say(run_on_first(lambda: check_save_folder(run.config), context.mesh))
        load(run)
        stack.enter_context(hardware(run))
        prepared = before_training(run)
        facts = startup_facts(run, parameters=parameters)
        run.reporter.say(startup_report(run.config, facts))
        about_data = [*run.data.describe(), *describe_chat(run.chat, run.tokenizer), *prepared]
        run.reporter.say("\n".join(["== data", *(f"   {line}" for line in about_data)]))
        tell_start(run, facts, about_data, setup_seconds=time.monotonic() - started)
        training = config.training
        with run.exit_watch.catching_signals(), garbage_on_schedule(training), deterministic_algorithms(training):
            finished = True if training.skip_train else train_and_save(run, still_held)
            if training.skip_train:
                evaluate_held_out(run)
                TaskScores(run).write()
            if finished and training.eval_iters:
                iteration, regular = run.progress.iteration, config.train_iters // training.eval_interval
                validate(run, "valid", f"iteration {iteration} on validation set", evaluation=regular)
                validate(run, "test", f"iteration {iteration} on test set", evaluation=0)
        run.optimizer.gather.make_whole()
        run.reporter.close()
    return run


def train_and_save(run: Run, still_held: StillHeld = lambda: None) -> bool:
    """Train; whether the last iteration was reached. Every checkpoint is durable when this returns."""
    with (
        saving(run, still_held) as saver,
        kept_on_interrupt(lambda: saver.kept()),
        profiling(run.config, run.context) as profiled,
        watching_stragglers(run) as timed,
    ):
        return train(run, saver, profiled, timed)


def train(run: Run, saver: Saver, profiled: Profiled, timed: Timed) -> bool:
    """Train until the last iteration or a reason to stop; evaluate and save at intervals, and save at the end.

    Returns whether the last iteration was reached.
    """
    config, progress, reporter = run.config, run.progress, run.reporter
    training, checkpoint = config.training, config.checkpoint
    saved_at = progress.iteration
    reason: str | None = None
    if progress.iteration >= config.train_iters:
        length = f"--train-iters {config.train_iters}"
        if training.train_iters is None:
            length = f"--train-samples {config.train_samples} ({config.train_iters} iterations)"
        reporter.say(f"already at iteration {progress.iteration} of {length}: nothing to train")
        if run.recovered and checkpoint.save is not None:  # the last save before this start had not become durable
            saver.save()

    samples, scores = Samples(run), TaskScores(run)
    folders = HuggingFaceFolders(run, saver)
    folders.write_if_due()  # a start before this one may have ended between checkpoint and model
    learned = training_batches(run)
    guard = StepGuard(run, saver) if config.guards.judges_steps else None
    reporter.restart_clock(progress.iteration)
    learned.evaluate_if_due()
    while progress.iteration < config.train_iters and reason is None:
        run.context.mesh.activity.progress = f"iteration {progress.iteration + 1}"
        with profiled(progress.iteration + 1), timed():
            with kept_if_answers_fail(run, saver, saved_at=saved_at), reporter.timers("batch-generator", level=1):
                microbatches = next(learned.batches)
            skipped = any(progress.iteration + 1 in each for each in training.skipped_iterations)
            if skipped or run.guards.passes_over(progress.iteration + 1):
                pass_over(run)
            else:
                record = train_step(run, microbatches) if guard is None else guard.step(microbatches)
                progress = run.progress
                if record is None:  # the run is that of its last checkpoint again
                    learned, saved_at = training_batches(run), progress.iteration
                    reporter.restart_clock(progress.iteration)
                    reporter.tell("rollback", iteration=progress.iteration)
                    continue
                reporter.step(record)
                for note in run.after_step:
                    note(record)
        run.context.mesh.activity.steps += 1
        saver.settle()
        timed.report(progress.iteration)
        release_memory(training, run.context, level=1)
        collect_garbage(training, iteration=progress.iteration)
        check_replicas_if_due(run)

        repeated_at_the_end = config.data.full_validation and progress.iteration == config.train_iters
        if training.eval_iters and progress.iteration % training.eval_interval == 0 and not repeated_at_the_end:
            number = progress.iteration // training.eval_interval - 1
            validate(run, "valid", f"iteration {progress.iteration}", evaluation=number)
        with kept_if_answers_fail(run, saver, saved_at=saved_at):
            learned.evaluate_if_due()
        samples.write_if_due()
        scores.write_if_due()
        reason = run.exit_watch.reason(progress.iteration)
        is_due = checkpoint.save_interval is not None and progress.iteration % checkpoint.save_interval == 0
        is_last = reason is not None or progress.iteration == config.train_iters
        if is_last:
            reporter.tell_rest()
        if checkpoint.save is not None and (is_due or is_last) and saved_at != progress.iteration:
            with reporter.aside("save-checkpoint"):
                saver.save()
            saved_at = progress.iteration
        else:
            saver.copy_if_due()
        folders.write_if_due()

    if reason is not None:
        reporter.say(reason)
    return reason is None


def check_replicas_if_due(run: Run) -> None:
    """Compare the weights of replicas at --check-weight-hash-across-dp-replicas-interval. A collective."""
    interval, iteration = run.config.training.check_weight_hash_across_dp_replicas_interval, run.progress.iteration
    if interval is not None and iteration % interval == 0:
        state = chain(run.whole_model_state(), run.buffer_state())
        check_replicas_agree(state, run.context, iteration=iteration, fault=run.fault)


def validate(run: Run, split: SplitName, where: str, *, evaluation: int) -> None:
    """Evaluate on each data set of a split for the ``evaluation``-th time, and report its losses."""
    progress, found, per_time = run.progress, dict[str, Evaluation](), run.config.training.eval_iters
    total = None if split == "valid" and run.config.data.full_validation else per_time
    read = "all batches"
    if total is not None:  # at the end other ones than in training, as in Megatron-LM: two losses of one iteration
        later = ", after those in training" if where.endswith("on validation set") and evaluation else ""
        first, last = evaluation * per_time + 1, (evaluation + 1) * per_time
        read = (f"batch: {first}" if first == last else f"batches: {first} to {last}") + later
    for name in run.data.evaluated(split):
        collect_garbage_around_evaluation(run.config.training)
        start = time.perf_counter()
        with run.reporter.aside("evaluate-time"):
            batches = run.data.evaluation_batches(split, evaluation=evaluation, name=name)
            loss = evaluate(run, run.reporter.evaluating(batches, total=total))
        found[name] = Evaluation(loss.totals, time.perf_counter() - start)
        collect_garbage_around_evaluation(run.config.training)
        if any(count for _, count in loss.totals.values()):
            run.reporter.validation(
                where,
                loss.means,
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                data_set=name,
                batches=read,
            )
        else:
            run.reporter.say(f"the {split} set{f' {name}' if name else ''} has no labels: loss skipped")
    if found:
        run.evaluated(run, found)
