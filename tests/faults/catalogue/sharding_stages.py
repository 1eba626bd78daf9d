"""Faults in ZeRO 2 and 3: what is gathered, freed and summed, and when."""

from __future__ import annotations

from tests.faults.fault import Fault

_MEMORY = "megatron/core/distributed/unit_memory.py"
_UNITS = "megatron/core/distributed/units.py"
_TABLE = "equivalence/test_sharding_stages.py"
_HELD = "parallel/test_sharding_stages.py"

FAULTS = (
    Fault(
        "only_the_last_microbatch_counts",
        _MEMORY,
        old="summing.home.sums.flat.add_(found)",
        new="summing.home.sums.flat.copy_(found)",
        suffers="With ZeRO 2 and accumulation a step is that of its last microbatch.",
        first=(_TABLE,),
    ),
    Fault(
        "gradients_of_the_microbatch_before_count_again",
        _MEMORY,
        old="            bucket.grads.flat.zero_()\n",
        new="            pass\n",
        suffers="With ZeRO 2 gradients begin with whatever was in their memory.",
        first=(_TABLE,),
    ),
    Fault(
        "late_gradients_stay_on_their_rank",
        "megatron/core/distributed/grad_sync.py",
        old="        self.units.finish()\n",
        new="        self.units.settle()\n",
        suffers="With ZeRO 2 the gradient of a weight that is read before its layer is added to the next step's.",
        first=("parallel/test_plain_modules.py::come_after",),
    ),
    Fault(
        "embedding_and_head_are_summed_once_a_step",
        _UNITS,
        old="            for unit in reversed(here.units):\n",
        new="            for unit in reversed(here.layers):\n",
        suffers="With ZeRO 2 whole gradients of embedding and head stay in memory for a step.",
        first=("parallel/test_communication.py",),
    ),
    Fault(
        "loaded_weights_meet_gathered_ones",
        "megatron/training/run/run.py",
        old="            self.optimizer.gather.forget()  # loading makes whole weights stale\n",
        new="",
        suffers="With ZeRO 3 and pipelines loaded weights take effect after the first step.",
        first=(_HELD + "::take_effect",),
    ),
    Fault(
        "weights_stay_whole_after_a_layer",
        _UNITS,
        old="            if not self._in_backward:  # a layer that is computed again is about to be needed\n",
        new="            if self._in_backward:\n",
        suffers="With ZeRO 3 all weights are whole after a forward pass.",
        first=(_HELD,),
    ),
    Fault(
        "what_modules_keep_is_not_guarded",
        "megatron/core/distributed/transient.py",
        old="                self._guard_aliases()\n",
        new="                pass\n",
        suffers="With ZeRO 3 torch crashes where a module reads weight.data that another kept.",
        first=("parallel/test_plain_modules.py::keeps_of",),
    ),
    Fault(
        "what_modules_keep_stays_unreadable",
        "megatron/core/distributed/transient.py",
        old="            alias.__class__ = alias.class_while_open",
        new="            alias.class_while_open",
        suffers="With ZeRO 3 a layer that keeps a view of its weight can't read it in its next call.",
        first=("parallel/test_plain_modules.py::keeps_of",),
    ),
    Fault(
        "prefetch_goes_the_wrong_way",
        _UNITS,
        old="zip([None, *near[:-1]], near, [*near[1:], None])",
        new="zip([*near[1:], None], near, [None, *near[:-1]])",
        suffers="With ZeRO 3 the layer that was just freed is gathered again, and the next one late.",
        first=(_HELD + "::one_layer",),
    ),
    Fault(
        "gathered_weights_are_not_awaited",
        _MEMORY,
        old="        self._gathered[bucket].wait()\n",
        new="",
        suffers="With ZeRO 3 a layer computes with weights that are on their way.",
        first=("parallel/test_poisoned.py",),
    ),
    Fault(
        "shared_weight_goes_with_a_layer",
        _UNITS,
        old="        tied = tied or (name if owners[parameter] > 1 else None)\n",
        new="",
        suffers="With ZeRO 3 a weight that two layers share is freed before the second reads it.",
        first=("parallel/test_plain_modules.py::share_a_weight",),
    ),
    Fault(
        "views_outlive_their_weights",
        _UNITS,
        old="if _others(leaves) or any(each.untyped_storage()._cdata in storages for each in tensors):",
        new="if _others(leaves):",
        suffers="With ZeRO 3 a module outside of layers that returns a view of its weights returns freed memory.",
        first=("parallel/test_plain_modules.py::outside_of_layers",),
    ),
    Fault(
        "sums_begin_with_the_step_before",
        _MEMORY,
        old="        for home in dict.fromkeys(self._homes.values()):\n            home.sums.free()\n",
        new="        pass\n",
        suffers="With ZeRO 2 gradients of all steps are summed, and lie beside all activations.",
        first=(_TABLE,),
    ),
    Fault(
        "replicas_are_compared_in_place",
        "megatron/training/run/agreement.py",
        old='entry.tensor.detach().to("cpu", copy=True)',
        new="entry.tensor.detach().cpu()",
        suffers="With ZeRO 3 a run ends in the step after its replicas were compared.",
        first=(_HELD + "::no_memory",),
    ),
    Fault(
        "copies_in_8_bits_stay",
        _MEMORY,
        old="            self._low_precision.weights.pop(entry.parameter, None)\n",
        new="            pass\n",
        suffers="With ZeRO 3 in FP8 a rank keeps two bytes of every weight of the model.",
        first=("parallel/test_fp8_weights.py::copies_in_8_bits",),
    ),
)
