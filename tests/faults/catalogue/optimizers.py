"""Faults in update rules: which matrices they see, on which rank, and what they do to them."""

from __future__ import annotations

from tests.faults.fault import Fault

RULES = "unit/optimizer/test_matrix_rules.py"
MATRICES = "unit/parallel/test_matrices.py"
LAYOUTS = "equivalence/test_optimizers.py"

FAULTS = (
    Fault(
        "update_of_the_transposed_shape",
        "megatron/core/optimizer/muon.py",
        old="return math.sqrt(rows / columns) if",
        new="return math.sqrt(columns / rows) if",
        suffers="Up and down projections swap the sizes of their updates with --muon-scale-mode unit_rms_norm.",
        first=(RULES,),
    ),
    Fault(
        "queries_and_keys_are_one_matrix",
        "megatron/core/parallel/matrices.py",
        old="and splits_qkv:",
        new="and not splits_qkv:",
        suffers="Queries, keys and values are orthogonalized together, and apart with --muon-no-split-qkv.",
        first=(MATRICES,),
    ),
    Fault(
        "rows_of_heads_out_of_order",
        "megatron/core/parallel/matrices.py",
        old="yield first, count, before\n        before += count",
        new="yield first, count, 0",
        suffers="All heads of the queries are written over each other before a matrix is orthogonalized.",
        first=(MATRICES,),
    ),
    Fault(
        "shared_rows_not_returned_to_all",
        "megatron/core/optimizer/matrix_updates.py",
        old="self._back = messages(counted=False,",
        new="self._back = messages(counted=True,",
        suffers="With fewer key groups than tensor-parallel ranks the copies of a key head drift apart.",
        first=(f"{LAYOUTS}::tp4 dp2",),
    ),
    Fault(
        "one_rank_owns_all_matrices",
        "megatron/core/optimizer/matrix_updates.py",
        old="loads[owner] += matrix_cost(shapes[index][number])",
        new="loads[owner] += 0",
        suffers="One rank of a stage does the whole work of Muon while the others wait.",
        first=(RULES,),
    ),
    Fault(
        "replicas_own_shards_of_what_they_hold_whole",
        "megatron/core/optimizer/matrix_updates.py",
        old="is_sharded = span != bucket.span",
        new="is_sharded = True",
        suffers="Without --use-distributed-optimizer a replica gets updates of its shard alone, and replicas differ.",
        first=(f"{LAYOUTS}::dp2",),
    ),
    Fault(
        "decay_inside_the_update",
        "megatron/core/optimizer/optimizer.py",
        old="weights.mul_(1.0 - lr * weight_decay).add_(update, alpha=-lr)",
        new="weights.add_(update, alpha=-lr)",
        suffers="--weight-decay does nothing to the matrices that Muon moves.",
        first=(RULES,),
    ),
    Fault(
        "embeddings_are_orthogonalized",
        "megatron/core/distributed/parameter_policy.py",
        old="return in_layer and is_weight",
        new="return is_weight",
        suffers="Position embeddings are trained by Muon.",
        first=(RULES,),
    ),
    Fault(
        "lion_mixes_with_the_wrong_weight",
        "megatron/core/optimizer/element_rules.py",
        old="torch.lerp(grads, average, self._beta1)",
        new="torch.lerp(grads, average, self._beta2)",
        suffers="Lion's updates follow its average as if --lion-beta1 were --lion-beta2.",
        first=(RULES,),
    ),
    Fault(
        "another_rules_state_is_continued",
        "megatron/training/checkpoints/loading.py",
        old='if there != here and config.optimizer != "sgd":',
        new='if there is None and config.optimizer != "sgd":',
        suffers="Muon continues AdamW's moments of the embeddings and begins its own average anew, without a word.",
        first=("parallel/test_resume.py::another_optimizer",),
    ),
)
