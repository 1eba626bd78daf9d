"""A conversion from start to end: read, write aside, prove, and only then give the target its name."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron.core.checkpointing.streamed import SourceError
from megatron.core.conversion import proof
from megatron.core.conversion.adapters import merged
from megatron.core.conversion.averaging import read_average
from megatron.core.conversion.gguf.number_types import library
from megatron.core.conversion.gguf.proof import gguf_file, own_type, prove_reading, prove_writing
from megatron.core.conversion.gguf.reading import read_gguf
from megatron.core.conversion.gguf.writing import write_gguf
from megatron.core.conversion.huggingface.hub import model_folder
from megatron.core.conversion.huggingface.quantizing import Rounding, as_read
from megatron.core.conversion.huggingface.reading import read_config, read_huggingface
from megatron.core.conversion.huggingface.writing import theirs_of, write_huggingface
from megatron.core.conversion.megatron_lm.answer import megatron_lm_answer
from megatron.core.conversion.megatron_lm.files import find_folder
from megatron.core.conversion.megatron_lm.format import format_for
from megatron.core.conversion.megatron_lm.known_arguments import not_handed_on
from megatron.core.conversion.megatron_lm.layer_arguments import notes_for_training
from megatron.core.conversion.megatron_lm.reading import read_megatron_lm
from megatron.core.conversion.megatron_lm.writing import write_megatron_lm
from megatron.core.conversion.native import read_native, training_of, write_native
from megatron.core.conversion.onnx.graph import onnx_format
from megatron.core.conversion.onnx.proof import prove_onnx
from megatron.core.conversion.onnx.writing import check_packages, write_onnx
from megatron.core.conversion.peft.proof import answer_beside, peft_is_there
from megatron.core.conversion.peft.reading import with_peft
from megatron.core.conversion.peft.writing import write_peft
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.programs import TITLES, GgufType, Program, Source
from megatron.core.conversion.quantized_proof import check_readers, prove_quantized
from megatron.core.conversion.questions import Answer, Question, question_for
from megatron.core.conversion.remote import becoming, fetched
from megatron.core.conversion.tensorrt_llm.cuts import Layout
from megatron.core.conversion.tensorrt_llm.proof import prove_tensorrt_llm
from megatron.core.conversion.tensorrt_llm.writing import write_tensorrt_llm
from megatron.core.files.remote_path import AnyPath
from megatron.core.models.registry import family_of
from megatron.errors import CheckpointError, exit_code_of


@dataclass(frozen=True)
class Conversion:
    """What is converted into what.

    ``load`` and ``save`` may be in object storage, and ``load`` the name of a repository of the Hugging Face Hub,
    ``ORG/NAME`` or ``ORG/NAME@REVISION``. ``step``: iteration of a folder of checkpoints, instead of the
    newest. ``averaged``: take the moving average of the weights. ``max_shard_size``: bytes of one weight file of
    Hugging Face's, or of one GGUF file. ``gguf_type``: numbers of a GGUF file's weights; as the source's unless given.
    ``dist``: write Megatron-LM's torch_dist format, else its torch format. ``true_vocab_size``: words of a Megatron-LM
    vocabulary before padding, where its tokenizer is missing. ``ignored``: arguments saved in a Megatron-LM source that
    are read as if they weren't there. ``family``: the title of the only one that is accepted. ``rounding``: how weights
    of a Hugging Face or TensorRT-LLM target are quantized. ``layout``: ranks of a TensorRT-LLM target. ``adapter``: a
    PEFT folder beside the source. ``base_name``: of the model beside which a PEFT target's adapters are; the published
    model that the run started from unless given.
    """

    source: Source
    load: AnyPath
    target: Program
    save: AnyPath
    step: int | None = None
    averaged: bool = False
    max_shard_size: int = 5_000_000_000
    gguf_type: GgufType | None = None
    dist: bool = True
    true_vocab_size: int | None = None
    ignored: tuple[str, ...] = ()
    skip_proof: bool = False
    family: str | None = None
    rounding: Rounding | None = None
    layout: Layout = field(default_factory=Layout)
    adapter: Path | None = None
    base_name: str | None = None


def convert(job: Conversion, say: Callable[[str], None]) -> proof.Proof | None:
    """Convert a checkpoint; returns the proof that source and target are the same model, or None when it was skipped.

    ``say`` prints a line. Raises CheckpointError for a source that can't be converted and a target that exists,
    ProofError when the two give different logits; the target is then not there at all.
    """
    try:
        return _convert(job, say)
    except OSError as error:
        where = error.filename or job.save
        said = f"{where}: {error.strerror or error}; nothing was left in {job.save.parent}"
        raise CheckpointError(said, exit_code=exit_code_of(error)) from error


def _convert(job: Conversion, say: Callable[[str], None]) -> proof.Proof | None:
    check_target(job.save)
    if not job.skip_proof and (job.adapter is not None or job.target == "peft"):
        peft_is_there()
    if not job.skip_proof and "hf" in (job.source, job.target):
        proof.transformers_version()
        if job.rounding is not None and job.target == "hf":
            check_readers(job.rounding.scheme)
    if "gguf" in (job.source, job.target):
        library()
    if job.target == "onnx":
        check_packages(proves=not job.skip_proof)
    with _at_hand(job, say) as (place, step), tempfile.TemporaryDirectory(prefix="megatron-tokenizer-") as scratch:
        with _reading(job.load):
            portable = _read(job, place, step=step, scratch=Path(scratch, "tokenizer"))
            if job.adapter is not None:
                portable = with_peft(portable, job.adapter)
        tensors = {name: _guarded(tensor, job.load) for name, tensor in portable.tensors.items()}
        portable = dataclasses.replace(portable, tensors=tensors)
        title = family_of(portable.groups).title
        if job.family not in (None, title):
            raise CheckpointError(f"--model-type {job.family}: {job.load} holds a {title}; give --model-type {title}")
        for note in portable.notes:
            say(note)
        say(f"{job.load}: {portable.num_parameters:,} parameters, mostly {str(portable.dtype).removeprefix('torch.')}")
        given = portable.quantization
        if given is not None and given.cache and job.target in ("gguf", "megatron-lm", "onnx"):
            say(f"note: files of --to {job.target} have no place for FP8 scales of keys and values: they are left out")
        if "megatron-lm" in (job.source, job.target):
            for warning in not_handed_on(portable.model, was_trained_there=job.source == "megatron-lm"):
                say(warning)
        if job.target == "onnx":
            onnx_format(portable)  # before work, what has no graph is refused
        if job.target == "megatron-lm":
            of_family = format_for(portable.groups).flags(portable.groups)
            for note in notes_for_training(portable.model, of_family):
                say(note)
        if not job.skip_proof:
            proof.check_memory(proof.memory_needed(portable, {job.source, job.target}))
        with becoming(job.save, say=say, check=lambda: check_target(job.save)) as aside:
            _write(job, portable, aside, say)
            found = None if job.skip_proof else _prove(job, portable, place, aside, say, step=step)
    if job.rounding is not None:
        say(f"weights of linear layers are in {job.rounding.scheme.name}: rounded, and no longer the source's numbers")
    say(f"proof: {found}" if found else "NOT PROVEN: --skip-proof skipped the comparison of logits")
    say(f"wrote {job.save} in {TITLES[job.target]} format: weights only, no optimizer state, no schedule")
    if job.target == "megatron":
        say("a run starts from it with --finetune, or with --no-load-optim to continue counting iterations")
    return found


@contextmanager
def _at_hand(job: Conversion, say: Callable[[str], None]) -> Iterator[tuple[AnyPath, int | None]]:
    """Where the source is read, and the iteration there. Other programs' files are mapped and opened by their
    libraries, so they are fetched from object storage first, and those of a repository of the Hub into its cache.
    """
    if job.source == "hf" and isinstance(job.load, Path):
        yield model_folder(job.load, flag="--load", say=say), None
        return
    if isinstance(job.load, Path) or job.source == "megatron":
        yield job.load, job.step
        return
    with ExitStack() as stack:
        if job.source == "gguf" and isinstance(job.load, Path):
            yield job.load, None
            return
        with _reading(job.load):
            # Of Megatron-LM's, one checkpoint and not all that a run has left.
            place = find_folder(job.load, step=job.step) if job.source == "megatron-lm" else job.load
            folder = stack.enter_context(fetched(place, say=say))
        yield folder, None


def _read(job: Conversion, place: AnyPath, *, step: int | None, scratch: Path) -> PortableModel:
    match job.source:
        case "hf":
            return read_huggingface(_folder(place))
        case "megatron":
            return (read_average if job.averaged else read_native)(place, step=step, merges=job.target != "peft")
        case "gguf":
            return read_gguf(_folder(place), scratch=scratch)
        case "megatron-lm":
            words = job.true_vocab_size
            return read_megatron_lm(_folder(place), step=step, true_vocab_size=words, ignored=job.ignored)


@contextmanager
def _reading(load: AnyPath) -> Iterator[None]:
    """Turn an OSError while the source is read into an error about the source."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        said = f"--load {load} can't be read: {where}{error.strerror or error}"
        raise SourceError(said, exit_code=exit_code_of(error)) from error


