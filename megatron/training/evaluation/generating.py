"""A trained model as a generation engine, at any layout that ``trained_model`` loads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.config.inference import InferenceConfig
from megatron.config.trained_model import TrainedModelConfig
from megatron.core.inference.drafts import DraftModel
from megatron.core.inference.engine import Engine
from megatron.core.inference.products import INT8, Form
from megatron.core.inference.runner import CachedRunner, EncoderDecoder, GenerativeModel, costs_little
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.inference.workers import EveryRanksRunner, Leader, follow
from megatron.core.ops.matmul import lacks_bf16
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.messages import Messages
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.tokenizers.conversations import OWN, ChatTemplate, load_template, own_template, template_tokens
from megatron.errors import ConfigError
from megatron.training.checkpoints.trained_model import PlacedModel, TrainedModel, another_trained_model

_BLOCK_SIZE = 64


@contextmanager
def generation_engine(
    trained: TrainedModel, config: InferenceConfig, *, releases: bool = False
) -> Iterator[Engine | None]:
    """An engine on rank 0; on other ranks None, after they have computed its steps until rank 0 leaves the block.

    ``releases``: the process does nothing else with the model; see ``CachedRunner.warm_up``.
    """
    check_limits(config)
    form = weights_form(trained, config)
    mesh = trained.context.mesh
    limits = limits_of(trained, config)
    models = [trained]
    if config.draft_load is not None:
        models.append(draft_model(trained, config.draft_load, length=limits.max_length))
    invariant = config.batch_invariant or None
    stages = [
        CachedRunner(each.models[0], each.config.model, each.context, limits, is_batch_invariant=invariant, form=form)
        for each in models
    ]
    for stage in stages:
        stage.warm_up(releases=releases)
    messages = Messages(mesh)
    if mesh.world_rank > 0:
        follow(stages, mesh, messages)
        yield None
        return
    runner, *drafts = [Leader(stage, mesh, messages, number=number) for number, stage in enumerate(stages)]
    options = SchedulerOptions(
        max_tokens=config.inference_dynamic_batching_max_tokens,
        chunked_prefill=not config.disable_chunked_prefill,
        prefix_caching=config.inference_dynamic_batching_prefix_caching,
        num_drafts=config.num_speculative_tokens,
    )
    drafter = DraftModel(drafts[0]) if drafts else None
    engine = Engine(
        runner, tokenizer=trained.tokenizer, options=options, drafter=drafter, quantization=config.quantization
    )
    if engine.limits.max_length < limits.max_length:
        print(
            f"texts have at most {engine.limits.max_length:,} tokens, not {limits.max_length:,}: the cache has no room "
            "for more, and --inference-dynamic-batching-buffer-size-gb gives it more",
            file=sys.stderr,
        )
    try:
        yield engine
    finally:
        engine.close()


def engine_of_every_rank(
    placed: PlacedModel, *, length: int, max_requests: int, options: SchedulerOptions | None = None
) -> Engine | None:
    """A rank's engine, which all ranks of a replica ask the same, for texts of up to ``length`` tokens. A collective.

    Ranks that split sequences in training don't here: those of context parallelism compute the same. None for a model
    that has no cache of keys and values.
    """
    context, model = placed.context, placed.config.model
    if not all(isinstance(part, GenerativeModel) for part in placed.models):
        return None
    assert model.vocab_size is not None, "a tokenizer has set it"
    limits = RunnerLimits(
        num_blocks=1 + max_requests * -(-length // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_requests=max_requests,
        max_length=length,
        vocabulary=model.vocab_size,
    )
    stages = [CachedRunner(part, model, context, limits) for part in placed.models]
    runner = EveryRanksRunner(stages, context.mesh, PipelineSettings.of(placed.config).placement)
    return Engine(runner, tokenizer=placed.tokenizer, options=options)


def exactness(trained: TrainedModel, config: InferenceConfig, *, together: bool = True) -> str:
    """A line that says how exact generation is: the type of numbers, where, and, for texts that are written together,
    whether they depend on each other. And what is faster, where the type is slow.
    """
    context = trained.context
    mesh = context.mesh
    dtype = str(context.dtype).removeprefix("torch.")
    sizes = ((mesh.size("tp"), "tensor"), (mesh.size("pp"), "pipeline"))
    ranks = [f"{size} {name}" for size, name in sizes if size > 1]
    dtype += f" with {config.quantization} weights" if config.quantization else ""
    where = f"{dtype} on {context.device.type}" + (f" with {' x '.join(ranks)}-parallel ranks" if ranks else "")
    if config.batch_invariant or costs_little(context):
        line = (
            f"generation in {where}, batch-invariant: a text's logits have the same bits whatever else is in the batch"
        )
        if costs_little(context) and config.quantization is None and lacks_bf16():
            line += (
                "; this processor has no instructions for 16-bit numbers and multiplies in fp32: --fp32 takes less "
                "than half the time for a single text, four times the memory of weights, and is not batch-invariant"
            )
        return line
    if not together:
        return f"generation in {where}"
    return (
        f"generation in {where}, not batch-invariant: what else is in the batch can change the last bits of a text's "
        "logits, and with them a near tie between two tokens; --batch-invariant prevents that"
    )


def weights_form(trained: TrainedModel, config: InferenceConfig) -> Form | None:
    """What ``--quantization`` asks for; None: the usual. Raises ConfigError where it can't be had."""
    if config.quantization is None:
        return None
    weight = torch.empty(0, 0, dtype=trained.context.dtype, device=trained.context.device)
    if (reason := INT8.refusal(weight)) is not None:
        raise ConfigError(f"--quantization {config.quantization} can't be used: {reason}; leave the flag out")
    return INT8


