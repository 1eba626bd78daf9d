"""A request's ``model`` names the base or one of its adapters, and nothing else."""

from __future__ import annotations

import pytest

from megatron.core.inference.limits import NamedFolder
from megatron.core.tokenizers.null import NullTokenizer
from megatron.serving.completions import read_completion
from megatron.serving.errors import ApiError
from megatron.serving.model import ServedModel
from tests.harness.sentences import check_sentence

MODEL = ServedModel(
    name="base",
    tokenizer=NullTokenizer(20),
    max_length=16,
    fingerprint="",
    end_ids=frozenset(),
    adapters=(NamedFolder("a", "runs/a"), NamedFolder("b", "runs/b")),
)


def test_a_request_gets_the_adapter_that_it_names() -> None:
    """A text had the adapter of another name, or the base's answer under an adapter's name. /v1/models told clients the
    server's folders.
    """
    for name, number in ((None, 0), ("base", 0), ("a", 1), ("b", 2)):
        call = read_completion({"model": name, "prompt": [1, 2], "max_tokens": 2}, MODEL, id="x")
        assert [request.adapter for request in call.requests] == [number]
    listed = [MODEL.listed(name) for name in MODEL.names]
    assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
        ("base", "base", None),
        ("a", "a", "base"),
        ("b", "b", "base"),
    ]
    with pytest.raises(ApiError) as caught:
        read_completion({"model": "c", "prompt": [1, 2], "max_tokens": 2}, MODEL, id="x")
    assert caught.value.status == 404
    check_sentence(str(caught.value), "'c'", "'base'", "'a'", "'b'")
