"""A trained model as a generation engine, at any layout that ``trained_model`` loads."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron.config.family import FamilyConfig
from megatron.config.inference import InferenceConfig
from megatron.config.trained_model import TrainedModelConfig
from megatron.config.vision import VisionConfig
from megatron.core.inference.drafts import DraftModel
from megatron.core.inference.engine import Engine
from megatron.core.inference.image_prompts import ImagePrompts
from megatron.core.inference.products import INT8, Form
from megatron.core.inference.runner import CachedRunner, EncoderDecoder, GenerativeModel, costs_little
from megatron.core.inference.scheduler import SchedulerOptions
from megatron.core.inference.step_plan import RunnerLimits
from megatron.core.inference.workers import EveryRanksRunner, Leader, LeaderOfAll, follow, follow_runner
from megatron.core.ops.matmul import lacks_bf16
from megatron.core.parallel.collectives import gather_objects
from megatron.core.parallel.messages import Messages
from megatron.core.pipeline_parallel.settings import PipelineSettings
from megatron.core.tokenizers.conversations import OWN, ChatTemplate, load_template, own_template, template_tokens
from megatron.errors import ConfigError
from megatron.training.checkpoints.several_adapters import FLAG, load_adapters, named_folders
from megatron.training.checkpoints.trained_model import PlacedModel, TrainedModel, another_trained_model
from megatron.training.evaluation.evaluate import Evaluator
from megatron.training.evaluation.stored_weights import stored_weights
from megatron.training.evaluation.whole_text_runner import WholeTextRunner

_BLOCK_SIZE = 64


@contextmanager
def generation_engine(
    trained: TrainedModel, config: InferenceConfig, *, releases: bool = False
) -> Iterator[Engine | None]:
    """An engine on rank 0; on other ranks None, after they have computed its steps until rank 0 leaves the block.

    ``releases``: the process does nothing else with the model; see ``CachedRunner.warm_up``.
    """
    check_limits(config)
    needs = text_needs(trained)
    if needs.unknown:
        with _whole_text_engine(trained, config, needs) as engine:
            yield engine
        return
    adapters = None
    if named := named_folders(config.lora_modules):
        if any(isinstance(model, EncoderDecoder) for model in trained.models):
            raise ConfigError(f"{FLAG} is for models that continue texts, and this one has an encoder: leave it out")
        adapters = load_adapters(trained, named)
    form = weights_form(trained, config)
    stored = stored_weights(trained) if config.quantization == "stored" else None
    mesh = trained.context.mesh
    models = [trained]
    if config.draft_load is not None:
        models.append(draft_model(trained, config.draft_load, length=_longest_text(trained, config)))
    limits = dataclasses.replace(limits_of(models, config), num_adapters=len(named))
    invariant = config.batch_invariant or (costs_little(trained.context) and not needs.bytes_per_text)
    stages = [
        CachedRunner(
            each.models[0],
            each.config.model,
            each.context,
            limits,
            is_batch_invariant=invariant if each is trained else None,  # texts don't depend on drafts
            form=form,
            stored=stored.forms if stored is not None and each is trained else None,
            experts=stored.experts if stored is not None and each is trained else None,
            adapters=adapters if each is trained else None,
        )
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
    drafter = DraftModel(drafts[0]) if drafts else None
    engine = Engine(
        runner,
        tokenizer=trained.tokenizer,
        options=scheduler_options(config),
        drafter=drafter,
        quantization=config.quantization,
        is_batch_invariant=invariant,
    )
    if stored is not None:
        print(stored.report(), file=sys.stderr)
    per_text = needs.bytes_per_text + sum(text_needs(each).bytes_per_text for each in models[1:])
    for remark in state_remarks(per_text, config, limits):
        print(remark, file=sys.stderr)
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


def scheduler_options(config: InferenceConfig) -> SchedulerOptions:
    """The scheduler's options that the flags of inference ask for."""
    return SchedulerOptions(
        max_tokens=config.inference_dynamic_batching_max_tokens,
        chunked_prefill=not config.disable_chunked_prefill,
        prefix_caching=config.inference_dynamic_batching_prefix_caching,
        num_drafts=config.num_speculative_tokens,
    )


@contextmanager
def _whole_text_engine(trained: TrainedModel, config: InferenceConfig, needs: TextNeeds) -> Iterator[Engine | None]:
    """``generation_engine`` for a model that reads the whole text for each token."""
    why = f"{', '.join(needs.unknown)} don't say what they keep of a text (text_state)"
    given = {
        "--draft-load": config.draft_load is not None,
        "--quantization": config.quantization is not None,
        "--batch-invariant": config.batch_invariant,
        FLAG: bool(config.lora_modules),
    }
    if flags := [flag for flag, is_given in given.items() if is_given]:
        raise ConfigError(
            f"layers with {why}, so the model reads the whole text for each token, without {', '.join(flags)}: leave "
            "the flags out, or give the module a text_state (docs/adding_a_family.md, Generation)"
        )
    mesh, messages = trained.context.mesh, Messages(trained.context.mesh)
    runner = WholeTextRunner(
        Evaluator(trained), max_requests=config.inference_max_requests, length=_longest_text(trained, config)
    )
    if mesh.world_rank > 0:
        follow_runner(runner, mesh, messages)
        yield None
        return
    engine = Engine(LeaderOfAll(runner, messages), tokenizer=trained.tokenizer, options=scheduler_options(config))
    print(f"layers with {why}: the model reads the whole text for each token, which is slow", file=sys.stderr)
    try:
        yield engine
    finally:
        engine.close()


