"""Importing this module leaves few documents in mock data.

Of all of them short sequences make millions of samples, and every rank of every run would spend a second on their
order. What was recorded with mock data asks for the whole of them.
"""

from __future__ import annotations

from megatron.core.datasets import mock

WHOLE, FEW = mock._NUM_DOCUMENTS, 500


def keep(documents: int) -> None:
    """Make mock data of as many documents from now on in this process."""
    mock._NUM_DOCUMENTS = documents


keep(FEW)
