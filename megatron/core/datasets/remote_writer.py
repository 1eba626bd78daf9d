"""A data set written to object storage: tokens are sent as they come, the index is made on a disk and sent last."""

from __future__ import annotations

import tempfile
from pathlib import Path

from numpy.typing import DTypeLike
from typing_extensions import override

from megatron.core.datasets.indexed_dataset import IndexedDatasetWriter
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.files.durable import write_errors
from megatron.core.files.remote_path import RemotePath, RemoteStream


class RemoteDatasetWriter(IndexedDatasetWriter):
    """Writes the files of the prefix ``url``, of which none appears before all tokens are there.

    ``num_tokens``: about how many will come. The index takes 12 bytes a sequence and 8 a document in the folder for
    temporary files. Raises DataError where the storage refuses, and for ids that don't fit ``dtype``.
    """

    def __init__(self, url: str, dtype: DTypeLike, *, tokenizer: TokenizerStamp, num_tokens: int) -> None:
        self._upload: RemoteStream | None = None
        self._tokens, self._scratch = RemotePath(f"{url}.bin"), tempfile.TemporaryDirectory(prefix="megatron-index-")
        super().__init__(Path(self._scratch.name) / "data", dtype, tokenizer=tokenizer)
        self._url = url
        with write_errors(self._tokens, remedy="write to another place"):
            self._upload = self._tokens.upload(num_tokens * self.dtype.itemsize)

    @override
    def _write_tokens(self, content: memoryview) -> None:
        assert self._upload is not None, "it is open until the end"
        with write_errors(self._tokens, remedy="write to another place"):
            self._upload.write(content)

    @override
    def _give_names(self) -> None:
        """Complete the tokens, then send metadata and index, so that an index always describes these tokens."""
        assert self._upload is not None, "it is open until the end"
        places = {path.name: RemotePath(self._url + path.name.removeprefix("data")) for path in self._aside}
        with write_errors(self._tokens, remedy="write to another place"):
            if places["data.idx"].exists():
                places["data.idx"].unlink()
            self._upload.close()
            self._upload = None
            for path, aside in self._aside.items():
                if path.name != "data.bin":
                    places[path.name].copy_from(aside)

    @override
    def finish(self) -> None:
        """Complete the files."""
        super().finish()
        self._scratch.cleanup()

    @override
    def abort(self) -> None:
        """Forget everything written so far; the files of an earlier run stay."""
        super().abort()
        if self._upload is not None:
            self._upload.discard()
            self._upload = None
        self._scratch.cleanup()
