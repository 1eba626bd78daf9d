"""Tools that use a trained model agree with each other on any number of ranks, and say what is wrong in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.errors import DataError, MegatronError
from tasks import main as tasks
from tests.end_to_end.commands import TINY, run
from tests.harness.sentences import check_line, expect_error
from tools import text_generation_cli

GENERATE, EVALUATE = "tools/text_generation_cli.py", "tasks/main.py"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    flags = f"{TINY} --pipeline-model-parallel-size 2 --train-iters 30 --save {folder} --save-interval 30"
    run("pretrain_gpt.py", flags, ranks=2)  # what was trained in stages is used whole
    return str(folder)


def generated(*flags: str) -> str:
    """Texts of one rank, after the line that says how exact they are."""
    exactness, _, texts = run(GENERATE, "", *flags).partition("\n")
    several = flags[flags.index("--prompt") + 2 :][:1] != ()  # a single text shares its batch with none
    assert exactness.startswith("generation in float32 on cpu" + ", not batch-invariant: " * several)
    return texts


def test_text_is_the_same_on_one_rank_and_on_two(checkpoints: str) -> None:
    """Which have parts of each layer, or half of the layers."""
    flags = ["--load", checkpoints, "--prompt", "1 2 3", "7", "--tokens-to-generate", "12"]
    for how, layout in (
        (["--temperature", "0"], []),
        (["--top-k", "20", "--temperature", "0.9"], []),
        (["--top-p", "0.8"], ["--pipeline-model-parallel-size", "2"]),
    ):
        alone = generated(*flags, *how)
        assert re.fullmatch(r"-- 1\n1 2 3( \d+){1,12}\n-- 2\n7( \d+){1,12}\n", alone)
        together = run(GENERATE, "", *flags, *how, *layout, ranks=2)
        assert alone in together  # the launcher may add words of its own


def test_a_prompts_text_does_not_depend_on_the_prompts_after_it(checkpoints: str) -> None:
    flags = ["--load", checkpoints, "--tokens-to-generate", "12", "--prompt", "1 2 3"]
    (alone,) = generated(*flags).splitlines()
    assert generated(*flags, "5 6 7 8 9 10 11").splitlines()[1] == alone


def test_perplexity_is_the_same_on_one_rank_and_on_two(checkpoints: str, tmp_path: Path) -> None:
    text = tmp_path / "held-out.jsonl"
    text.write_text('{"text": "1 2 3 4 5 6 7 8"}\n\n{"text": "' + " ".join(map(str, range(100))) + '"}\n')
    flags = ["--task", "LM", "--load", checkpoints, "--valid-data", str(text), "--micro-batch-size", "3"]
    (alone,) = re.findall(r"^ validation results.*", run(EVALUATE, "", *flags), re.MULTILINE)
    assert "documents: 2 | tokens: 108 | bytes: 304" in alone
    assert alone in run(EVALUATE, "--pipeline-model-parallel-size 2", *flags, ranks=2)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        (["--load", "nowhere", "--prompt", "1"], ["--load nowhere"]),
        (["localhost:1", "--prompt", "1"], ["localhost:1"]),
        (["--prompt", "1"], ["--load"]),
        (
            ["--load", "{}", "--prompt", " ".join(["1"] * 30)],
            ["prompt 1", "30 tokens", "64"],
        ),
        (["--load", "{}", "--prompt", "1 301"], ["301"]),
        (["--load", "{}", "--prompt-file", "missing"], ["--prompt-file missing"]),
        (["--load", "{}", "--top-p", "1.5", "--prompt", "1"], ["--top-p", "1.5"]),
        (["--load", "{}", "--ckpt-step", "7", "--prompt", "1"], ["--ckpt-step 7"]),
    ],
    ids=["no folder", "server", "no model", "too long", "unknown token", "no file", "impossible", "no step"],
)
def test_mistakes_are_one_sentence(checkpoints: str, more: list[str], facts: list[str]) -> None:
    with expect_error(MegatronError, *facts, exit_code=2):
        text_generation_cli.main([word.format(checkpoints) for word in more])


@pytest.mark.parametrize(
    ("flags", "code"), [(["--top-p", "1.5"], 2), (["--load", "nowhere", "--prompt", "1"], 2)], ids=["flags", "folder"]
)
def test_ranks_do_not_repeat_what_the_first_says(
    flags: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one sentence would be lost among its copies."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as caught:
        text_generation_cli.main(flags)
    assert caught.value.code == code
    assert capsys.readouterr().err == ""


def test_more_ranks_than_heads_are_refused_with_what_would_work(checkpoints: str) -> None:
    said = run(GENERATE, "", "--load", checkpoints, "--prompt", "1", ranks=3, expect=1)
    check_line(said, "3 ranks", "4 heads", "128 columns", "start 1, 2 or 4")


@pytest.mark.parametrize("line", ["{broken", '{"body": "1"}'])
def test_bad_lines_are_named(checkpoints: str, tmp_path: Path, line: str) -> None:
    text = tmp_path / "held-out.jsonl"
    text.write_text('{"text": "1 2"}\n' + line + "\n")
    with expect_error(DataError, "held-out.jsonl:2"):
        tasks.main(["--task", "LM", "--load", checkpoints, "--valid-data", str(text)])
