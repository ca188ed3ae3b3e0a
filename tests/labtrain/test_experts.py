"""Training with experts: every layout has the losses, norms, weights and biases of one process; and what is refused.

In each run, all ranks of a group must call the same collectives in the same order (`tests.support.collectives`).

`make test` runs a selection in which experts are divided beside each size and option. `make sweep-layouts` runs one in
which every two meet that can, and every layout of eight ranks, which alone is
``SWEEP=1 pytest -s -o faulthandler_timeout=7200 tests/labtrain/test_experts.py -k product``.
"""

import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch

from labkit.expert_parallel import Router
from labkit.groups import group_of_one
from labkit.launch import RankFailed, launch
from labkit.parallel_config import V_SHAPED
from labkit.tensor_parallel import ParallelMLP
from labtrain import TrainConfig, train, training
from labtrain.checkpoint_tensors import SlicedTensor, tensors_of
from labtrain.estimate import estimate, what_a_rank_holds
from labtrain.model import ParallelGPT
from tests.labtrain.tiny import TINY, TODAY, in_few_launches, numbers
from tests.support.collectives import check_order, recorded
from tests.support.plain import train_plainly
from tests.support.sweep import IS_SWEEP

# Step 2 shows what step 1 has left behind, and the third step what biases do after two changes.
MOE = replace(TINY, steps=3, warmup_steps=2, eval_interval=3, num_experts=8, moe_ffn_hidden_size=8)
FORMS = {  # one for each number of experts per token
    1: dict(top_k=1, moe_layer_freq=2),
    2: dict(top_k=2, num_shared_experts=1, **TODAY),
    4: dict(top_k=4, router_scores="sigmoid"),
}
BALANCES = {
    "sequence": dict(
        aux_loss="sequence", aux_loss_coefficient=0.3, z_loss_coefficient=0.1, expert_bias_update_rate=0.02
    ),
    "micro_batch": dict(aux_loss="micro_batch", aux_loss_coefficient=0.3, expert_bias_update_rate=0.02),
    "global": dict(aux_loss="global", aux_loss_coefficient=0.3, z_loss_coefficient=0.1),
    "bias": dict(expert_bias_update_rate=0.05),
}
FACTORS = {
    "tp_size": (1, 2, 4),
    "cp_size": (1, 2, 4),
    "pp_size": (1, 2, 4),
    "ep_size": (1, 2, 4, 8),
    "expert_tp_size": (1, 2, 4),
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble", "dualpipe-v"),
    "sequence_parallel": (False, True),
    "zero_stage": (0, 1, 2, 3),
    "shard_size": (None, 2),
    "recompute": ("none", "full"),
    "balance": tuple(BALANCES),
    "top_k": tuple(FORMS),
}
SMALL = {"tp_size": 2, "cp_size": 2, "pp_size": 2, "ep_size": 2, "expert_tp_size": 2}

# -- one process, against plain torch ----------------------------------------------------------------------------------


def test_one_process_trains_as_plain_torch_does(on_ranks):
    balance = dict(aux_loss_coefficient=0.3, z_loss_coefficient=0.1, expert_bias_update_rate=0.02)
    config = replace(MOE, steps=5, num_layers=2, **balance)
    expected, oracle = train_plainly(config)
    assert numbers(on_ranks(train, config, world_size=1)[0]) == pytest.approx(expected, rel=1e-10, abs=0)
    assert sum(map(abs, oracle.expert_biases)).max() > 0
    no_balance = dict.fromkeys(balance, 0.0)
    without, _ = train_plainly(replace(config, **no_balance))
    assert abs(without[-3] - expected[-3]) > 1e-5, "balancing changes nothing"


# -- every layout, against one process ---------------------------------------------------------------------------------


def whole(tensor):
    """A whole tensor of one process, from its slices."""
    if not isinstance(tensor, SlicedTensor):
        return tensor.clone()
    result = torch.full(tensor.size(), math.nan, dtype=tensor.dtype)
    for offsets, each in tensor.slices.items():
        result[tuple(slice(at, at + n) for at, n in zip(offsets, each.shape))] = each
    return result