def check_limits(config: InferenceConfig) -> None:
    """Raise ConfigError for settings that cannot work together."""
    budget, texts = config.inference_dynamic_batching_max_tokens, config.inference_max_requests
    if budget < texts:
        raise ConfigError(
            f"--inference-dynamic-batching-max-tokens {budget} is less than --inference-max-requests {texts}: a step "
            "computes a token of each text; raise the one or lower the other"
        )
    if config.draft_load is not None and not config.num_speculative_tokens:
        raise ConfigError("--draft-load needs --num-speculative-tokens: how many tokens to guess, such as 4")


def limits_of(trained: TrainedModel, config: InferenceConfig) -> RunnerLimits:
    """What the ranks have room for, at most what the longest texts need. A collective.

    Raises ConfigError when the cache is too small for the states of all texts and the shortest text.
    """
    model, block_size = trained.config.model, config.inference_dynamic_batching_block_size
    length = min(model.max_position_embeddings, config.inference_max_seq_length or model.max_position_embeddings)
    part = trained.models[0]
    assert isinstance(part, GenerativeModel), f"{type(part).__name__} doesn't generate text"
    states, size = part.layer_states(), config.inference_dynamic_batching_buffer_size_gb
    bytes_per_block = block_size * states.bytes_per_token(trained.context.dtype)
    room = int(size * 2**30) - config.inference_max_requests * states.bytes_per_text
    found = gather_objects(  # layers may be divided unequally
        (room // max(1, bytes_per_block), states.bytes_per_text), trained.context.mesh
    )
    num_blocks = min(
        1 + config.inference_max_requests * -(-length // block_size), *(affordable for affordable, _ in found)
    )
    if num_blocks < 2 and (largest := max(per_text for _, per_text in found)):
        raise ConfigError(
            f"--inference-dynamic-batching-buffer-size-gb {size:g} has no room for the states of "
            f"--inference-max-requests {config.inference_max_requests} texts, {largest / 2**20:.3g} MiB each, and 2 "
            "blocks: give it more, or lower --inference-max-requests"
        )
    if num_blocks < 2:
        raise ConfigError(
            f"--inference-dynamic-batching-buffer-size-gb {size:g} has no room for 2 blocks of {block_size} "
            f"tokens, {2 * bytes_per_block / 2**30:.3g} GiB: give it more, or lower "
            "--inference-dynamic-batching-block-size"
        )
    return RunnerLimits(
        num_blocks=num_blocks,
        block_size=block_size,
        max_requests=config.inference_max_requests,
        max_length=length,
        vocabulary=trained.tokenizer.vocab_size,
        max_encoder_length=length if isinstance(part, EncoderDecoder) else 0,
        has_states=any(per_text for _, per_text in found),
    )


def draft_model(trained: TrainedModel, folder: str, *, length: int) -> TrainedModel:
    """The smaller model of ``--draft-load`` for texts of ``length``, on the ranks of ``trained``. A collective.

    Raises ConfigError for a model with another tokenizer or for shorter texts, CheckpointError when there is none.
    """
    draft = another_trained_model(trained, TrainedModelConfig(load=folder))
    if draft.tokenizer.fingerprint != trained.tokenizer.fingerprint:
        raise ConfigError(
            f"--draft-load {folder} has another tokenizer than the model: name one trained with the same tokenizer"
        )
    if (longest := draft.config.model.max_position_embeddings) < length:
        raise ConfigError(
            f"--draft-load {folder} sees at most {longest} tokens, and texts have up to {length}: give "
            f"--inference-max-seq-length {longest}"
        )
    return draft


def decoder_start(trained: TrainedModel) -> int | None:
    """What a text of an encoder-decoder model begins with; None for a model whose texts continue their prompts.

    Raises ConfigError for a tokenizer that has no such token.
    """
    if not isinstance(trained.models[0], EncoderDecoder):
        return None
    found: int | None = getattr(trained.tokenizer, "decoder_start", None)
    if found is None:
        raise ConfigError(
            f"{trained.folder.path} is used with {trained.tokenizer.name}, which has no token that a decoder's text "
            "begins with: name a checkpoint that was trained on text, or its --tokenizer-type and files"
        )
    return found


def template_of(trained: TrainedModel, given: str | None) -> ChatTemplate | None:
    """The template in the file ``given``, or the one that the model has learned, or its tokenizer's own; None: neither.

    A model that was fine-tuned on conversations knows those alone in the form that it has seen. Raises ConfigError and
    DataError for a template that can't be used.
    """
    files, chat = trained.config.tokenizer.tokenizer_model, trained.chat
    if given is None and chat is not None and chat.template is not None:
        return ChatTemplate(chat.template, tokens=template_tokens(files), learned="assistant")
    if given is None and own_template(files) is None:
        return None
    return load_template(given or OWN, files, learned="assistant")
