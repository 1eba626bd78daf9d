"""What a run reports while it trains."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import COUNT, Settings, flag, switch


class ReportingConfig(Settings):
    """Log lines, events, timers, metrics, TensorBoard, Weights & Biases and MLflow."""

    log_interval: int = flag("Iterations between log lines.", default=100, at_least=1, at_most=COUNT)
    log_throughput: bool = switch("Show TFLOP/s per GPU in the log line.")
    log_params_norm: bool = switch("Show the norm of the parameters.")
    log_num_zeros_in_grad: bool = switch("Show how many gradient elements are zero.")
    eval_tasks: tuple[str, ...] = flag(
        "Tasks, each with its file, on which the model is measured while it trains: NAME=FILE ..., with WIKITEXT103, "
        "LAMBADA, LM (any text), CAPTION and VQA (images beside JSON lines) as names.",
        default=(),
    )
    eval_tasks_interval: int | None = flag(
        "Iterations between scores of --eval-tasks; --eval-interval unless given. The last iteration has scores, too.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    generate_samples_interval: int | None = flag(
        "Iterations between samples of what the model writes, in the log, TensorBoard and Weights & Biases; none "
        "unless given.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    generate_samples_prompts: tuple[str, ...] = flag(
        "Texts that samples continue; without them one sample begins a document.", default=()
    )
    generate_samples_tokens: int = flag("Maximum number of tokens in a sample.", default=64, at_least=1)
    generate_samples_temperature: float = flag(
        "Divides the logits of samples; 0 always takes the most probable token.", default=1.0, at_least=0
    )
    health_file: str | None = flag(
        "File that the first rank of each node writes every 10 seconds: time, iteration, place and losses. "
        "tools/check_health.py tells a supervisor from it whether the run is alive. It must be on the node's own disk.",
        default=None,
    )
    log_json: str | None = flag(
        "File to which the run's events are appended as JSON lines: starts, steps of each log line, evaluations, "
        "samples, checkpoints, warnings, ends. tools/report.py and the account of lost time read it; events.jsonl in "
        "--save unless given.",
        default=None,
    )
    log_dir: str | None = flag(
        "Folder with a log of each rank, rank00012.log: its warnings, the traceback of its failure, and its own times. "
        "None is written unless given.",
        default=None,
    )
    metrics_port: int | None = flag(
        "Port on which the first rank serves the run's numbers at /metrics for Prometheus; none unless given.",
        default=None,
        at_least=1,
        at_most=65535,
    )
    metrics_host: str = flag("Address of --metrics-port; 0.0.0.0 for other machines.", default="127.0.0.1")
    mlflow_experiment: str | None = flag(
        "MLflow experiment for settings, curves and samples; nothing is sent unless given.", default=None
    )
    mlflow_run_name: str | None = flag("MLflow run name.", default=None)
    mlflow_tracking_uri: str | None = flag(
        "MLflow's server or database; $MLFLOW_TRACKING_URI unless given.", default=None
    )
    otlp_endpoint: str | None = flag(
        "URL of an OpenTelemetry collector, as http://127.0.0.1:4318, to which the first rank sends a trace of each "
        "step, evaluation and save; none unless given.",
        default=None,
    )
    log_progress: bool = switch("Append progress lines to progress.txt in the --save folder.")
    timing_log_level: Literal[0, 1, 2] = flag("Timers: 0 whole iterations, 1 their parts, 2 everything.", default=0)
    timing_log_option: Literal["max", "minmax", "all"] = flag(
        "Which timer values to show: the maximum over ranks, minimum and maximum, or those of all ranks.",
        default="minmax",
    )
    barrier_with_level_1_timing: bool = switch(
        "No barriers around the timers of level 1.", off="--no-barrier-with-level-1-timing"
    )
    tensorboard_dir: str | None = flag("Folder for TensorBoard events; none are written unless given.", default=None)
    tensorboard_log_interval: int = flag("Iterations between TensorBoard points.", default=1, at_least=1, at_most=COUNT)
    tensorboard_queue_size: int = flag("TensorBoard events that are buffered before a write.", default=1000, at_least=1)
    log_timers_to_tensorboard: bool = switch("Write timers to TensorBoard.")
    log_loss_scale_to_tensorboard: bool = switch(
        "Do not write the loss scale to TensorBoard.", off="--no-log-loss-scale-to-tensorboard"
    )
    log_validation_ppl_to_tensorboard: bool = switch("Write validation perplexity to TensorBoard.")
    log_memory_to_tensorboard: bool = switch("Write memory use to TensorBoard.")
    log_world_size_to_tensorboard: bool = switch("Write the number of ranks to TensorBoard.")
    wandb_project: str | None = flag("Weights & Biases project; nothing is sent unless given.", default=None)
    wandb_entity: str | None = flag("Weights & Biases entity.", default=None)
    wandb_exp_name: str | None = flag("Weights & Biases run name.", default=None)
    wandb_save_dir: str | None = flag("Weights & Biases folder; beside --save unless given.", default=None)

    @property
    def writes_curves(self) -> bool:
        """Whether some rank writes curves."""
        return not (self.tensorboard_dir is self.wandb_project is self.mlflow_experiment is None)
