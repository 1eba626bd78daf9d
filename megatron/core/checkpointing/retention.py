"""Which old checkpoints to delete, and their deletion once a newer checkpoint is durable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.checkpointing.agreement import run_on_first
from megatron.core.checkpointing.find import whole_checkpoints
from megatron.core.checkpointing.folders import remove
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.parallel.mesh import Mesh


@dataclass(frozen=True)
class Retention:
    """Keep the newest ``keep_last`` checkpoints and all whose iteration is a multiple of ``keep_every``; None: all.

    With ``keep_every`` alone, the newest is kept too.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def surplus(self, iterations: Iterable[int], *, newest: int) -> list[int]:
        """Iterations to delete now that ``newest`` is durable, ascending.

        Iterations beyond ``newest`` belong to a run that went on from there before; they are left alone.
        """
        if self.keep_last is None and self.keep_every is None:
            return []
        older = sorted(iteration for iteration in set(iterations) if iteration < newest)
        num_recent = (self.keep_last or 1) - 1
        recent = older[len(older) - num_recent :] if num_recent else []
        return [
            iteration
            for iteration in older
            if iteration not in recent and not (self.keep_every and iteration % self.keep_every == 0)
        ]


def prune(root: str | AnyPath, newest: int, retention: Retention, mesh: Mesh) -> list[int]:
    """Delete what ``retention`` doesn't keep in ``root``; call it when ``save_checkpoint`` of ``newest`` has returned.

    A collective: rank 0 deletes, all learn which. Only whole checkpoints of ours are counted or deleted. Returns the
    iterations of those that are gone; one that can't be deleted is a warning.
    """

    def delete() -> list[int]:
        whole = whole_checkpoints(path_of(root))
        assert newest in whole, f"prune after iteration {newest} is durable"
        return [iteration for iteration in retention.surplus(whole, newest=newest) if remove(whole[iteration])]

    return run_on_first(delete, mesh)
