"""What the documents claim: links to files and headings, and commands that a reader will type."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE_COMMAND = re.compile(r"`((?:bash|sbatch|python|torchrun|\.venv/bin/\w+|\w+=\S+ bash) [^`]+)`")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
REPOSITORY_PATH = re.compile(
    r"(?:[\w.-]+/)*[\w.-]+\.(?:py|sh|sbatch|flags|md|toml)|(?:tests|tools|examples|benchmarks|tasks)/[\w./-]*"
)


def anchor(heading: str) -> str:
    """The name that a heading gets in a link, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(document: Path, text: str) -> list[str]:
    """Links to local files or headings that aren't there."""
    broken = []
    for match in LINK.finditer(FENCE.sub("", text)):
        target = match.group(1) or match.group(2)
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists():
            broken.append(target)
        elif heading and path.suffix == ".md":
            linked = text if path == document else path.read_text(encoding="utf-8")
            if heading not in {anchor(found) for found in HEADING.findall(FENCE.sub("", linked))}:
                broken.append(target)
    return broken


def commands(text: str) -> Iterator[str]:
    """Shell commands of the document: in code blocks (continued lines joined, comments dropped), then in the text."""
    for language, block in FENCE.findall(text):
        if language not in ("bash", "sh", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ").strip()
            if command and not command.startswith("#"):
                yield command
    yield from INLINE_COMMAND.findall(FENCE.sub("", text))


def missing_paths(root: Path, command: str) -> list[str]:
    """Words of a command that look like files of the repository and aren't there."""
    words = [word.lstrip("@").split("::")[0] for word in shlex.split(command, comments=True)]
    return [word for word in words if REPOSITORY_PATH.fullmatch(word) and not (root / word).exists()]


def flags_by_script(command: str) -> dict[str, list[str]]:
    """The repository's Python script that a command runs, and the flags it is given."""
    words = shlex.split(command, comments=True)
    scripts = [place for place, word in enumerate(words) if word.endswith(".py") and "test" not in word]
    if not scripts:
        return {}
    given = [word for word in words[scripts[0] + 1 :] if word.startswith("--")]
    if "--can-load" not in given:
        return {words[scripts[0]]: given}
    last = given.index("--can-load") + 1  # of inspect_checkpoint.py; what follows are flags of a training command
    return {words[scripts[0]]: given[:last], "pretrain_gpt.py": given[last:]}
