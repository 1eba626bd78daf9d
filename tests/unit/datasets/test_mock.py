"""Mock data are Megatron-LM's, so that a trial run there and here reads the same."""

from __future__ import annotations

import pytest

from megatron.core.datasets.mock import MockDocuments
from tests import mock_data


def test_documents_count_up_to_their_end() -> None:
    """Lengths as megatron-core 0.12 draws them; 1, 2, 3 … and EOD last."""
    mock_data.keep(mock_data.WHOLE)
    try:
        mock = MockDocuments(eod=50256, vocab_size=50257)
    finally:
        mock_data.keep(mock_data.FEW)
    assert len(mock.lengths) == 100_000
    assert mock.lengths[:5].tolist() == [3484, 2609, 2094, 1105, 1261]
    assert mock.get(0)[:3].tolist() == [1, 2, 3]
    assert mock.get(0)[-2:].tolist() == [3483, 50256]
    assert len(mock.get(0)) == 3484


@pytest.mark.parametrize("offset", [0, 1, 165, 167])
def test_parts_equal_the_whole(offset: int) -> None:
    """Reading a document in pieces gives the same tokens; EOD only at its very end."""
    mock = MockDocuments(eod=9999, vocab_size=50257)
    assert mock.lengths[5] == 168
    whole = mock.get(5).tolist()
    for length in range(168 - offset + 1):
        assert mock.get(5, offset, length).tolist() == whole[offset : offset + length]
    assert mock.get(5, offset).tolist() == whole[offset:]


def test_small_vocabularies_get_ids_they_have() -> None:
    """A model of 128 ids can be tried too; counting starts over."""
    mock = MockDocuments(eod=127, vocab_size=128)
    tokens = mock.get(0)
    assert tokens[125:131].tolist() == [126, 127, 0, 1, 2, 3]
    assert max(mock.get(index).max() for index in range(50)) == 127