def trained(config, expected=None):
    """The steps of a run and what it has in the end, or how much that differs from what one process has."""
    with training(config) as trainer:
        steps = [*trainer.steps()]
        tensors = dict(tensors_of(trainer._state))
        routers = {name: m for model in trainer.models for name, m in model.named_modules() if isinstance(m, Router)}
        for name, router in routers.items():  # every token once
            num_tokens = config.batch_size * config.seq_length
            assert router.last_load.sum() == num_tokens * config.top_k, f"{name}: {router.last_load}"
        if expected is None:
            return numbers(steps), {name: whole(tensor) for name, tensor in tensors.items()}
        worst = 0.0
        for name, tensor in tensors.items():
            is_sliced = isinstance(tensor, SlicedTensor)
            for offsets, each in tensor.slices.items() if is_sliced else [([0] * tensor.dim(), tensor)]:
                there = expected[name][tuple(slice(at, at + n) for at, n in zip(offsets, each.shape))]
                torch.testing.assert_close(
                    each, there, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name} {text}"
                )
                worst = max(worst, (each - there).abs().max().item() if each.numel() else 0.0)
        return numbers(steps), worst


def trained_with_calls(*args):
    with recorded() as calls:
        return *trained(*args), calls


def run_of(world_size, choice):
    """The config of a choice, and that of one process with the same losses; a ValueError if there is no such run."""
    options = dict(choice)
    balance, top_k = options.pop("balance"), options.pop("top_k")
    t, c, p, ep, etp = (options[f"{name}_size"] for name in ("tp", "cp", "pp", "ep", "expert_tp"))
    dp_size = world_size // (t * c * p)
    is_whole = dp_size * t * c * p == world_size and world_size % (p * ep * etp) == 0
    has_use = (p > 1 or options["schedule"] == "1f1b") and (t > 1 or not options["sequence_parallel"])
    if not is_whole or not has_use or (options["zero_stage"] and world_size == t * p):
        raise ValueError("no such run")
    two_chunks = options["schedule"] in ("interleaved", *V_SHAPED)
    # Of a "global" loss, micro-batches must be the whole batch; of one per micro-batch, they must have equal rows.
    rows = {"global": 8, "micro_batch": 2}.get(balance, 8)
    alone = dict(FORMS[top_k], **BALANCES[balance], num_layers=p * 2 if p > 1 else 2, micro_batch_size=rows)
    size = {"global": 8 // dp_size, "micro_batch": rows}.get(balance, max(1, 4 // dp_size))
    own = options | {"micro_batch_size": size, "num_chunks": 2 if options["schedule"] == "interleaved" else 1}
    config = replace(MOE, **alone | own)
    config.make_schedule(world_size)
    assert config.num_layers >= p * (1 + two_chunks)
    return replace(MOE, **alone), config


DIVIDED = {("ep_size", 2), ("expert_tp_size", 2)}


def some_runs(num_tried=300, seed=0):
    """A few runs of sizes up to 2, in which divided experts meet every value that they can; in a sweep, all do.

    The next run always adds most for its cost. Sizes of 4 and 8 come in the long sweep.
    """
    draw, covers = random.Random(seed), {}
    while len(covers) < num_tried:
        small = {
            name: [each for each in values if name not in SMALL or each <= SMALL[name]]
            for name, values in FACTORS.items()
        }
        choice, world_size = (
            tuple((name, draw.choice(values)) for name, values in small.items()),
            draw.choice((2, 4, 8)),
        )
        try:
            run_of(world_size, choice)
        except ValueError:
            continue
        pairs = itertools.combinations(choice, 2)
        covers[world_size, choice] = {pair for pair in pairs if IS_SWEEP or DIVIDED & {*pair}}
    uncovered = set().union(*covers.values())
    while uncovered:
        best = max(covers, key=lambda run: len(covers[run] & uncovered) / run[0])
        uncovered -= covers.pop(best)
        yield best


def compare(on_ranks, runs):
    alone, all_runs = {}, []
    for world_size, choice in runs:
        reference, config = run_of(world_size, choice)
        if reference not in alone:
            [alone[reference]] = on_ranks(trained, reference, world_size=1)
        expected, tensors = alone[reference]
        all_runs.append((world_size, (config, tensors), (expected, choice)))
    for (world_size, _, (expected, choice)), ranks in in_few_launches(on_ranks, trained_with_calls, all_runs):
        check_order([calls for *_, calls in ranks])
        for rank, (got, *_) in enumerate(ranks):
            assert got == pytest.approx(expected, rel=1e-10, abs=0), f"rank {rank} of {world_size}: {choice}"


def test_divided_experts_beside_every_size_and_option(on_ranks):
    runs = [*some_runs()]
    met = set().union(*(itertools.combinations(choice, 2) for _, choice in runs))
    for pair in DIVIDED:
        for other in [("zero_stage", 3), ("schedule", "zero-bubble"), ("balance", "global"), ("recompute", "full")]:
            assert {(pair, other), (other, pair)} & met
    compare(on_ranks, runs)


HYBRID = [  # ranks, among how many an expert is divided and how many have the same shard, and sizes
    (4, (2, 2), dict(shard_size=2, zero_stage=3)),
    (4, (1, 2), dict(shard_size=2, zero_stage=1, ep_size=2)),
    (8, (2, 2), dict(shard_size=4, zero_stage=3, ep_size=2, recompute="full")),  # ep inside a block with one copy,
    (8, (2, 2), dict(shard_size=4, zero_stage=2, ep_size=2, order="tp-cp-dp-ep-pp", balance="bias")),  # and across
    (8, (2, 2), dict(shard_size=2, zero_stage=1, tp_size=2, ep_size=2, sequence_parallel=True)),
    (8, (2, 2), dict(shard_size=4, zero_stage=3, cp_size=2, ep_size=2, balance="global")),
    (8, (2, 4), dict(shard_size=2, zero_stage=2, cp_size=2, order="tp-dp-cp-pp")),
    (8, (2, 2), dict(shard_size=2, zero_stage=3, pp_size=2, schedule="interleaved")),
    (8, (2, 2), dict(shard_size=1, zero_stage=1, pp_size=2, tp_size=2, schedule="zero-bubble")),
]


def test_hybrid_shards_of_experts(on_ranks):
    runs = []
    for world_size, sizes, options in HYBRID if IS_SWEEP else HYBRID[::2]:
        runs.append((world_size, tuple(({name: values[0] for name, values in FACTORS.items()} | options).items())))
        config = run_of(*runs[-1])[1]
        groups = config.layout(world_size).shard_groups(config.shard_size, experts=True)
        assert tuple(len(each[0]) for each in groups) == sizes
    compare(on_ranks, runs)


WHOLE = ("tp_size", "cp_size", "pp_size", "ep_size", "expert_tp_size", "schedule", "sequence_parallel", "zero_stage")


def long_sweep(seed=0):
    """Every layout of eight ranks with every schedule, each with and without sequence parallelism and all ZeRO stages.

    The other options vary, so that any four values meet in a run, if they can.
    """
    runs, layouts, met, more = [], set(), set(), []
    for values in itertools.product(*FACTORS.values()):
        with suppress(ValueError):
            run_of(8, choice := tuple(zip(FACTORS, values)))
            runs.append(choice)
    random.Random(seed).shuffle(runs)
    for choice in runs:
        layout = tuple(value for name, value in choice if name in WHOLE)
        if layout in layouts:
            more.append(choice)
        else:
            layouts.add(layout)
            met |= {*itertools.combinations(choice, 4)}
            yield 8, choice
    for choice in more:
        if not met.issuperset(fours := {*itertools.combinations(choice, 4)}):
            met |= fours
            yield 8, choice


@pytest.mark.skipif(not IS_SWEEP, reason="takes half an hour or more")
def test_the_whole_product_of_axes(on_ranks):
    compare(on_ranks, long_sweep())


def loads_of(config):
    with training(config) as trainer:
        loss = [step.loss for step in trainer.steps()]
        loads = [m.last_load.tolist() for model in trainer.models for m in model.modules() if isinstance(m, Router)]
        return loss, loads


@pytest.mark.parametrize(("kind", "options"), [("global", {}), ("micro_batch", {"micro_batch_size": 4})])
def test_what_an_auxiliary_loss_depends_on(on_ranks, kind, options):
    """On the rows of a micro-batch; with "global" also on which ones came before, if there are any."""
    config = replace(MOE, num_layers=1, aux_loss=kind, aux_loss_coefficient=1.0, steps=3)
    alone, other = (on_ranks(train, each, world_size=1)[0] for each in (config, replace(config, micro_batch_size=4)))
    assert abs(alone[-1].loss - other[-1].loss) > 1e-7
    two = on_ranks(train, replace(config, ep_size=2, **options))[0]
    is_same = numbers(two) == pytest.approx(numbers(other if options else alone), rel=1e-10)
    assert is_same == (kind == "micro_batch")


def test_a_capacity_drops_tokens_and_one_that_is_large_drops_none(on_ranks):
    config = replace(MOE, num_layers=2)
    dropless, loads = on_ranks(loads_of, config)[0]
    assert len(loads) == 2
    assert all(min(load) < max(load) for load in loads)
    same, less = (on_ranks(loads_of, replace(config, capacity_factor=factor))[0][0] for factor in (8, 0.5))
    assert same == pytest.approx(dropless, rel=1e-12)
    assert max(abs(a - b) for a, b in zip(less, dropless)) > 1e-4


def test_an_evaluation_leaves_counts_and_biases_alone(on_ranks):
    config = replace(MOE, num_layers=2, expert_bias_update_rate=0.05, aux_loss="global", aux_loss_coefficient=0.1)
    assert on_ranks(loads_of, replace(config, eval_interval=1)) == on_ranks(loads_of, replace(config, eval_interval=0))


@pytest.mark.parametrize(
    "options", [{"ep_size": 2, "zero_stage": 1}, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 2}]
)
def test_bfloat16_learns_as_float32_does(on_ranks, options):
    config = replace(MOE, precision="bfloat16", num_layers=2, steps=10, eval_interval=0, aux_loss_coefficient=0.01)
    got = [step.loss for step in on_ranks(train, replace(config, **options))[0]]
    expected = [step.loss for step in on_ranks(train, replace(config, precision="float32"), world_size=1)[0]]
    assert got == pytest.approx(expected, rel=0.01)
    assert got[-1] < got[0] - 0.2