@dataclass(frozen=True)
class TextNeeds:
    """What the layers of all ranks need of texts. ``unknown``: class names of branches that need whole texts.
    ``bytes_per_text``: states of fixed size for one text, on the rank that has most.
    """

    unknown: tuple[str, ...]
    bytes_per_text: int


def text_needs(placed: PlacedModel) -> TextNeeds:
    """What the model needs of texts. A collective. Raises ConfigError for a model that doesn't continue texts."""
    unknown, most = dict[str, None](), 0
    for part in placed.models:
        if not isinstance(part, GenerativeModel):
            raise ConfigError(
                f"a {placed.train_spec.name} model ({type(part).__name__}) says neither how texts go on "
                "(continue_texts) nor what its layers keep of them (layer_states), so it can't generate here"
            )
    states = [part.layer_states() for part in placed.models if isinstance(part, GenerativeModel)]
    own = (tuple(name for each in states for name in each.unknown), sum(each.bytes_per_text for each in states))
    for names, size in gather_objects(own, placed.context.mesh):
        unknown |= dict.fromkeys(names)
        most = max(most, size)
    return TextNeeds(tuple(unknown), most)


def state_remarks(bytes_per_text: int, config: InferenceConfig, limits: RunnerLimits) -> list[str]:
    """What a user should know of states of fixed size: their memory, and what is off because of them."""
    if not limits.has_states:
        return []
    memory = bytes_per_text * limits.num_slots
    line = (
        f"each text keeps {_size(bytes_per_text)} of states on a rank, however long it is: {_size(memory)} for "
        f"{limits.max_requests} texts and {limits.num_snapshots} snapshots"
    )
    found = [line]
    if config.inference_dynamic_batching_prefix_caching and not limits.num_snapshots:
        found.append(
            "equal beginnings of prompts are read again: the cache has no room for snapshots of states, and "
            "--inference-dynamic-batching-buffer-size-gb gives it more"
        )
    return found


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def engine_of_every_rank(
    placed: PlacedModel, *, length: int, max_requests: int, options: SchedulerOptions | None = None
) -> Engine | None:
    """A rank's engine, which all ranks of a replica ask the same, for texts of up to ``length`` tokens. A collective.

    None for a model that can't generate with a cache.
    """
    runner = runner_of_every_rank(placed, length=length, max_requests=max_requests)
    return None if runner is None else Engine(runner, tokenizer=placed.tokenizer, options=options)


