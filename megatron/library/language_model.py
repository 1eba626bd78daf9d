"""A trained language model as one object: logits, generated text, and folders in either format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.checkpointing.gathering import Gathering
from megatron.core.conversion.huggingface.writing import check_writable, write_huggingface
from megatron.core.conversion.native import PREFIX, write_native
from megatron.core.conversion.portable import LazyTensor, PortableModel
from megatron.core.conversion.remote import becoming
from megatron.core.files.remote_path import AnyPath, path_of
from megatron.core.inference.sampling import Sampling
from megatron.core.parallel.environment import launch_environment
from megatron.core.parallel.rng import StreamKey
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.transformer.output_layer import VocabularyOutput
from megatron.errors import CheckpointError, ConfigError
from megatron.library.generation import Generation, TextModel, continued
from megatron.training.checkpoints.trained_model import PlacedModel
from megatron.training.run.stages import model_state

Prompts = TypeVar("Prompts", str, "list[str]", "list[int]", "list[list[int]]")


class LanguageModel(nn.Module):
    """A model of this project on one device, as ``megatron.load`` and ``megatron.from_transformers`` give it.

    It is a ``torch.nn.Module``: ``model(ids)`` gives logits with gradients, and ``parameters()``, ``train()`` and any
    torch optimizer work. Every process of a launcher holds a whole model, so data-parallel wrappers of other libraries
    fit around it. Models that ranks divide are trained by ``megatron.pretrain``, and load what ``save`` wrote.

    ``model``: the module itself. ``config``: its architecture. ``tokenizer``: None for a model without one, whose
    prompts and answers are token ids.
    """

    def __init__(
        self,
        placed: PlacedModel,
        *,
        companions: Mapping[str, AnyPath],
        end_tokens: frozenset[int],
        decoder_start: int | None = None,
        iteration: int = 0,
    ) -> None:
        """Wrap a placed model.

        ``companions``: files that travel with the model, by name. ``end_tokens``: ids that end a generated text.
        ``decoder_start``: the id that a decoder's text begins with. ``iteration``: the checkpoint's, or 0.
        """
        super().__init__()
        (self.model,) = placed.models
        self._placed, self._companions = placed, dict(companions)
        self._end_tokens, self._decoder_start = end_tokens, decoder_start
        self._iteration = iteration

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        return self._placed.config.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where token ids are used as they are."""
        has_text = self._placed.config.tokenizer.tokenizer_type != "NullTokenizer"
        return self._placed.tokenizer if has_text else None

    @property
    def device(self) -> torch.device:
        """The device that the model was built on."""
        return self._placed.context.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self._placed.context.dtype

    @override
    def forward(self, ids: Tensor, *inputs: Tensor, **named: Tensor | None) -> Tensor:
        """Logits ``[b, s, vocabulary]`` for token ids ``[b, s]``.

        ``inputs``, ``named``: further inputs of the family's model, such as the decoder's ids of a T5
        (``model(ids, decoder_ids)``) or ``attention_mask`` of a BERT. A decoder needs no mask for padding on the right.
        Raises ConfigError for a model that was moved or converted after it was built.
        """
        self._check_unmoved()
        key = StreamKey(int(torch.randint(2**62, ())) if self.training else 0)  # dropout follows torch.manual_seed
        output = self.model(ids, *inputs, rng_key=key, **named)
        output = getattr(output, "words", output)  # of several heads, the one for words
        assert isinstance(output, VocabularyOutput), "the model has all its stages"
        return output.logits_with_gradient()

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 0.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        min_new_tokens: int = 0,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 1234,
    ) -> Prompts:
        """Continue a prompt or several, and return the continuations alone, in the same form.

        ``prompts``: a text or a list of token ids, or a list of these. ``max_new_tokens``: unless given, 64, or fewer
        if the model sees no more. ``min_new_tokens``: the text doesn't end before it has these. ``temperature``: 0
        always takes the most probable token. ``top_k``, ``top_p``, ``min_p``: 0 samples from all tokens.
        ``repetition_penalty``: above 1, tokens that are in the text already are less probable. ``num_beams``: above 1,
        beam search for the most probable answer instead of sampling. ``length_penalty``: above 0, beam search prefers
        longer answers. ``stop``: a text ends before the first of these. ``seed``: the same one gives the same answer,
        whatever else is in the list.

        Raises ConfigError for invalid options and prompts, and for options that have no effect together; DataError for
        a prompt that leaves no room.
        """
        self._check_unmoved()
        options = Generation(
            max_new_tokens=max_new_tokens,
            sampling=Sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                min_tokens=min_new_tokens,
            ),
            num_beams=num_beams,
            length_penalty=length_penalty,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=seed,
        )
        was_training = self.model.training
        self.model.eval()
        try:
            model = TextModel(
                placed=self._placed,
                tokenizer=self.tokenizer,
                end_tokens=self._end_tokens,
                decoder_start=self._decoder_start,
            )
            found: Prompts = continued(model, prompts, options)
            return found
        finally:
            self.model.train(was_training)

    def save_pretrained(
        self, folder: str | Path, *, overwrite: bool = False, max_shard_size: int = 5_000_000_000
    ) -> None:
        """Write a Hugging Face folder: settings, weights, and the tokenizer's files if the model has any.

        ``max_shard_size``: bytes of one weight file. Under a launcher rank 0 writes, and other ranks return at once.
        Raises CheckpointError for a model that no class of transformers matches, for a folder that isn't empty unless
        ``overwrite`` is True, and when the folder can't be written.
        """
        check_writable(self.config, self._placed.config.extra)
        self._write(folder, partial(write_huggingface, max_shard_size=max_shard_size), overwrite=overwrite)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a checkpoint of this project, which loads at any layout: ``megatron.load(folder)``, or a run's
        ``--load`` with ``--finetune``.

        Weights and tokenizer only, without the state of an optimizer. Under a launcher rank 0 writes, and other ranks
        return at once. Raises CheckpointError for a folder that isn't empty unless ``overwrite`` is True.
        """
        self._write(folder, partial(write_native, final=path_of(str(folder))), overwrite=overwrite)

    def _write(self, folder: str | Path, write: Any, *, overwrite: bool) -> None:
        if launch_environment().rank > 0:
            return
        place = path_of(str(folder))

        def check() -> None:
            if not overwrite and place.exists() and (not place.is_dir() or any(place.iterdir())):
                raise CheckpointError(f"{place} exists and is not empty: name a new folder, or pass overwrite=True")

        check()
        try:
            with becoming(place, say=_say_nothing, check=check) as aside:
                write(self._portable(), aside)
        except OSError as error:
            raise CheckpointError(f"{error.filename or place}: {error.strerror or error}") from error

    def _portable(self) -> PortableModel:
        """The model as it is now, in the form that both writers take."""
        gathering = Gathering(model_state(self.model), self._placed.context)
        config = self._placed.config
        return PortableModel(
            model=config.model,
            groups=config.extra,
            tensors={
                name.removeprefix(PREFIX): LazyTensor(shape, dtype, partial(_gathered, gathering, number))
                for number, (name, shape, dtype) in enumerate(zip(gathering.names, gathering.shapes, gathering.dtypes))
            },
            tokenizer=config.tokenizer,
            seq_length=config.data.seq_length,
            companions=self._companions,
            iteration=self._iteration,
            chat=self._placed.chat,
        )

    def _check_unmoved(self) -> None:
        parameter = next(self.model.parameters())
        if (parameter.device, parameter.dtype) != (self.device, self.dtype):
            now, built = (
                f"{str(dtype).removeprefix('torch.')} on {device}"
                for device, dtype in ((parameter.device, parameter.dtype), (self.device, self.dtype))
            )
            raise ConfigError(
                f"the model was built in {built} and has been converted to {now}: pass device= and dtype= to "
                "megatron.load or megatron.from_transformers instead"
            )

    @override
    def extra_repr(self) -> str:
        """What ``print(model)`` shows besides the modules."""
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{self._placed.train_spec.name}, {count:,} parameters, {self.dtype} on {self.device}"


def _gathered(gathering: Gathering, number: int) -> Tensor:
    tensor = gathering.gather(number)
    assert tensor is not None, "a world of one gathers on its only rank"
    return tensor


def _say_nothing(line: str) -> None:
    """Leftovers of killed conversions are not this call's business."""