OF_FOUR = dict(shard_size=4, zero_stage=3)

# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, dict(ep_size=4)), (4, dict(tp_size=2, expert_tp_size=2, ep_size=2, zero_stage=3))),
        ((4, dict(tp_size=2, expert_tp_size=1, ep_size=2, zero_stage=2)), (4, dict(pp_size=2, ep_size=2))),
        ((8, dict(ep_size=2, micro_batch_size=1, **OF_FOUR)), (4, dict(tp_size=2, expert_tp_size=1, zero_stage=2))),
        ((4, dict(ep_size=4)), (8, dict(cp_size=2, ep_size=2, order="tp-cp-dp-ep-pp", **OF_FOUR))),
        ((2, dict(ep_size=2, precision="bfloat16", zero_stage=1)), (4, dict(expert_tp_size=2, precision="bfloat16"))),
    ],
    ids=str,
)
def test_a_checkpoint_continues_in_another_layout(on_ranks, tmp_path, before, after):
    """Experts of three dims, fused and cut twice; and the biases, which are no parameters."""
    form = dict(mlp="swiglu", bias=False, num_shared_experts=1, num_layers=2, eval_interval=1)
    config = replace(MOE, **form, **BALANCES["sequence"], checkpoint_dir=str(tmp_path))
    (first, there), (second, here) = before, after
    on_ranks(train, replace(config, steps=2, **there), world_size=first)
    alone = replace(config, checkpoint_dir=None, precision=there.get("precision", "float64"))
    [(expected, tensors)] = on_ranks(trained, alone, world_size=1)
    if alone.precision == "float64":
        for got, _ in on_ranks(trained, replace(config, resume=True, **here), tensors, world_size=second):
            assert got == pytest.approx(expected[6:], rel=1e-10)
    else:
        [step] = on_ranks(train, replace(config, resume=True, **here), world_size=second)[0]
        assert step.loss == pytest.approx(expected[6], rel=0.01)
    with pytest.raises(RankFailed, match="num_experts is 8 there and 4 here"):
        launch(train, replace(config, num_experts=4, resume=True, steps=4), world_size=1)


