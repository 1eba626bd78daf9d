"""/metrics as Prometheus reads it: what dashboards divide and add must fit together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.serving import Running, ask, served, slow_table


def numbers_of(running: Running, prefix: str) -> dict[str, float]:
    """The series that have no label but the model's name, read by Prometheus' own parser."""
    running.wait_until_idle()
    families = text_string_to_metric_families(ask(running.url, "/metrics").body.decode())
    samples = [sample for family in families for sample in family.samples if {*sample.labels} == {"model_name"}]
    assert all(sample.name.startswith(prefix) for sample in samples)
    return {sample.name.removeprefix(prefix): sample.value for sample in samples}


@pytest.mark.parametrize("prefix", ["megatron_", "vllm:"])
def test_times_of_requests_add_up(prefix: str) -> None:
    """Dashboards of vLLM's users had empty panels for the time in the queue, of prefill and of inference, and for the
    tokens of a step.
    """
    step, names = 0.01, ("queue", "prefill", "decode", "inference")
    with served(slow_table(seconds=step, max_requests=1), vllm_metric_names=prefix == "vllm:") as running:
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            with running.table.held():
                replies = [pool.submit(ask, running.url, "/v1/completions", body) for _ in range(2)]
                running.wait_until(lambda: running.server.engine.unfinished == 2)
            assert [each.result().status for each in replies] == [200] * 2
        found, engine = numbers_of(running, prefix), running.engine.statistics
    assert {found[f"request_{name}_time_seconds_count"] for name in names} == {2.0}
    queue, prefill, decode, inference = (found[f"request_{name}_time_seconds_sum"] for name in names)
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(queue + inference)
    assert found["time_to_first_token_seconds_sum"] == pytest.approx(queue + prefill)
    assert inference == pytest.approx(prefill + decode)
    assert queue > 5 * step, "the second waits for all steps of the first"
    assert prefill > 2 * step and decode > 2 * 4 * step
    assert found["iteration_tokens_total_count"] == engine.steps == 10
    assert found["iteration_tokens_total_sum"] == engine.step_tokens


def test_a_search_has_no_time_of_prefill() -> None:
    """Its tokens all come at its end, so that the time to the first of them would be counted as prefill."""
    with served() as running:
        searched = {"prompt": "hello", "use_beam_search": True, "n": 2, "max_tokens": 3}
        assert ask(running.url, "/v1/completions", searched).status == 200
        found = numbers_of(running, "megatron_")
    names = ("queue", "prefill", "decode", "inference")
    assert [found[f"request_{name}_time_seconds_count"] for name in names] == [1, 0, 0, 1]
