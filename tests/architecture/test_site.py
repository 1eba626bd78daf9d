"""docs/site.py: every link of a page leads to a page, and the site builds without a warning."""

from __future__ import annotations

import posixpath
import subprocess
import sys
from pathlib import Path

import pytest

from docs import site
from tests.architecture.documents import FENCE, LINK
from tests.architecture.source_tree import ROOT


def test_links_lead_to_pages() -> None:
    """Links that work on GitHub, to code and to documents outside docs/, would lead nowhere on the site."""
    pages, found = site.pages(), []
    there = {*pages, *(f"pictures/{each.name}" for each in (ROOT / site.PICTURES).iterdir())}
    assert "![](pictures/a.svg)" in site.linked("docs/grpo.md", "![](pictures/a.svg)"), (
        "pictures would be pages of text"
    )
    for page, text in pages.items():
        for match in LINK.finditer(FENCE.sub("", text) if page.partition("/")[0] != "source" else ""):
            target = (match[1] or match[2]).partition("#")[0]
            if (
                target
                and ":" not in target
                and posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) not in there
            ):
                found.append(f"{page}: {target}")
    assert not found


def test_blocks_of_code_stay_as_they_are() -> None:
    """A command with brackets in a code block is no link."""
    text = "[a](../README.md#install)\n```python\nx[0](training.md)\n```\n[b](training.md) [c](https://example.org)\n"
    assert site.linked("docs/design/0001-settings.md", text.replace("../", "../../").replace("b](", "b](../")) == (
        "[a](../overview.md#install)\n```python\nx[0](training.md)\n```\n[b](../training.md) [c](https://example.org)\n"
    )


def test_every_package_has_a_page_that_the_navigation_names(tmp_path: Path) -> None:
    """A new package is documented without anybody listing it."""
    site.write_pages(tmp_path)
    settings = (tmp_path / "mkdocs.yml").read_text(encoding="utf-8")
    assert "      - core.parallel: api/megatron.core.parallel.md\n" in settings
    page = (tmp_path / "docs" / "api" / "megatron.core.parallel.md").read_text(encoding="utf-8")
    assert "::: megatron.core.parallel.sharding\n" in page
    assert "$ROOT" not in settings


def test_the_navigation_names_every_page_of_docs(tmp_path: Path) -> None:
    """A page that the navigation leaves out is found by search alone; decisions are listed on a page of their own."""
    site.write_pages(tmp_path)
    settings = (tmp_path / "mkdocs.yml").read_text(encoding="utf-8")
    own = [site.page_of(path) for path in site.documents() if not path.startswith("docs/design/0")]
    assert [page for page in own if f": {page}\n" not in settings] == []


@pytest.mark.slow  # a minute; the fast tests above prove its links
def test_the_site_builds(tmp_path: Path) -> None:
    """With search, and with API pages from docstrings; --strict ends with 1 on a broken link or an unknown module."""
    for package in ("zensical", "mkdocstrings", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the site needs the extra docs: pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "site.py", "--folder", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "site"
    assert "the one description of where a parameter" in (built / "search.json").read_text(encoding="utf-8").lower()
    api = (built / "api" / "megatron.core.parallel" / "index.html").read_text(encoding="utf-8")
    assert 'id="megatron.core.parallel.sharding.Sharding"' in api
    assert 'href="../source/tests/equivalence/test_equivalence.py/' in (built / "overview" / "index.html").read_text(
        encoding="utf-8"
    )