# -- what a run says, and refuses --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "says"), [
    ({"num_experts": None, "ep_size": 2}, "ep_size=2 is for experts: give num_experts too, or leave ep_size out"),
    ({"num_experts": None, "aux_loss_coefficient": 0.1}, "aux_loss_coefficient=0.1 is for experts: give num_experts"),
    ({"num_experts": None, "moe_ffn_hidden_size": None, "num_shared_experts": 1}, "give num_experts too"),
    ({"top_k": 9}, "top_k=9 must be at most num_experts=8"),
    ({"top_k": 0}, "top_k=0 must be at least 1"),
    ({"num_experts": 6, "ep_size": 4}, "ep_size=4 does not divide num_experts=6: use ep_size 1, 2, 3 or 6, or num_e"),
    ({"expert_tp_size": 3}, "expert_tp_size=3 does not divide width of an expert=8: use expert_tp_size 1, 2, 4 or 8"),
    ({"moe_ffn_hidden_size": 9, "tp_size": 2}, "tp_size=2 does not divide width of an expert=9"),
    ({"num_shared_experts": 1, "moe_ffn_hidden_size": 9, "tp_size": 2, "expert_tp_size": 1}, "of shared experts=9"),
    ({"moe_layer_freq": 2, "ffn_hidden_size": 9, "tp_size": 2}, "tp_size=2 does not divide ffn_hidden_size=9: use"),
    ({"capacity_factor": 0}, "capacity_factor=0 must be a number above 0: leave it out to drop no token"),
    ({"capacity_factor": math.nan}, "capacity_factor=nan must be a number above 0"),
    ({"aux_loss": "batch"}, "aux_loss='batch' is unknown: use micro_batch, sequence or global"),
    ({"z_loss_coefficient": -1}, "z_loss_coefficient=-1 must be a number of at least 0"),
    ({"router_scores": "tanh"}, "router_scores='tanh' is unknown: use softmax or sigmoid"),
    ({"moe_layer_freq": 0}, "moe_layer_freq=0 must be at least 1"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, says):
    if options.get("num_experts", 8) is None:
        options = {"moe_ffn_hidden_size": None} | options
    with pytest.raises(ValueError, match=says):
        replace(MOE, **options)


