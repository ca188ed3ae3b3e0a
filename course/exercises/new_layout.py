"""An exercise of notebook 08: save a model and its optimizer in one layout, and load them in another."""

# pyright: reportPrivateImportUsage=false
# (torch.distributed.checkpoint does not list `save` and `load` as exported, though it documents them.)

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

from course.exercises.on_ranks import whole_numbers
from course.exercises.parallel_objects import New, ObjectExercise, local

HIDDEN, WIDTH = 3, 6


def my_new_layout(trained, fresh, folder):
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    model, optimizer = get_state_dict(fresh.model, fresh.optimizer)  # fresh's own shards, which load fills
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return fresh


@dataclass
class Job:
    """A model that is cut over all ranks, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Take one step on rows that are the same on all ranks, so that all layouts take the same step."""
        x = whole_numbers((4, HIDDEN), seed=870).cpu().double() / 4
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        self.optimizer.step()


def make_job(layout: str, seed: int, lr: float, num_steps: int) -> Job:
    """Return a job whose weights are cut by a plan ("tp") or by fully_shard ("fsdp"), after some steps."""
    model = nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.Tanh(), nn.Linear(WIDTH, HIDDEN)).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.data = whole_numbers(tuple(parameter.shape), seed + number).cpu().double() / 8
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "tp":
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    else:
        fully_shard(model, mesh=mesh)
    job = Job(model, torch.optim.AdamW(model.parameters(), lr=lr))
    for _ in range(num_steps):
        job.step()
    return job


class Folder(str):
    """The path of a new folder, the same on all ranks; rank 0 deletes it when it forgets the path."""


def make_folder() -> Folder:
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    folder = Folder(paths[0])
    if dist.get_rank() == 0:
        weakref.finalize(folder, shutil.rmtree, paths[0], ignore_errors=True)
    return folder


def layout_inputs(layout: str, new_layout: str):
    """Return a job of two steps in one layout, one in the other that has not begun, and an empty folder."""
    trained = New(partial(make_job, layout, seed=800, lr=0.125, num_steps=2), f"a {layout} job after two steps")
    fresh = New(partial(make_job, new_layout, seed=820, lr=0.001, num_steps=0), f"a new {new_layout} job")
    return trained, fresh, New(make_folder, "an empty folder")


