"""The generated reference and the snapshot of the command line are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.regenerate_flags import REFERENCE, SNAPSHOT, reference, snapshot, write

REPOSITORY = Path(__file__).parents[3]
ADVICE = "the command line changed: run `python -m tests.golden.regenerate_flags` and review the diff"


@pytest.mark.parametrize(("name", "text"), [(REFERENCE, reference()), (SNAPSHOT, snapshot())])
def test_up_to_date(name: str, text: str) -> None:
    """A change of the command line is seen as a diff of these files, never unawares."""
    assert (REPOSITORY / name).read_text() == text, ADVICE


def test_reference_is_complete() -> None:
    """Every flag and every legacy flag is in the reference, as rows of well-formed tables."""
    text = reference()
    for spelling in (
        "`--num-layers N`",
        "`--override-opt_param-scheduler`",
        "`--num-experts N`",
        "`--moe-latent-size`",
        "`--dry-run`",
    ):
        assert spelling in text
    for line in text.splitlines():
        if line.startswith("|"):
            assert line.count("|") == 4, line


def test_write(tmp_path: Path) -> None:
    """The generator writes both files under the folder it is given."""
    write(tmp_path)
    assert (tmp_path / REFERENCE).read_text() == reference()
    assert (tmp_path / SNAPSHOT).read_text() == snapshot()