def test_sizes_that_do_not_fit_a_grid_say_which_grid(on_ranks):
    fault = (
        r"expert_tp_size=1 \* ep_size=8 = 8 does not divide the expert grid's world_size/pp_size=4: use ep_size 1, 2 or"
    )
    with pytest.raises(ValueError, match=fault):
        replace(MOE, pp_size=2, ep_size=8, batch_size=16).layout(8)
    with pytest.raises(ValueError, match=r"tp_size=4 .* does not divide world_size=6"):
        replace(MOE, tp_size=4, ep_size=2).layout(6)


def test_a_shard_size_that_does_not_fit_the_experts_says_which_would():
    """Also to those who only ask what ranks would hold."""
    config = replace(MOE, shard_size=2, zero_stage=3, ep_size=4, micro_batch_size=1)
    fault = r"ep_size=4 = 4 does not divide a copy's tp_size\*shard_size=2: use .*, or shard_size 4 or 8"
    for asked in (config.layout, partial(estimate, config)):
        with pytest.raises(ValueError, match=fault):
            asked(8)
    assert replace(config, shard_size=4).layout(8).expert_dp_size == 2


def test_fit_ranks_keeps_a_shard_size_that_fits_the_experts_too():
    """Else all ranks share the shards: of fewer, each would hold more."""
    config = replace(MOE, ep_size=4, micro_batch_size=1, fit_ranks=True, batch_size=24, **OF_FOUR)
    sizes = [(each.ep_size, each.shard_size) for each in map(config.resize_to, (8, 12, 6, 4, 2))]
    assert sizes == [(4, 4), (4, 4), (2, None), (4, 4), (2, None)]


