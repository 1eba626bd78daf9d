"""Checks of a run's files before it starts: ``--dry-run`` opens them with the functions of a real start.

Torch is imported only to compare with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from megatron.config.eval_tasks import eval_tasks_of
from megatron.config.rules import listed
from megatron.config.run import RunConfig
from megatron.core.datasets.build import open_source, sources_read
from megatron.core.datasets.metadata import TokenizerStamp
from megatron.core.files.remote_path import is_url, path_of
from megatron.core.files.writable import why_not_writable
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import build_tokenizer
from megatron.errors import ConfigError, MegatronError, read_errors
from megatron.training.run.split_sizes import split_sizes

T = TypeVar("T")
_WITH_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_WITHOUT = "to check all else where these files are missing, as on another machine, add --no-check-files"


@dataclass
class Findings:
    """Findings, a line each, and every error that doesn't follow from another one."""

    lines: list[str] = field(default_factory=list)
    errors: list[MegatronError] = field(default_factory=list)

    def check(self, look: Callable[[], T]) -> T | None:
        """The result of ``look``; None when it raises a MegatronError, which is kept in ``errors``."""
        try:
            with read_errors("a file"):
                return look()
        except MegatronError as error:
            self.errors.append(error)
        return None

    def raise_errors(self) -> None:
        """Raise all errors as one, whose exit code suggests a restart only when all of theirs do."""
        if self.errors:
            sentences = list(dict.fromkeys(str(error) for error in self.errors))
            code = max(error.exit_code for error in self.errors)
            raise ConfigError(f"{listed(sentences, of='files')}\n({_WITHOUT})", exit_code=code)


def check_files(run: RunConfig, found: Findings, *, model_name: str, bodies: Sequence[str] = ()) -> RunConfig:
    """Check the files of tokenizer, data, checkpoints and reports; the run with its tokenizer's vocabulary.

    Nothing is written. ``found`` receives lines and errors. ``model_name``: in the run's own checkpoints. ``bodies``:
    names of models that it may start from with another head.
    """
    tokenizer = found.check(lambda: build_tokenizer(run.tokenizer))
    sized = None if tokenizer is None else found.check(lambda: run.with_vocab_size(tokenizer.vocab_size))
    if tokenizer is not None and run.family.reads_tokens:
        found.lines.append(f"tokenizer: {TokenizerStamp.of(tokenizer)}")
    if not run.data.mock_data:
        _check_data(run, found, tokenizer=tokenizer, vocab_size=None if sized is None else sized.model.vocab_size)
    _check_load(sized or run, found, tokenizer if sized else None, model_name=model_name, bodies=bodies)
    if run.checkpoint.load_hf is not None or run.checkpoint.save_hf is not None:
        from megatron.training.checkpoints.huggingface_folders import check_huggingface

        found.lines += found.check(lambda: check_huggingface(sized or run)) or ()
    _check_eval_tasks(run, found)
    _check_folders(run, found)
    if run.checkpoint.save is not None:
        found.lines += filter(None, [found.check(lambda: _look_at_save(run))])
    return sized or run


def _check_data(run: RunConfig, found: Findings, *, tokenizer: Tokenizer | None, vocab_size: int | None) -> None:
    stamp = None if tokenizer is None else TokenizerStamp.of(tokenizer)
    with TemporaryDirectory() as folder:  # for indices at URLs: the run downloads its own copy
        fetches = run.data.data_cache_path is not None
        data = replace(run.data, data_cache_path=folder) if fetches else run.data
        for prefix in found.check(lambda: sources_read(data, split_sizes(run))) or ():
            reads_all = data.verify_data and not is_url(prefix)  # data at a URL are checked when the run downloads them
            look = partial(
                open_source, prefix, replace(data, verify_data=reads_all), stamp=stamp, vocab_size=vocab_size
            )
            source = found.check(look)
            if source is not None:
                lengths = source.documents.lengths
                when = "all bytes read" if reads_all else "all bytes are read at the start of the run"
                found.lines.append(
                    f"data: {prefix}, {int(lengths.sum(dtype='int64')):,} tokens in {len(lengths):,} sequences"
                    f"{f', {when} (--verify-data)' if data.verify_data else ''}"
                )


def _check_eval_tasks(run: RunConfig, found: Findings) -> None:
    if not run.reporting.eval_tasks:
        return
    from megatron.training.evaluation.task_scores import FLAG, check_file

    for named in eval_tasks_of(run.reporting.eval_tasks):
        if found.check(partial(check_file, named)) is not None:
            found.lines.append(f"{FLAG}: {named.name} reads {named.file}")


def _check_load(
    run: RunConfig, found: Findings, tokenizer: Tokenizer | None, *, model_name: str, bodies: Sequence[str]
) -> None:
    settings = run.checkpoint
    if settings.load is None and settings.pretrained_checkpoint is None:
        return
    if settings.load_hf is not None:
        from megatron.training.checkpoints.published import starts_from_published

        if starts_from_published(settings):
            return
    is_new = settings.may_be_new and not is_url(settings.load or "") and not path_of(settings.load or "").exists()
    if is_new and settings.pretrained_checkpoint is None:
        found.lines.append(f"checkpoint: none in {settings.load} yet, a new run")
        return
    from megatron.training.checkpoints.compatibility import describe_start

    line = found.check(lambda: describe_start(run, tokenizer, model_name=model_name, bodies=bodies))
    if line is not None:
        found.lines.append(f"checkpoint: {line}")


def _look_at_save(run: RunConfig) -> str:
    """A remark about what ``--save`` holds; raises CheckpointError for another run that is further on."""
    if not is_url(run.checkpoint.save or "") and not path_of(run.checkpoint.save or "").is_dir():
        return ""
    from megatron.training.checkpoints.earlier_run import check_save_folder

    return check_save_folder(run)


def _check_folders(run: RunConfig, found: Findings) -> None:
    """Check the folders that the run writes into, except a cache, which a run can do without."""
    folders = {
        "--save": run.checkpoint.save,
        "--log-dir": run.reporting.log_dir,
        "--log-json": str(Path(run.reporting.log_json).parent) if run.reporting.log_json else None,
        "--tensorboard-dir": run.reporting.tensorboard_dir,
        "--wandb-save-dir": run.reporting.wandb_save_dir if run.reporting.wandb_project else None,
        "--memory-snapshot-path": str(Path(run.profiling.memory_snapshot_path).parent)
        if run.profiling.record_memory_history
        else None,
    }
    for flag, folder in folders.items():
        if folder is None:
            continue
        if is_url(folder):
            line = found.check(partial(_look_at_url, flag, folder))
            found.lines += [line] if line is not None else []
            continue
        reason = why_not_writable(Path(folder))
        if reason is not None:
            found.errors.append(ConfigError(f"{flag} {folder} cannot be written: {reason}; name another folder"))
        else:
            found.lines.append(f"{flag}: {folder} {'can be written' if Path(folder).exists() else 'can be made'}")


def _look_at_url(flag: str, url: str) -> str:
    """Check a URL without writing to it; raises ConfigError for a missing bucket."""
    scheme, _, path = url.partition("://")
    bucket = path.partition("/")[0]
    if scheme in _WITH_BUCKETS and not path_of(f"{scheme}://{bucket}").exists():
        raise ConfigError(f"{flag} {url}: the bucket {bucket} does not exist; make it first")
    return f"{flag}: {url} is reachable; that it can be written is checked at the start of the run"
