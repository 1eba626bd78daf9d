"""Mistakes that public reports tell of other trainers, made here; chosen by the reports alone, not by our tests."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "rotary_frequencies_rounded",
        "megatron/core/ops/rotary.py",
        old="frequencies = frequencies.to(positions.device, non_blocking=True)",
        new="frequencies = frequencies.to(positions.device, dtype, non_blocking=True)",
        suffers="In bf16 far positions turn by a wrong angle.",
        first=("unit/ops/test_rotary.py",),
        report="https://github.com/EleutherAI/gpt-neox/issues/1003",
    ),
    Fault(
        "global_balancing_divided_by_replicas",
        "megatron/core/moe/balancing.py",
        old='axes = ("dp", *axes)',
        new='axes, shares = ("dp", *axes), shares / self.context.mesh.size("dp")',
        suffers="global_aux_loss is weaker by the number of data-parallel ranks.",
        first=("unit/moe/test_balancing.py", "equivalence/test_experts.py::a loss over all replicas"),
        report="https://github.com/NVIDIA/Megatron-LM/pull/3769",
    ),
    Fault(
        "sequence_balancing_divided_by_batch",
        "megatron/core/moe/balancing.py",
        old=("shares, choices = shares.sum(0), choices.sum(0)\n"),
        new=(
            "shares, choices = shares.sum(0), choices.sum(0)\n"
            "        else:\n"
            "            shares = shares / len(shares)\n"
            ""
        ),
        suffers="seq_aux_loss is weaker with a larger --micro-batch-size.",
        first=("unit/moe/test_balancing.py",),
        report="https://github.com/NVIDIA/Megatron-LM/pull/5798",
    ),
    Fault(
        "first_epoch_again_after_resuming",
        "megatron/core/datasets/sampler.py",
        old="return random_state(self.shuffle_seed, number).permutation(self.num_samples)",
        new=(
            "return random_state(self.shuffle_seed, number - self.consumed // self.num_samples).permutation(\n"
            "            self.num_samples\n"
            "        )"
        ),
        suffers="With --dataloader-type cyclic a run that resumes in a later epoch reads the first one's order.",
        first=("unit/datasets/test_sampler.py::cyclic_passes",),
        report="https://github.com/huggingface/accelerate/pull/4071",
    ),
    Fault(
        "no_dropout_after_an_evaluation",
        "megatron/training/run/run.py",
        old="        finally:\n            for model in self.models:\n                model.train()\n",
        new="        finally:\n            pass\n",
        suffers="After the first evaluation the run trains without dropout.",
        report="https://github.com/sgl-project/SpecForge/pull/563",
    ),
    Fault(
        "gradients_grow_with_accumulation",
        "megatron/training/step.py",
        old="count=loss.count,",
        new="count=loss.count / len(microbatches),",
        suffers="Gradients are too large by the number of microbatches.",
        first=("equivalence/test_real_step.py::micro-batches of 4",),
        report="https://github.com/axolotl-ai-cloud/axolotl/issues/2262",
    ),
    Fault(
        "clipping_not_applied",
        "megatron/core/optimizer/optimizer.py",
        old="divisor / min(clip, 1.0)",
        new="divisor",
        suffers="--clip-grad is reported and has no effect.",
        report="https://github.com/deepspeedai/DeepSpeed/pull/5150",
    ),
    Fault(
        "tokens_of_one_context_rank",
        "megatron/training/loss_sums.py",
        old="return all_reduce(pairs, context.mesh, *axes)",
        new='return all_reduce(pairs, context.mesh, *(axis for axis in axes if axis != "cp"))',
        suffers="With context parallelism the loss is divided by the tokens of one rank.",
        first=("equivalence/test_real_step.py::cp2 tp2 sp",),
        report="https://github.com/NVIDIA/Megatron-LM/issues/673",
    ),
    Fault(
        "later_losses_divided_by_all_tokens",
        "megatron/core/models/gpt/train_spec.py",
        old="(future.masked_cross_entropy(labels, mask, backward_scale=scale), mask.sum())",
        new='(future.masked_cross_entropy(labels, mask, backward_scale=scale), tensors["loss_mask"].sum())',
        suffers="The log shows losses of multi-token prediction that are means over tokens that have none.",
        first=("unit/models/test_multi_token.py", "equivalence/test_megatron_core.py"),
        report="https://github.com/NVIDIA/Megatron-LM/issues/2417",
    ),
    Fault(
        "norm_without_other_ranks_experts",
        "megatron/core/parallel/sharding.py",
        old="for axis in axes if axis not in self.split.values())",
        new='for axis in axes if axis == "ep" or axis not in self.split.values())',
        suffers="With expert parallelism the gradient norm misses experts of other ranks.",
        report="https://github.com/deepspeedai/DeepSpeed/issues/8475",
    ),
)
