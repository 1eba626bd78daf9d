"""Faults in hybrid sharding and in weights that are gathered in 8 bits by unit."""

from __future__ import annotations

from tests.faults.fault import Fault

_TABLE = "equivalence/test_two_levels.py"
_GATHER = "megatron/core/distributed/param_gather.py"

FAULTS = (
    Fault(
        "copies_are_interleaved",
        "megatron/core/parallel/grid.py",
        old="axes |= {outer: copies, inner: ranks}",
        new="axes |= {inner: ranks, outer: copies}",
        suffers="With --num-distributed-optimizer-instances weights of layers travel between nodes, and shards in one.",
        first=("unit/parallel/test_mesh.py",),
    ),
    Fault(
        "buckets_are_summed_in_one_copy",
        "megatron/core/distributed/grad_sync.py",
        old="            reduction.handle = Chain(reduction.handle, over_copies)\n",
        new="",
        suffers="With ZeRO 1 and several copies each of them trains a model of its own.",
        first=(_TABLE,),
    ),
    Fault(
        "units_are_summed_in_one_copy",
        "megatron/core/distributed/unit_memory.py",
        old="            if home.buffer.levels.num_copies > 1:\n",
        new="            if home.buffer.levels.divides_state:\n",
        suffers="With ZeRO 2 or 3 and several copies each of them trains a model of its own.",
        first=(_TABLE,),
    ),
    Fault(
        "late_gradients_stay_in_their_copy",
        "megatron/core/distributed/unit_memory.py",
        old="home.buffer.levels.start_sum(own, self._mesh,",
        new="home.buffer.levels.start_sum(own.clone(), self._mesh,",
        suffers="With several copies the gradient of a weight that is read before its layer differs between them.",
        first=("parallel/test_plain_modules.py::come_after",),
    ),
    Fault(
        "every_microbatch_is_summed_over_copies",
        "megatron/core/distributed/unit_memory.py",
        old="            if self.is_last and home.buffer.levels.num_copies > 1:\n",
        new="            if home.buffer.levels.num_copies > 1:\n",
        suffers="With several copies the network between nodes carries shards for every microbatch.",
        first=("parallel/test_sharding_stages.py::hide_behind",),
    ),
    Fault(
        "copies_count_twice_in_the_norm",
        "megatron/core/optimizer/grad_norm.py",
        old="parts_of([buffer], FlatBuffer.portion)",
        new="parts_of([buffer], FlatBuffer.shard)",
        suffers="With several copies gradients are clipped by a norm that is too large by the root of their number.",
        first=(_TABLE,),
    ),
    Fault(
        "updates_of_matrices_reach_one_copy",
        "megatron/core/optimizer/matrix_updates.py",
        old="held=buffer.owned if is_sharded else buffer.whole)",
        new="held=buffer.portion if is_sharded else buffer.whole)",
        suffers="With Muon and several copies each of them updates other parts of a matrix.",
        first=(_TABLE,),
    ),
    Fault(
        "updated_portions_stay_in_their_copy",
        _GATHER,
        old="        self.units.start_shards()\n",
        new="",
        suffers="With --outer-dp-sharding-strategy optim a rank multiplies by weights of which others updated parts.",
        first=(_TABLE,),
    ),
    Fault(
        "codes_of_weights_before_loading",
        _GATHER,
        old="        self._fp8.is_stale = self._fp8.by_unit\n",
        new="",
        suffers="With ZeRO 3 and --fp8-param-gather loaded weights take effect after the first step.",
        first=("parallel/test_sharding_stages.py::take_effect",),
    ),
)