def _guarded(tensor: LazyTensor, load: AnyPath) -> LazyTensor:
    """The tensor, which is read while others are already written: an error then still names the source."""

    def make() -> Tensor:
        with _reading(load):
            return tensor.make()

    return dataclasses.replace(tensor, make=make)


def _folder(place: AnyPath) -> Path:
    assert isinstance(place, Path), "files of other programs are read from a disk"
    return place


def check_target(save: AnyPath) -> None:
    """Raise CheckpointError when there is something at ``save``: nothing is ever overwritten."""
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise CheckpointError(f"--save {save} exists and is not empty: name a new folder, nothing is overwritten")


def _write(job: Conversion, portable: PortableModel, aside: Path, say: Callable[[str], None]) -> None:
    if job.target not in ("megatron", "peft"):
        portable = merged(portable)
    match job.target:
        case "hf":
            write_huggingface(portable, aside, max_shard_size=job.max_shard_size, rounding=job.rounding)
        case "megatron":
            write_native(portable, aside, final=job.save)
        case "megatron-lm":
            write_megatron_lm(portable, aside, dist=job.dist, final=job.save)
        case "gguf":
            kind = job.gguf_type or own_type(portable)
            write_gguf(portable, aside, kind=kind, say=say, max_shard_size=job.max_shard_size)
        case "tensorrt-llm":
            write_tensorrt_llm(portable, aside, layout=job.layout, rounding=job.rounding, say=say)
        case "onnx":
            write_onnx(portable, aside, say=say)
        case "peft":
            training = training_of(job.load, portable, step=job.step)
            write_peft(portable, aside, base=job.base_name or training.base, others=training.others)


