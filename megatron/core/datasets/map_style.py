"""A map-style data set of a user's own (``len(data)`` and ``data[number]``) as the samples of a split.

Which sample comes when is a function of the seed and its position in the run, as for all data here: each epoch has an
order of its own, and a resumed run goes on where it ended. Python's, NumPy's and torch's global generators are seeded
for every read, so random transforms that use them are the same in any layout, with any workers, and after a resume.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.datasets.index_build import random_state
from megatron.core.datasets.index_cache import digest_of
from megatron.core.datasets.sample_order import RecentEpochs
from megatron.core.datasets.samples import Sample
from megatron.core.parallel.rng import derive_seed
from megatron.errors import ConfigError, DataError, MegatronError

if TYPE_CHECKING:
    from typing_extensions import Self

PADDING = "is_padding"
"""A field that every sample has besides its own: True for one that only fills a batch, which no loss may count."""
_LOOKED_AT = 8  # samples whose bytes are part of a data set's digest


@dataclass(frozen=True)
class SampleForm:
    """What all samples of a data set are.

    ``kind``: a dictionary, a tuple, or a single value. ``shapes``, ``dtypes``: of its fields; a tuple's are named
    ``"0"``, ``"1"`` and so on.
    """

    kind: Literal["mapping", "sequence", "single"]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, np.dtype[Any]]

    def difference(self, other: SampleForm) -> str | None:
        """What is different in ``other``, naming the field; None for samples that fit into one batch."""
        if self.kind != other.kind or self.shapes.keys() != other.shapes.keys():
            return f"has the fields {', '.join(other.shapes)} ({other.kind}), and not {', '.join(self.shapes)}"
        for name, shape in self.shapes.items():
            if other.shapes[name] != shape:
                return f"has the shape {list(other.shapes[name])} in field {name!r}, and not {list(shape)}"
            if other.dtypes[name] != self.dtypes[name]:
                return f"has the type {other.dtypes[name]} in field {name!r}, and not {self.dtypes[name]}"
        return None


class MapStyleDataset:
    """The samples of one split, endless: epoch after epoch of ``data``.

    ``name``: for messages. ``split``: makes orders and random transforms of splits differ. ``shuffle``: each epoch has
    a random order; else that of the data. ``units``: numbers of the samples that belong to the split; None: all.
    ``num_samples``: length; None: one epoch.
    """

    def __init__(
        self,
        data: Any,
        *,
        name: str,
        split: str,
        seed: int,
        shuffle: bool,
        units: range | None = None,
        num_samples: int | None = None,
    ) -> None:
        self._data, self.prefix, self._split, self._seed, self._shuffle = data, name, split, seed, shuffle
        self._units = range(length_of(data, name)) if units is None else units
        if not self._units:
            reason = "its length is 0" if units is None else f"--split leaves none of them for {split}"
            raise DataError(f"{name} has no samples: {reason}; give more data")
        self._num_samples = len(self._units) if num_samples is None else num_samples
        self._orders = RecentEpochs(self._order)

    @cached_property
    def form(self) -> SampleForm:
        """What all samples are: as the first one is. Raises DataError for one that is no sample."""
        return self._read(self._units[0], key=0)[0]

    @cached_property
    def fingerprint(self) -> str | None:
        """Digest of the data's own ``fingerprint`` if it has one, else of a few samples; None where two reads of a
        sample differ although they are seeded alike, so that nothing can be compared.
        """
        own = getattr(self._data, "fingerprint", None)
        if isinstance(own, str):
            return digest_of(own)
        count = len(self._units)
        numbers = sorted({self._units[place * (count - 1) // (_LOOKED_AT - 1)] for place in range(_LOOKED_AT)})
        first, second = (
            digest_of(*(self._read(number, key=0)[1][name] for number in numbers for name in self.form.shapes))
            for _ in range(2)
        )
        return first if first == second else None

    @property
    def digest(self) -> str:
        """Hex digest of what determines the samples, as far as it is known."""
        return digest_of("map-style", self._units, self._seed, self._shuffle, self._split, self.fingerprint)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int | None) -> Sample:
        """Sample ``index``; None gives the first one marked as padding."""
        if index is None:
            return {**self[0], PADDING: np.array(True)}
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        number = self._number(index)
        form, sample = self._read(number, key=index)
        if (difference := self.form.difference(form)) is not None:
            raise DataError(
                f"sample {number} of {self.prefix} {difference}, as sample {self._units[0]} has: samples of a batch "
                "are stacked, so pad or cut them to one shape and type in __getitem__"
            )
        return {**sample, PADDING: np.array(False)}

    def origin(self, index: int) -> str:
        """The number of a sample in the user's data."""
        return f"sample {self._number(index)} of {self.prefix}"

    def describe(self) -> list[str]:
        """Length, order, and what can't be compared."""
        order = "in a random order each epoch" if self._shuffle else "in their own order"
        lines = [f"{self.prefix}: {len(self):,} samples, {len(self) / len(self._units):.2f} epochs, {order}"]
        if self.fingerprint is None:
            lines.append(
                f"{self.prefix}: two reads of one sample differ, by randomness of its own or of the machine. A resumed "
                "run is not bitwise equal, and nobody checks that ranks, or a resumed run, read the same data; use the "
                "global generators of random, NumPy or torch, which are seeded for each sample"
            )
        return lines

    def with_samples(self, num_samples: int) -> Self:
        """This data set with another number of samples, of which the common ones are unchanged."""
        other = copy(self)
        other._num_samples = num_samples
        return other

    def prepare(self) -> None:
        """Nothing is stored."""

    def _number(self, index: int) -> int:
        epoch, place = divmod(index, len(self._units))
        return self._units[self._orders[epoch].item(place) if self._shuffle else place]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return random_state(derive_seed(self._seed, self._split), epoch).permutation(len(self._units))

    def _read(self, number: int, *, key: int) -> tuple[SampleForm, Sample]:
        """Sample ``number`` of the user's data, read with generators that are seeded by ``key``."""
        where = f"sample {number} of {self.prefix}"
        with seeded(self._seed, self._split, "sample", key):
            try:
                found = self._data[number]
            except MegatronError:
                raise
            except Exception as error:
                raise DataError(f"{where} can't be read: {type(error).__name__}: {error}{_line_of(error)}") from error
        return formed(found, where=where)


