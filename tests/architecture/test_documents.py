"""Documents tell the truth: links lead somewhere, and commands name files that exist."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from megatron.core.models import registry
from tests.architecture.documents import LINK, broken_links, commands, flags_by_script, missing_paths
from tests.architecture.source_tree import ROOT, files, relative
from tests.harness.sentences import check_sentence


def test_every_local_link_resolves() -> None:
    """A stranger follows them on the first day."""
    found = [
        f"{relative(path)}: {link}"
        for path in files(".md")
        for link in broken_links(path, path.read_text(encoding="utf-8"))
    ]
    assert not found, "links that lead nowhere:\n" + "\n".join(found)


def test_broken_links_are_seen(tmp_path: Path) -> None:
    """Missing files, missing headings, here and in another document; code blocks and web addresses are left alone."""
    (tmp_path / "other.md").write_text("# One heading: `x` & more\n")
    start = tmp_path / "start.md"
    start.write_text(
        "# Start\n[a](other.md) [b](none.md) [c](#start) [d](#end)\n"
        "[e](other.md#one-heading-x--more) [f](other.md#two) ![picture](none.png) [g](https://example.org)\n"
        "```python\nx[0](1)\n```\n"
    )
    assert broken_links(start, start.read_text()) == ["none.md", "#end", "other.md#two", "none.png"]


def test_commands_name_files_that_exist() -> None:
    """Every command in a document can be typed as it stands."""
    found = []
    for path in files(".md"):
        for command in commands(path.read_text(encoding="utf-8")):
            found += [f"{relative(path)}: {word} in: {command}" for word in missing_paths(ROOT, command)]
    assert not found, "commands that name missing files:\n" + "\n".join(found)


def test_tools_named_in_sentences_exist() -> None:
    """A refused flag, and an example, named a tool that had another name by then."""
    named = [path for ending in (".py", ".sh", ".flags", ".md") for path in files(ending)]
    found = {
        f"{relative(path)}: {tool}"
        for path in named
        if relative(path).split("/")[0] in ("megatron", "tools", "tasks", "examples", "docs", "README.md")
        for tool in re.findall(r"(?<![\w/.])tools/[\w/]+\.py", path.read_text(encoding="utf-8"))
        if not (ROOT / tool).is_file()
    }
    assert not found, "tools that don't exist:\n" + "\n".join(sorted(found))


def test_missing_files_in_commands_are_seen(tmp_path: Path) -> None:
    """Also behind an interpreter, on a continued line, and with a test's name attached."""
    (tmp_path / "there.py").touch()
    text = (
        "```bash\n# a comment\n$ python there.py --flag \\\n    gone.sh @gone.flags\n"
        "bash tests/gone.py::test_x  # why.py\n```\n| run it | `A=1 bash gone.sh` | `not.py` |\n"
    )
    found = [missing_paths(tmp_path, command) for command in commands(text)]
    assert found == [["gone.sh", "gone.flags"], ["tests/gone.py"], ["gone.sh"]]


def test_table_of_lines_is_true() -> None:
    """A reader judges by it where the project's weight is."""
    section = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("## The tree")[1].split("\n## ")[0]
    total = lines_of("")
    (said_in_all,) = re.findall(r"rounded to hundreds; ([\d,]+) in all", section)
    assert total == pytest.approx(int(said_in_all.replace(",", "")), rel=0.05), (
        f"{total} lines in all, not {said_in_all}"
    )
    for folders, said in re.findall(r"^\| .+? \| (`.+?) \| ([\d,]+) \|", section, re.MULTILINE):
        lines = sum(map(lines_of, re.findall(r"`([\w/]+)`", folders)))
        assert lines == pytest.approx(int(said.replace(",", "")), rel=0.15), f"{folders}: {lines} lines, not {said}"
        total -= lines
    assert total < 1500, f"the table leaves out folders of {total} lines"


def test_the_architecture_is_one_page() -> None:
    """It had grown to 482 lines, which nobody reads before the code; reasons are records in docs/design."""
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_decisions_are_numbered_dated_and_listed() -> None:
    """A record is found by its number and title, and says when it was decided."""
    records = sorted((ROOT / "docs" / "design").glob("0*.md"))
    index = (ROOT / "docs" / "design" / "README.md").read_text(encoding="utf-8")
    for number, record in enumerate(records, start=1):
        title, _, dated = record.read_text(encoding="utf-8").splitlines()[:3]
        assert record.name.startswith(f"{number:04}-")
        assert title.startswith(f"# {number}. ")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d · (in force|replaced by .+)", dated), record.name
        assert f"| [{title.removeprefix('# ')}]({record.name}) |" in index


NOT_IN_CODE = {"auto", "costs", "forward", "huggingface"}
"""Words of CONTRIBUTING's table that are no names in the files of their row."""


