"""The exercise on a plan for a block: the solution is the whole block, cut, and what gathers too much is told so."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from course.exercises import block_plan
from course.exercises.values import same
from labkit.launch import launch

pytestmark = pytest.mark.usefixtures("launches_on_kept_ranks")


def cut_and_whole():
    """On one rank: the facts of the solution's block, and those of the whole block in this process alone."""
    block, mesh = copy.deepcopy(block_plan.block_inputs(18, 6, 15))
    whole, _ = copy.deepcopy(block_plan.block_inputs(18, 6, 15))
    facts = block_plan.facts_of_block(block_plan.my_parallel_block(block, mesh), block, mesh)
    return facts, block_plan.facts_of_block(whole, whole, mesh)


def test_the_solution_agrees_with_one_process():
    ranks = launch(cut_and_whole, world_size=3, backend="gloo")
    for rank, (facts, whole) in enumerate(ranks):
        assert same(facts["output"], whole["output"])
        assert same(facts["gradient of x"], whole["gradient of x"])
        of_shards, of_whole = facts["gradients of its shards"], whole["gradients of its shards"]
        q, k, v = torch.tensor(of_whole["qkv.weight"]).chunk(3)
        assert same(of_shards["qkv.weight"], torch.cat([part.chunk(3)[rank] for part in (q, k, v)]))
        assert same(of_shards["out.weight"], torch.tensor(of_whole["out.weight"]).chunk(3, dim=1)[rank])
        assert facts["shape of its shards"]["gate_up.weight"] == [10, 18]


def test_what_is_sent_for_nothing_is_told_so():
    def averages(block, mesh):
        block = block_plan.my_parallel_block(block, mesh)
        block.register_forward_hook(lambda *_: dist.all_reduce(torch.ones(1, dtype=torch.float64)))
        return block

    def gathers(block, mesh):
        block = block_plan.my_parallel_block(block, mesh)
        block.register_forward_hook(lambda *_: dist.all_gather_object([None] * mesh.size(), 0))
        return block

    for function, complaint in ((averages, "call 5 all-reduces"), (gathers, "call all_gather")):
        text = " ".join(block_plan.block_plan.verdict(function).text.split())
        assert "the values are right, but not the way they were computed" in text
        assert f"Forward and backward {complaint}" in text


def test_an_answer_of_the_wrong_kind_is_told_so():
    text = " ".join(block_plan.block_plan.verdict(lambda block, mesh: [dist.get_rank()]).text.split())
    assert "gave a list expected the block" in text


def test_a_dtensor_that_meets_a_plain_tensor_is_explained():
    def leaves_dtensors(block, mesh):
        plan = {"gate_up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
        return parallelize_module(block, mesh, plan)

    text = " ".join(block_plan.block_plan.verdict(leaves_dtensors).text.split())
    assert "torch refuses to mix them" in text
