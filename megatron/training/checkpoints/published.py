"""Runs that start from published weights: the Hugging Face model of ``--load-hf``."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.family import FamilyConfig
from megatron.config.flags import plural_s
from megatron.config.lora import LoraConfig, is_adapter, without_adapters
from megatron.config.objective import is_of_objective
from megatron.config.run import RunConfig, groups_to_json
from megatron.core.checkpointing.agreement import gather_from_all, run_on_all, run_on_first
from megatron.core.checkpointing.find import is_unused
from megatron.core.checkpointing.first_rank import work_on_first
from megatron.core.checkpointing.save import save_streamed
from megatron.core.conversion import proof
from megatron.core.conversion.companions import FOLDER, SETTINGS, companions_in, tokenizer_files, tokenizer_of
from megatron.core.conversion.gguf.proof import gguf_file, prove_reading
from megatron.core.conversion.gguf.reading import is_gguf, read_gguf
from megatron.core.conversion.huggingface.hub import model_folder
from megatron.core.conversion.huggingface.reading import CONFIG, read_huggingface
from megatron.core.conversion.kept_tokenizer import files_to_keep
from megatron.core.conversion.native import boxes_of, state_of
from megatron.core.conversion.peft.reading import with_peft
from megatron.core.conversion.portable import PortableModel, fill, fitted
from megatron.core.conversion.questions import question_for
from megatron.core.files.durable import write_durably
from megatron.core.files.remote_path import AnyPath, RemotePath, is_url, path_of
from megatron.core.models.registry import family_of
from megatron.core.parallel.context import ParallelContext
from megatron.core.parallel.mesh import Mesh
from megatron.core.tokenizers.chat_settings import without_ids_from
from megatron.errors import RESTART_CANNOT_HELP, CheckpointError, ParallelError
from megatron.small_files import read_bytes
from megatron.training.run.run import Run

_SKIP = "--load-hf-proof off"
BASE = "base"
"""Folder in ``--save`` with the published weights beside which adapters are trained."""


def published_config(folder: str, groups: Sequence[type], adapter: str | None = None) -> dict[str, Any]:
    """The settings of the model in ``folder`` as a checkpoint would have them, for a command with these ``groups``.
    ``adapter``: a PEFT folder beside it.

    Raises CheckpointError as ``read_huggingface``, and for a model of another family than the command's.
    """
    portable = read_published(folder, adapter)
    family, own = family_of(portable.groups), [kind.name for kind in groups if issubclass(kind, FamilyConfig)]
    if family.name not in own:
        raise CheckpointError(f"--load-hf {folder} holds a {family.title}: start it with pretrain_{family.name}.py")
    settings = groups_to_json((portable.model, portable.tokenizer, *portable.groups))
    return {"data": {"seq_length": portable.seq_length}, **settings}


@cache  # a name of the Hub is looked up once, and means one revision then
def folder_of(load_hf: str) -> Path:
    """The folder of ``--load-hf``, which may be the name of a repository of the Hub."""
    if is_url(load_hf):
        raise CheckpointError(f"--load-hf {load_hf} is a URL: download the model, and give its folder")
    folder = model_folder(Path(load_hf), flag="--load-hf", say=lambda words: None)
    assert isinstance(folder, Path), "it is on this machine"
    return folder


def read_published(load_hf: str, adapter: str | None = None) -> PortableModel:
    """The model of ``--load-hf``; of its weights only names, shapes and types are read now.

    ``adapter``: the PEFT folder of ``--load-peft``, with whose adapters it is read.
    """
    folder, flag = folder_of(load_hf), "--load-hf"
    try:
        base = read_gguf(folder, scratch=_tokenizer_place(folder)) if is_gguf(folder) else read_huggingface(folder)
        flag = "--load-peft"
        return base if adapter is None else with_peft(base, Path(adapter))
    except CheckpointError as error:
        raise CheckpointError(f"{flag}: {error}", exit_code=error.exit_code) from error


def _start_of(config: RunConfig) -> PortableModel:
    """What a run starts from: the published model, with the adapters of ``--load-peft``.

    Raises CheckpointError as ``read_published``, and for adapters of other settings than the run's.
    """
    checkpoint, own = config.checkpoint, config.part(LoraConfig)
    found = read_published(checkpoint.load_hf or "", checkpoint.load_peft)
    lora = LoraConfig.among(found.groups)
    if lora.is_on and (wrong := own.differences(lora)):
        raise CheckpointError(
            f"{', '.join(wrong)}: these come from the PEFT folder of --load-peft {checkpoint.load_peft}; leave the "
            "flags out"
        )
    return found


def _tokenizer_place(place: Path) -> Path:
    """Where the files of a GGUF file's tokenizer are kept: in the user's cache, under a digest of the file."""
    file = gguf_file(place).resolve()
    seen = file.stat()
    name = hashlib.sha256(f"{file} {seen.st_size} {seen.st_mtime_ns}".encode()).hexdigest()[:32]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron" / "tokenizers" / f"gguf-{name}"


def starts_from_published(settings: CheckpointConfig) -> bool:
    """Whether a run starts from ``--load-hf``: there is nothing to resume in ``--load``."""
    if settings.load_hf is None:
        return False
    return settings.load is None or (settings.may_be_new and is_unused(settings.load))


def weights_for(config: RunConfig, published: PortableModel) -> PortableModel:
    """The published model with the vocabulary size of the run; CheckpointError where it can't be that of the run."""
    return fitted(published, config.model, config.extra, where=f"--load-hf {config.checkpoint.load_hf}")


