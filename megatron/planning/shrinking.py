"""A small copy of a run, for one machine's processors, with the same layout and kinds of layers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.family import FamilyConfig, PartConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline import chunks_per_rank, num_stages
from megatron.config.precision import PrecisionConfig
from megatron.config.profiling import ProfilingConfig
from megatron.config.reporting import ReportingConfig
from megatron.config.run import RunConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.config.training import TrainingConfig

SMALL_VOCABULARY = 211  # prime: no layout divides it evenly
_HEAD_WIDTH, _BUCKET, _LENGTH = 8, 2000, 16


def without_files(run: RunConfig, *, vocab_size: int, steps: int) -> RunConfig:
    """The run with mock data, for ``steps`` steps, without dropout; it reads and writes no files."""
    mock_data = DataConfig(
        seq_length=run.data.seq_length,
        mock_data=True,
        num_workers=0,
        packing=run.data.packing,
        reset_position_ids=run.data.reset_position_ids,
        reset_attention_mask=run.data.reset_attention_mask,
        eod_mask_loss=run.data.eod_mask_loss,
    )
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, vocab_size=vocab_size, attention_dropout=0.0, hidden_dropout=0.0),
        data=mock_data,
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size - 1),
        precision=PrecisionConfig(),
        checkpoint=CheckpointConfig(),
        reporting=ReportingConfig(),
        profiling=ProfilingConfig(),
        optimizer=OptimizerConfig(
            optimizer=run.optimizer.optimizer,
            lr=1e-2,
            lr_decay_style="constant",
            weight_decay=0.1,
            clip_grad=run.optimizer.clip_grad,
        ),
        training=dataclasses.replace(
            run.training,
            skip_train=False,
            train_iters=steps,
            train_samples=None,
            eval_iters=0,
            rampup_batch_size=None,
            step_batch_size_schedule=None,
        ),
    )


def on_one_rank(run: RunConfig) -> RunConfig:
    """The run with its model and batches on a single rank that keeps all activations."""
    training = dataclasses.replace(
        run.training, recompute_granularity=None, recompute_method=None, recompute_num_layers=None
    )
    return dataclasses.replace(run, world_size=1, parallel=ParallelConfig(), training=training)


def shrunk(run: RunConfig) -> RunConfig:
    """The run with few narrow layers, short sequences and at most two data-parallel replicas."""
    parallel = run.parallel
    inside = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    experts = parallel.expert_model_parallel_size * parallel.etp
    replicas = max(min(run.data_parallel_size, 2), experts // math.gcd(experts, inside))
    flags_place_layers = (
        run.segments
        or parallel.pipeline_model_parallel_layout
        or parallel.decoder_first_pipeline_num_layers
        or parallel.decoder_last_pipeline_num_layers
    )
    # One layer more than there are stages, so that stages differ, and all kinds of layers.
    least = max((num_stages(run) + 1, *(part.least_layers for part in run.parts)))
    depth = run.num_layers if flags_place_layers else min(run.num_layers, least)
    multiple = 2 * run.parallel.context_parallel_size * run.parallel.tensor_model_parallel_size
    length = multiple * -(-_LENGTH // multiple)
    layers, own = run.family.shrunk(run.model, num_layers=depth, seq_length=length, multiple=multiple)
    model = _small_model(run, num_layers=layers, seq_length=length)
    stacks = own.stacks(model)

    def small(group: object) -> object:
        if isinstance(group, PartConfig):
            return group.shrunk(run.stacks, stacks)
        return own if isinstance(group, FamilyConfig) else group

    return dataclasses.replace(
        run,
        world_size=replicas * run.model_parallel_size * run.parallel.num_workers,
        model=model,
        extra=tuple(map(small, run.extra)),
        tokenizer=dataclasses.replace(run.tokenizer, vocab_size=SMALL_VOCABULARY - 1),
        parallel=_small_parallel(run, depth),
        data=dataclasses.replace(run.data, seq_length=length),
        training=_small_training(run, replicas * run.parallel.num_workers),
    )


def _small_model(run: RunConfig, *, num_layers: int, seq_length: int) -> ModelConfig:
    model, parallel = run.model, run.parallel
    exchanged = max([parallel.head_exchange_size(kind) for kind in parallel.cp_comm_types], default=1)
    unit = parallel.tensor_model_parallel_size * exchanged  # ranks that share the heads of a layer
    groups = math.gcd(model.num_query_groups, unit)
    heads = groups * min(model.num_attention_heads // model.num_query_groups, 2)
    if heads % unit:
        heads = math.lcm(groups, unit)
    latent_widths: dict[str, Any] = {}
    if model.multi_latent_attention:
        names = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        latent_widths = dict.fromkeys(names, _HEAD_WIDTH)
        if model.q_lora_rank is not None:
            latent_widths["q_lora_rank"] = 2 * _HEAD_WIDTH
    window = None if model.window_size is None else (seq_length // 4, model.window_size[1] and seq_length // 8)
    return dataclasses.replace(
        model.of_depth(num_layers),
        window_size=window,
        hidden_size=heads * _HEAD_WIDTH,
        ffn_hidden_size=2 * heads * _HEAD_WIDTH,
        kv_channels=_HEAD_WIDTH,
        **latent_widths,
        word_embedding_size=model.word_embedding_size and heads * _HEAD_WIDTH // 2,
        num_attention_heads=heads,
        num_query_groups=groups,
        group_query_attention=groups < heads,
        max_position_embeddings=seq_length,
        vocab_size=SMALL_VOCABULARY,
        init_method_std=0.2,  # so that small layers still matter to the loss
    )


def _small_parallel(run: RunConfig, layers: int) -> ParallelConfig:
    parallel = run.parallel
    chunks = chunks_per_rank(run)
    per_layer = len(parallel.cp_comm_type) > 1
    return dataclasses.replace(
        parallel,
        ddp_bucket_size=_BUCKET,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=(
            chunks if chunks > 1 and parallel.pipeline_model_parallel_layout is None and not run.segments else None
        ),
        cp_comm_type=parallel.cp_comm_type[:layers] if per_layer else parallel.cp_comm_type,
    )


def _small_training(run: RunConfig, replicas: int) -> TrainingConfig:
    training = run.training
    micro = min(training.micro_batch_size, 2)
    accumulated = training.global_batch_size // run.batch_unit
    count = min(accumulated, 2 * run.parallel.pipeline_model_parallel_size)  # more than fill the pipeline
    return dataclasses.replace(
        training,
        micro_batch_size=micro,
        global_batch_size=micro * replicas * max(count, 2),
        recompute_num_layers=None if training.recompute_num_layers is None else 1,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
    )
