"""course/project/one_file.py: however the ranks are split, it trains as one rank does; no message waits for ever.

That torchrun starts it is shown in test_steps.py, by a learner's file that has all of its lines.
"""

import ast
import os
import runpy
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labkit.groups import group_of_one
from labkit.launch import launch
from labkit.shape import GPT
from labtrain.model import ParallelGPT
from tests.support.nccl import under_nccls_rules
from tests.support.sweep import IS_SWEEP

PATH = Path(__file__).resolve().parents[3] / "course" / "project" / "one_file.py"
SMALL = {
    "--layers": 8,
    "--hidden": 32,
    "--heads": 8,
    "--seq": 16,
    "--global_batch": 16,
    "--steps": 3,
    "--warmup": 1,
    "--dtype": "float64",
    "--bucket": 3000,
    "--text": PATH,
}
LAYOUTS = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) if tp * pp <= 8]


def one_file(options, whole=False):
    """Run the file on this rank, as torchrun does; return loss and norm of its steps, or all that it defines."""
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    os.environ["LOCAL_WORLD_SIZE"] = str(torch.distributed.get_world_size())
    sys.argv = [str(PATH)]
    for name, value in options.items():
        sys.argv += [name, str(value)]
    end = runpy.run_path(str(PATH), run_name="one_file")
    return end if whole else end["history"]


def assert_same_training(**options):
    options = SMALL | {f"--{name}": value for name, value in options.items()}
    alone = options | {"--tp": 1, "--pp": 1}
    [expected] = launch(one_file, world_size=1, options=alone)
    assert expected[0][0] > expected[-1][0], "it learns"
    expected = torch.tensor(expected, dtype=torch.float64)
    for found in launch(one_file, world_size=8, options=options):
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("tp", "pp", "layers", "untied", "micro_batch"),
    [
        (2, 2, 4, 0, 1),  # 8 micro-batches for 2 stages, 2 replicas
        (1, 4, 8, 1, 2),  # 4 for 4
        (1, 8, 8, 0, 4),  # 4 for 8 stages
        (8, 1, 2, 0, 8),
    ],
)
def test_a_split_changes_no_loss_and_no_norm(tp, pp, layers, untied, micro_batch):
    assert_same_training(tp=tp, pp=pp, layers=layers, untied=untied, micro_batch=micro_batch)


@pytest.mark.parametrize("untied", [0, 1])
@pytest.mark.parametrize(("tp", "pp"), LAYOUTS if IS_SWEEP else [])
def test_every_layout_of_eight_ranks(tp, pp, untied):
    assert_same_training(tp=tp, pp=pp, untied=untied, micro_batch=1)


def as_in_labtrain(name):
    """Return labtrain's name of a parameter: blocks.0.norm1.weight is layers.0.attention_norm.weight."""
    name = name.replace("blocks.", "layers.").replace("norm1", "attention_norm").replace("norm2", "mlp_norm")
    return "embedding.weight" if name == "embedding" else name


def losses_and_grads_of_both():
    """Run one batch through the file's model and, with the same weights, through labtrain's."""
    options = SMALL | {"--steps": 0, "--global_batch": 4, "--micro_batch": 4}
    file = one_file(options, whole=True)
    inputs, targets = file["batch"](0)
    for bucket in file["buckets"]:
        bucket.start()
    losses = [file["forward_backward"](inputs, targets).item()]
    params = {as_in_labtrain(name): param for name, param in file["stage"].named_parameters()}
    shape = GPT(num_layers=8, hidden_size=32, num_attention_heads=8, seq_length=16, vocab_size=256)
    model = ParallelGPT(shape, group_of_one(), dtype=torch.float64)
    model.load_state_dict({name: params[name].reshape(param.shape) for name, param in model.named_parameters()})
    loss = model.loss(model(inputs[0]), targets[0])
    loss.backward()
    losses.append(loss.item())
    grads = {name: (params[name].grad.reshape(param.shape), param.grad) for name, param in model.named_parameters()}
    return losses, grads


def test_its_model_is_labtrains():
    [(losses, grads)] = launch(losses_and_grads_of_both, world_size=1)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for found, expected in grads.values():
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_it_trains_on_a_connection_that_keeps_nccls_rules():
    with under_nccls_rules():
        assert_same_training(tp=2, pp=4, layers=4, untied=0, micro_batch=2)


@cache
def of_the_schedule():
    """Return the file's functions that decide on the order of messages, compiled."""
    names = {"one_f_one_b", "exchange"}
    tree = ast.parse(PATH.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    return compile(ast.Module(functions, []), PATH, "exec")


def messages(pp_rank, pp, num_micro_batches):
    """Return the messages of one stage's step: a list of ("isend" or "irecv", peer) for each call of `exchange`."""
    batches = []
    fake = SimpleNamespace(isend="isend", irecv="irecv", P2POp=lambda way, tensor, peer, group: (way, peer))
    fake.batch_isend_irecv = lambda ops: batches.append(list(ops)) or []
    scope = {
        "dist": fake,
        "pp": pp,
        "pp_rank": pp_rank,
        "pp_group": None,
        "num_micro_batches": num_micro_batches,
        "is_first": pp_rank == 0,
        "is_last": pp_rank == pp - 1,
        "previous_stage": pp_rank - 1,
        "next_stage": pp_rank + 1,
        "empty_activation": lambda: None,
    }
    exec(of_the_schedule(), scope)
    done = None
    for kind, _ in scope["one_f_one_b"]():
        scope["exchange"](done, None, kind)
        done = kind
    scope["exchange"](done, None, None)
    return batches


def stands_still(lists):
    """Run each rank's list of batches by NCCL's rules, and return whether some rank waits for ever.

    The messages of a batch start together. Each waits until its peer has started the other end of it. The next batch
    waits until all are through.
    """
    lists = [[list(batch) for batch in batches] for batches in lists]
    moved = True
    while moved:
        moved = False
        for rank, batches in enumerate(lists):
            if batches and not batches[0]:
                del batches[0]
                moved = True
            for way, peer in list(batches[0]) if batches else []:
                other = ("irecv" if way == "isend" else "isend", rank)
                if lists[peer] and other in lists[peer][0]:
                    batches[0].remove((way, peer))
                    lists[peer][0].remove(other)
                    moved = True
    return any(lists)


SIZES = [(pp, num_micro_batches) for pp in range(2, 9) for num_micro_batches in range(1, 17)]


def test_no_message_waits_for_ever():
    for pp, num_micro_batches in SIZES:
        lists = [messages(pp_rank, pp, num_micro_batches) for pp_rank in range(pp)]
        assert not stands_still(lists), (pp, num_micro_batches)


def test_without_batches_most_sizes_stand_still():
    """A stage that only sends, then only receives, is the classic fault: this shows that the rules above find it."""
    stuck = 0
    for pp, num_micro_batches in SIZES:
        lists = [messages(pp_rank, pp, num_micro_batches) for pp_rank in range(pp)]
        one_by_one = [[[op] for batch in batches for op in batch] for batches in lists]
        stuck += stands_still(one_by_one)
    assert stuck == 105
