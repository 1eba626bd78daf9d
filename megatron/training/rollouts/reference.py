"""The weights that a run starts from, kept beside those that it trains, and put in their place for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.config.lora import LoraConfig, is_adapter
from megatron.core.checkpointing.agreement import run_on_all, run_on_first
from megatron.core.checkpointing.load import load_checkpoint
from megatron.core.conversion.portable import fill
from megatron.core.files.remote_path import path_of
from megatron.core.parallel.sharding import ShardedState
from megatron.errors import CheckpointError
from megatron.training.checkpoints.loading import where_to_find_weights
from megatron.training.checkpoints.published import read_published, weights_for
from megatron.training.evaluation.first_pass import digest_of_start, origin_of
from megatron.training.run.run import Run

_AGAIN = "put it back, give --grpo-kl-beta 0, or begin anew with --finetune"


class ReferenceWeights:
    """Copies of what a run trains, as it was at its start; adapters add nothing.

    A run that goes on takes them from where it once started, which its checkpoints name with a digest (``state``).
    """

    def __init__(self, run: Run, saved: Mapping[str, Any] | None) -> None:
        """Copy the weights, or load them from where ``saved`` says. A collective; raises CheckpointError."""
        self._run = run
        self._kept = [entry.tensor.clone() for entry in self._trained()]
        is_published = run.loaded_from is not None and run.loaded_from == run.config.checkpoint.load_hf
        self.state: dict[str, Any] = dict(saved or {"path": run.loaded_from, "published": is_published})
        if saved is None:
            self.state["digest"] = run_on_first(lambda: origin_of(run), run.context.mesh)
        if run.config.part(LoraConfig).is_on:
            for entry, kept in zip(self._trained(), self._kept):
                if is_adapter(entry.name):
                    kept.zero_()
        elif saved is not None:
            run_on_first(self._check_start, run.context.mesh)
            self._load()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While the block lasts, the run's models compute with these weights. A collective."""
        own = [entry.tensor.clone() for entry in self._trained()]
        self._put(self._kept)
        try:
            yield
        finally:
            self._put(own)

    def _trained(self) -> list[ShardedState]:
        trained = self._run.config.optimizer.trained
        return [each for each in self._run.model_state() if each.name.removeprefix("model.") in trained]

    @torch.no_grad()
    def _put(self, values: Sequence[Tensor]) -> None:
        for entry, value in zip(self._trained(), values):
            entry.tensor.copy_(value)
            if entry.after_load is not None:
                entry.after_load()

    def _check_start(self) -> None:
        """Raise CheckpointError where the weights are gone or others."""
        place = self.state.get("path")
        if place is None:
            raise CheckpointError(f"the checkpoint doesn't name the weights that its run started from: {_AGAIN}")
        what = f"{place} holds the weights that the run started from and is compared with"
        try:
            found = digest_of_start(place, is_published=self.state["published"])
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"{what}, and can't be read ({error}): {_AGAIN}") from None
        if found != self.state["digest"]:
            raise CheckpointError(f"{what}, and they are others by now: {_AGAIN}")

    def _load(self) -> None:
        """Fill the copies with the weights that the run once started from."""
        run, place, mesh = self._run, self.state["path"], self._run.context.mesh
        entries = [replace(entry, tensor=kept, after_load=None) for entry, kept in zip(self._trained(), self._kept)]
        if self.state["published"]:
            run_on_all(lambda: fill(entries, weights_for(run.config, read_published(place)), mesh), mesh)
            return
        load_checkpoint(path_of(place), entries, mesh, exhaust=(), alternatives=where_to_find_weights(entries))
