"""Arguments of a scan, which all its backends share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class ScanInputs:
    """A batch of sequences for a scan of ``h`` heads: head i reads B and C of group i // (h / g).

    ``x`` [b, l, h, p]; ``dt`` [b, l, h], not negative; ``a`` [h], negative; ``B`` and ``C`` [b, l, g, n].
    ``document_ids`` [b, l]: the state restarts from zero where a run of equal numbers begins; the first run continues
    the initial state.
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    B: Tensor
    C: Tensor
    document_ids: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Everything that has a gradient, in the order above."""
        return self.x, self.dt, self.a, self.B, self.C

    def token(self, number: int) -> ScanInputs:
        """One token of each sequence, of which all tensors but ``a`` lack their dim ``l``."""
        x, dt, B, C = (each[:, number] for each in (self.x, self.dt, self.B, self.C))
        return ScanInputs(x, dt, self.a, B, C)
