"""A checkout whose ``python`` and ``torchrun`` run scripts in processes forked from one that has loaded torch.

A bash script that starts Python a dozen times runs in it word for word, without the seconds that each start takes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.end_to_end.commands import ROOT
from tests.harness.scripts import run_script

PROGRAMS = ("python", "torchrun")
STAND_IN = r"""#!/bin/sh
# Announces its words, waits for the exit code, and prints what the script printed.
here=$(mktemp -d "{folder}/call-XXXXXX")
mkfifo "$here/code"
printf '%s\0' "${{0##*/}}" "$@" >"$here/words"
echo "$here" >"{folder}/calls"
code=$(cat "$here/code")
cat "$here/log"
exit "$code"
"""


def run_bash(script: str, folder: Path, *, variables: Mapping[str, str]) -> str:
    """Run a bash script of the repository to its end and return what it prints; ``folder`` is for its checkout.

    Raises AssertionError when it fails.
    """
    checkout, calls = folder / "checkout", folder / "calls"
    (checkout / ".venv/bin").mkdir(parents=True)
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (checkout / path.name).symlink_to(path)
    for program in PROGRAMS:
        stand_in = checkout / ".venv/bin" / program
        stand_in.write_text(STAND_IN.format(folder=folder))
        stand_in.chmod(0o755)
    os.mkfifo(calls)
    with (folder / "output").open("wb") as output, os.fdopen(os.open(calls, os.O_RDWR), "r") as announced:
        words = f'bash "$1"; code=$?; echo >"{calls}"; exit $code'  # the empty line is the last one
        process = subprocess.Popen(
            ["bash", "-c", words, "bash", str(checkout / script)],
            cwd=folder,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while call := announced.readline().strip():
            _answer(Path(call))
        code = process.wait()
    said = (folder / "output").read_text()
    assert code == 0, said
    return said


def _answer(call: Path) -> None:
    """Run what a stand-in was called with."""
    program, *words = (call / "words").read_text().split("\0")[:-1]
    code, ranks, log = 0, 1, call / "log"
    log.touch()
    if program == "torchrun":
        standalone, number, *words = words
        assert standalone == "--standalone"
        ranks = int(number.removeprefix("--nproc_per_node="))
    if words[0] != "-c":  # looks for libraries, which are here
        code = run_script(words[0], words[1:], ranks=ranks, log=log).code
    (call / "code").write_text(f"{code}\n")
