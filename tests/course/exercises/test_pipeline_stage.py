"""The exercise on a model that is cut into stages: the solution's losses and gradients are those of one process."""

import pytest
import torch

from course.exercises import pipeline_stage
from course.exercises.values import same
from labkit.launch import launch

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")


def facts():
    model, rank, num_stages = pipeline_stage.stage_inputs(5)
    return pipeline_stage.facts_of_stage(pipeline_stage.my_stage(model, rank, num_stages), model, rank, num_stages)


def test_the_solution_agrees_with_one_process():
    ranks = launch(facts, world_size=3, backend="gloo")
    model = pipeline_stage.Model(5).double()
    launched = launch(lambda: pipeline_stage.stage_inputs(5)[0].state_dict(), world_size=1, backend="gloo")
    model.load_state_dict(launched[0])
    tokens = torch.arange(12).view(6, 2) % 5
    losses = [pipeline_stage.loss_of(model(x), (x + 1) % 5) for x in tokens.chunk(3)]
    (sum(losses) / 3).backward()
    assert same(ranks[-1]["losses"], [loss.item() for loss in losses])
    assert [len(rank["parameters"]) for rank in ranks] == [5, 4, 6]
    gradients = {name: grad for rank in ranks for name, grad in rank["gradients"].items()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert same(gradients[name], parameter.grad)


def test_what_is_no_cut_is_not_run():
    stages = [{"the number of the stage, and of all": [rank, 2], "parameters": ["embed.weight"]} for rank in (0, 1)]
    assert not pipeline_stage.is_cut(stages)
    text = " ".join(pipeline_stage.pipeline_stage.verdict(lambda model, *_: model.layers).text.split())
    assert "gave a ModuleDict expected a PipelineStage" in text