def describe_published(config: RunConfig) -> str:
    """What the run starts from, in words; raises CheckpointError as ``read_published`` and ``weights_for``."""
    folder = config.checkpoint.load_hf or ""
    published = _start_of(config)
    before, after = published.model.vocab_size or 0, weights_for(config, published).model.vocab_size or 0
    resized = f", without the last {before - after:,} of {before:,} rows of the vocabulary" if after < before else ""
    if after > before:
        rows = f"{after - before:,} new row{plural_s(after - before)}"
        resized = f", with {rows} of the vocabulary, each the mean of the {before:,} there"
    dtype = str(published.dtype).removeprefix("torch.")
    at = folder_of(folder)
    of = "" if at == Path(folder) else f" (revision {at.name}, in {at})"
    adapter = config.checkpoint.load_peft
    beside = "" if adapter is None else f", with the adapters in {adapter}"
    count = f"{published.num_parameters:,} parameters"
    return f"the published weights in {folder}{of}{beside}, {count} in {dtype}{resized}"


def load_published(run: Run) -> None:
    """Fill the run's model from ``--load-hf``, after its weights are proven. A collective.

    Raises CheckpointError on all ranks when a rank can't read them, and when they compute something else here.
    """
    config, mesh = run.config, run.context.mesh
    folder = config.checkpoint.load_hf
    assert folder is not None, "the caller asks for it"
    new = "" if config.checkpoint.load is None else f"no checkpoint in {config.checkpoint.load} yet: "
    _check_same_everywhere(folder, mesh)
    run.reporter.say(f"{new}starting from {run_on_first(lambda: describe_published(config), mesh)}")
    run.reporter.say(f"  {prove(config, run.context)}")

    def read() -> PortableModel:
        published = _start_of(config)
        portable = weights_for(config, published)
        entries = chain(run.model_state(), run.optimizer.master_entries())
        has_adapters = LoraConfig.among(published.groups).is_on
        given = (entry for entry in entries if not is_of_objective(entry.name))
        fill((entry for entry in given if has_adapters or not is_adapter(entry.name)), portable, mesh)
        return published

    published = run_on_all(read, mesh)
    run.loaded_from = folder
    if config.part(LoraConfig).is_on and config.checkpoint.save is not None:
        run.base = _keep_base(run)
    if run_on_first(lambda: _has_tokenizer_of(published, run), mesh):  # else its ids mean something else here
        run.chat_before = without_ids_from(published.chat, config.model.vocab_size or 0)
    for note in published.notes:
        run.reporter.say(f"  {note}")
    if remark := run_on_first(lambda: _keep_companions(run, published), mesh):
        run.reporter.say(f"  {remark}")


def _keep_base(run: Run) -> AnyPath:
    """Write the published weights into ``--save`` once, as the checkpoint that those with adapters alone refer to."""
    place = path_of(run.config.checkpoint.save or "") / BASE
    tokenizer = run.tokenizer

    def write() -> AnyPath:
        portable = weights_for(run.config, _start_of(run.config))
        plain = {name: tensor for name, tensor in portable.tensors.items() if not is_adapter(name)}
        portable = dataclasses.replace(portable, tensors=plain, groups=without_adapters(run.config.extra))
        settings = run.config.tokenizer
        state = state_of(portable, settings, name=tokenizer.name, fingerprint=tokenizer.fingerprint)
        return save_streamed(place, 0, boxes_of(portable), state, files=files_to_keep(settings))

    kept = run_on_first(lambda: str(write()), run.context.mesh)
    run.reporter.say(f"  kept these weights in {kept}: checkpoints hold only what is trained, and refer to them")
    return path_of(kept)


def files_seen(load_hf: str) -> str:
    """A digest of a published model's settings, and of its files' names and sizes."""
    folder = folder_of(load_hf)
    files = folder.iterdir() if folder.is_dir() else (folder,)
    sizes = sorted((path.name, path.stat().st_size) for path in files if path.is_file())
    if is_gguf(folder):
        return hashlib.sha256(repr(sizes).encode()).hexdigest()
    settings = read_bytes(folder / CONFIG, where=str(folder / CONFIG), error=CheckpointError)
    return hashlib.sha256(repr((sizes, settings)).encode()).hexdigest()


