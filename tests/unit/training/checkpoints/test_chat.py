"""What fine-tuning on conversations teaches, where answers end and how turns are written, stays with the model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse_run
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.models.registry import FAMILIES
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.environment import launch_environment
from megatron.core.tokenizers.chat_settings import ChatSettings, without_ids_from
from megatron.errors import DataError
from megatron.training.checkpoints.huggingface_folders import HuggingFaceFolders
from megatron.training.checkpoints.loading import load, saved_config
from megatron.training.checkpoints.published import published_config
from megatron.training.checkpoints.saving import Saver
from megatron.training.checkpoints.trained_model import trained_model
from megatron.training.evaluation.samples import Samples
from megatron.training.run.run import Run, build_run
from megatron.training.step import train_step
from tasks.zero_shot.questions import Asked, Questions
from tests.harness.chat_model import END, LETTER, TURN_END, TURN_OVER, change_json, chat_folder
from tests.harness.sentences import expect_error
from tools import preprocess_sft, text_generation_cli
from tools.generation.families import GENERATIVE

pytest.importorskip("transformers", reason="it writes the published model")
pytest.importorskip("jinja2", reason="chat templates are written in it")

TINY = (
    "--micro-batch-size 1 --global-batch-size 2 --lr 0 --train-iters 4 --eval-iters 0 --num-workers 0 --sft "
    "--packing best-fit --seq-length 32 --attention-dropout 0 --hidden-dropout 0 --load-hf-proof off --save-interval 1"
)
RECORD = {"messages": [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "brown"}]}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model that would say the end of a turn and go on: it has neither a template nor that as its end."""
    return chat_folder(tmp_path_factory.mktemp("base") / "hf", says=TURN_END, template=None, eos_token_id=END)