def test_fit_ranks_keeps_as_many_expert_ranks_as_fit():
    config = replace(MOE, ep_size=4, tp_size=2, expert_tp_size=1, fit_ranks=True, batch_size=24)
    sizes = [(each.tp_size, each.ep_size, each.pp_size) for each in map(config.resize_to, (8, 6, 4, 3))]
    assert sizes == [(2, 4, 1), (2, 2, 1), (2, 4, 1), (1, 1, 1)]


def held(config):
    with training(config) as trainer:
        return sum(p.numel() for model in trainer.models for p in model.parameters())


@pytest.mark.parametrize(
    "options", [{}, {"ep_size": 4}, {"tp_size": 2, "pp_size": 2, "expert_tp_size": 1, "ep_size": 2}]
)
def test_check_builds_what_a_rank_has(on_ranks, options):
    config = replace(MOE, num_shared_experts=1, **options)
    counted = [what_a_rank_holds(config, 4, stage)[0] for stage in range(config.pp_size)]
    found = on_ranks(held, config, world_size=4)
    assert found == [counted[config.layout(4).coords(rank).pp] for rank in range(4)]
    whole, divided = (what_a_rank_holds(replace(config, zero_stage=stage), 4, 0)[1] for stage in (0, 1))
    replicas = [4 if not options else config.layout(4).expert_dp_size, 4 // config.tp_size // config.pp_size]
    assert whole.optimizer / max(replicas) <= divided.optimizer <= whole.optimizer / min(replicas)


@pytest.mark.parametrize("options", [{}, {"tp_size": 2, "expert_tp_size": 1}, {"cp_size": 2}], ids=str)
def test_check_knows_what_hybrid_shards_hold(on_ranks, options):
    config = replace(MOE, num_layers=2, micro_batch_size=1, ep_size=2, **options, **OF_FOUR)
    _, of_rank = what_a_rank_holds(config, 8, 0)
    assert of_rank.optimizer == 16 * sum(on_ranks(held, config, world_size=8)) / 8  # bytes of AdamW's float64 moments


def test_the_number_of_parameters_is_exact():
    for form in FORMS.values():
        shape = replace(MOE, **form).shape
        norm = shape.hidden_size * (2 if shape.norm == "layernorm" else 1)  # the last one, which it leaves out
        with torch.device("meta"):
            model = ParallelGPT(shape, group_of_one())
        count = sum(p.numel() for p in model.parameters())
        assert shape.num_parameters == count - norm
        experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
        assert shape.num_active_parameters == count - norm - experts + experts * shape.top_k // 8


def test_a_model_without_experts_is_as_before():
    """It has no router, no buffer and no new name, and the default order is Megatron-LM's."""
    model, config = ParallelGPT(TINY.shape, group_of_one()), TrainConfig()
    assert isinstance(model.layers["0"].mlp, ParallelMLP)
    assert not [*model.buffers()]
    modules = "attention_norm", "mlp_norm", "attention.qkv", "attention.out", "mlp.up", "mlp.down"
    names = {name.split(".", 2)[2] for name in model.state_dict() if name.startswith("layers.")}
    assert names == {f"{name}.{which}" for name in modules for which in ("weight", "bias")}
    assert TINY.shape.num_active_parameters == TINY.shape.num_parameters
    assert str(config.layout(4)) == str(replace(config, order="tp-cp-ep-dp-pp").layout(4))
