"""Answers to the exercise on a model that is cut into stages."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

CPU = torch.device("cpu")


def keep(model, numbers):
    for name in list(model.layers):
        if int(name) not in numbers:
            del model.layers[name]


def close_ends(model, rank, num_stages):
    if rank != 0:
        model.embed = None
    if rank != num_stages - 1:
        model.norm = None
        model.head = None


def whole_model_everywhere(model, rank, num_stages):
    return PipelineStage(model, rank, num_stages, CPU)


def layers_not_cut(model, rank, num_stages):
    close_ends(model, rank, num_stages)
    return PipelineStage(model, rank, num_stages, CPU)


def ends_not_closed(model, rank, num_stages):
    keep(model, torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist())
    return PipelineStage(model, rank, num_stages, CPU)


def embedding_stays(model, rank, num_stages):
    keep(model, torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist())
    if rank < num_stages - 1:
        model.norm = model.head = None
    return PipelineStage(model, rank, num_stages, CPU)


def norm_stays(model, rank, num_stages):
    keep(model, torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist())
    if rank > 0:
        model.embed = None
    if rank < num_stages - 1:
        model.head = None
    return PipelineStage(model, rank, num_stages, CPU)


def whole_division(model, rank, num_stages):
    each = len(model.layers) // num_stages
    keep(model, range(rank * each, (rank + 1) * each))
    close_ends(model, rank, num_stages)
    return PipelineStage(model, rank, num_stages, CPU)


def last_takes_the_rest(model, rank, num_stages):
    each = len(model.layers) // num_stages
    end = len(model.layers) if rank == num_stages - 1 else (rank + 1) * each
    keep(model, range(rank * each, end))
    close_ends(model, rank, num_stages)
    return PipelineStage(model, rank, num_stages, CPU)


def every_pth_layer(model, rank, num_stages):
    keep(model, range(rank, len(model.layers), num_stages))
    close_ends(model, rank, num_stages)
    return PipelineStage(model, rank, num_stages, CPU)


def ranks_from_1(model, rank, num_stages):
    keep(model, torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist())
    close_ends(model, rank, num_stages)
    return PipelineStage(model, rank + 1, num_stages, CPU)


def always_stage_0(model, rank, num_stages):
    keep(model, torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist())
    close_ends(model, rank, num_stages)
    return PipelineStage(model, 0, num_stages, CPU)


def deletes_while_it_loops(model, rank, num_stages):
    kept = torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist()
    for name in model.layers:
        if int(name) not in kept:
            del model.layers[name]
    close_ends(model, rank, num_stages)
    return PipelineStage(model, rank, num_stages, CPU)


def layers_as_a_list(model, rank, num_stages):
    kept = torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist()
    model.layers = nn.ModuleList([layer for name, layer in model.layers.items() if int(name) in kept])
    close_ends(model, rank, num_stages)
    return PipelineStage(model, rank, num_stages, CPU)


def sequential_of_the_parts(model, rank, num_stages):
    kept = torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist()
    parts = [model.layers[str(number)] for number in kept]
    if rank == 0:
        parts.insert(0, model.embed)
    if rank == num_stages - 1:
        parts += [model.norm, model.head]
    return PipelineStage(nn.Sequential(*parts), rank, num_stages, CPU)


def returns_the_model(model, rank, num_stages):
    keep(model, torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist())
    close_ends(model, rank, num_stages)
    return model


def only_ends_cut_on_the_wrong_sides(model, rank, num_stages):
    keep(model, torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist())
    close_ends(model, num_stages - 1 - rank, num_stages)
    return PipelineStage(model, rank, num_stages, CPU)


def zero_is_false(model, rank, num_stages):
    keep(model, torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist())
    close_ends(model, rank, num_stages)
    model.embed = (rank and model.embed) or None
    return PipelineStage(model, rank, num_stages, CPU)


def new_layers(model, rank, num_stages):
    kept = torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist()
    keep(model, kept)
    for name in model.layers:
        model.layers[name] = nn.Linear(3, 3).double()
        nn.init.zeros_(model.layers[name].weight)
        nn.init.zeros_(model.layers[name].bias)
    close_ends(model, rank, num_stages)
    return PipelineStage(model, rank, num_stages, CPU)


def on_a_copy(model, rank, num_stages):
    """Cuts a copy, and takes the rank from torch.distributed."""
    part = copy.deepcopy(model)
    sizes = [len(model.layers) // num_stages + (stage < len(model.layers) % num_stages) for stage in range(num_stages)]
    first = sum(sizes[:rank])
    keep(part, range(first, first + sizes[rank]))
    close_ends(part, rank, num_stages)
    return PipelineStage(part, dist.get_rank(), dist.get_world_size(), CPU)


def new_dict_with_the_old_names(model, rank, num_stages):
    kept = torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist()
    model.layers = nn.ModuleDict({str(number): model.layers[str(number)] for number in kept})
    close_ends(model, rank, num_stages)
    return PipelineStage(model, stage_index=rank, num_stages=num_stages, device=CPU, group=dist.group.WORLD)


WRONG = [
    ("pipeline_stage", whole_model_everywhere, "nothing is cut"),
    ("pipeline_stage", layers_not_cut, "all layers in each stage"),
    ("pipeline_stage", ends_not_closed, "embedding, norm and head in each stage"),
    ("pipeline_stage", embedding_stays, "the embedding in each stage"),
    ("pipeline_stage", norm_stays, "the norm in each stage"),
    ("pipeline_stage", whole_division, "the last layer is in no stage"),
    ("pipeline_stage", last_takes_the_rest, "the rest goes to the last stage"),
    ("pipeline_stage", every_pth_layer, "layers in turns"),
    ("pipeline_stage", ranks_from_1, "stages counted from 1"),
    ("pipeline_stage", always_stage_0, "every rank is stage 0"),
    ("pipeline_stage", deletes_while_it_loops, "deletes from what it loops over"),
    ("pipeline_stage", layers_as_a_list, "a list, and the loop needs names"),
    ("pipeline_stage", sequential_of_the_parts, "new names, and no residual"),
    ("pipeline_stage", returns_the_model, "returns the model"),
    ("pipeline_stage", only_ends_cut_on_the_wrong_sides, "the ends are exchanged"),
    ("pipeline_stage", zero_is_false, "no embedding on rank 0"),
    ("pipeline_stage", new_layers, "layers of its own"),
]

RIGHT = [("pipeline_stage", on_a_copy), ("pipeline_stage", new_dict_with_the_old_names)]