def digest_of_files(place: str) -> str:
    """A digest of a published model's or an adapter's settings and weights, which reads all of them."""
    folder = folder_of(place)
    files = sorted(folder.iterdir()) if folder.is_dir() else (folder,)
    found = hashlib.sha256()
    for path in files:
        if path.name in (CONFIG, "adapter_config.json") or path.suffix in (".safetensors", ".bin", ".gguf"):
            found.update(path.name.encode())
            with path.open("rb") as file:
                while read := file.read(1 << 24):
                    found.update(read)
    return found.hexdigest()


def _check_same_everywhere(load_hf: str, mesh: Mesh) -> None:
    """Raise ParallelError when nodes have different files under one name. A collective."""
    everyone = gather_from_all(lambda: files_seen(load_hf), mesh)
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        raise ParallelError(
            f"rank {other} sees another model in --load-hf {load_hf} than rank 0: its files must be the same on every "
            "node; copy them again, or name a revision of the Hub as ORG/NAME@REVISION",
            exit_code=RESTART_CANNOT_HELP,
        )


def prove(config: RunConfig, context: ParallelContext) -> str:
    """Compare the logits of the published model with those of transformers, as ``--load-hf-proof`` asks; the result in
    words. A collective, in which rank 0 works. Raises CheckpointError when they differ, or must be compared and can't.
    """
    asked, folder = config.checkpoint.load_hf_proof, config.checkpoint.load_hf or ""

    def compared() -> str:
        portable = read_published(folder)
        question = question_for(portable.model, portable.groups)
        if is_gguf(folder_of(folder)):
            ours = proof.portable_answer(portable, question)
            return f"proof: {prove_reading(gguf_file(folder_of(folder)), portable, ours, question)}"
        try:
            proof.transformers_version(skip=_SKIP)
            proof.check_memory(proof.memory_needed(portable, {"hf"}), skip=_SKIP)
        except CheckpointError as error:
            if asked == "required":
                raise
            return f"NOT PROVEN: {error}"
        try:
            theirs = proof.huggingface_answer(folder_of(folder), question)
        except CheckpointError as error:  # evidence against the weights
            raise CheckpointError(f"--load-hf: {error}; correct the folder, or skip the proof with {_SKIP}") from error
        try:
            return f"proof: {proof.compare(theirs, proof.portable_answer(portable, question), skip=_SKIP)}"
        except proof.ProofError as error:
            raise CheckpointError(f"--load-hf {folder}: {error}") from error

    if asked == "off":
        return f"NOT PROVEN: {_SKIP} skipped the comparison of logits"
    return work_on_first(lambda ask: compared(), context)


def _keep_companions(run: Run, published: PortableModel) -> str:
    """Keep settings and tokenizer of the published model beside the checkpoints, for models in Hugging Face's format
    that are written later; not with another tokenizer, whose ids mean something else. A remark, or nothing.
    """
    checkpoint, is_same = run.config.checkpoint, _has_tokenizer_of(published, run)
    if checkpoint.save is not None:
        place: AnyPath = path_of(checkpoint.save) / FOLDER
        if place.exists():  # a start that was killed before its first checkpoint
            place.remove_tree() if isinstance(place, RemotePath) else shutil.rmtree(place)
        for name, path in published.companions.items() if is_same else ():
            place.mkdir(parents=True, exist_ok=True)
            write_durably(place / name, path.read_bytes())
    if is_same:
        return ""
    return (
        f"note: {run.tokenizer.name} is another tokenizer than that of {checkpoint.load_hf}: every id keeps the row of "
        "the embeddings that it has there"
    )


def _has_tokenizer_of(published: PortableModel, run: Run) -> bool:
    """Whether ids mean the same in the run; a model without tokenizer files has no meaning to lose."""
    if published.tokenizer.tokenizer_type == "NullTokenizer":
        return True
    own = tokenizer_of(published.tokenizer)
    return own is not None and own.fingerprint == run.tokenizer.fingerprint


def companions_of(run: Run) -> dict[str, AnyPath]:
    """Files that travel with the run's model, by name, where they are now: settings of the published model that it
    started from, and the run's tokenizer.
    """
    checkpoint, found = run.config.checkpoint, dict[str, AnyPath]()
    if checkpoint.save is not None:
        found = companions_in(path_of(checkpoint.save) / FOLDER)
    elif checkpoint.load_hf is not None:
        published = read_published(checkpoint.load_hf)
        found = dict(published.companions) if _has_tokenizer_of(published, run) else {}
    own = {name: path for name, path in tokenizer_files(run.config.tokenizer).items() if name not in SETTINGS}
    return {**found, **own}
