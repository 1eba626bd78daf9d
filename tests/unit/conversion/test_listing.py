"""The lists of published types: printed by the converter, and in the documents."""

from __future__ import annotations

import pytest

from megatron.core.conversion.huggingface.listing import published_types
from megatron.errors import ConfigError
from tests.golden.regenerate_models import PAGE, page
from tests.harness.data import REPOSITORY
from tests.harness.sentences import expect_error
from tools.checkpoint import convert as tool


def test_the_page_is_up_to_date() -> None:
    """A type that converts and is nowhere said to is one that nobody uses."""
    written = (REPOSITORY / PAGE).read_text(encoding="utf-8")
    assert written == page(), "types changed: run `python -m tests.golden.regenerate_models` and review the diff"


def test_every_type_is_described() -> None:
    """In a sentence that a user can read, with transformers' name for the class."""
    import transformers

    for each in published_types():
        assert each.converts, f"{each.model_type}: ModelType.about says which of its models convert"
        assert all(hasattr(transformers, name) for name in each.classes)
        assert each.model_type in transformers.CONFIG_MAPPING


def test_the_list_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each type, as wide as the terminal; the flag does nothing else."""
    monkeypatch.setenv("COLUMNS", "120")
    assert tool.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert listed == [each.model_type for each in published_types()]
    assert max(map(len, lines)) <= 120
    (llama,) = (line for line in lines if line.startswith("llama "))
    assert llama.split()[1:3] == ["GPT", "LlamaForCausalLM"]
    with expect_error(ConfigError, "--list"):
        tool.main(["--list", "--load", "x"])
