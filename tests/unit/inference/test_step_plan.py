"""A plan crosses to other ranks as integers; one that changes on the way makes them compute another text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron.core.inference.step_plan import PlanRow, StepPlan

ids = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
rows = st.builds(
    PlanRow,
    slot=st.integers(0, 7),
    start=st.integers(0, 5000),
    tokens=ids,
    blocks=ids,
    logits_from=st.integers(0, 5),
    encoder=st.booleans(),
    copies=st.integers(0, 9),
)


copies = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple)


@given(st.builds(StepPlan, st.lists(rows, max_size=5).map(tuple), copies))
def test_a_plan_comes_back_from_its_message(plan: StepPlan) -> None:
    assert StepPlan.from_array(plan.to_array()) == plan


def test_counts_what_the_runner_returns() -> None:
    first = PlanRow(slot=0, start=4, tokens=(1, 2, 3), blocks=(5,), logits_from=1)
    second = PlanRow(slot=1, start=0, tokens=(1, 2), blocks=(6,), logits_from=2)
    plan = StepPlan((first, second))
    assert (plan.num_tokens, plan.num_logits) == (5, 2)