def facts_of_job(job, trained, fresh, folder) -> dict[str, Any] | str:
    """Return the files, and what the job has: its shards, weights, moments and learning rate, and a step from there."""
    if not isinstance(job, Job):
        return f"a {type(job).__name__}"
    parameters = dict(job.model.named_parameters())
    states = {name: job.optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    facts = {
        "files in the folder": sorted(os.listdir(folder)),
        "shape of its shards": {name: list(local(parameter).shape) for name, parameter in parameters.items()},
        "weights": {name: whole(parameter) for name, parameter in parameters.items()},
        "Adam's first moment": {name: whole(state["exp_avg"]) for name, state in states.items() if "exp_avg" in state},
        "steps that Adam has counted": {name: float(local(state["step"])) for name, state in states.items() if state},
        "learning rate": job.optimizer.param_groups[0]["lr"],
    }
    job.step()
    return facts | {"weights after one more step": {name: whole(each) for name, each in parameters.items()}}


def whole(tensor: torch.Tensor) -> list:
    """Return all numbers of a tensor, for which all ranks call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist()


new_layout = ObjectExercise(
    "new_layout",
    my_new_layout,
    notebook="08",
    cases=[(2, "tp", "fsdp"), (3, "fsdp", "tp")],
    inputs=layout_inputs,
    measure=facts_of_job,
    kind="the new job",
    may_change=("fresh", "trained"),
    facts={
        "files in the folder": "The checkpoint should lie in `folder`, with a file from each rank: "
        "`dcp.save(states, checkpoint_id=folder)`, called by all ranks.",
        "shape of its shards": "The new job should keep its own layout: `dcp.load` fills the shards that its states "
        "have.",
        "weights": "The weights are not those that were trained. `dcp.load` fills the tensors of the dict that it is "
        "given, which must be `fresh`'s, and `set_state_dict` puts them into the job.",
        "Adam's first moment": "The weights have come, and the optimizer's moments have not: save and load both "
        "states.",
        "steps that Adam has counted": "The moments have come, and not the count of steps, by which AdamW corrects "
        "them. Save and load all of the optimizer's state.",
        "learning rate": "The learning rate is that of the new job. It belongs to the optimizer's state, and is a "
        "number: `dcp.load` cannot write into it, so it stays in the dict until `set_state_dict` takes it.",
        "weights after one more step": "All has come, and the next step goes elsewhere: does this optimizer update "
        "this model?",
    },
    errors={
        "Missing key": "What you load has names that were not saved. Save and load dicts of the same form: "
        '`{"model": ..., "optimizer": ...}`.',
        "not subscriptable|NoneType": "`dcp.load` returns None: it fills the tensors in the dict that it is given.",
        "[Ss]ize mismatch|shape": "A shard of one layout does not fit into another. Load into the states of `fresh`, "
        "and DCP finds which parts of which files belong there.",
        "checkpoint_id|No such file|not a directory|not exist": "`dcp.save(states, checkpoint_id=folder)`, and then "
        "`dcp.load(states, checkpoint_id=folder)`, with the same folder.",
        "has no attribute 'state_dict'|no attribute": "A job has two parts: `trained.model` and `trained.optimizer`.",
    },
    hints=[
        "`model, optimizer = get_state_dict(trained.model, trained.optimizer)` are two dicts of DTensors, named by "
        "parameter. (An optimizer's own state_dict numbers them, and has nothing before the first step.)",
        '`dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)`: each rank '
        "calls it, and writes its shards.",
        "To load, first get the states of `fresh`, in the same way. `dcp.load(states, checkpoint_id=folder)` fills "
        "their tensors, and returns None.",
        "`set_state_dict(model, optimizer, model_state_dict=..., optim_state_dict=...)` puts them back: the learning "
        "rate is a number, which nothing can fill.",
    ],
    if_stuck="a call of `dcp.save` or `dcp.load` that only some ranks make, as in an `if rank == 0`. All ranks save: "
    "each has shards of its own.",
)


def states_of(job: Job) -> dict[str, Any]:
    model, optimizer = get_state_dict(job.model, job.optimizer)
    return {"model": model, "optimizer": optimizer}


def put(job: Job, states: dict[str, Any]) -> None:
    set_state_dict(job.model, job.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def layout_wrongly(
    trained, fresh, folder, *, of_saved=states_of, parts=("model", "optimizer"), of_loaded=states_of, sets=put,
    answer=lambda trained, fresh: fresh,
):  # fmt: skip
    """Do what `my_new_layout` does, with one thing wrong."""
    dcp.save(of_saved(trained), checkpoint_id=folder)
    states = of_loaded(fresh)
    dcp.load({part: states[part] for part in parts}, checkpoint_id=folder)
    sets(fresh, states)
    return answer(trained, fresh)


def raw_states(job: Job) -> dict[str, Any]:
    return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}


def put_raw(job: Job, states: dict[str, Any]) -> None:
    job.model.load_state_dict(states["model"])
    job.optimizer.load_state_dict(states["optimizer"])


def nothing(job: Job, states: dict[str, Any]) -> None:
    """Leave the job as it is."""


def with_new_optimizer(trained: Job, fresh: Job) -> Job:
    return Job(fresh.model, torch.optim.AdamW(fresh.model.parameters()))


def clones_of(job: Job) -> dict[str, Any]:
    states = states_of(job)
    copied: Callable = partial(tree_map_only, torch.Tensor, torch.clone)
    return {part: copied(values) for part, values in states.items()}


new_layout.mistakes_of(
    layout_wrongly,
    (
        dict(of_loaded=clones_of, sets=nothing),
        "The new job still has its own values. Either the checkpoint has them (was `trained` saved?), or `dcp.load` "
        "has filled a copy, which `set_state_dict` must put into the job.",
    ),
    (
        dict(sets=nothing),
        "`dcp.load` has filled the tensors, which the job shares, and the learning rate is still the new job's: a "
        "number cannot be filled. End with `set_state_dict`.",
    ),
    (
        dict(parts=("model",)),
        "Only the model was loaded. Without the moments and the count of steps, AdamW begins anew: the loss jumps "
        "after each restart.",
    ),
    (
        dict(parts=("optimizer",)),
        "Only the optimizer was loaded: the weights are the new job's.",
    ),
    (
        dict(answer=lambda trained, fresh: trained),
        "This is the trained job, in its old layout. Return the new one.",
    ),
    (
        dict(of_saved=raw_states, of_loaded=raw_states, sets=put_raw),
        "The optimizer's own `state_dict()` is empty before its first step, so there was no place for the moments to "
        "be loaded into. `get_state_dict` makes them first, and names them by parameter.",
    ),
    (
        dict(answer=with_new_optimizer),
        "The optimizer was made anew after loading, so its moments are gone. The job has one already.",
    ),
    (
        dict(answer=lambda trained, fresh: Job(fresh.model, trained.optimizer)),
        "The model is the new one, and the optimizer the old one: it still updates the old model's weights.",
    ),
)


@new_layout.mistake(
    "Nothing was loaded into the new job: either nobody calls `dcp.load`, or it fills the states of the trained job, "
    "where they came from. Load into the states of `fresh`."
)
def loaded_where_it_came_from(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    dcp.load(states_of(trained), checkpoint_id=folder)
    return fresh


@new_layout.mistake(
    "The values are right, but they went through memory: each rank had the whole model, which a large one does not "
    "allow, and nothing is in the folder. `dcp.save` writes shards, and `dcp.load` reads those that a rank needs."
)
def through_memory(trained, fresh, folder):
    whole_states = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(trained.model, trained.optimizer, options=whole_states)
    set_state_dict(
        fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=whole_states
    )
    return fresh
