"""The proof of a GGUF file: its readers give the probabilities of tokens that the model gives."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from megatron.core.conversion.companions import text_tokenizer_of
from megatron.core.conversion.gguf.architecture import architecture_named
from megatron.core.conversion.gguf.files import GgufFile, open_gguf
from megatron.core.conversion.gguf.llama_cpp import (
    llama_cpp_pairs,
    llama_cpp_rows,
    llama_cpp_tokens,
    llama_cpp_version,
)
from megatron.core.conversion.gguf.reading import read_gguf
from megatron.core.conversion.gguf.writing import LATER_TOKENS
from megatron.core.conversion.portable import PortableModel
from megatron.core.conversion.programs import GgufType
from megatron.core.conversion.proof import TOLERANCE, Proof, ProofError, compare, portable_answer
from megatron.core.conversion.questions import Answer, Question
from megatron.errors import CheckpointError, DataError

# llama.cpp rounds what weights are multiplied by to 16 or 8 bits, too: differences allowed, as a part of the largest.
_OF_TYPES = {"F32": 0.0, "F16": 4e-3, "BF16": 2e-2, "Q8_0": 3e-2}
_OF_FEW_BITS = 5e-2
# Root mean square of what rounding changes, as a part of that of the weights; of normally distributed ones it is half.
_ROUNDING = {
    "f32": 1e-6,
    "f16": 1e-3,
    "bf16": 4e-3,
    "q8_0": 1.2e-2,
    "q5_0": 9e-2,
    "q5_1": 9e-2,
    "q4_0": 0.18,
    "q4_1": 0.18,
    "q4_k_m": 0.13,
    "q5_k_m": 9e-2,
    "q6_k": 4e-2,
}
_OURS_ALONE = (
    "this project reads it back, and no other program did: install llama.cpp for a proof by it (pip install xllamacpp)"
)
_POSITIONS = 6  # of each sample
_TEXTS = (
    "It's the first of 12 lines: they don't end, do they?",
    "def f(x):\n    return x[1984] + 2048  # 3.14159\n\n\n",
    "Grüße, naïve café — 日本語 и русский 🙂",
)


@dataclass(frozen=True)
class GgufProof(Proof):
    """Result of comparing log-probabilities. ``reader``: the program that read the file."""

    reader: str = ""

    @override
    def __str__(self) -> str:
        if self.reader == _OURS_ALONE:
            return self.reader
        return (
            f"{self.reader} reads it: largest difference {self.difference:.3g} between log-probabilities of up to "
            f"{self.largest:.3g}"
        )


def chosen_positions(tokens: Tensor) -> list[tuple[int, int]]:
    """Samples and positions of ``tokens`` ``[b, s]`` that are compared, the first and the last among them."""
    samples, length = tokens.shape
    places = sorted({number * (length - 1) // (_POSITIONS - 1) for number in range(_POSITIONS)})
    return [(sample, place) for sample in range(samples) for place in places]


def log_probabilities(answer: Answer, places: Sequence[tuple[int, int]], words: int) -> Tensor:
    """Log-probabilities ``[places, words]`` of an answer's logits."""
    logits = torch.stack([answer["words"][sample, place, :words] for sample, place in places])
    return torch.log_softmax(logits.double(), -1).float()


def compare_rows(ours: Tensor, theirs: Tensor, *, tolerance: float, reader: str) -> GgufProof:
    """The proof that both are the same but for ``tolerance``, a part of the largest; ProofError otherwise."""
    found = GgufProof((ours - theirs).abs().max().item(), ours.abs().max().item(), reader)
    if not found.difference <= tolerance * found.largest:
        raise ProofError(
            f"the file and its source are different models: {found}, where {tolerance:g} of the largest is allowed. "
            "Nothing was written; please report the source"
        )
    return found


def tolerance_of(architecture: str, kinds: Sequence[str]) -> float:
    """How far llama.cpp may be from exact results with numbers of these types."""
    own, _ = architecture_named(architecture, where="it")
    return max(own.tolerance, *(own.sensitivity * _OF_TYPES.get(kind, _OF_FEW_BITS) for kind in kinds))


