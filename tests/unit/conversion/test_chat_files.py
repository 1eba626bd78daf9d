"""What ends a published model's answers, and how it writes conversations: read, kept and written back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.core.checkpointing.find import find_checkpoint
from megatron.core.checkpointing.load import read_run_state
from megatron.core.conversion.chat_files import chat_of_checkpoint, write_chat
from megatron.core.conversion.convert import Conversion, convert
from megatron.core.conversion.huggingface.reading import from_transformers, read_huggingface
from megatron.core.conversion.huggingface.writing import write_huggingface
from megatron.core.conversion.native import read_native
from megatron.core.tokenizers.build import build_tokenizer
from megatron.core.tokenizers.chat_settings import ChatSettings
from megatron.errors import CheckpointError
from tests.harness.chat_model import END, LETTER, TEMPLATE, TURN_END, TURN_OVER, chat_folder
from tests.harness.sentences import check_line, check_sentence, expect_error

ENDS = ChatSettings(template=None, end_tokens=(TURN_END, TURN_OVER))


def do(source: Any, load: Path, target: Any, save: Path) -> list[str]:
    said = list[str]()
    convert(Conversion(source, load, target, save, skip_proof=True), say=said.append)
    return said


def ids(path: Path) -> Any:
    return json.loads(path.read_text()).get("eos_token_id")


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"eos_token_id": [TURN_OVER, END, TURN_END]}, (TURN_END, TURN_OVER)),
        ({"config_eos_token_id": [END, TURN_END]}, (TURN_END,)),
        ({"eos_token_id": TURN_OVER, "config_eos_token_id": [END, TURN_END]}, (TURN_OVER,)),
        ({"max_length": 9, "config_eos_token_id": TURN_END}, (TURN_END,)),
        ({"config_eos_token_id": None, "config_text_config": {"eos_token_id": [END, TURN_END]}}, (TURN_END,)),
        ({"eos_token_id": END}, ()),
        ({"eos_token_id": None, "config_eos_token_id": None}, ()),
    ],
)
def test_end_tokens_are_those_of_the_folder(settings: dict[str, Any], ends: tuple[int, ...], tmp_path: Path) -> None:
    """Lists, which most chat models have, were copied and read by nothing: answers went on after their end."""
    portable = read_huggingface(chat_folder(tmp_path / "hf", **settings))
    assert portable.chat == (ChatSettings(template=None, end_tokens=ends) if ends else None)


@pytest.mark.parametrize("value", ["2", [0, "2"], True, 2.0, {"a": 2}, [[2]]])
def test_what_is_no_id_is_refused(value: Any, tmp_path: Path) -> None:
    """It became a traceback, or an end token that nothing is equal to."""
    folder = chat_folder(tmp_path / "hf", eos_token_id=value)
    with expect_error(CheckpointError, "generation_config.json", "eos_token_id"):
        read_huggingface(folder)


def test_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    """No text has them; whoever wrote them meant something else."""
    portable = read_huggingface(chat_folder(tmp_path / "hf", eos_token_id=[END, 275, -1, TURN_END]))
    assert portable.chat == ChatSettings(template=None, end_tokens=(TURN_END,))
    (note,) = portable.notes
    check_sentence(note, f"{tmp_path}/hf/generation_config.json", "eos_token_id", "275", "-1", "274")


def test_settings_that_only_transformers_takes_are_named(tmp_path: Path) -> None:
    """A model seems worse here than there when its folder asks for sampling settings and nobody says so."""
    asked: dict[str, Any] = {
        "temperature": 0.6,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
        "suppress_tokens": [5],
        "num_beams": 1,
    }
    for do_sample, found in ((True, "temperature 0.6, top_p 0.9, "), (False, "")):
        name = f"hf {do_sample}"
        portable = read_huggingface(chat_folder(tmp_path / name, do_sample=do_sample, **asked))
        (note,) = portable.notes
        assert note.startswith(
            f"note: {tmp_path}/{name}/generation_config.json asks for {found}repetition_penalty 1.05, "
        )
        check_line(note, "suppress_tokens a list of 1")


@pytest.mark.parametrize("way", [["megatron"], ["megatron-lm"], ["megatron", "megatron-lm", "megatron"]], ids=str)
def test_lists_come_back_in_their_order(way: list[str], tmp_path: Path) -> None:
    """In both files, as they were: an id that is no list stays one."""
    settings: dict[str, Any] = {"eos_token_id": [TURN_OVER, END, TURN_END], "top_k": 7}
    place = chat_folder(tmp_path / "hf", config_eos_token_id=[TURN_END, END], **settings)
    kind = "hf"
    for number, each in enumerate([*way, "hf"]):
        do(kind, place, each, tmp_path / str(number))
        kind, place = each, tmp_path / str(number)
        if each == "megatron":
            assert read_native(place).chat == ENDS
    assert json.loads((place / "generation_config.json").read_text()) == settings
    assert ids(place / "config.json") == [TURN_END, END]
    assert (place / "chat_template.jinja").read_text() == TEMPLATE


def stops_at(folder: Path) -> list[int]:
    """What transformers' model in the folder says by itself."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[LETTER, LETTER]])
    said: list[int] = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=END)[0, 2:].tolist()
    return said


