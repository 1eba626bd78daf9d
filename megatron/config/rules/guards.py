"""Rules about guards."""

from __future__ import annotations

from megatron.config.family import Rule
from megatron.config.guards import FLIPS
from megatron.config.rules.sentence import rule
from megatron.config.run import RunConfig


def flips_exist(run: RunConfig) -> str | None:
    """Bits to flip are those of ranks of the run that hold them."""
    asked = f"--inject-bit-flip {' '.join(run.guards.inject_bit_flip)}"
    try:
        flips = run.guards.flips
    except ValueError:
        return f"{asked} must be {' or '.join(FLIPS)}, a rank and an iteration from 1 on, as in weight:1:20"
    wrong = [flip.rank for flip in flips if flip.rank >= run.world_size]
    if wrong:
        return f"{asked}: the run has ranks 0 to {run.world_size - 1}"
    return None


def can_roll_back(run: RunConfig) -> str | None:
    """What --spike-action rollback needs."""
    if run.guards.spike_action != "rollback":
        return None
    checkpoint = run.checkpoint
    if checkpoint.save is None or checkpoint.save_interval is None:
        return "--spike-action rollback needs checkpoints: give --save and --save-interval, or --spike-action skip"
    if not checkpoint.save_optim:
        return "--spike-action rollback needs the optimizer's state in checkpoints: leave --no-save-optim out"
    return None


RULES: tuple[Rule, ...] = (
    flips_exist,
    can_roll_back,
    rule(
        "--spike-action {run.guards.spike_action} and --diloco-workers are mutually exclusive, as workers train apart: "
        "use --spike-action warn",
        lambda run: run.guards.spike_action in ("skip", "rollback") and run.parallel.diloco_workers is not None,
    ),
    rule(
        "--rerun-mode {run.guards.rerun_mode} is not available with --diloco-workers: leave it out",
        lambda run: run.guards.rerun_mode != "disabled" and run.parallel.diloco_workers is not None,
    ),
    rule(
        "--check-replay-interval {run.guards.check_replay_interval} is not available with --diloco-workers: leave it "
        "out",
        lambda run: run.guards.check_replay_interval is not None and run.parallel.diloco_workers is not None,
    ),
    rule(
        "--error-injection-rate {run.guards.error_injection_rate} needs --rerun-mode validate_results",
        lambda run: run.guards.error_injection_rate and run.guards.rerun_mode != "validate_results",
    ),
    rule(
        "--result-rejected-tracker-filename needs --rerun-mode validate_results, which finds what to reject",
        lambda run: run.guards.result_rejected_tracker_filename and run.guards.rerun_mode != "validate_results",
    ),
    rule(
        "--check-for-spiky-loss and --check-for-large-grads say what to compute again: add --rerun-mode "
        "validate_results, or use --spike-action",
        lambda run: run.guards.looks_for_large and run.guards.rerun_mode != "validate_results",
    ),
    rule(
        "--max-starts-without-progress {run.guards.max_starts_without_progress} counts starts in the ledger: add "
        "--node-ledger",
        lambda run: run.guards.max_starts_without_progress and not run.guards.node_ledger,
    ),
    rule(
        "--node-ledger writes ledger.jsonl into --save, which is not given: give --save",
        lambda run: run.guards.node_ledger and run.checkpoint.save is None,
    ),
    rule(
        "--disable-straggler-on-startup needs a port that turns --log-straggler on: give --straggler-ctrlr-port",
        lambda run: run.guards.disable_straggler_on_startup and run.guards.straggler_ctrlr_port is None,
    ),
    rule(
        "--straggler-ctrlr-port {run.guards.straggler_ctrlr_port} turns --log-straggler off and on: add "
        "--log-straggler",
        lambda run: run.guards.straggler_ctrlr_port is not None and not run.guards.log_straggler,
    ),
    rule(
        "--elastic keeps the global batch size for any number of ranks: give --global-batch-size",
        lambda run: (
            run.guards.elastic and not (run.given("global_batch_size") or run.training.step_batch_size_schedule)
        ),
    ),
    rule(
        "--elastic and --diloco-workers are mutually exclusive: --diloco-ranks-per-worker follows the number of ranks",
        lambda run: run.guards.elastic and run.parallel.diloco_workers is not None,
    ),
)
