"""Documents rearranged for fill-in-the-middle: the same text, in the same length, the same for every reading."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import override

from megatron.config.data import DataConfig
from megatron.core.datasets.fill_in_the_middle import FillInTheMiddle, mark_id
from megatron.core.datasets.splits import SplitSizes
from megatron.core.models.gpt.data import build_gpt_splits
from megatron.errors import ConfigError
from tests.harness.sentences import expect_error
from tests.unit.datasets.conftest import FakeTokenizer, WriteDocuments

EOD, PREFIX, MIDDLE, SUFFIX = 50, 51, 52, 53
MARKS = {"<p>": PREFIX, "<m>": MIDDLE, "<s>": SUFFIX}


class Letters(FakeTokenizer):
    """Token n below 50 is one character, 49 is no character; marks are known as special tokens."""

    @override
    def tokenize(self, text: str) -> list[int]:
        return [MARKS[text]] if text in MARKS else [ord(character) - 65 for character in text]

    @override
    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join("\ufffd" if each == 49 else chr(65 + each) for each in ids)


def rearrange(rate: float = 1.0, spm_rate: float = 0.0) -> FillInTheMiddle:
    return FillInTheMiddle(
        tokenizer=Letters(),
        eod=EOD,
        seed=1,
        rate=rate,
        spm_rate=spm_rate,
        prefix=PREFIX,
        middle=MIDDLE,
        suffix=SUFFIX,
    )


DOCUMENT = np.arange(40)


def cut(tokens: NDArray[np.int64], *marks: int) -> list[list[int]]:
    """What stands after each mark."""
    places = [int(np.flatnonzero(tokens == mark)[0]) for mark in marks]
    assert places == sorted(places)
    return [tokens[start + 1 : stop].tolist() for start, stop in zip(places, [*places[1:], len(tokens)])]


@pytest.mark.parametrize("index", range(20))
def test_prefix_suffix_middle(index: int) -> None:
    """Put together in their order the parts are the document, without what the three marks take at its end."""
    tokens = rearrange()(DOCUMENT, index=index)
    prefix, suffix, middle = cut(tokens, PREFIX, SUFFIX, MIDDLE)
    assert prefix + middle + suffix == list(range(37))
    assert len(tokens) == len(DOCUMENT)


@pytest.mark.parametrize("index", range(20))
def test_prefix_last(index: int) -> None:
    tokens = rearrange(spm_rate=1.0)(DOCUMENT, index=index)
    empty, suffix, rest = cut(tokens, PREFIX, SUFFIX, MIDDLE)
    assert empty == []
    assert rest + suffix == list(range(37))


def test_documents_of_a_sample_are_rearranged_each() -> None:
    """Borders stay where they are, or documents would run into each other."""
    tokens = np.concatenate([DOCUMENT[:12], [EOD], DOCUMENT[12:30], [EOD], DOCUMENT[30:]])
    found = rearrange()(tokens, index=3)
    assert np.flatnonzero(found == EOD).tolist() == np.flatnonzero(tokens == EOD).tolist()
    assert np.count_nonzero(found == PREFIX) == 3


def test_the_same_for_every_reading() -> None:
    """A resumed run, another worker, another rank: sample i is sample i."""
    once, again = (rearrange(0.5, 0.5)(DOCUMENT, index=7) for _ in range(2))
    assert once.tolist() == again.tolist()
    different = {tuple(rearrange(1.0, 0.5)(DOCUMENT, index=index).tolist()) for index in range(30)}
    assert len(different) > 25
    assert rearrange()(DOCUMENT, index=7, copy=1).tolist() != rearrange()(DOCUMENT, index=7).tolist()


def test_rates() -> None:
    changed = [PREFIX in rearrange(0.3)(DOCUMENT, index=index) for index in range(2000)]
    assert 0.27 < np.mean(changed) < 0.33
    last = [rearrange(1.0, 0.25)(DOCUMENT, index=index)[1] == SUFFIX for index in range(2000)]
    assert 0.22 < np.mean(last) < 0.31  # with an empty prefix both forms look alike
    assert (rearrange(0.0)(DOCUMENT, index=1) == DOCUMENT).all()


def test_what_is_no_text_stays() -> None:
    """Half of a character at the edge of a sample can't be spelled; a document of two tokens has no room for marks."""
    broken = np.array([49, *range(20)])
    assert (rearrange()(broken, index=0) == broken).all()
    assert rearrange()(np.array([1, 2]), index=0).tolist() == [1, 2]
    assert rearrange()(np.array([EOD, EOD]), index=0).tolist() == [EOD, EOD]


def test_marks_are_tokens() -> None:
    """A mark that is spelled in letters would teach nothing that can be asked for."""
    assert mark_id(Letters(), "<m>", flag="--fim-middle-token") == MIDDLE
    with expect_error(ConfigError, "--fim-middle-token 'ABC'", "3 tokens"):
        mark_id(Letters(), "ABC", flag="--fim-middle-token")


def test_training_data_only(write_documents: WriteDocuments) -> None:
    """The validation loss stays comparable with that of a model trained without."""
    prefix = write_documents([[*range(20), EOD]] * 30)
    config = DataConfig(
        seq_length=21,
        train_data_path=(prefix,),
        valid_data_path=(prefix,),
        fim_rate=1.0,
        fim_prefix_token="<p>",
        fim_middle_token="<m>",
        fim_suffix_token="<s>",
    )
    splits = build_gpt_splits(
        config, seed=1, sizes=SplitSizes(20, 20, 0), tokenizer=Letters(vocab_size=54), vocab_size=54
    )
    assert splits.train is not None
    assert splits.valid is not None
    assert all(PREFIX in splits.train[index]["tokens"] for index in range(20))
    assert not any(PREFIX in splits.valid[index]["tokens"] for index in range(20))
