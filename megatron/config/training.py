"""Batches and length of a run."""

from __future__ import annotations

from typing import Literal

from typing_extensions import override

from megatron.config.flags import COUNT, Settings, flag, switch

RecomputeModule = Literal[
    "core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "mamba", "gated_delta_net"
]

_ALL_LAYERS = 1 << 30


class TrainingConfig(Settings):
    """Batches, length, evaluation, recomputation and when to stop."""

    micro_batch_size: int = flag("Samples of one forward pass on one rank.", at_least=1)
    global_batch_size: int = flag(
        "Samples of one optimizer step over all ranks.",
        derived="the last size of --step-batch-size-schedule, or micro batch size x data-parallel size",
        follows=(
            *("step_batch_size_schedule", "micro_batch_size", "world_size", "tensor_model_parallel_size"),
            *("pipeline_model_parallel_size", "context_parallel_size"),
        ),
        at_least=1,
    )
    rampup_batch_size: tuple[int, int, int] | None = flag(
        "START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over SAMPLES.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    step_batch_size_schedule: tuple[str, ...] | None = flag(
        "TOKENS:BATCH_SIZE pairs, such as 0:768 250B:1536, or all of them in quotes: the global batch size from that "
        "number of tokens on. Suffixes K, M, B and T are allowed.",
        default=None,
    )
    train_iters: int | None = flag("Optimizer steps of the whole run.", default=None, at_least=0, at_most=COUNT)
    train_samples: int | None = flag(
        "Samples of the whole run, instead of --train-iters.", default=None, at_least=0, at_most=COUNT
    )
    skip_train: bool = switch("Only evaluate.")
    iterations_to_skip: tuple[str, ...] = flag(
        "Iterations that pass over their data without a step, such as 120 or 101-200: data that spoil training. The "
        "learning rate does not move on.",
        default=(),
        aliases=("--skip-train-iteration-range",),
    )
    eval_interval: int = flag("Iterations between evaluations.", default=1000, at_least=1, at_most=COUNT)
    eval_iters: int = flag(
        "Batches of one evaluation; 0 turns evaluation off.",
        default=100,
        renamed_values={"-1": ("0", "there is no evaluation")},
        at_least=0,
        at_most=COUNT,
    )
    exit_interval: int | None = flag(
        "Save and exit when the iteration is a multiple of this; 0: never.", default=None, at_least=0, at_most=COUNT
    )
    exit_duration_in_mins: int | None = flag("Save and exit after this many minutes.", default=None, at_least=1)
    exit_signal_handler: bool = switch(
        "Save and exit on SIGTERM, SIGINT, SIGUSR1 and SIGUSR2, after the step in progress."
    )
    seed: int = flag("Seed of initial weights, dropout and data order.", default=1234, at_least=1, at_most=COUNT)
    recompute_granularity: Literal["full", "selective"] | None = flag(
        "What is recomputed in the backward pass instead of kept: full layers, or (selective) --recompute-modules.",
        default=None,
    )
    recompute_modules: tuple[RecomputeModule, ...] = flag(
        "With --recompute-granularity selective. core_attn: attention scores; layernorm: outputs of the norms before "
        "attention and MLPs; mlp: dense MLPs; moe: experts and their router, which sends tokens again; moe_act: the "
        "activation of experts; shared_experts; mla_up_proj: queries, keys and values of multi-latent attention, from "
        "their latents; mamba and gated_delta_net: what Mamba-2 layers and gated delta nets compute between their "
        "projections.",
        default=("core_attn",),
    )
    recompute_activations: bool = switch("Short for --recompute-granularity selective.")
    recompute_method: Literal["uniform", "block"] | None = flag(
        "With full recomputation: uniform recomputes every group of --recompute-num-layers layers, "
        "block only the first --recompute-num-layers layers.",
        default=None,
    )
    recompute_num_layers: int | None = flag("Layers of --recompute-method.", default=None, at_least=1)
    compile: bool = switch(
        "Compile RMSNorm, gated activations, rotary embeddings and the gradient of logits with torch.compile. On a CPU "
        "this needs a C++ compiler."
    )
    cpu_offloading: bool = switch(
        "Offload activations of layers to CPU memory between forward and backward pass. Copies overlap with layers."
    )
    cpu_offloading_num_layers: int | None = flag(
        "Offload only the first N layers of each pipeline stage; turns --cpu-offloading on, which offloads all. Best "
        "is one fewer than a stage has: the backward pass starts with the last layer.",
        default=None,
        at_least=0,
    )
    min_offloaded_tensor_size: int = flag(
        "With --cpu-offloading: elements of the smallest tensors that are offloaded.",
        default=1 << 20,
        at_least=1,
        at_most=COUNT,
    )
    check_for_nan_in_loss_and_grad: bool = switch(
        "Do not stop when a loss or gradient is not finite.", off="--no-check-for-nan-in-loss-and-grad"
    )
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        "Iterations between comparisons of the weights of data-parallel replicas.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    deterministic_mode: bool = switch("Use deterministic kernels only.")
    manual_gc: bool = switch("Run Python's garbage collector on a schedule, not automatically.")
    manual_gc_interval: int = flag(
        "Iterations between collections with --manual-gc; 0: never during training.",
        default=0,
        at_least=0,
        at_most=COUNT,
    )
    manual_gc_eval: bool = switch("With --manual-gc, do not collect around evaluations.", off="--no-manual-gc-eval")
    empty_unused_memory_level: Literal[0, 1, 2] = flag(
        "Empty the GPU allocator's cache: 0 never, 1 after each iteration, 2 also before the optimizer.", default=0
    )

    @property
    def skipped_iterations(self) -> tuple[range, ...]:
        """The iterations of each of ``iterations_to_skip``. Raises ValueError for what is no number and no range."""
        return tuple(map(_iterations, self.iterations_to_skip))

    @property
    def selected_modules(self) -> frozenset[RecomputeModule]:
        """The modules of each layer that are recomputed one by one."""
        return frozenset(self.recompute_modules if self.recompute_granularity == "selective" else ())

    @property
    def offloaded_layers(self) -> int:
        """The first layers of each stage, whose activations are in main memory; more than any stage has for all."""
        if not self.cpu_offloading:
            return 0
        return _ALL_LAYERS if self.cpu_offloading_num_layers is None else self.cpu_offloading_num_layers

    @override
    def __post_init__(self) -> None:
        if self.step_batch_size_schedule is not None:  # in quotes or without them
            object.__setattr__(self, "step_batch_size_schedule", tuple(" ".join(self.step_batch_size_schedule).split()))
        if self.cpu_offloading_num_layers:
            object.__setattr__(self, "cpu_offloading", True)
        if self.recompute_activations and self.recompute_granularity is None:
            object.__setattr__(self, "recompute_granularity", "selective")
        if self.recompute_granularity == "full":
            if self.recompute_method is None:
                object.__setattr__(self, "recompute_method", "uniform")
            if self.recompute_num_layers is None:
                object.__setattr__(self, "recompute_num_layers", 1)


def _iterations(text: str) -> range:
    first, dash, last = text.partition("-")
    found = range(int(first), int(last if dash else first) + 1)
    if not 1 <= found.start < found.stop <= COUNT:
        raise ValueError(text)
    return found
