"""Faults in weights of few bits: codes, scales and what other programs read of them."""

from __future__ import annotations

from tests.faults.fault import Fault

PACKING = "unit/quantization/test_packing.py"
LAYOUTS = "unit/conversion/test_quantized_layouts.py"
WRITTEN = "unit/conversion/test_quantizing.py"
SERVED = "unit/inference/test_stored_weights.py"
RANKS = "unit/training/evaluation/test_stored_weights.py"

FAULTS = (
    Fault(
        "packed_from_the_other_end",
        "megatron/core/quantization/packing.py",
        old="filled |= numbers[:, place::each] << (bits * place)",
        new="filled |= numbers[:, place::each] << (bits * (each - place))",
        suffers="Files hold numbers of 4 bits that other programs read as others.",
        first=(PACKING,),
    ),
    Fault(
        "zero_points_one_off",
        "megatron/core/conversion/huggingface/gptq_awq.py",
        old='== "gptq_v2" else 1',
        new='== "gptq_v2" else 0',
        suffers="Every weight of a GPTQ model is shifted by one step.",
        first=(LAYOUTS,),
    ),
    Fault(
        "columns_of_awq_in_their_packed_order",
        "megatron/core/conversion/huggingface/gptq_awq.py",
        old="_AWQ_ORDER.index(place)",
        new="_AWQ_ORDER[place]",
        suffers="Outputs of an AWQ model change places within eights.",
        first=(LAYOUTS,),
    ),
    Fault(
        "order_of_inputs_forgotten",
        "megatron/core/conversion/huggingface/quantized_weights.py",
        old="        if self.scales.groups is not None:\n            return self.scales.groups.make().long()\n",
        new="",
        suffers="A GPTQ model with desc_act has the scales of other inputs.",
        first=(LAYOUTS,),
    ),
    Fault(
        "everything_in_a_layer_quantized",
        "megatron/core/quantization/targets.py",
        old='(last.startswith("linear_") or last in _MIXERS)',
        new='".layers." in name and "norm" not in name',
        suffers="Routers are in 4 bits, and send tokens to other experts.",
        first=(WRITTEN,),
    ),
    Fault(
        "tied_output_not_ignored",
        "megatron/core/conversion/huggingface/quantizing.py",
        old='{"lm_head": None}',
        new="{}",
        suffers="transformers expects packed weights of an output layer that has none, and doesn't run the model.",
        first=(WRITTEN,),
    ),
    Fault(
        "scales_chosen_anew",
        "megatron/core/conversion/huggingface/stored_codes.py",
        old="held = scales_of(numbers, grid, factors) if scales is None else",
        new="held = scales_of(numbers, grid, factors) if True else",
        suffers="The scales that calibration chose are replaced by those of rounding when a folder is written.",
        first=(WRITTEN,),
    ),
    Fault(
        "proof_of_quantized_weights_compares_none",
        "megatron/core/conversion/quantized_proof.py",
        old="if name in theirs and not torch.equal(",
        new="if name not in theirs and not torch.equal(",
        suffers="A folder is written that transformers reads as other weights, with a proof.",
        first=(WRITTEN,),
    ),
    Fault(
        "negative_numbers_of_fp8",
        "megatron/core/inference/stored_weights.py",
        old="bitwise_and_(~0x4000)",
        new="bitwise_and_(0x7FFF)",
        suffers="Served from FP8, negative weights are large positive ones.",
        first=(SERVED,),
    ),
    Fault(
        "scales_of_the_first_rank",
        "megatron/training/checkpoints/stored_parts.py",
        old="shape[dim] + box.offsets[dim] + steps",
        new="shape[dim] + steps",
        suffers="At two ranks, outputs of the second are multiplied by scales of the first.",
        first=(RANKS,),
    ),
)
