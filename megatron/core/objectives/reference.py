"""Log-probabilities of the initial model for each pair, kept in a file that says what they are of."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.scored import ScoredDataset
from megatron.core.files.durable import write_durably
from megatron.core.files.remote_path import AnyPath
from megatron.errors import CheckpointError, ConfigError

FILE_NAME = "reference_log_probs.npz"


@dataclass(frozen=True)
class Reference:
    """What a file holds: by digest of a source's pairs float64 [pairs, 2], NaN for pairs that no split reads, and a
    digest of the ``model``.
    """

    model: str
    scores: Mapping[str, NDArray[np.float64]]

    @property
    def digest(self) -> str:
        """Digest of the model's and of all numbers."""
        parts = (each for key in sorted(self.scores) for each in (key, self.scores[key]))
        return digest_of("reference", self.model, *parts)

    def write(self, path: AnyPath) -> None:
        """Write the file whole; raises OSError."""
        keys, content = sorted(self.scores), io.BytesIO()
        about = json.dumps({"model": self.model, "pairs": keys})
        arrays: dict[str, Any] = {f"scores_{number}": self.scores[key] for number, key in enumerate(keys)}
        np.savez(content, about=np.frombuffer(about.encode(), np.uint8), **arrays)
        write_durably(path, content.getvalue())

    @classmethod
    def read(cls, path: AnyPath) -> Reference:
        """What the file holds; raises CheckpointError for one that can't be read."""
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
                about = json.loads(bytes(stored["about"]))
                scores = {key: stored[f"scores_{number}"] for number, key in enumerate(about["pairs"])}
            if not all(each.ndim == 2 and each.shape[1] == 2 and each.dtype == np.float64 for each in scores.values()):
                raise ValueError("its tables have another shape")
            return cls(str(about["model"]), scores)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            raise CheckpointError(
                f"{path} is damaged, or holds no log-probabilities of pairs: restore it from a copy; for a new run "
                "delete it, and it is computed again"
            ) from None

    def check(
        self, path: AnyPath | None, *, model: str, sources: Sequence[tuple[ScoredDataset, NDArray[np.int64]]]
    ) -> None:
        """Raise ConfigError for a file of another ``model`` or of other pairs than those of ``sources``, data sets and
        the numbers of the pairs that are needed.
        """
        again = "delete the file to compute them again, or give another --preference-reference"
        if self.model != model:
            raise ConfigError(
                f"{path} holds log-probabilities of another model than the one that this run starts from: {again}"
            )
        for dataset, numbers in sources:
            scores = self.scores.get(dataset.scores.digest)
            if scores is None or len(scores) != len(dataset.scores.values):
                raise ConfigError(
                    f"{path} holds log-probabilities of other {dataset.what}s than those of {dataset.prefix}, or those "
                    f"for another --preference-loss or --seq-length: {again}"
                )
            lacking = numbers[np.isnan(scores[numbers]).any(axis=1)]
            if len(lacking):
                raise ConfigError(
                    f"{path} has no log-probabilities of {dataset.name_of(lacking.item(0))} of {dataset.prefix}, as "
                    f"--split or --seq-length were others: give those, or {again}"
                )
