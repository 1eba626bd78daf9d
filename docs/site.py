"""Build the documentation as a site, with search and with API pages made from docstrings.

``python docs/site.py`` writes build/site; ``--serve`` shows it at http://localhost:8000. Needs the extra ``docs``.

Documents link to each other and to code as GitHub shows them. The site has a page for each such file: first all pages
are written to build/docs, with their links changed, then zensical builds them.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = {
    "README.md": "overview.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/NOTES.md": "benchmarks.md",
}
"""Documents outside docs/ and their pages; READMEs of examples have ``examples/NAME.md``."""
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".jsonl": "json", ".yml": "yaml"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def main(argv: list[str]) -> int:
    """Write the pages and build the site; the exit status of zensical."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="serve the site on this machine")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="where pages and site go (build)")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_pages(arguments.folder)
    command = ["serve"] if arguments.serve else ["build", "--strict", "--clean"]
    return subprocess.call([sys.executable, "-m", "zensical", *command], cwd=arguments.folder)


def write_pages(folder: Path) -> None:
    """Write every page to ``folder``/docs, and zensical's settings to ``folder``/mkdocs.yml."""
    target = folder / "docs"
    shutil.rmtree(target, ignore_errors=True)
    for page, text in pages().items():
        (target / page).parent.mkdir(parents=True, exist_ok=True)
        (target / page).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "docs" / "site.css", target)
    shutil.copytree(ROOT / "docs" / "pictures", target / "pictures")
    settings = (ROOT / "docs" / "site.yml").read_text(encoding="utf-8").replace("$ROOT", str(ROOT))
    sections = {"Examples": sorted(examples().values()), "API": ["api/index.md", *map(api_page, packages())]}
    for title, listed in sections.items():
        settings += f"  - {title}:\n"
        settings += "".join(f"      - {title_of(page)}: {page}\n" for page in listed)
    (folder / "mkdocs.yml").write_text(settings, encoding="utf-8")


def title_of(page: str) -> str:
    """A page's name in the navigation: ``core.parallel`` for ``api/megatron.core.parallel.md``."""
    name = posixpath.splitext(posixpath.basename(page))[0].removeprefix("megatron.")
    return "all packages" if name == "index" else name


def pages() -> dict[str, str]:
    """All pages by their path in the site, with links to other pages."""
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in documents()}
    found = {page_of(path): linked(path, text) for path, text in sources.items()}
    files = {link for path, text in sources.items() for link in links(path, text) if link not in sources}
    files = {path for path in files if not path.startswith(PICTURES)}
    found |= {page_of(path): source_text(path) for path in sorted(files) if (ROOT / path).exists()}
    return found | api_pages()


@cache
def examples() -> dict[str, str]:
    """READMEs of examples, and the page of each."""
    found = sorted((ROOT / "examples").glob("*/README.md"))
    return {f"examples/{each.parent.name}/README.md": f"examples/{each.parent.name}.md" for each in found}


@cache
def documents() -> list[str]:
    """Every document that has a page, by its path in the repository."""
    own = (each.relative_to(ROOT).as_posix() for each in sorted((ROOT / "docs").rglob("*.md")))
    return [*DOCUMENTS, *examples(), *own]


PICTURES = "docs/pictures/"
"""Files that are on the site as they are."""


def page_of(path: str) -> str:
    """The page of a file or folder of the repository; of a picture, the picture."""
    if path.startswith(PICTURES):
        return path.removeprefix("docs/")
    page = {**DOCUMENTS, **examples()}.get(path)
    if page is None and path.startswith("docs/") and path.endswith(".md"):
        page = path.removeprefix("docs/")
    return page or f"source/{path}.md"


def linked(path: str, text: str) -> str:
    """The text of document ``path``, with links to files of the repository turned into links to their pages."""
    here = posixpath.dirname(page_of(path)) or "."

    def rewritten(match: re.Match[str]) -> str:
        target, anchor = resolved(path, match[2])
        return match[0] if target is None else f"{match[1]}{posixpath.relpath(page_of(target), here)}{anchor}{match[3]}"

    return outside_code(text, lambda part: LINK.sub(rewritten, part))


def links(path: str, text: str) -> set[str]:
    """Files of the repository that document ``path`` links to."""
    found = (resolved(path, match[2])[0] for match in LINK.finditer(FENCE.sub("", text)))
    return {target for target in found if target is not None}


def resolved(path: str, link: str) -> tuple[str | None, str]:
    """The file that a link of document ``path`` leads to, and ``#anchor``; None for addresses and the same page."""
    name, hash_sign, anchor = link.partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return None, ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
    if (ROOT / target / "README.md").is_file():
        target = f"{target}/README.md"
    return target, hash_sign + anchor


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with every part outside code blocks changed."""
    parts, last = [], 0
    for block in FENCE.finditer(text):
        parts += [change(text[last : block.start()]), block[0]]
        last = block.end()
    return "".join([*parts, change(text[last:])])


def source_text(path: str) -> str:
    """A page with the text of a file, or with the names in a folder; search leaves it out."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if (ROOT / path).is_dir():
        names = sorted(each.name for each in (ROOT / path).iterdir() if not each.name.startswith(("_", ".")))
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"{head}`````{LANGUAGES.get(posixpath.splitext(path)[1], 'text')}\n{text}\n`````\n"


@cache
def packages() -> dict[str, list[str]]:
    """Packages of the library, and the modules of each."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        if not path.name.startswith("_"):
            package = path.parent.relative_to(ROOT).as_posix().replace("/", ".")
            found.setdefault(package, []).append(f"{package}.{path.stem}")
    return dict(sorted(found.items()))


def api_page(package: str) -> str:
    """The page of a package's docstrings."""
    return f"api/{package}.md"


def api_pages() -> dict[str, str]:
    """A page for each package, which mkdocstrings fills with docstrings, and one page that lists the packages."""
    found = {
        api_page(name): f"# {name}\n\n" + "\n".join(f"::: {each}\n" for each in packages()[name]) for name in packages()
    }
    rows = "\n".join(
        f"| [{package}]({package}.md) | {', '.join(name.rpartition('.')[2] for name in modules)} |"
        for package, modules in packages().items()
    )
    about = "Made from docstrings. [Megatron as a library](../library.md) says which names are stable."
    found["api/index.md"] = f"# API\n\n{about}\n\n| package | modules |\n|---|---|\n{rows}\n"
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
