"""What watches the nodes of a run: its ledger, and their tests before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.training.guards.ledger import ledger
from megatron.training.guards.preflight import preflight
from megatron.training.run.run import Run


@contextmanager
def hardware(run: Run) -> Iterator[None]:
    """Keep ``--node-ledger`` during the block, and begin with ``--preflight``. A collective at its start.

    Raises ConfigError where ``--max-starts-without-progress`` ends the run, ParallelError for nodes that fail.
    """
    settings, context, say = run.config.guards, run.context, run.reporter.say
    with ledger(run.config, context, iteration=run.progress.iteration, say=say) as book:
        if book is not None:
            run.fault = book.fault
        if settings.preflight is not None:
            preflight(
                context,
                threshold=settings.preflight_threshold,
                stops=settings.preflight == "stop",
                say=say,
                fault=run.fault if context.mesh.world_rank == 0 else lambda places, what: None,
            )
        yield
