"""How weights change: the optimizer and its schedules."""

from __future__ import annotations

import math
from typing import Literal

from typing_extensions import override

from megatron.config.flags import COUNT, derive, flag, flag_of, switch
from megatron.config.parameter_names import TrainedNames
from megatron.config.update_rules import MATRIX_RULES, STATE_FLAGS, UpdateRuleSettings


class OptimizerConfig(UpdateRuleSettings):
    """The optimizer, and learning rate and weight decay over the run."""

    optimizer: Literal["adam", "sgd", "muon", "lion", "ademamix", "adafactor", "soap"] = flag(
        "adam (AdamW), sgd with momentum, lion or ademamix; muon, adafactor or soap for the matrices of layers, with "
        "--muon-scalar-optimizer for everything else.",
        default="adam",
        renamed_values={
            "adamw": ("adam", ""),
            "fusedadamw": ("adam", ""),
            "hybridadam": ("adam", "--optimizer-cpu-offload keeps its state in main memory"),
            "dist_muon": ("muon", "--use-distributed-optimizer divides its state among data-parallel ranks"),
        },
        refused_values={
            "adaptive_muon": "Muon with second moments of its updates is not available yet; use muon",
            "shampoo": "it is not available; use soap, which is Adam in Shampoo's eigenvectors",
        },
    )
    lr: float | None = flag("Peak learning rate.", default=None, at_least=0)
    min_lr: float = flag("Learning rate at the end of the decay.", default=0.0, at_least=0)
    decoupled_lr: float | None = flag(
        "Peak learning rate of the word embeddings and the output layer; --lr unless given.",
        default=None,
        at_least=0,
    )
    decoupled_min_lr: float | None = flag(
        "Learning rate at the end of the decay of --decoupled-lr.",
        derived="--min-lr",
        follows=("min_lr", "decoupled_lr"),
        at_least=0,
    )
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "Shape of the learning rate after the warm-up.", default="linear"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "Shape of the final decay of WSD.", default="exponential"
    )
    lr_decay_iters: int | None = flag(
        "Iterations until the learning rate reaches --min-lr; --train-iters unless given.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    lr_decay_samples: int | None = flag(
        "Samples until the learning rate reaches --min-lr; --train-samples unless given.",
        default=None,
        at_least=1,
        at_most=COUNT,
    )
    lr_wsd_decay_iters: int | None = flag(
        "Iterations of the final decay of WSD.", default=None, at_least=1, at_most=COUNT
    )
    lr_wsd_decay_samples: int | None = flag(
        "Samples of the final decay of WSD.", default=None, at_least=1, at_most=COUNT
    )
    lr_warmup_fraction: float | None = flag(
        "Warm-up as a fraction of the decay length.", default=None, at_least=0, below=1
    )
    lr_warmup_iters: int = flag("Iterations of linear warm-up.", default=0, at_least=0, at_most=COUNT)
    lr_warmup_samples: int = flag("Samples of linear warm-up.", default=0, at_least=0, at_most=COUNT)
    lr_warmup_init: float = flag("Learning rate at the start of the warm-up.", default=0.0, at_least=0)
    weight_decay: float = flag(
        "Weight decay of matrices: added to the gradient (L2) with sgd, decoupled with all other optimizers.",
        default=0.01,
        at_least=0,
    )
    start_weight_decay: float = flag(
        "Weight decay at the start of training, with --weight-decay-incr-style linear or cosine.",
        derived="--weight-decay",
        follows=("weight_decay",),
        at_least=0,
    )
    end_weight_decay: float = flag(
        "Weight decay at the end of training, with --weight-decay-incr-style linear or cosine.",
        derived="--weight-decay",
        follows=("weight_decay",),
        at_least=0,
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "Shape of weight decay between start and end.", default="constant"
    )
    no_weight_decay_cond_type: Literal["apply_wd_to_qk_layernorm"] | None = flag(
        "Apply weight decay also to the norms of queries and keys, besides matrices and embeddings.",
        default=None,
        renamed_values={"qwen3_next": ("apply_wd_to_qk_layernorm", "")},
    )
    freeze: tuple[str, ...] = flag(
        "Quoted patterns of names of parameters that are not trained, such as 'embedding.*' or "
        "'decoder.layers.[0-3].*'. Frozen parameters have no gradient and no optimizer state.",
        default=(),
    )
    train_only: tuple[str, ...] = flag(
        "Quoted patterns of names of the only parameters that are trained, such as '*.bias' or 'output_layer.*'; all "
        "others are frozen. With --lora-rank: what is trained beside the adapters.",
        default=(),
    )
    lr_multipliers: tuple[str, ...] = flag(
        "Quoted PATTERN=FACTOR pairs: parameters whose names match PATTERN, as --freeze gives it, are trained at "
        "FACTOR times the learning rate of the others, such as 'embedding.*=0.1'. The first pair that matches counts.",
        default=(),
    )
    clip_grad: float = flag("Clip the gradient norm to this value; 0 turns clipping off.", default=1.0, at_least=0)
    adam_beta1: float = flag("Adam's decay of the first moment.", default=0.9, at_least=0, below=1)
    adam_beta2: float = flag("Adam's decay of the second moment.", default=0.999, at_least=0, below=1)
    adam_eps: float = flag("Adam's epsilon.", default=1e-8, at_least=0)
    use_precision_aware_optimizer: bool = switch(
        "Store Adam's moments in the formats of the --…-dtype flags, and the fp32 master weights as exact "
        "remainders of the bf16 weights: 2.125 bytes per weight instead of 4."
    )
    main_params_dtype: Literal["fp32"] = flag(
        "Format of master weights with --use-precision-aware-optimizer.",
        default="fp32",
        renamed_values={
            "fp16": (
                "fp32",
                "fp32 masters take 2.125 bytes beside bf16 weights, and fp16 ones would lose small updates",
            )
        },
    )
    exp_avg_dtype: Literal["fp32", "bf16"] = flag(
        "Storage format of Adam's first moment, with --use-precision-aware-optimizer; steps compute in fp32.",
        default="fp32",
        renamed_values={"fp16": ("bf16", "bf16 takes as many bytes and holds small gradients without a scale")},
        refused_values={"fp8": "moments in 8 bits are not available yet; give bf16"},
    )
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = flag(
        "Storage format of Adam's second moment. bf16 is rounded stochastically: rounded to nearest, it would not "
        "follow the gradients at --adam-beta2 0.999.",
        default="fp32",
        renamed_values={"fp16": ("bf16", "fp16 would round squares of small gradients to zero, and divide by that")},
        refused_values={"fp8": "moments in 8 bits are not available yet; give bf16"},
    )
    optimizer_cpu_offload: bool = switch(
        "Keep master weights and moments in CPU memory and run the optimizer there: gradients are copied to the CPU, "
        "updated weights back. The GPU holds only weights and gradients."
    )
    optimizer_offload_fraction: float = flag(
        "With --optimizer-cpu-offload: fraction of the parameters whose optimizer state is in CPU memory. A parameter "
        "is never divided.",
        default=1.0,
        at_least=0,
        at_most=1,
    )
    overlap_cpu_optimizer_d2h_h2d: bool = switch(
        "With --optimizer-cpu-offload: copy gradients and weights while the CPU computes."
    )
    pin_cpu_grads: bool = switch(
        "With --optimizer-cpu-offload: copy gradients through pageable instead of pinned memory.",
        off="--no-pin-cpu-grads",
    )
    pin_cpu_params: bool = switch(
        "With --optimizer-cpu-offload: copy weights through pageable instead of pinned memory.",
        off="--no-pin-cpu-params",
    )
    sgd_momentum: float = flag("Momentum of sgd.", default=0.9, at_least=0, below=1)
    ema_decay: float | None = flag(
        "Keep an exponential moving average (EMA) of the weights, which each step moves by 1 - this towards the new "
        "ones: 4 bytes per weight, sharded and saved as master weights are. --load-ema takes it.",
        default=None,
        above=0,
        below=1,
    )
    override_opt_param_scheduler: bool = switch(
        "On resume, take the schedules from the flags where they differ from the checkpoint's.",
        name="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = switch(
        "On resume, take the schedules from the checkpoint where they differ from the flags'.",
        name="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )

    @property
    def trained(self) -> TrainedNames:
        """Names of the parameters that are trained."""
        return TrainedNames(self.freeze, self.train_only)

    @property
    def scalar_rule(self) -> str:
        """Name of the update rule of what isn't a matrix of a layer."""
        return self.muon_scalar_optimizer if self.optimizer in MATRIX_RULES else self.optimizer

    @property
    def state_flags(self) -> str:
        """The flags that decide which state checkpoints have: another run continues it if it has the same."""
        words = {name: getattr(self, name) for name, rules in STATE_FLAGS.items() if self.optimizer in rules}
        given = [f"{flag_of(name)} {value}" for name, value in words.items() if not isinstance(value, bool)]
        off = [flag_of(name.replace("split", "no_split")) for name, value in words.items() if value is False]
        return " ".join([f"--optimizer {self.optimizer}", *given, *off])

    @override
    def __post_init__(self) -> None:
        if self.decoupled_lr is not None:
            derive(self, "decoupled_min_lr", self.min_lr)
        derive(self, "start_weight_decay", self.weight_decay)
        derive(self, "end_weight_decay", self.weight_decay)


def pattern_and_factor(pair: str) -> tuple[str, float]:
    """Pattern of names and factor of one of ``lr_multipliers``. Raises ValueError for what is no such pair."""
    pattern, _, factor = pair.rpartition("=")
    if not pattern or not 0 < float(factor) < math.inf:
        raise ValueError(pair)
    return pattern, float(factor)
