"""transformers' models as oracles: random weights, and every number in fp64 where their code casts to fp32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from megatron.config.model import ModelConfig
from megatron.core.conversion.huggingface.reading import from_transformers
from megatron.core.conversion.portable import PortableModel
from megatron.core.models.bert.config import BertConfig, TokenTypesConfig
from megatron.core.models.bert.model import BertOutput
from megatron.core.models.registry import family_of


class InFP64(TorchFunctionMode):
    """Every fp32 that code asks for is fp64: transformers casts norms, rotary angles and softmax to fp32. So is the
    bf16 to which it casts the slopes of Falcon's ALiBi.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """``func`` with other types."""

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        named = {name: wide(value) for name, value in (kwargs or {}).items()}
        called = torch.Tensor.double if func in (torch.Tensor.float, torch.Tensor.bfloat16) else func
        return called(*map(wide, args), **named)


@contextmanager
def in_fp64() -> Iterator[None]:
    """The block computes in fp64 throughout, also where a whole number becomes a float; see ``InFP64``."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with InFP64():
            yield
    finally:
        torch.set_default_dtype(usual)


def random_model(family: str, settings: Mapping[str, Any], *, seed: int = 0) -> Any:
    """A model of the class that ``architectures`` names, or a causal language model, with weights large enough that a
    mistake shows, and no two equal.
    """
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **deepcopy(settings))  # it changes nested ones
    causal: Any = transformers.AutoModelForCausalLM.from_config
    model = getattr(transformers, config.architectures[0])(config) if config.architectures else causal(config)
    output = model.get_output_embeddings()
    if settings.get("tie_word_embeddings") is False and output.weight is model.get_input_embeddings().weight:
        # as real files of T5 v1.1 are; in a new model transformers 5 ties, whatever the settings say
        output.weight = torch.nn.Parameter(output.weight.detach().clone())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.15 if parameter.dim() > 1 else 0.3
            is_scale = name.endswith("weight") and ("norm" in name.lower() or name.split(".")[-2] == "ln")
            parameter.normal_(parameter.mean().item() if is_scale else 0.0, std)  # 0 in Gemma, which adds 1
        parameters = dict(model.named_parameters())
        for (
            name,
            parameter,
        ) in parameters.items():  # of an untied BERT: nothing reads the first; a copy in transformers 4
            if (live := parameters.get(f"{name.removesuffix('bias')}decoder.bias")) is not None:
                parameter.copy_(live)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def _is_unread(name: str, model: Any) -> bool:
    """Whether it is the bias that an untied BERT keeps where a tied one has its own; a copy in transformers 4."""
    head, _, kind = name.rpartition(".")
    return kind == "bias" and f"{head}.decoder.bias" in dict(model.named_parameters())


def fp64_model(family: str, settings: dict[str, Any], **more: Any) -> Any:
    """``random_model`` in fp64, with eager attention and without dropout; ``more``: as for ``random_model``."""
    with in_fp64():
        model = random_model(family, settings, **more).double()
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"  # the other kernels refuse fp64
    return model.eval()


LENGTH, DECODER_LENGTH = 40, 24


@dataclasses.dataclass(frozen=True)
class PublishedBatch:
    """A batch of a published model's training. ``fields``: for our train spec. ``inputs``: for transformers' model.

    ``answers``: for each loss the name of transformers' logits, the labels, and where they count.
    """

    fields: dict[str, Tensor]
    inputs: dict[str, Any]
    answers: dict[str, tuple[str, Tensor, Tensor]]

    @classmethod
    def of(cls, portable: PortableModel) -> PublishedBatch:
        """Three samples for a model, some of them padded; without the ids 0 to 7, which transformers may not train."""
        generator = torch.Generator().manual_seed(5)

        def ids(length: int) -> Tensor:
            return torch.randint(8, portable.model.vocab_size or 9, (3, length), generator=generator)

        make = {"gpt": _causal_batch, "bert": _masked_batch, "t5": _decoder_batch}
        return make[family_of(portable.groups).name](portable, ids)

    def theirs(self, model: Any) -> dict[str, Tensor]:
        """Logits that count, ``[counted, classes]``, by the name of their loss, with their graph."""
        with in_fp64():
            output = model(**self.inputs)
        return {name: output[logits][where] for name, (logits, _, where) in self.answers.items()}

    def ours(self, output: Any) -> dict[str, Tensor]:
        """The same of the output of our model."""
        words, order = (output.words, output.order) if isinstance(output, BertOutput) else (output, None)
        logits: list[Any] = [words.logits(), order]
        return {name: each[where] for each, (name, (_, _, where)) in zip(logits, self.answers.items())}


def _causal_batch(portable: PortableModel, ids: Callable[[int], Tensor]) -> PublishedBatch:
    tokens = ids(LENGTH + 1)
    where = torch.ones(3, LENGTH, dtype=torch.bool)
    fields = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": where.double()}
    inputs = {"input_ids": tokens[:, :-1], "use_cache": False}
    return PublishedBatch(fields, inputs, {"lm loss": ("logits", tokens[:, 1:], where)})


def _masked_batch(portable: PortableModel, ids: Callable[[int], Tensor]) -> PublishedBatch:
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13], [31]])
    tokens = ids(LENGTH).masked_fill(~real, max(portable.model.position_embedding_offset - 1, 0))
    has_types = TokenTypesConfig.among(portable.groups).num_tokentypes > 1
    types = (torch.arange(LENGTH) >= torch.tensor([[9], [4], [15]])).long() * has_types
    labels, order = ids(LENGTH), torch.tensor([0, 1, 1])
    has_order = BertConfig.among(portable.groups).bert_binary_head
    fields = {
        "text": tokens,
        "types": types,
        "labels": labels,
        "loss_mask": real.double(),
        "attention_mask": real.long(),
        **({"is_random": order} if has_order else {}),
    }
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    inputs |= {"token_type_ids": types} if TokenTypesConfig.among(portable.groups).num_tokentypes else {}
    answers = {"lm loss": ("prediction_logits" if has_order else "logits", labels, real)}
    answers |= {"sop loss": ("seq_relationship_logits", order, order >= 0)} if has_order else {}
    return PublishedBatch(fields, inputs, answers)


def _decoder_batch(portable: PortableModel, ids: Callable[[int], Tensor]) -> PublishedBatch:
    real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [13], [31]])
    answered = torch.arange(DECODER_LENGTH) < torch.tensor([[9], [DECODER_LENGTH], [15]])
    encoder, decoder, labels = ids(LENGTH), ids(DECODER_LENGTH), ids(DECODER_LENGTH)
    fields = {
        "text_enc": encoder,
        "text_dec": decoder,
        "labels": labels,
        "loss_mask": answered.double(),
        "enc_mask": real.long(),
    }
    inputs = {"input_ids": encoder, "attention_mask": real.long(), "decoder_input_ids": decoder, "use_cache": False}
    inputs["decoder_attention_mask"] = answered.long()
    return PublishedBatch(fields, inputs, {"lm loss": ("logits", labels, answered)})


def without_dropout(model: ModelConfig) -> ModelConfig:
    """The same architecture, to compare numbers."""
    return dataclasses.replace(model, attention_dropout=0.0, hidden_dropout=0.0)


def portable_gradients(model: Any) -> PortableModel:
    """The gradients of a model that was run backward, under our names; the model's weights are lost."""
    for name, parameter in model.named_parameters():
        if not _is_unread(name, model):
            assert parameter.grad is not None, name
            parameter.data = parameter.grad
    return from_transformers(model)
