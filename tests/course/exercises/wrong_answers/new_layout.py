"""Answers to the exercise on a checkpoint that is saved in one layout and loaded in another."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)


def states_of(job):
    model, optimizer = get_state_dict(job.model, job.optimizer)
    return {"model": model, "optimizer": optimizer}


def put(job, states):
    set_state_dict(job.model, job.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def only_saved(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    return fresh


def model_alone(trained, fresh, folder):
    dcp.save({"model": get_model_state_dict(trained.model)}, checkpoint_id=folder)
    states = {"model": get_model_state_dict(fresh.model)}
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(fresh.model, states["model"])
    return fresh


def optimizer_alone(trained, fresh, folder):
    dcp.save({"optimizer": get_optimizer_state_dict(trained.model, trained.optimizer)}, checkpoint_id=folder)
    states = {"optimizer": get_optimizer_state_dict(fresh.model, fresh.optimizer)}
    dcp.load(states, checkpoint_id=folder)
    set_optimizer_state_dict(fresh.model, fresh.optimizer, states["optimizer"])
    return fresh


def set_is_forgotten(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    dcp.load(states_of(fresh), checkpoint_id=folder)
    return fresh


def set_before_load(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    states = states_of(fresh)
    put(fresh, states)
    dcp.load(states, checkpoint_id=folder)
    return fresh


def result_of_load(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    states = dcp.load(states_of(fresh), checkpoint_id=folder)
    put(fresh, states)
    return fresh


def roles_exchanged(trained, fresh, folder):
    dcp.save(states_of(fresh), checkpoint_id=folder)
    states = states_of(trained)
    dcp.load(states, checkpoint_id=folder)
    put(trained, states)
    return fresh


def returns_the_trained(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    states = states_of(fresh)
    dcp.load(states, checkpoint_id=folder)
    put(fresh, states)
    return trained


def returns_the_model(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    states = states_of(fresh)
    dcp.load(states, checkpoint_id=folder)
    put(fresh, states)
    return fresh.model


def plain_state_dicts(trained, fresh, folder):
    old = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
    dcp.save(old, checkpoint_id=folder)
    new = {"model": fresh.model.state_dict(), "optimizer": fresh.optimizer.state_dict()}
    dcp.load(new, checkpoint_id=folder)
    fresh.model.load_state_dict(new["model"])
    fresh.optimizer.load_state_dict(new["optimizer"])
    return fresh


def copied_without_a_file(trained, fresh, folder):
    whole = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(trained.model, trained.optimizer, options=whole)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=whole)
    return fresh


def load_state_dict_of_shards(trained, fresh, folder):
    torch.save(trained.model.state_dict(), f"{folder}/rank{dist.get_rank()}.pt")
    fresh.model.load_state_dict(torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=False))
    return fresh


def inner_dict_loaded(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    model, optimizer = get_state_dict(fresh.model, fresh.optimizer)
    dcp.load(model, checkpoint_id=folder)
    dcp.load(optimizer, checkpoint_id=folder)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    return fresh


def new_optimizer_at_the_end(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=folder)
    states = states_of(fresh)
    dcp.load(states, checkpoint_id=folder)
    put(fresh, states)
    fresh.optimizer = torch.optim.AdamW(fresh.model.parameters())
    return fresh


def old_optimizer_taken_along(trained, fresh, folder):
    dcp.save({"model": get_model_state_dict(trained.model)}, checkpoint_id=folder)
    states = {"model": get_model_state_dict(fresh.model)}
    dcp.load(states, checkpoint_id=folder)
    set_model_state_dict(fresh.model, states["model"])
    fresh.optimizer = trained.optimizer
    return fresh


def in_a_folder_below(trained, fresh, folder):
    dcp.save(states_of(trained), checkpoint_id=f"{folder}/step_2")
    states = states_of(fresh)
    dcp.load(states, checkpoint_id=f"{folder}/step_2")
    put(fresh, states)
    return fresh


def part_by_part(trained, fresh, folder):
    """With the functions for one part each."""
    old = {
        "m": get_model_state_dict(trained.model),
        "o": get_optimizer_state_dict(trained.model, trained.optimizer),
    }
    dcp.save(old, checkpoint_id=folder)
    new = {"m": get_model_state_dict(fresh.model), "o": get_optimizer_state_dict(fresh.model, fresh.optimizer)}
    dcp.load(new, checkpoint_id=folder)
    set_model_state_dict(fresh.model, new["m"])
    set_optimizer_state_dict(fresh.model, fresh.optimizer, new["o"])
    return fresh


def by_stateful_objects(trained, fresh, folder):
    """As PyTorch's tutorial does it: DCP calls state_dict and load_state_dict of the objects that it is given."""

    class Stateful(dcp.stateful.Stateful):
        def __init__(self, job):
            self.job = job

        def state_dict(self):
            return states_of(self.job)

        def load_state_dict(self, states):
            put(self.job, states)

    dcp.save({"job": Stateful(trained)}, checkpoint_id=folder)
    dcp.load({"job": Stateful(fresh)}, checkpoint_id=folder)
    return fresh


WRONG = [
    ("new_layout", only_saved, "nothing is loaded"),
    ("new_layout", model_alone, "no optimizer"),
    ("new_layout", optimizer_alone, "no model"),
    ("new_layout", set_is_forgotten, "the learning rate stays the new job's"),
    ("new_layout", set_before_load, "the learning rate stays the new job's"),
    ("new_layout", result_of_load, "load returns None"),
    ("new_layout", roles_exchanged, "the new job is saved"),
    ("new_layout", returns_the_trained, "returns the old job"),
    ("new_layout", returns_the_model, "returns the model alone"),
    ("new_layout", plain_state_dicts, "the optimizer's own state_dict is empty"),
    ("new_layout", copied_without_a_file, "no checkpoint"),
    ("new_layout", load_state_dict_of_shards, "a file for each rank fits one layout only"),
    ("new_layout", inner_dict_loaded, "names that were not saved"),
    ("new_layout", new_optimizer_at_the_end, "the optimizer is made anew"),
    ("new_layout", old_optimizer_taken_along, "the optimizer of the old model"),
    ("new_layout", in_a_folder_below, "not in the folder itself"),
]

RIGHT = [("new_layout", part_by_part), ("new_layout", by_stateful_objects)]