def check_rounding(source: PortableModel, back: PortableModel, *, kind: str) -> None:
    """Raise ProofError where a tensor of the file, read ``back``, is further from the source's than rounding."""
    for name, tensor in source.tensors.items():
        if name.startswith(LATER_TOKENS):
            continue
        one, other = tensor.make().double(), back.tensors[name].make().double()
        scale, change = one.square().mean().sqrt(), (one - other).square().mean().sqrt()
        if not change <= _ROUNDING[kind] * scale + 1e-7:
            raise ProofError(
                f"{name} in the file is {change / scale:.2g} of its size away from the source, more than {kind} "
                "rounds. Nothing was written; please report the source"
            )


def check_tokens(file: Path, portable: PortableModel, *, say: Callable[[str], None]) -> None:
    """Compare llama.cpp's tokens of some texts with the tokenizer's: the same tokens give the same probabilities.

    ProofError where plain English is cut otherwise; ``say`` is told of other texts.
    """
    tokenizer, model = text_tokenizer_of(portable.tokenizer), portable.model
    if tokenizer is None or llama_cpp_version() is None:
        return
    asked: list[tuple[str, list[int]]] = []
    for text in _TEXTS:
        try:
            ids = tokenizer.tokenize(text)
        except DataError:  # a vocabulary without all characters
            continue
        if 0 < len(ids) <= model.max_position_embeddings - 8:
            asked.append((text, ids))
    if not asked:
        return
    for (text, ids), same in zip(asked, _cuts_the_same(file, asked, words=model.vocab_size or 0)):
        if same:
            continue
        if text == _TEXTS[0]:
            raise ProofError(
                f"llama.cpp cuts {text!r} into other tokens than this tokenizer, which cuts it into {ids[:12]} …. "
                "Nothing was written; please report the tokenizer"
            )
        say(f"note: llama.cpp cuts {text!r} into other tokens than this tokenizer: such texts are read otherwise there")


def _cuts_the_same(file: Path, asked: Sequence[tuple[str, list[int]]], *, words: int) -> list[bool]:
    """Whether llama.cpp's tokens of each text are these; without an encoder, by what they make likely."""
    if _has_encoder(open_gguf(file)):
        found = llama_cpp_tokens(file, [text for text, _ in asked])
        return [ids == theirs for (_, ids), theirs in zip(asked, found)]
    context = max(len(ids) for _, ids in asked) + 32
    rows = llama_cpp_rows(file, [each for pair in asked for each in pair], words=words, context=context)
    return [torch.allclose(one, other, rtol=1e-3, atol=1e-3) for one, other in zip(rows[::2], rows[1::2])]


def own_type(portable: PortableModel) -> GgufType:
    """The type of a file whose numbers are those of the model."""
    own: dict[torch.dtype, GgufType] = {torch.bfloat16: "bf16", torch.float16: "f16"}
    return own.get(portable.dtype, "f32")


def prove_writing(
    file: Path,
    source: PortableModel,
    before: Answer,
    question: Question,
    *,
    kind: GgufType,
    say: Callable[[str], None],
) -> Proof:
    """The proof that ``file`` holds the model ``source`` but for the rounding of ``kind``, and that readers compute it.

    ``before``: logits of the source's files. ProofError otherwise. Where llama.cpp is not installed, transformers reads
    the file, if it knows the architecture; else this project alone, which the proof says.
    """
    words = source.model.vocab_size or 0
    unpadded = {name: logits[..., :words] for name, logits in before.items()}
    if kind != "f32":
        compare(unpadded, portable_answer(source, question))
    with tempfile.TemporaryDirectory(prefix="megatron-gguf-") as scratch:
        back, held = read_gguf(file, scratch=Path(scratch, "tokenizer")), open_gguf(file)
        check_rounding(source, back, kind=kind)
        ours = portable_answer(back, question)
        check_tokens(file, source, say=say)
    if kind == "f32":
        context = _context_of(held)  # where the source has a window, both are the same within it alone
        compare(*({name: each[:, :context] for name, each in answer.items()} for answer in (unpadded, ours)))
    return _prove_reader(file, held, _as_run(back, ours, question, held), question, words=words)


def prove_reading(file: Path, portable: PortableModel, target: Answer, question: Question) -> Proof:
    """The proof that the readers of ``file`` compute what ``target`` says, the answer of what was made of it.
    ``portable``: the model as it was read.
    """
    held, words = open_gguf(file), portable.model.vocab_size or 0
    return _prove_reader(file, held, _as_run(portable, target, question, held), question, words=words)


