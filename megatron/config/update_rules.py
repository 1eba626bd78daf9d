"""Settings of update rules beside AdamW and SGD: Muon, Lion, AdEMAMix, Adafactor and SOAP."""

from __future__ import annotations

from typing import Literal

from megatron.config.flags import COUNT, Settings, flag, switch

MATRIX_RULES = frozenset({"muon", "adafactor", "soap"})
"""Rules for the matrices of layers; ``--muon-scalar-optimizer`` moves everything else."""
STATE_FLAGS = {
    "muon_scalar_optimizer": MATRIX_RULES,
    "muon_split_qkv": frozenset({"adafactor", "soap"}),
    "muon_split_gate_up": frozenset({"adafactor", "soap"}),
}
"""Fields beside ``optimizer`` that decide on the state of the update rules, with the rules for which they do."""


class UpdateRuleSettings(Settings):
    """The fields of ``OptimizerConfig`` that one rule reads, Adam's and SGD's apart."""

    muon_momentum: float = flag("Muon's decay of the averaged gradients.", default=0.9, at_least=0, below=1)
    muon_nesterov: bool = switch(
        "With --optimizer muon: orthogonalize a mix of the gradient and its average (Nesterov momentum).",
        aliases=("--muon-use-nesterov",),
    )
    muon_num_ns_steps: int = flag("Newton-Schulz steps that orthogonalize a matrix.", default=5, at_least=1, at_most=99)
    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "aol"] = flag(
        "Coefficients of the Newton-Schulz steps: simple repeats the original ones, as torch does; quintic has five "
        "steps, each with its own; polar_express converges furthest and needs 8 steps; aol has four.",
        default="quintic",
    )
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = flag(
        "Size of an update of a matrix [out, in]: spectral is sqrt(max(out, in)), unit_rms_norm sqrt(out/in), "
        "shape_scaling sqrt(max(1, out/in)).",
        default="spectral",
    )
    muon_extra_scale_factor: float = flag(
        "Factor of all updates; 0.2 with --muon-scale-mode spectral gives them the size of AdamW's, whose learning "
        "rate then fits.",
        default=1.0,
        above=0,
    )
    muon_split_qkv: bool = switch(
        "With --optimizer muon, adafactor or soap: treat stacked queries, keys and values as one matrix.",
        off="--muon-no-split-qkv",
    )
    muon_split_gate_up: bool = switch(
        "With --optimizer muon, adafactor or soap: treat the stacked gate and up matrices, and others that a layer "
        "stacks, as one matrix, as Megatron-LM does.",
        off="--muon-no-split-gate-up",
    )
    muon_tp_mode: Literal["duplicated", "distributed"] = flag(
        "Accepted for Megatron-LM's command lines: here each whole matrix is orthogonalized once, on one of the ranks "
        "that hold parts of it, which gives the numbers of both.",
        default="duplicated",
        refused_values={
            "blockwise": "each tensor-parallel rank would orthogonalize its part alone, which is another optimizer at "
            "each --tensor-model-parallel-size; use duplicated"
        },
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = flag(
        "Products of the Newton-Schulz steps: medium multiplies in bf16, high and highest in fp32.",
        default="medium",
        renamed_values={"low": ("medium", "")},
    )
    muon_scalar_optimizer: Literal["adam", "lion"] = flag(
        "With --optimizer muon, adafactor or soap: the update of everything but the matrices of layers: embeddings, "
        "output layer, norms and biases.",
        default="adam",
    )
    lion_beta1: float = flag("Lion's weight of the average in an update.", default=0.95, at_least=0, below=1)
    lion_beta2: float = flag("Lion's decay of the averaged gradients.", default=0.98, at_least=0, below=1)
    ademamix_alpha: float = flag("Weight of AdEMAMix's slow average of gradients.", default=8.0, at_least=0)
    ademamix_beta3: float = flag("Decay of AdEMAMix's slow average.", default=0.9999, above=0, below=1)
    ademamix_warmup_iters: int = flag(
        "Iterations in which AdEMAMix's weight and decay of the slow average grow to their values; 0: none.",
        default=0,
        at_least=0,
        at_most=COUNT,
    )
    adafactor_decay: float = flag(
        "Exponent of Adafactor's decay of second moments: in step t it is 1 - t^-N.", default=0.8, above=0, at_most=1
    )
    adafactor_clip_threshold: float = flag(
        "Root mean square to which Adafactor clips the update of a matrix.", default=1.0, above=0
    )
    adafactor_scale_parameter: bool = switch(
        "With --optimizer adafactor: multiply the update of a matrix by the root mean square of its weights."
    )
    soap_shampoo_beta: float = flag(
        "SOAP's decay of the matrices of second moments.", default=0.95, at_least=0, below=1
    )
    soap_precondition_frequency: int = flag(
        "Steps between refreshes of SOAP's eigenvectors.", default=10, at_least=1, at_most=COUNT
    )


COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
"""Coefficients (a, b, c) of a Newton-Schulz step X ← aX + (bA + cA²)X with A = XXᵀ, by ``--muon-coefficient-type``."""