def runner_of_every_rank(placed: PlacedModel, *, length: int, max_requests: int) -> EveryRanksRunner | None:
    """What such engines compute with, one after the other: each begins with an empty cache. A collective.

    Ranks that split sequences in training don't here: those of context parallelism compute the same. None for a model
    that can't generate with a cache.
    """
    context, model = placed.context, placed.config.model
    if not all(isinstance(part, GenerativeModel) for part in placed.models) or (needs := text_needs(placed)).unknown:
        return None
    assert model.vocab_size is not None, "a tokenizer has set it"
    limits = RunnerLimits(
        num_blocks=1 + max_requests * -(-length // _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_requests=max_requests,
        max_length=length,
        vocabulary=model.vocab_size,
        has_states=needs.bytes_per_text > 0,
        image_shape=image_shape(placed),
    )
    stages = [CachedRunner(part, model, context, limits) for part in placed.models]
    return EveryRanksRunner(stages, context.mesh, PipelineSettings.of(placed.config).placement)


def exactness(
    trained: TrainedModel, config: InferenceConfig, *, together: bool = True, is_invariant: bool | None = None
) -> str:
    """A line that says how exact generation is: the type of numbers, the device, and batch invariance.

    It names a faster type where the type is slow. ``together``: texts are generated in batches. ``is_invariant``:
    whether the engine is batch-invariant; None: as its settings say.
    """
    context = trained.context
    mesh = context.mesh
    dtype = str(context.dtype).removeprefix("torch.")
    sizes = ((mesh.size("tp"), "tensor"), (mesh.size("pp"), "pipeline"))
    ranks = [f"{size} {name}" for size, name in sizes if size > 1]
    dtype += f" with {config.quantization} weights" if config.quantization else ""
    where = f"{dtype} on {context.device.type}" + (f" with {' x '.join(ranks)}-parallel ranks" if ranks else "")
    if is_invariant is None:
        is_invariant = config.batch_invariant or costs_little(context)
    if is_invariant:
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
    """The form of weights that ``--quantization int8`` asks for; None without the flag.

    Raises ConfigError where the device or type doesn't support it.
    """
    if config.quantization in (None, "stored"):
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


def limits_of(models: Sequence[TrainedModel], config: InferenceConfig) -> RunnerLimits:
    """Limits of the engine of a model and, after it, of its draft model: what all ranks have room for, and no more than
    the longest texts need. A collective. Memory counts the draft model's states, and not its keys and values.

    Raises ConfigError when the cache is too small for the states of all texts and the shortest text.
    """
    trained, block_size = models[0], config.inference_dynamic_batching_block_size
    length, size = _longest_text(trained, config), config.inference_dynamic_batching_buffer_size_gb
    part, *drafts = (each.models[0] for each in models)
    assert isinstance(part, GenerativeModel), f"{type(part).__name__} doesn't generate text"
    states = part.layer_states()
    bytes_per_block = block_size * states.bytes_per_token(trained.context.dtype)
    bytes_per_text = states.bytes_per_text + sum(
        each.layer_states().bytes_per_text for each in drafts if isinstance(each, GenerativeModel)
    )
    room = int(size * 2**30) - config.inference_max_requests * bytes_per_text
    wanted = 1 + config.inference_max_requests * -(-length // block_size)
    spare = (room - wanted * bytes_per_block) // max(1, bytes_per_text)
    found = gather_objects(  # layers may be divided unequally
        (room // max(1, bytes_per_block), bytes_per_text, spare), trained.context.mesh
    )
    num_blocks = min(wanted, *(affordable for affordable, *_ in found))
    snapshots = [each for _, per_text, each in found if per_text]
    if num_blocks < 2 and (largest := max(per_text for _, per_text, _ in found)):
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
        has_states=len(snapshots) > 0,
        num_snapshots=max(0, min(config.inference_max_requests, *snapshots)) if snapshots else 0,
        image_shape=image_shape(trained),
    )


def image_shape(placed: PlacedModel) -> tuple[int, int, int] | None:
    """Height and width of tiles of images, and features of each; None for a model that reads texts alone."""
    vision = VisionConfig.among(placed.config.extra)
    return vision.tile_shape if vision.has_vision else None


def image_prompts(placed: PlacedModel) -> ImagePrompts | None:
    """What makes prompts of texts and pictures; None for a model that reads texts alone."""
    vision = VisionConfig.among(placed.config.extra)
    if not vision.has_vision:
        return None
    marked = (group.image_id for group in placed.config.extra if isinstance(group, FamilyConfig))
    return ImagePrompts(vision, placed.tokenizer, next(marked, None))


def _longest_text(trained: TrainedModel, config: InferenceConfig) -> int:
    longest = trained.config.model.max_position_embeddings
    return min(longest, config.inference_max_seq_length or longest)


def draft_model(trained: TrainedModel, folder: str, *, length: int) -> TrainedModel:
    """The smaller model of ``--draft-load`` for texts of ``length``, on the ranks of ``trained``. A collective.

    Raises ConfigError for a model with another tokenizer or for shorter texts, CheckpointError when there is none.
    """
    draft = another_trained_model(trained, TrainedModelConfig(load=folder))
    if draft.tokenizer.fingerprint != trained.tokenizer.fingerprint:
        raise ConfigError(
            f"--draft-load {folder} has another tokenizer than the model: name one trained with the same tokenizer"
        )
    if needs := text_needs(draft).unknown:
        raise ConfigError(
            f"--draft-load {folder} has layers with {', '.join(needs)}, which don't say what they keep of a text "
            "(text_state): name a draft model of other layers, or leave the flag out"
        )
    if (longest := draft.config.model.max_position_embeddings) < length:
        raise ConfigError(
            f"--draft-load {folder} sees at most {longest} tokens, and texts have up to {length}: give "
            f"--inference-max-seq-length {longest}"
        )
    return draft


def decoder_start(trained: TrainedModel) -> int | None:
    """The token id that a decoder's text begins with; None for a model whose texts continue their prompts.

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


def template_of(placed: PlacedModel, given: str | None) -> ChatTemplate | None:
    """The template in the file ``given``, or the one that the model was trained with, or its tokenizer's own, or None.

    A model that was fine-tuned on conversations knows only the form that it was trained on. Raises ConfigError and
    DataError for a template that can't be used.
    """
    files, chat = placed.config.tokenizer.tokenizer_model, placed.chat
    if given is None and chat is not None and chat.template is not None:
        return ChatTemplate(chat.template, tokens=template_tokens(files), learned="assistant")
    if given is None and own_template(files) is None:
        return None
    return load_template(given or OWN, files, learned="assistant")