@pytest.mark.parametrize(
    ("settings", "written"),
    [
        ({"eos_token_id": [TURN_OVER, END]}, [TURN_OVER, END, TURN_END]),
        ({"eos_token_id": END, "_from_model_config": True}, [END, TURN_END]),
        ({"eos_token_id": TURN_OVER}, [TURN_OVER, END, TURN_END]),
        ({}, [END, TURN_END]),
    ],
)
def test_transformers_stops_where_the_model_learned_to(
    settings: dict[str, Any], written: list[int], tmp_path: Path
) -> None:
    """After fine-tuning here, the end of a turn was written nowhere, and transformers went on after it."""
    source = chat_folder(tmp_path / "hf", template=None, **settings)
    assert stops_at(source) == [TURN_END] * 4
    learned = ChatSettings(template=TEMPLATE, end_tokens=(TURN_END,))
    write_huggingface(
        dataclasses.replace(read_huggingface(source), chat=learned), tmp_path / "out", max_shard_size=10**9
    )
    found = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert found == {"eos_token_id": written} | ({} if settings else {"bos_token_id": END})
    assert ids(tmp_path / "out/config.json") == END
    assert stops_at(tmp_path / "out") == [TURN_END]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.chat_template == TEMPLATE
    assert stops_at(tmp_path / "out") == [TURN_END]


def test_a_template_beside_another_kind_of_tokenizer_is_kept(tmp_path: Path) -> None:
    """A tokenizer of vocab.json and merges.txt looks for no template, so it was lost on the way."""
    source = chat_folder(tmp_path / "hf")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    do("hf", source, "megatron", tmp_path / "ours")
    portable = read_native(tmp_path / "ours")
    assert portable.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert portable.chat is not None and portable.chat.template == TEMPLATE
    (tmp_path / "ours/huggingface/chat_template.jinja").unlink()
    do("megatron", tmp_path / "ours", "hf", tmp_path / "out")
    assert (tmp_path / "out/chat_template.jinja").read_text() == TEMPLATE


def test_transformers_finds_the_class_of_a_vocabulary(tmp_path: Path) -> None:
    """vocab.json and merges.txt alone don't say what reads them: AutoTokenizer failed on our own folders."""
    source = chat_folder(tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).unlink()
    do("hf", source, "megatron", tmp_path / "ours")
    do("megatron", tmp_path / "ours", "hf", tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    back = read_huggingface(tmp_path / "out").tokenizer
    assert back.tokenizer_type == "GPT2BPETokenizer"
    ours = build_tokenizer(back)
    text = "It's 12 lines,\n  naïve 日本"
    assert theirs.encode(text) == ours.tokenize(text)
    assert theirs.eos_token_id == ours.eod


def test_older_checkpoints_end_as_their_source_does(tmp_path: Path) -> None:
    """They were saved without an entry for it, and beside the files of the model that they come from."""
    do("hf", chat_folder(tmp_path / "hf", eos_token_id=[TURN_OVER, END, TURN_END]), "megatron", tmp_path / "ours")
    folder = find_checkpoint(tmp_path / "ours")
    state, tokenizer = read_run_state(folder), read_native(tmp_path / "ours").tokenizer
    assert state.pop("chat") == {"template": None, "end_tokens": [TURN_END, TURN_OVER]}
    assert chat_of_checkpoint(folder, state, tokenizer) == ENDS
    for name in ("generation_config.json", "config.json"):
        (tmp_path / "ours/huggingface" / name).unlink()
    assert chat_of_checkpoint(folder, state, tokenizer) is None


def test_a_damaged_entry_is_one_sentence(tmp_path: Path) -> None:
    """As every other part of a checkpoint that someone has edited."""
    do("hf", chat_folder(tmp_path / "hf", eos_token_id=[END, TURN_END]), "megatron", tmp_path / "ours")
    folder = find_checkpoint(tmp_path / "ours")
    state, tokenizer = read_run_state(folder), read_native(tmp_path / "ours").tokenizer
    damaged: tuple[Any, ...] = (
        {"template": None, "end_tokens": [2, 275]},
        {"template": None, "end_tokens": "2"},
        {"end_tokens": [2]},
        [],
    )
    for entry in damaged:
        with expect_error(CheckpointError):
            chat_of_checkpoint(folder, {**state, "chat": entry}, tokenizer)


def test_a_model_in_memory_ends_as_it_does_there(tmp_path: Path) -> None:
    """Its list of end tokens was left behind."""
    folder = chat_folder(tmp_path / "hf", eos_token_id=[END, TURN_END])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chat = from_transformers(model).chat
    assert chat is not None and chat.end_tokens == (END, TURN_END)


def test_a_tokenizer_with_two_ends_writes_both(tmp_path: Path) -> None:
    """Texts ended here at both, and in transformers at one of them. A BERT writes no texts."""
    source = chat_folder(tmp_path / "hf", template=None)
    portable = read_huggingface(source)
    tokenizer = build_tokenizer(portable.tokenizer)
    tokenizer.eos = TURN_END
    for continues, files in ((False, False), (True, True)):
        folder = tmp_path / str(continues)
        write_huggingface(portable, folder, max_shard_size=10**9)
        write_chat(None, folder, tokenizer, continues_texts=continues)
        assert (folder / "generation_config.json").exists() == files
    assert ids(tmp_path / "True/generation_config.json") == [END, TURN_END]
