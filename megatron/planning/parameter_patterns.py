"""Checks of patterns of parameters' names, such as those of ``--freeze``, and what a resume with others changes.

Names are those of the model built without values, so all ranks and a dry run find the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from megatron.config.optimizer import pattern_and_factor
from megatron.config.parameter_names import TrainedNames, matches
from megatron.config.run import RunConfig
from megatron.config.update_rules import MATRIX_RULES
from megatron.core.distributed.parameter_policy import is_layer_matrix
from megatron.core.models.train_spec import TrainSpec
from megatron.core.parallel.sharding import sharded_parameters
from megatron.errors import CheckpointError, ConfigError
from megatron.planning.estimate import parameter_sizes
from megatron.planning.model import whole_model
from megatron.small_files import check_kinds

_MOST_NAMED = 8


def check_patterns(run: RunConfig, train_spec: TrainSpec) -> None:
    """Raise ConfigError for a pattern that matches no parameter of the model, for a learning-rate multiplier of
    parameters that are all frozen or all have an earlier one, and when all parameters are frozen.
    """
    trained, pairs = run.optimizer.trained, run.optimizer.lr_multipliers
    names = set() if trained.is_all and not pairs else {*parameter_sizes(run, train_spec)}
    for flag, patterns in {"--freeze": trained.freeze, "--train-only": trained.only}.items():
        for pattern in patterns:
            _check_matches(flag, pattern, names)
    rest = {name for name in names if name in trained}
    if names and not rest and trained.only:
        raise ConfigError(
            f"--train-only {' '.join(trained.only)} and --freeze {' '.join(trained.freeze)} leave nothing to train: "
            "leave out a pattern of --freeze"
        )
    if names and not rest:
        raise ConfigError(
            f"--freeze {' '.join(trained.freeze)} freezes all {len(names)} parameter tensors of the model, so nothing "
            "would be trained: leave out a pattern, or evaluate with --skip-train and without --freeze"
        )
    for pair in pairs:
        pattern, _ = pattern_and_factor(pair)
        _check_matches("--lr-multipliers", pattern, names)
        concerned = {name for name in rest if matches(name, [pattern])}
        if not concerned and not any(name in trained for name in names if matches(name, [pattern])):
            raise ConfigError(
                f"--lr-multipliers {pair} has no effect: {_flags(trained)} all its parameters; leave it out"
            )
        if not concerned:
            raise ConfigError(
                f"--lr-multipliers {pair} has no effect: earlier pairs match all its parameters; move it before them"
            )
        rest -= concerned


def check_update_rule(run: RunConfig, train_spec: TrainSpec) -> None:
    """Raise ConfigError for a rule of matrices where no layer has a matrix that is trained."""
    named = sharded_parameters(whole_model(run, train_spec)) if run.optimizer.optimizer in MATRIX_RULES else None
    trained = run.optimizer.trained
    if named is None or any(
        parameter.requires_grad and is_layer_matrix(name, sharding) and name in trained
        for name, parameter, sharding in named
    ):
        return
    lacks = "the model has" if trained.is_all else "--freeze or --train-only leaves"
    raise ConfigError(
        f"--optimizer {run.optimizer.optimizer} updates the matrices of layers, that is, two-dimensional weights in "
        f"numbered modules, and {lacks} none to train; use --optimizer adam"
    )


def _flags(trained: TrainedNames) -> str:
    """The flags that freeze parameters, and a verb."""
    return "--freeze names" if not trained.only else "--train-only and --freeze leave out"


def _check_matches(flag: str, pattern: str, names: set[str]) -> None:
    if any(matches(name, [pattern]) for name in names):
        return
    prefixes = {f"{name[:at]}.*" for name in names for at, letter in enumerate(name) if letter == "."}
    near = get_close_matches(pattern, sorted(names | prefixes), n=4)
    roots = sorted({f"{name.partition('.')[0]}.*" for name in names})
    raise ConfigError(
        f"{flag} {pattern} matches no parameter of the model; "
        + (f"close patterns that do: {', '.join(near)}" if near else f"these do: {', '.join(roots)}")
    )


@dataclass(frozen=True)
class FreezingChange:
    """Names of parameters that a checkpoint's run trained and this one does not (``frozen``), and the other way."""

    frozen: frozenset[str]
    trained: frozenset[str]

    @classmethod
    def since(cls, saved: Mapping[str, Any], run: RunConfig, train_spec: TrainSpec) -> FreezingChange:
        """The change from the settings ``saved`` in a checkpoint to those of ``run``."""
        # None in a checkpoint from before there was such a flag.
        patterns = {flag: (saved.get("optimizer") or {}).get(flag) for flag in ("freeze", "train_only")}
        kinds = dict.fromkeys(patterns, list[str])
        check_kinds(patterns, kinds, where="the checkpoint's settings", error=CheckpointError)
        then = TrainedNames(*(tuple(each or ()) for each in patterns.values()))
        names = parameter_sizes(run, train_spec)
        before, after = (
            frozenset(name for name in names if name not in trained) for trained in (then, run.optimizer.trained)
        )
        return cls(frozen=after - before, trained=before - after)

    def remarks(self) -> list[str]:
        """Lines for the log about the optimizer state of these parameters."""
        found = []
        if self.frozen:
            found.append(
                f"  frozen since that checkpoint: {len(self.frozen)} parameter tensors, whose optimizer state is not "
                f"loaded and will not be saved ({_some(self.frozen)})"
            )
        if self.trained:
            found.append(
                f"  frozen in that checkpoint's run and trained now: {len(self.trained)} parameter tensors, which "
                f"start with fresh optimizer state ({_some(self.trained)})"
            )
        return found


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(sorted(names)[:_MOST_NAMED]) + more
