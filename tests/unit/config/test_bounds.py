"""Every number has bounds, and they are checked before anything is computed from it."""

from __future__ import annotations

import gc
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.config.command import CommandConfig
from megatron.config.flags import COUNT, REAL, SIZE, FlagSpec, flags_of, words
from megatron.config.parse import parse_run
from megatron.config.run import CORE_GROUPS
from megatron.core.models.registry import FAMILIES
from megatron.errors import ConfigError

SIZES = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
LINE = f"{SIZES} --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --mock-data --vocab-size 100"
MORE = {"t5": "--decoder-seq-length 64"}
EXTREMES = (SIZE, SIZE - 1, COUNT - 111, REAL, 0, -1, 1e-320)
LONGEST_SECONDS = 1.0  # of the processor


def numbers_of(family: str, *, own: bool = False) -> Iterator[FlagSpec]:
    """Every flag of a training run that takes numbers; only those of the family's ``own`` groups."""
    for group in (*(() if own else (*CORE_GROUPS, CommandConfig)), *FAMILIES[family].groups):
        yield from (spec for spec in flags_of(group) if spec.kind in (int, float) and not spec.options.internal)


def typed(spec: FlagSpec, number: object) -> str:
    """The flag with as many values as it takes."""
    return f"{spec.positive} {words([number] * (spec.count or 1))}"


def answer(family: str, *given: str) -> str:
    """What a dry run says to the line with ``given`` flags; nothing when it is valid. It must not take long."""
    argv = " ".join([LINE, MORE.get(family, ""), "--dry-run --world-size 8", *given]).split()
    gc.disable()  # of other tests' garbage
    before, said = time.thread_time(), ""
    try:
        run = parse_run(argv, extra_groups=FAMILIES[family].groups)
        assert run.train_iters >= 0 and run.train_samples >= 0
    except ConfigError as error:
        said = str(error)
    finally:
        gc.enable()
    assert time.thread_time() - before < LONGEST_SECONDS, given
    return said


@pytest.mark.parametrize("number", ["1" + 31 * "0", "-1" + 31 * "0", "9" * 5000, "1.1e30", "1e400", "inf", "nan"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_has_bounds(family: str, number: str) -> None:
    """--num-layers 99999999999999999999 made a list of as many layers before its bound was checked, for minutes."""
    specs = [*numbers_of(family)]
    said = answer(family, *(typed(spec, number) for spec in specs))
    for spec in specs:
        assert re.search(rf"{spec.positive} (is [^\n]*(must be|number)|cannot be)", said), spec.positive
    assert len(said) < 200 * len(specs)  # a number of 5000 digits is shown by its beginning


@pytest.mark.parametrize(
    "numbers",
    [(SIZE - 1, COUNT - 111), *(pytest.param((each,), marks=pytest.mark.slow) for each in EXTREMES)],
    ids=lambda numbers: "in turn" if len(numbers) > 1 else repr(numbers[0]),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_extremes_are_answered_at_once(family: str, numbers: tuple[float, ...]) -> None:
    """--hidden-size 9007199254740881 looked for its divisors for seconds; each flag takes its largest and smallest."""
    for spec, number in zip(numbers_of(family, own=family != "gpt"), itertools.cycle(numbers)):
        answer(family, typed(spec, number))


@pytest.mark.parametrize("family", FAMILIES)
def test_extremes_together_are_answered_at_once(family: str) -> None:
    """Numbers that are each within their bounds."""
    sizes = [typed(spec, SIZE - 1) for spec in numbers_of(family) if not spec.out_of_bounds(SIZE - 1)]
    assert len(sizes) > 80
    assert answer(family, *sizes)
    assert answer(family, "--rampup-batch-size 8 8 1000000", f"--global-batch-size {SIZE - 7}")


def test_a_later_value_replaces_one_out_of_bounds() -> None:
    """A value that is not used is not judged."""
    assert answer("gpt", "--lr -1 --lr 1e-3") == ""


def test_settings_files_have_the_same_bounds(tmp_path: Path) -> None:
    """A number of a file is named with its file."""
    file = tmp_path / "run.json"
    file.write_text('{"ffn_hidden_size": 1000000000000000000000}', encoding="utf-8")
    said = answer("gpt", f"--config {file}")
    assert said == f"{file}: --ffn-hidden-size is 1000000000000000000000; it must be at most 2147483647"
