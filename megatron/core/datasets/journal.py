"""The finished part of a long conversion of text to data sets, so that an interrupted one goes on instead of anew.

The journal says how far into the input the output reaches, and how long the output is there. It counts only for the
same settings and for input files that are unchanged up to that place; what was written after it is written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.datasets.files import replaced_file, write_errors
from megatron.core.datasets.metadata import DatasetMetadata
from megatron.core.datasets.tally import Tally
from megatron.core.tokenizers.text_files import STDIN, Position
from megatron.errors import DataError
from megatron.small_files import VOCABULARY_BYTES, as_kind, read_json


@dataclass(frozen=True)
class Milestone:
    """``position`` in the input, the output's counts there by prefix, and everything counted up to there."""

    position: Position
    bytes_read: int
    outputs: Mapping[str, DatasetMetadata]
    tally: Tally


class Journal:
    """The last milestone of a run that turns ``inputs`` into data sets with ``settings``, in the file ``path``.

    Input from a pipe can't be read again, so with it there is none.
    """

    def __init__(self, path: Path, *, settings: Mapping[str, Any], inputs: Sequence[str]) -> None:
        self.path, self._settings, self._inputs = path, json.loads(json.dumps(settings)), inputs
        self.possible = STDIN not in inputs and all(Path(each).is_file() for each in inputs)

    def read(self) -> Milestone | None:
        """Where to go on; None when nothing is left of an earlier run, or it was another one."""
        try:
            saved = read_json(self.path, dict[str, Any], error=DataError, most_bytes=VOCABULARY_BYTES)
            position = as_kind(saved["position"], Position, where=str(self.path), error=DataError)
            if not self.possible or saved["settings"] != self._settings or saved["inputs"] != self._files(position):
                return None
            outputs = {prefix: DatasetMetadata(tokenizer=None, **counts) for prefix, counts in saved["outputs"].items()}
            return Milestone(position, saved["bytes_read"], outputs, Tally.from_json(saved["tally"]))
        except (OSError, DataError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, milestone: Milestone) -> None:
        """Note a milestone; raises DataError when the disk is full."""
        counts = {}
        for prefix, metadata in milestone.outputs.items():
            counts[prefix] = asdict(replace(metadata, tokenizer=None))
            del counts[prefix]["tokenizer"]
        content = {
            "settings": self._settings,
            "inputs": self._files(milestone.position),
            "position": asdict(milestone.position),
            "bytes_read": milestone.bytes_read,
            "outputs": counts,
            "tally": milestone.tally.to_json(),
        }
        with write_errors(self.path), replaced_file(self.path) as aside:
            aside.write_text(json.dumps(content), encoding="utf-8")

    def remove(self) -> None:
        """Forget everything: the output is complete, or it is begun anew."""
        with write_errors(self.path):
            self.path.unlink(missing_ok=True)

    def _files(self, position: Position) -> list[list[Any]]:
        """Name, size and time of change of the files up to ``position``."""
        states = [(each, Path(each).stat()) for each in self._inputs[: position.file + 1]]
        return [[each, state.st_size, state.st_mtime_ns] for each, state in states]