def lines_of(folder: str) -> int:
    """Lines of the Python files in a folder of the package."""
    return sum(path.read_bytes().count(b"\n") for path in (ROOT / "megatron" / folder).rglob("*.py"))


def test_flags_in_commands_exist() -> None:
    """A renamed flag must not live on in the documents."""
    given: dict[str, set[str]] = {}
    for path in files(".md"):
        for command in commands(path.read_text(encoding="utf-8")):
            for script, named in flags_by_script(command).items():
                given.setdefault(script, set()).update(named)
    assert {"pretrain_gpt.py", "tools/preprocess_data.py", "tasks/lm_eval.py"} <= set(given)
    del given["tasks/lm_eval.py"]  # whose flags are lm-evaluation-harness's, which need not be there
    del given["examples/accelerate/train.py"]  # which has none, and needs a library that need not be there
    for script, flags in given.items():
        known = help_of(script)
        assert known.startswith("usage: "), f"{script} --help does its work"
        unknown = [flag for flag in flags - {"--help"} if not re.search(rf"^ +{flag}\b(?!-)", known, re.MULTILINE)]
        assert not unknown, f"{script} has no {unknown}"


def help_of(script: str) -> str:
    """What a script prints for --help; run in this process, which need not load its libraries again for each."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        patch.setattr(sys, "argv", [script, "--help"])
        patch.setattr(registry, "_REGISTERED", {})  # a script of an example's own family registers it
        patch.setattr(sys, "path", [str((ROOT / script).parent), str(ROOT), *sys.path])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("pretrain_*.py")))
def test_help_says_what_a_script_pretrains(script: str) -> None:
    """Scripts for hybrids said "Pretrain a GPT"."""
    kind = script.removeprefix("pretrain_").removesuffix(".py")
    models = {"mamba": ("hybrid", "Mamba-2"), "hybrid": ("hybrid", "Mamba-2")}.get(kind, (kind.upper(),))
    check_sentence(help_of(script).split("\n\n")[1], *models)


def test_flags_in_commands_are_found() -> None:
    """Those of the script, not those of its launcher."""
    command = "torchrun --nproc_per_node=8 pretrain_gpt.py @x.txt --save runs/a --bf16  # --not-this"
    assert flags_by_script(command) == {"pretrain_gpt.py": ["--save", "--bf16"]}
    assert flags_by_script("bash tests/run.sh -k x") == {}
    command = "python tools/checkpoint/inspect_checkpoint.py DIR --can-load --bf16"
    assert flags_by_script(command) == {
        "tools/checkpoint/inspect_checkpoint.py": ["--can-load"],
        "pretrain_gpt.py": ["--bf16"],
    }


def test_every_page_is_two_clicks_from_the_readme() -> None:
    """A page that only other pages name is found by who knows it already."""

    def linked(page: str) -> set[str]:
        found = LINK.findall((ROOT / page).read_text(encoding="utf-8"))
        return {target.partition("#")[0] for target, _ in found}

    assert "docs/index.md" in linked("README.md")
    assert linked("docs/index.md") >= {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}


def test_the_readme_lists_every_example() -> None:
    """A script that nobody finds is of no use."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    scripts = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*/train_*.sh")}
    scripts |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("**/quickstart.sh")}
    assert len(scripts) > 10
    assert sorted(script for script in scripts if script not in text) == []


def test_what_to_read_first_is_short() -> None:
    """Seven files, less than 1,500 lines together: a stranger sees the whole idea in one sitting."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.findall(r"^\d\. \[.*?\]\((.*?)\)", text.partition("## Read first")[2], re.MULTILINE)
    assert len(first) == 7
    assert sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in first) < 1500


def test_where_things_go_names_what_is_there() -> None:
    """Somebody new finds a room in a minute only if the function that a row names is in a file that the row links."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Where things go")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!\*\*)(.+?) \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) > 25
    missing = []
    for what, where in rows:
        linked = [ROOT / target.partition("#")[0] for target, _ in LINK.findall(where)]
        text = "".join(path.read_text(encoding="utf-8") for path in linked if path.suffix == ".py")
        names = [name for name in re.findall(r"(?<!\[)`([A-Za-z_.]+)`", where) if name not in NOT_IN_CODE]
        missing += [f"{what}: {name}" for name in names if name.rpartition(".")[2] not in text]
    assert not missing, "CONTRIBUTING.md names what its links don't have:\n" + "\n".join(missing)


def test_the_recipe_for_a_family_shows_its_example() -> None:
    """Code that was copied into a document goes on being shown when the example has changed."""
    page = ROOT / "docs" / "adding_a_family.md"
    blocks = re.findall(
        r"[Ff]rom \[[^\]]+\]\(([^)]+)\):\n\n```python\n(.+?)```", page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(blocks) == 6
    for link, code in blocks:
        assert code in (page.parent / link).read_text(encoding="utf-8"), f"{link} has no longer:\n{code}"