@pytest.fixture(scope="module")
def data(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations, prepared in the usual format of turns."""
    return prepared(tmp_path_factory.mktemp("data") / "sft", hf)


@pytest.fixture(scope="module")
def learned(data: str) -> ChatSettings:
    """What the data say of themselves."""
    metadata = DatasetMetadata.read(data)
    assert metadata is not None and metadata.chat is not None and metadata.chat.end_tokens == (TURN_END,)
    return metadata.chat


def prepared(prefix: Path, hf: Path, chat: ChatSettings | None = None) -> str:
    """Conversations that say they are written as in ``chat``, if it is given."""
    source = prefix.with_suffix(".jsonl")
    source.write_text(f"{json.dumps(RECORD)}\n" * 20)
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(hf)]
    preprocess_sft.main(["--input", str(source), "--output-prefix", str(prefix), *tokenizer])
    if chat is not None:
        change_json(Path(f"{prefix}.meta.json"), chat={"template": chat.template, "end_tokens": list(chat.end_tokens)})
    return str(prefix)


def started(flags: str) -> Run:
    config = parse_run(
        f"{TINY} {flags}".split(),
        extra_groups=FAMILIES["gpt"].groups,
        checkpoint_config=saved_config,
        published_config=published_config,
    )
    run = build_run(config, FAMILIES["gpt"].train_spec, ParallelContext.single(), started=0.0)
    load(run)
    return run


def trained(flags: str) -> Run:
    """One more step and its checkpoint."""
    run = started(flags)
    batches = run.data.training_batches(run.progress.consumed_samples)
    train_step(run, next(batches))
    Saver(run).save()
    return run


def stored(save: Path) -> Any:
    step = (save / "latest_checkpointed_iteration.txt").read_text()
    return json.loads((save / f"iter_{int(step):07d}/run.json").read_text())["state"]["chat"]


def said_in_chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What ``--chat`` prints of an answer of up to three tokens."""
    monkeypatch.setattr("sys.stdin", io.StringIO("the fox\n"))
    words = ["--load", str(folder), "--chat", "--tokens-to-generate", "3", "--temperature", "0"]
    capsys.readouterr()
    text_generation_cli.main([*words, *flags])
    return capsys.readouterr().out


def test_an_answer_ends_where_fine_tuning_ended_it(
    hf: Path,
    data: str,
    learned: ChatSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The end of a turn was written nowhere: --chat wanted a template, and the model talked on for its user.

    Samples during training and generation for evaluation end there, too, and so does the model that --save-hf writes.
    """
    save = tmp_path / "saved"
    run = trained(f"--load-hf {hf} --train-data-path {data} --save {save} --save-hf {tmp_path}/hf")
    assert stored(save) == {"template": learned.template, "end_tokens": [TURN_END]}
    assert said_in_chat(save, monkeypatch, capsys) == "\n"
    assert said_in_chat(save, monkeypatch, capsys, "--end-tokens", str(TURN_OVER)) == "<|im_end|>" * 3 + "\n"
    with trained_model(TrainedModelConfig(load=str(save)), GENERATIVE, launch_environment({})) as model:
        assert model.chat == learned
        asked = Asked.of({"max_gen_toks": 3, "until": []})
        assert Questions(model).continuations([[LETTER]], [0], asked) == [""]
    run.progress.iteration = run.config.train_iters
    HuggingFaceFolders(run, Saver(run)).write_if_due()
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == [END, TURN_END]
    assert (tmp_path / "hf/chat_template.jinja").read_text() == learned.template


def test_samples_end_there(hf: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a run on conversations went on after the end of the answer, unlike the model when it is asked."""
    sampling = "--generate-samples-interval 1 --generate-samples-prompts the --generate-samples-temperature 0"
    run = started(f"--load-hf {hf} --train-data-path {data} {sampling}")
    found = list[tuple[str, str]]()
    monkeypatch.setattr(run.reporter, "samples", lambda each, iteration: found.extend(each))
    Samples(run).write_if_due()
    assert found == [("the", "")]


def test_whoever_goes_on_keeps_it(hf: Path, data: str, learned: ChatSettings, tmp_path: Path) -> None:
    """A resumed run, one of other data, and one that starts from the weights alone."""
    save, other = tmp_path / "saved", tmp_path / "plain"
    trained(f"--load-hf {hf} --train-data-path {data} --save {save}")
    resumed = f"--load {save} --use-checkpoint-args"
    trained(f"{resumed} --train-data-path {data} --save {save}")
    assert stored(save) == {"template": learned.template, "end_tokens": [TURN_END]}
    plain = f"{resumed} --finetune --train-data-path {data} --no-sft --packing stream --save {other}"
    assert trained(plain).chat == learned
    new = prepared(tmp_path / "new", hf, ChatSettings(template="{{ messages }}", end_tokens=(TURN_OVER,)))
    weights = (
        f"--pretrained-checkpoint {save} --use-checkpoint-args --load {tmp_path}/new-run --save {tmp_path}/new-run"
    )
    assert trained(f"{weights} --train-data-path {new}").chat == ChatSettings(
        template="{{ messages }}", end_tokens=(TURN_END, TURN_OVER)
    )
    convert(Conversion("megatron", save, "hf", tmp_path / "hf", skip_proof=True), say=lambda line: None)
    assert started(f"--load-hf {tmp_path}/hf --train-data-path {data}").chat == learned


def test_a_blend_of_different_formats_is_said(hf: Path, data: str, learned: ChatSettings, tmp_path: Path) -> None:
    """One template was kept, and nobody knew of which data."""
    other = prepared(tmp_path / "other", hf, ChatSettings(template="{{ messages }}", end_tokens=(TURN_OVER,)))
    run = started(f"--load-hf {hf} --train-data-path {data} {other} {data}")
    (remark,) = [line for line in run.data.describe() if "written alike" in line]
    assert remark.startswith(
        f"conversations are not written alike: {other} has another chat template and other end tok"
    )
    assert run.chat == ChatSettings(template=learned.template, end_tokens=(TURN_END, TURN_OVER))


def test_another_tokenizer_means_other_ids(hf: Path, tmp_path: Path) -> None:
    """End tokens of the published model would be words of the run's tokenizer."""
    base = chat_folder(tmp_path / "base", eos_token_id=[END, TURN_END])
    assert started(f"--load-hf {base} --mock-data --no-sft --packing stream").chat == ChatSettings(
        template=None, end_tokens=(TURN_END,)
    )
    (tmp_path / "words").mkdir()
    vocabulary = json.loads((base / "vocab.json").read_text())
    swapped = {name: {TURN_END: LETTER, LETTER: TURN_END}.get(each, each) for name, each in vocabulary.items()}
    (tmp_path / "words/vocab.json").write_text(json.dumps(swapped))
    (tmp_path / "words/merges.txt").write_bytes((base / "merges.txt").read_bytes())
    files = f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path}/words/vocab.json"
    files += f" --merge-file {tmp_path}/words/merges.txt"
    assert started(f"--load-hf {base} --mock-data --no-sft --packing stream {files}").chat is None


def test_end_tokens_that_the_model_does_not_have_are_not_stored(hf: Path, tmp_path: Path) -> None:
    """They made a checkpoint that no program could load."""
    wrong = prepared(tmp_path / "wrong", hf, ChatSettings(template=None, end_tokens=(275,)))
    with expect_error(DataError, "wrong.meta.json", "chat.end_tokens", "275", "0", "274"):
        started(f"--load-hf {hf} --train-data-path {wrong}")
    assert without_ids_from(ChatSettings(template="a", end_tokens=(2, 275)), 275) == ChatSettings(
        template="a", end_tokens=(2,)
    )
    assert without_ids_from(None, 275) is None
