"""Faults in calibrated quantization and in training with rounded weights."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "scales_of_a_rank_s_part_of_a_group",
        "megatron/core/quantization/fake.py",
        old='both = all_reduce(both, self._mesh, part.axis, op="max")',
        new="both = both.clone()",
        suffers="Quantization-aware training with tensor parallelism trains for other scales than an export has.",
        first=("equivalence/test_quantization_training.py",),
    ),
    Fault(
        "router_of_scaled_inputs",
        "megatron/core/conversion/quantizing/folds.py",
        old="return [module.experts.linear_fc1.weight, module.router.weight, *of_shared]",
        new="return [module.experts.linear_fc1.weight, *of_shared]",
        suffers="AWQ and SmoothQuant of a mixture of experts change which experts tokens choose.",
        first=("unit/conversion/test_calibrating.py",),
    ),
    Fault(
        "sums_that_depend_on_ranks",
        "megatron/core/quantization/statistics.py",
        old="whole = torch.round(rows.double() / self.units)",
        new="whole = rows.double() / self.units",
        suffers="GPTQ gives other codes on two ranks than on one, where two are nearly as good.",
        first=("unit/quantization/test_methods.py",),
    ),
    Fault(
        "errors_that_stay_in_their_column",
        "megatron/core/quantization/gptq.py",
        old="left[:, at:last] -= error @ upper[at : at + 1, at:last]",
        new="left[:, at:last] -= 0 * error @ upper[at : at + 1, at:last]",
        suffers="GPTQ is rounding within its blocks of columns, and nothing says so.",
        first=("unit/quantization/test_methods.py",),
    ),
    Fault(
        "scales_of_floats_in_the_weights_type",
        "megatron/core/quantization/grid.py",
        old='if self.kind == "float" or dtype.itemsize',
        new="if dtype.itemsize",
        suffers="Scales of FP8 weights are in bf16, and programs that read them in fp32 find other numbers.",
        first=("unit/conversion/test_calibrating.py",),
    ),
    Fault(
        "rounded_again_where_it_is_loaded",
        "megatron/core/conversion/quantizing/calibrate.py",
        old="groups = without_rounding(portable.groups)",
        new="groups = portable.groups",
        suffers="What was trained with rounded weights and is then quantized in another way is evaluated with neither.",
        first=("unit/tools/test_quantize.py",),
    ),
)