def _prove(
    job: Conversion,
    portable: PortableModel,
    place: AnyPath,
    aside: Path,
    say: Callable[[str], None],
    *,
    step: int | None,
) -> proof.Proof:
    """Compare the logits of the files read with those of the files written."""
    question = question_for(portable.model, portable.groups)
    if job.target == "peft":
        others = training_of(job.load, portable, step=job.step).others
        after = answer_beside(portable, aside, question, others=others)
        return _compared(portable, proof.portable_answer(portable, question), after)
    if job.source == "gguf" and job.adapter is None:
        return prove_reading(gguf_file(_folder(place)), portable, _answer(job.target, aside, question), question)
    with _reading(job.load):
        if job.adapter is not None:
            before = answer_beside(portable, job.adapter, question)
            portable = merged(portable)
        else:
            before = _answer(job.source, place, question, step=step, averaged=job.averaged, ignored=job.ignored)
    if job.target == "gguf":
        kind = job.gguf_type or own_type(portable)
        return prove_writing(gguf_file(aside), portable, before, question, kind=kind, say=say)
    if job.target == "tensorrt-llm":
        _compared(portable, before, proof.portable_answer(portable, question))
        return prove_tensorrt_llm(portable, aside, layout=job.layout, rounding=job.rounding)
    if job.target == "onnx":
        return prove_onnx(aside, portable, before, question)
    quantization = job.rounding or portable.quantization
    if job.target != "hf" or quantization is None:
        return _compared(portable, before, _answer(job.target, aside, question))
    with _reading(job.load):
        _compared(portable, before, proof.portable_answer(portable, question))
        model_type = read_config(aside)["model_type"]
        found = theirs_of(portable.model, portable.groups, model_type)
        model_in = partial(as_read, found, portable, job.rounding, model_type)
        return prove_quantized(model_in, aside, question, quantization.scheme, say)


def _compared(portable: PortableModel, before: Answer, after: Answer) -> proof.Proof:
    words = portable.model.vocab_size
    unpadded = [{**answer, "words": answer["words"][..., :words]} for answer in (before, after)]
    return proof.compare(*unpadded)


def _answer(
    kind: Program,
    place: AnyPath,
    question: Question,
    *,
    step: int | None = None,
    averaged: bool = False,
    ignored: Collection[str] = (),
) -> Answer:
    match kind:
        case "hf":
            return proof.huggingface_answer(_folder(place), question)
        case "megatron":
            return proof.native_answer(place, question, step=step, averaged=averaged)
        case "megatron-lm":
            return megatron_lm_answer(_folder(place), question, step=step, ignored=ignored)
        case "gguf" | "tensorrt-llm" | "onnx" | "peft":
            raise AssertionError("these are proven in ways of their own")