def length_of(data: Any, name: str) -> int:
    """Number of samples; ConfigError for data without a length."""
    if not hasattr(data, "__getitem__"):
        raise ConfigError(
            f"{name} gives no samples by number (it has no __getitem__), and training that is shuffled and resumed "
            "needs them: give a map-style data set, such as a torch Dataset or a list of samples"
        )
    try:
        return len(data)
    except TypeError:
        raise ConfigError(
            f"{name} has no length, and training that is shuffled and resumed needs one: give a map-style data set, "
            "with __len__ and __getitem__"
        ) from None


def formed(sample: Any, *, where: str) -> tuple[SampleForm, Sample]:
    """The form of a sample, and its fields as arrays; DataError for one that isn't made of numbers.

    Numbers of 64 bits after the point become those of 32, and integers of 16 and 32 bits those of 64, which torch's
    layers and losses take.
    """
    kind: Literal["mapping", "sequence", "single"]
    if isinstance(sample, Mapping):
        kind, fields = "mapping", {str(name): value for name, value in sample.items()}
    elif isinstance(sample, tuple):
        kind, fields = "sequence", {str(place): value for place, value in enumerate(sample)}
    else:
        kind, fields = "single", {"0": sample}
    if not fields:
        raise DataError(f"{where} has no fields: return a dictionary or a tuple of arrays or tensors")
    if PADDING in fields:
        raise DataError(f"{where} has a field {PADDING!r}, which is a name of the trainer's own: rename it")
    arrays = {
        name: _array(value, where=where if kind == "single" else f"field {name!r} of {where}")
        for name, value in fields.items()
    }
    shapes = {name: array.shape for name, array in arrays.items()}
    return SampleForm(kind, shapes, {name: array.dtype for name, array in arrays.items()}), arrays


def _array(value: Any, *, where: str) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        what = "text" if isinstance(value, str) else f"a {type(value).__name__}"
        advice = "turn text into token ids" if array.dtype.kind in "US" else "return numbers, arrays or tensors"
        raise DataError(f"{where} is {what}, which no tensor can be made of: {advice} in __getitem__")
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    if array.dtype.kind in "iu" and array.dtype.itemsize > 1:
        return array.astype(np.int64, copy=False)
    return array


def _line_of(error: BaseException) -> str:
    """The last line of code that an error came through, for a message."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})" if trace is not None else ""


@contextmanager
def seeded(*parts: object) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch's CPU from ``parts`` for the block, and restore them."""
    seed = derive_seed(*parts)
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])