def _as_run(portable: PortableModel, answer: Answer, question: Question, held: GgufFile) -> Answer:
    """The answer of the model as llama.cpp runs it. ``answer``: that of the model itself."""
    architecture, _ = architecture_named(str(held.keys["general.architecture"]), where="it")
    own = portable.model, tuple(portable.groups)
    model, groups = architecture.as_run(*own)
    if (model, groups) == own:
        return answer
    words = portable.model.vocab_size or 0
    compare({name: each[..., :words] for name, each in answer.items()}, portable_answer(portable, question))
    return portable_answer(dataclasses.replace(portable, model=model, groups=groups), question)


def _prove_reader(file: Path, held: GgufFile, ours: Answer, question: Question, *, words: int) -> Proof:
    name = str(held.keys["general.architecture"])
    asked = _asked(question, _context_of(held), has_encoder=_has_encoder(held))
    places = asked.places
    rows = log_probabilities(ours, places, words)
    if (version := llama_cpp_version()) is not None:
        theirs = asked.by_llama_cpp(file, words=words)
        reader, tolerance = f"llama.cpp (xllamacpp {version})", tolerance_of(name, held.kinds)
    elif (answer := transformers_answer(file, question)) is not None:
        theirs, reader, tolerance = log_probabilities(answer, places, words), "transformers' GGUF loader", TOLERANCE
    else:
        return GgufProof(0.0, rows.abs().max().item(), _OURS_ALONE)
    return compare_rows(rows, theirs, tolerance=tolerance, reader=reader)


@dataclass(frozen=True)
class _Asked:
    """What llama.cpp is asked at some ``places`` of a question: to continue ``prompts``, where the encoder reads
    ``given``; None for a model without one.
    """

    places: list[tuple[int, int]]
    prompts: list[list[int]]
    given: list[list[int]] | None
    context: int

    def by_llama_cpp(self, file: Path, *, words: int) -> Tensor:
        """Log-probabilities ``[places, words]``."""
        if self.given is None:
            return llama_cpp_rows(file, self.prompts, words=words, context=self.context)
        return llama_cpp_pairs(file, [*zip(self.given, self.prompts)], words=words, context=self.context)


def _asked(question: Question, longest: int, *, has_encoder: bool) -> _Asked:
    of: Any = question  # a decoder's has tokens; an encoder-decoder's those of both, and which are no padding
    tokens: Tensor = of.decoder_tokens if has_encoder else of.tokens
    # llama.cpp makes room for no more positions than the file says, and one is for the token that it predicts.
    places = chosen_positions(tokens[:, : longest - 1])
    prompts = [tokens[sample, : place + 1].tolist() for sample, place in places]
    given = [of.tokens[sample][of.real[sample]].tolist() for sample, _ in places] if has_encoder else None
    return _Asked(places, prompts, given, of.tokens.shape[1] + 8)


def _has_encoder(held: GgufFile) -> bool:
    return architecture_named(str(held.keys["general.architecture"]), where="it")[0].has_encoder


def _context_of(held: GgufFile) -> int:
    return int(held.keys[f"{held.keys['general.architecture']}.context_length"])


def transformers_answer(file: Path, question: Question) -> Answer | None:
    """The answer of transformers, or None where it is missing or doesn't load the file. It loads files of T5 as other
    models: without scale, and with a gate.
    """
    try:
        import transformers
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
    except ImportError:
        return None
    name = str((held := open_gguf(file)).keys["general.architecture"])
    if name not in GGUF_SUPPORTED_ARCHITECTURES or _has_encoder(held):
        return None
    load = getattr(transformers, question.auto_class).from_pretrained
    try:
        model = load(file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True)
    except Exception as error:  # transformers raises anything for files that it doesn't like
        raise CheckpointError(f"transformers cannot load {file.name}: {type(error).__name__}: {error}") from error
    with torch.no_grad():
        return {kind: logits.float() for kind, logits in question.ask_theirs(model.eval()).items()}


def gguf_file(place: Path) -> Path:
    """The file of a model, the first of its parts; CheckpointError for a folder without one."""
    found = sorted(place.glob("*.gguf")) if place.is_dir() else [place]
    if not found:
        raise CheckpointError(f"{place} holds no .gguf file")
    return found[0]
