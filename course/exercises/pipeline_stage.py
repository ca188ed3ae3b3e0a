"""An exercise of notebook 07: a small model, cut into stages for `torch.distributed.pipelining`."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from course.exercises.on_ranks import whole_numbers
from course.exercises.parallel_objects import ObjectExercise, numbers_in

WORDS, HIDDEN, MICRO_BATCHES = 5, 3, 3


class Model(nn.Module):
    """An embedding, layers, a norm and a head. What is None is left out: x are tokens, or hidden states."""

    def __init__(self, num_layers: int):
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleDict({str(number): nn.Linear(HIDDEN, HIDDEN) for number in range(num_layers)})
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x

    def __repr__(self) -> str:
        return f"Model({len(self.layers)})"


def my_stage(model, rank, num_stages):
    kept = torch.arange(len(model.layers)).tensor_split(num_stages)[rank].tolist()
    for name in list(model.layers):
        if int(name) not in kept:
            del model.layers[name]
    if rank > 0:
        model.embed = None
    if rank < num_stages - 1:
        model.norm = None
        model.head = None
    return PipelineStage(model, rank, num_stages, torch.device("cpu"))


def stage_inputs(num_layers: int):
    """Return a whole model in float64, alike on all ranks, the rank, and the number of stages: that of the ranks."""
    model = Model(num_layers).double()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = whole_numbers(tuple(parameter.shape), seed=740 + seed).cpu().double() / 8
    return model, dist.get_rank(), dist.get_world_size()


def facts_of_stage(stage, model, rank, num_stages) -> dict[str, Any] | str:
    """Return which stage it is and what is in it; and if each parameter is in one stage, the gradients of a step."""
    if not isinstance(stage, PipelineStage):
        return f"a {type(stage).__name__}"
    names = [name for name, _ in stage.submod.named_parameters()]
    facts = {"the number of the stage, and of all": [stage.stage_index, stage.num_stages], "parameters": names}
    everybodys = [{} for _ in range(num_stages)]
    dist.all_gather_object(everybodys, facts)
    if not is_cut(everybodys):
        return facts | {"losses": "was not run", "gradients": "was not run"}
    tokens = torch.arange(2 * MICRO_BATCHES * 2).view(2 * MICRO_BATCHES, 2) % WORDS
    losses: list[torch.Tensor] = []
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_of)
    if rank == num_stages - 1:
        schedule.step(target=(tokens + 1) % WORDS, losses=losses)
    else:
        schedule.step(*[tokens] * (rank == 0))
    gradients = {name: numbers_in(parameter.grad) for name, parameter in stage.submod.named_parameters()}
    return facts | {"losses": [loss.item() for loss in losses], "gradients": gradients}


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def is_cut(stages: list[dict]) -> bool:
    """Whether the ranks have the stages in order, and each parameter of the model is in one of them, in order."""
    places = [stage["the number of the stage, and of all"] for stage in stages]
    names = [name for stage in stages for name in stage["parameters"]]
    num_layers = sum(name.startswith("layers.") for name in names) // 2
    whole = [name for name, _ in Model(num_layers).named_parameters()]
    return places == [[rank, len(stages)] for rank in range(len(stages))] and names == whole


pipeline_stage = ObjectExercise(
    "pipeline_stage",
    my_stage,
    notebook="07",
    cases=[(2, 4), (3, 5)],
    inputs=stage_inputs,
    measure=facts_of_stage,
    kind="a PipelineStage",
    may_change=("model",),
    facts={
        "the number of the stage, and of all": "`PipelineStage(model, rank, num_stages, device)`: the stages are "
        "numbered like the ranks, from 0, and each rank has one.",
        "parameters": "Each layer belongs to one stage, in order: the first stages have one more where it does not "
        "come out even. The first has the embedding as well, the last the norm and the head. The names stay those of "
        "the whole model.",
        "losses": "The right layers are in the stage, but their numbers are not those of the model that you were "
        "given: cut that model, and make no new layers.",
        "gradients": "The right layers are in the stage, but not all of them learn. Are they the model's own?",
    },
    errors={
        "[Ss]tage index .* out of range": "Stages count from 0, like ranks: the last is num_stages - 1.",
        "changed size during iteration|mutated during iteration": "The loop is over the very dict from which it "
        "deletes. Loop over a copy of its names: `for name in list(model.layers):`.",
        "has no len|no attribute 'append'|slice|unhashable|KeyError|no attribute 'layers'": "`model.layers` is a "
        'ModuleDict, like a dict: its keys are the texts "0", "1", and so on.',
    },
    hints=[
        "Each rank has the whole model, and throws away what is not its own. What is None, the model leaves out: "
        "`model.embed = None`.",
        "Which layers are this stage's? `torch.arange(num_layers).tensor_split(num_stages)[rank]` has their numbers.",
        '`del model.layers["3"]` takes a layer out. The others keep their names, so a checkpoint of the whole model '
        "still fits. Loop over `list(model.layers)`.",
        '`PipelineStage(model, rank, num_stages, torch.device("cpu"))` makes a stage of what is left.',
    ],
    if_stuck="a stage that expects a message that nobody sends: are the stages numbered like the ranks?",
)


def tensor_split(num_layers: int, num_stages: int) -> list[list[int]]:
    return [part.tolist() for part in torch.arange(num_layers).tensor_split(num_stages)]


def shorter_first(num_layers: int, num_stages: int) -> list[list[int]]:
    bounds = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    return [list(range(*pair)) for pair in pairwise(bounds)]


def rest_to_the_last(num_layers: int, num_stages: int) -> list[list[int]]:
    each = num_layers // num_stages
    last = list(range(each * (num_stages - 1), num_layers))
    return [list(range(each * stage, each * (stage + 1))) for stage in range(num_stages - 1)] + [last]


def rest_left_out(num_layers: int, num_stages: int) -> list[list[int]]:
    each = num_layers // num_stages
    return [list(range(each * stage, each * (stage + 1))) for stage in range(num_stages)]


def round_robin(num_layers: int, num_stages: int) -> list[list[int]]:
    return [list(range(stage, num_layers, num_stages)) for stage in range(num_stages)]


def overlapping(num_layers: int, num_stages: int) -> list[list[int]]:
    return [
        [*part, part[-1] + 1] if part[-1] < num_layers - 1 else part for part in tensor_split(num_layers, num_stages)
    ]


def all_layers(num_layers: int, num_stages: int) -> list[list[int]]:
    return [list(range(num_layers))] * num_stages


def stage_wrongly(
    model, rank, num_stages, *, parts=tensor_split, embed=lambda rank, p: rank == 0, norm=lambda rank, p: rank == p - 1,
    head=lambda rank, p: rank == p - 1, place=lambda rank, p: rank, is_renumbered=False,
):  # fmt: skip
    """Do what `my_stage` does, with one thing wrong."""
    kept = parts(len(model.layers), num_stages)[place(rank, num_stages)]
    layers = {str(number): model.layers[str(number)] for number in kept}
    model.layers = nn.ModuleDict(dict(zip("0123", layers.values())) if is_renumbered else layers)
    model.embed = model.embed if embed(rank, num_stages) else None
    model.norm = model.norm if norm(rank, num_stages) else None
    model.head = model.head if head(rank, num_stages) else None
    return PipelineStage(model, place(rank, num_stages), num_stages, torch.device("cpu"))


def everywhere(rank: int, num_stages: int) -> bool:
    return True


pipeline_stage.mistakes_of(
    stage_wrongly,
    (
        dict(parts=all_layers, embed=everywhere, norm=everywhere, head=everywhere),
        "Each stage is the whole model. A rank keeps its own layers, and deletes the others.",
    ),
    (dict(parts=all_layers), "Every stage has all layers: `del` those that belong to the other stages."),
    (
        dict(parts=round_robin),
        "The layers were dealt out in turns, so a micro-batch would go round and round. A stage has consecutive "
        "layers.",
    ),
    (
        dict(parts=rest_left_out),
        "Where the layers do not come out even, the last ones are in no stage. The first stages take one more each.",
    ),
    (
        dict(parts=rest_to_the_last),
        "What does not come out even went to the last stage, which has the norm and the head as well. The first stages "
        "take one more each.",
    ),
    (
        dict(parts=shorter_first),
        "The stages are equally long up to one layer, but the shorter ones come first. Here the first ones take one "
        "more.",
    ),
    (dict(parts=overlapping), "The layer where two stages meet is in both. Does your range include its end?"),
    (
        dict(embed=everywhere),
        "Every stage has an embedding, but only the first gets tokens: the others get hidden states. Set it to None "
        "there.",
    ),
    (
        dict(head=everywhere),
        "Every stage has a head: each would turn its hidden states into logits. Only the last one does.",
    ),
    (
        dict(norm=everywhere),
        "Every stage has the final norm. It comes once, before the head: set it to None on the others.",
    ),
    (
        dict(norm=everywhere, head=everywhere),
        "Every stage has the norm and the head. They come once, at the end: set both to None on all but the last "
        "stage.",
    ),
    (dict(embed=everywhere, norm=everywhere, head=everywhere), "Embedding, norm and head are in every stage."),
    (
        dict(embed=lambda rank, p: rank == p - 1, norm=lambda rank, p: rank == 0, head=lambda rank, p: rank == 0),
        "The ends are exchanged: the first stage gets the tokens, so it has the embedding; the last one has the head.",
    ),
    (
        dict(embed=lambda rank, p: False),
        "The embedding is in no stage. The first one has it: there rank is 0, which counts as false.",
    ),
    (
        dict(head=lambda rank, p: False, norm=lambda rank, p: False),
        "Norm and head are in no stage. Ranks count from 0: the last is num_stages - 1.",
    ),
    (
        dict(is_renumbered=True),
        "The layers of each stage are numbered from 0 again. Keep their names, by which a checkpoint finds them: "
        "delete from `model.layers`, and make no new dict or list of those that stay.",
    ),
    (
        dict(place=lambda rank, p: p - 1 - rank),
        "The stages run from the last rank to the first. Stage 0 is on rank 0.",
    ),
    (
        dict(place=lambda rank, p: 0),
        "Every rank says that it is stage 0. The stage's number is the rank.",
    ),
)
