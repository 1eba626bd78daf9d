"""Make an environment of each promised pair of Python and torch, and run a flow of ten minutes in it.

``python -m tests.releases.try_versions`` tries all pairs, with ``--pair 3.10:2.9.1`` one of them or another one. Each
environment gets the wheel of this checkout, and is deleted afterwards unless ``--keep`` is given. It prints which pairs
were not run, as this machine lacks their Python or pip their torch; nothing is promised of those.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from tests.releases.flow import Environment, StepError, run_flow

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "huggingface,plot"


@dataclass(frozen=True)
class Pair:
    """A Python and a torch that users are promised, and the oldest releases of other libraries to go with them."""

    python: str
    torch: str
    others: tuple[str, ...] = ()

    @override
    def __str__(self) -> str:
        return f"Python {self.python} with torch {self.torch}"


PROMISED = (Pair("3.10", "2.9.1", ("nltk==3.9.1",)), Pair("3.11", "2.13.0"), Pair("3.13", "2.14.1"))
"""The oldest, the one that everything is tested with, and the newest that were run; README names them."""


class NotRunError(Exception):
    """A pair that this machine can't try, and why."""


def interpreter(version: str) -> str:
    """Path of a Python of ``version``, such as 3.10: one on the path, or one of pyenv's. Raises NotRunError."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
        return found  # pyenv puts a command of that name on the path that may only say that there is none
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    if installed := sorted(pyenv.glob(f"{version}.*/bin/python")):
        return str(installed[-1])
    raise NotRunError(f"there is no Python {version} here")


def wheel(folder: Path) -> Path:
    """A wheel of the files that git knows, so that nothing is built in the checkout."""
    copy = folder / "checkout"
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    built = folder / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), str(copy)]
    subprocess.run(command, check=True)
    return next(built.glob("*.whl"))


def environment(pair: Pair, folder: Path, built: Path) -> Environment:
    """A new environment of ``pair`` in ``folder``, with the wheel ``built`` and its extras. Raises NotRunError."""
    python = interpreter(pair.python)
    place = folder / f"python{pair.python}-torch{pair.torch}"
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(place)], check=True)
        wanted = [f"torch=={pair.torch}", *pair.others, f"{built}[{EXTRAS}]"]
        pip = [str(place / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
        with (folder / f"{place.name}.pip.log").open("w") as log:
            if subprocess.run([*pip, *wanted], stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
                raise NotRunError(f"pip can't install {' '.join(wanted[:-1])}: {log.name} says why")
        (place / "complete").touch()
    else:  # kept by an earlier call: only this project is new
        pip = [str(place / "bin/python"), "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
        subprocess.run([*pip, str(built)], check=True)
    return Environment(place / "bin", folder / f"{place.name}.flow", pair.torch)


def try_pair(pair: Pair, folder: Path, built: Path, *, keep: bool) -> str:
    """What becomes of the flow with ``pair``, in a few words that begin with ok, FAILED or not run."""
    try:
        made = environment(pair, folder, built)
        return f"ok: {run_flow(made)}"
    except NotRunError as reason:
        return f"not run: {reason}"
    except StepError as failure:
        return f"FAILED: {failure}"
    finally:
        if not keep:
            shutil.rmtree(folder / f"python{pair.python}-torch{pair.torch}", ignore_errors=True)


def main(argv: Sequence[str]) -> int:
    """Try the pairs, and print a line for each; 1 if one failed or could not be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.releases.try_versions", description=__doc__)
    parser.add_argument("--pair", action="append", metavar="PYTHON:TORCH", help="only this one; may be given again")
    parser.add_argument("--folder", type=Path, help="folder of environments and logs (default: a temporary one)")
    parser.add_argument(
        "--keep", action="store_true", help="keep the environments, of several GB with CUDA's libraries"
    )
    given = parser.parse_args(argv)
    known = {(pair.python, pair.torch): pair for pair in PROMISED}
    asked = [tuple(text.partition(":")[::2]) for text in given.pair or ()]
    pairs = [known.get(words, Pair(*words)) for words in asked] or PROMISED
    folder = given.folder.resolve() if given.folder else Path(tempfile.mkdtemp(prefix="try_versions_"))
    folder.mkdir(parents=True, exist_ok=True)
    built, said = wheel(folder), {}
    for pair in pairs:
        print(f"== {pair}", flush=True)
        said[pair] = try_pair(pair, folder, built, keep=given.keep)
        print(f"   {said[pair]}", flush=True)
    print("\n".join(["== all", *(f"   {pair}: {words}" for pair, words in said.items()), f"   logs: {folder}"]))
    return 0 if all(words.startswith("ok") for words in said.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
