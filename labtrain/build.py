"""Builds one rank's part of a training job: its chunks of the model, their wrappers, its optimizer.

Read `build` from top to bottom. A job with a different model, wrapper or optimizer passes its own
function for that one step, as in ``launch(train, config, partial(build, wrap=my_wrap))``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from labkit.data_parallel import DataParallel, FullyShardedDataParallel
from labkit.data_parallel.replicas import DataParallelBase, check_alike
from labkit.groups import ProcessGroups
from labkit.placement import PlacedParameters, placed_parameters, shape_before_flat
from labkit.schedules import Schedule
from labtrain.config import TrainConfig
from labtrain.master_weights import MasterWeights
from labtrain.model import ParallelGPT


@dataclass(frozen=True)
class Job:
    """One rank's part of a training job.

    ``models`` has one chunk of the model for each stage that lives on this rank, and ``chunks`` the
    same ones, wrapped: what the pipeline runs. ``parameters`` are those of the chunks, shards with
    ZeRO, each with its placement. ``tied`` has the embedding if a different rank holds the same
    weight, else nothing.
    """

    config: TrainConfig
    groups: ProcessGroups
    schedule: Schedule
    models: list[ParallelGPT]
    chunks: list[DataParallelBase]
    parameters: PlacedParameters
    tied: list[nn.Parameter]
    optimizer: Optimizer


def make_models(
    config: TrainConfig, schedule: Schedule, groups: ProcessGroups
) -> list[ParallelGPT]:
    """Return this rank's chunks of the model, on the meta device: `wrap` gives them memory."""
    models: list[ParallelGPT] = []
    for stage in schedule.stages[groups.coords.pp]:
        model = ParallelGPT(
            config.shape,
            groups.tp,
            # Which layers
            stage=stage,
            num_stages=schedule.num_stages,
            stage_layers=config.layers_per_stage(config.num_layers),
            first=next((model for model in models if model.is_first), None),
            num_micro_batches=schedule.num_micro_batches,
            # How activations are cut, and which are kept
            sequence_parallel=config.sequence_parallel,
            cp_group=groups.cp,
            context_parallel=config.context_parallel,
            zigzag=config.zigzag,
            recompute=config.recompute,
            # Experts
            experts=dict(
                groups=groups,
                capacity_factor=config.capacity_factor,
                router={"balance": config.balance},
            ),
            # Weights: one all-reduce at the end of a step sums what each tensor rank has a part of
            defer_grad_reduce=True,
            dropout=config.dropout,
            seed=config.seed,
            dtype=config.dtype,
            device="meta",
        )
        models.append(model)
    return models


def wrap(config: TrainConfig, model: ParallelGPT, groups: ProcessGroups) -> DataParallelBase:
    """Return a chunk that averages gradients over replicas, sharded from ZeRO stage 1 on.

    Stage 3 also frees weights after forward. (torchtitan does not, by default, where there is a
    pipeline: each micro-batch gathers them twice.) Stages 2 and 3 reduce-scatter gradients after
    each micro-batch: the trainer tells `labkit.pipeline.run`. A wrapper of your own derives from
    `DataParallelBase`.

    Its weights are drawn here, by their names: on one unit after the other, so that a rank never
    holds more than its shards and one whole unit.
    """
    if config.zero_stage == 0:
        return DataParallel(model, groups.shard)
    return FullyShardedDataParallel(
        model,
        groups.shard,
        units=model.units,
        reshard_after_forward=config.zero_stage == 3,
        replicate_group=groups.replicate,
        own_groups={groups.expert_dp: (groups.expert_replicate, groups.expert_shard)},
    )


def make_optimizer(config: TrainConfig, parameters: PlacedParameters) -> Optimizer:
    """Return AdamW, with weight decay for matrices only, and master weights for bfloat16."""
    matrices = []
    others = []
    for parameter, placement in parameters.items():
        if len(shape_before_flat(parameter, placement)) > 1:
            matrices.append(parameter)
        else:
            others.append(parameter)
    param_groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    options: dict[str, Any] = dict(lr=config.learning_rate, weight_decay=config.weight_decay)
    adamw = partial(AdamW, betas=(0.9, 0.95), fused=True, **options)
    if config.precision == "bfloat16":
        return MasterWeights(param_groups, adamw)
    return adamw(param_groups)


def build(
    config: TrainConfig,
    groups: ProcessGroups,
    *,
    make_models: Callable[..., list[ParallelGPT]] = make_models,
    wrap: Callable[..., DataParallelBase] = wrap,
    make_optimizer: Callable[..., Optimizer] = make_optimizer,
) -> Job:
    """Build this rank's part of a job; call it on every rank of the groups.

    Raises:
        ValueError: ranks that hold the same weight do not agree on whether it is frozen, or the
            folder of ``init_from`` does not fit the model.
    """
    # 1. Which stages live here, and in which order this rank computes its micro-batches
    schedule = config.make_schedule(groups.layout.world_size)

    # 2. Layers of these stages, cut over tensor, context and expert groups: shapes, no memory yet
    models = make_models(config, schedule, groups)
    if config.precision == "bfloat16":
        for parameter in placed_parameters(*models):
            # The sum over many micro-batches needs more bits than bfloat16 (Megatron-LM: main_grad)
            parameter.grad_dtype = torch.float32

    # 3. Replicas: weights in memory, whole or in shards; gradients averaged while backward runs
    chunks = [wrap(config, model, groups) for model in models]

    # 4. Somebody's weights instead of drawn ones
    if config.init_from is not None:
        from labtrain import pretrained  # which needs safetensors

        pretrained.load(config.init_from, models, groups)

    # 5. The optimizer sees what the wrappers made: shards have replaced the model's parameters
    parameters = placed_parameters(*chunks)
    tied = _tied_embedding(config, schedule, models, groups)
    optimizer = make_optimizer(config, parameters)
    return Job(config, groups, schedule, models, chunks, parameters, tied, optimizer)


def _tied_embedding(
    config: TrainConfig, schedule: Schedule, models: list[ParallelGPT], groups: ProcessGroups
) -> list[nn.Parameter]:
    """Return this rank's embedding if a different rank holds the same weight, or nothing."""
    if not config.tied or len(schedule.end_ranks) == 1:
        return []
    ends = [model for model in models if model.is_first != model.is_last]
    tied = [model.embedding.weight for model in ends]
    if tied:  # else one end would wait for the other's gradient, or they would drift apart
        ways = {"the tied embedding": "trained" if tied[0].requires_grad else "frozen"}
        advice = "freeze it on the first and on the last stage, or on none"
        check_alike(ways, advice, groups.embedding)
    return tied
