"""Training with experts: every layout has the losses, norms, weights and biases of one process.

In each run, all ranks of a group must call the same collectives in the same order (`tests.support.collectives`).

`make test` runs a selection in which experts are divided beside each size and option. In `make sweep-layouts` every two
options meet that can, and so do layouts of eight ranks.
"""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from labkit.expert_parallel import Router
from labkit.groups import group_of_one
from labkit.launch import RankFailed, launch
from labkit.parallel_config import V_SHAPED
from labtrain import train, training
from labtrain.estimate import what_a_rank_holds
from labtrain.model import ParallelGPT
from tests.labtrain.layouts import check_loads, compare, drawn, in_few_launches
from tests.labtrain.tiny import MOE, TODAY, numbers
from tests.support.collectives import check_order, recorded
from tests.support.plain import train_plainly
from tests.support.sweep import IS_SWEEP

FORMS = [  # one for each number of experts per token
    dict(top_k=1, moe_layer_freq=2),
    dict(top_k=2, num_shared_experts=1, **TODAY),
    dict(top_k=4, router_scores="sigmoid"),
]
LOSSES = dict(aux_loss_coefficient=0.3, z_loss_coefficient=0.1)
SEQUENCE = dict(aux_loss="sequence", expert_bias_update_rate=0.02, **LOSSES)
GLOBAL = dict(aux_loss="global", **LOSSES)
# Of a global loss, micro-batches must be the whole batch; of one per micro-batch, they must have equal rows.
BALANCES = [
    SEQUENCE,
    dict(aux_loss="micro_batch", aux_loss_coefficient=0.3, expert_bias_update_rate=0.02),
    GLOBAL,
    dict(expert_bias_update_rate=0.05),
]
SIZES = ("tp_size", "cp_size", "pp_size", "ep_size", "expert_tp_size")
VARIED = (*SIZES, "schedule", "sequence_parallel", "zero_stage", "shard_size", "recompute", "top_k", "aux_loss")

# -- one process, against plain torch ----------------------------------------------------------------------------------


def test_one_process_trains_as_plain_torch_does(on_ranks):
    balance = dict(expert_bias_update_rate=0.02, **LOSSES)
    config = replace(MOE, steps=5, num_layers=2, **balance)
    expected, oracle = train_plainly(config)
    assert numbers(on_ranks(train, config, world_size=1)[0]) == pytest.approx(expected, rel=1e-10, abs=0)
    assert sum(map(abs, oracle.expert_biases)).max() > 0
    without, _ = train_plainly(replace(config, **dict.fromkeys(balance, 0.0)))
    assert abs(without[-3] - expected[-3]) > 1e-5, "balancing changes nothing"


# -- every layout, against one process ---------------------------------------------------------------------------------


def draw(choose):
    """A run of random options, of sizes up to 2; in a sweep, up to 4."""
    sizes = [1, 2, 4] if IS_SWEEP else [1, 2]
    dp_size, pp_size = choose(sizes), choose(sizes)
    schedule = choose(["gpipe", "interleaved", "zero-bubble", "dualpipe-v"]) if pp_size > 1 else "1f1b"
    options = {name: choose(sizes) for name in SIZES} | dict(
        pp_size=pp_size,
        schedule=schedule,
        num_chunks=2 if schedule in ("interleaved", *V_SHAPED) else 1,
        num_layers=2 * pp_size,
        recompute=choose(["none", "full"]),
        sequence_parallel=choose([False, True]),
        zero_stage=choose([0, 1, 2, 3]),
    )
    if options["zero_stage"]:
        options |= dict(shard_size=choose([None, 2]))
    balance = choose(BALANCES)
    rows = {"global": 8 // dp_size, "micro_batch": 2}.get(balance.get("aux_loss"), max(1, 4 // dp_size))
    config = replace(MOE, **options, **choose(FORMS), **balance, micro_batch_size=rows)
    return dp_size * config.tp_size * config.cp_size * pp_size, config


DIVIDED = {("ep_size", 2), ("expert_tp_size", 2)}


def parts(world_size, config):
    """Each two options of a run of up to four ranks beside divided experts; in a sweep, any two of up to eight."""
    pairs = {*combinations([(name, getattr(config, name)) for name in VARIED], 2)}
    if IS_SWEEP:
        return pairs if world_size <= 8 else set()
    return {pair for pair in pairs if world_size <= 4 and DIVIDED & {*pair}}


def test_divided_experts_beside_every_size_and_option(on_ranks):
    compare(on_ranks, [*drawn(draw, parts, num_tried=20_000 if IS_SWEEP else 2000)])


INSIDE = dict(shard_size=4, zero_stage=3, ep_size=2, recompute="full")  # ep inside a block with one copy,
ACROSS = dict(shard_size=4, zero_stage=2, ep_size=2, order="tp-cp-dp-ep-pp", expert_bias_update_rate=0.05)  # and across
HYBRID = [
    (4, dict(shard_size=2, zero_stage=3)),
    (8, INSIDE),
    (8, ACROSS),
    (4, dict(shard_size=2, zero_stage=1, ep_size=2)),
    (8, dict(shard_size=2, zero_stage=1, tp_size=2, ep_size=2, sequence_parallel=True)),
    (8, dict(shard_size=4, zero_stage=3, cp_size=2, ep_size=2)),
    (8, dict(shard_size=2, zero_stage=2, cp_size=2, order="tp-dp-cp-pp")),
    (8, dict(shard_size=2, zero_stage=3, pp_size=2, schedule="interleaved", num_chunks=2)),
    (8, dict(shard_size=1, zero_stage=1, pp_size=2, tp_size=2, schedule="zero-bubble")),
]
ORDERED = dict(steps=2, eval_interval=2, num_layers=2, ep_size=2, micro_batch_size=2, **GLOBAL)
WITHOUT_AN_EQUAL = [  # of one process: only the order of the collectives is looked at, of two micro-batches each
    dict(zero_stage=3, recompute="full", dropout=0.1, async_save=True, micro_batch_size=1),
    dict(zero_stage=2, capacity_factor=0.5, moe_layer_freq=2, precision="bfloat16", micro_batch_size=1),
    dict(tp_size=2, expert_tp_size=1, sequence_parallel=True, dropout=0.1, async_save=True),
    dict(cp_size=2, context_parallel="ulysses", zero_stage=3),
    dict(pp_size=2, schedule="v-min", num_layers=4, zero_stage=1, recompute="full", expert_bias_update_rate=0.1),
]


def test_hybrid_shards_of_experts(on_ranks):
    base = replace(MOE, top_k=1, moe_layer_freq=2, micro_batch_size=1, **SEQUENCE)
    runs = [(world_size, replace(base, **options)) for world_size, options in HYBRID]
    compare(on_ranks, runs if IS_SWEEP else runs[:3])


def calls_of(config):
    with recorded() as calls:
        train(config)
    return calls


@pytest.mark.gloo  # what records the calls hears torch's own groups only
def test_every_rank_calls_the_same_collectives(on_ranks, tmp_path):
    runs = []
    for number, options in enumerate(WITHOUT_AN_EQUAL):
        saving = dict(checkpoint_dir=str(tmp_path / str(number)), save_interval=1)
        runs.append((4, (replace(MOE, **ORDERED | options | saving),), None))
    for _, ranks in in_few_launches(on_ranks, calls_of, runs):
        check_order(ranks)


# -- what balancing and a capacity do ----------------------------------------------------------------------------------


def loads_of(config):
    with training(config) as trainer:
        loss = [step.loss for step in trainer.steps()]
        check_loads(trainer)
        routers = [module for model in trainer.models for module in model.modules() if isinstance(module, Router)]
        return loss, [router.last_load.tolist() for router in routers]


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


def test_bfloat16_learns_as_float32_does(on_ranks):
    config = replace(MOE, num_layers=2, steps=10, eval_interval=0, aux_loss_coefficient=0.01)
    [expected] = on_ranks(train, replace(config, precision="float32"), world_size=1)
    for options in ({"ep_size": 2, "zero_stage": 1}, {"tp_size": 2, "expert_tp_size": 1, "ep_size": 2}):
        got = on_ranks(train, replace(config, precision="bfloat16", **options))[0]
        assert [step.loss for step in got] == pytest.approx([step.loss for step in expected], rel=0.01)
        assert got[-1].loss < got[0].loss - 0.2


# -- checkpoints -------------------------------------------------------------------------------------------------------

OF_FOUR = dict(shard_size=4, zero_stage=3, micro_batch_size=1)
RELAY = [  # a step each
    (4, dict(ep_size=4)),
    (4, dict(tp_size=2, expert_tp_size=2, ep_size=2, zero_stage=3)),
    (8, dict(cp_size=2, ep_size=2, order="tp-cp-dp-ep-pp", **OF_FOUR)),
    (4, dict(tp_size=2, expert_tp_size=1, ep_size=2, zero_stage=2)),
    (4, dict(pp_size=2, ep_size=2)),
]


def one_step(config):
    """On a rank: resume if there is something, make a step, save."""
    with training(config) as trainer:
        return trainer.step()


def test_a_checkpoint_continues_in_another_layout(on_ranks, tmp_path):
    """Experts of three dims, fused and cut twice; and the biases, which are no parameters."""
    form = dict(mlp="swiglu", bias=False, num_shared_experts=1, num_layers=2, steps=len(RELAY), eval_interval=1)
    config = replace(MOE, **form, **SEQUENCE)
    [unbroken] = on_ranks(train, config, world_size=1)
    saving = replace(config, checkpoint_dir=str(tmp_path), save_interval=1, resume=True)
    for expected, (world_size, options) in zip(unbroken, RELAY, strict=True):
        for step in on_ranks(one_step, replace(saving, **options), world_size=world_size):
            assert numbers([step]) == pytest.approx(numbers([expected]), rel=1e-10, abs=0), options
    with pytest.raises(RankFailed, match="num_experts is 8 there and 4 here"):
        launch(train, replace(saving, num_experts=4), world_size=1)


# -- what ranks would hold ---------------------------------------------------------------------------------------------


def test_fit_ranks_keeps_what_fits_the_experts():
    """Without a shard size that fits, all ranks share the shards: of fewer, each would hold more."""
    asked = replace(MOE, ep_size=4, fit_ranks=True, batch_size=24)
    sharded = replace(asked, **OF_FOUR)
    sizes = [(config.ep_size, config.shard_size) for config in map(sharded.resize_to, (8, 12, 6, 4, 2))]
    assert sizes == [(4, 4), (4, 4), (2, None), (4, 4), (2, None)]
    divided = replace(asked, tp_size=2, expert_tp_size=1)
    sizes = [(config.tp_size, config.ep_size, config.pp_size) for config in map(divided.resize_to, (8, 6, 4, 3))]
    assert sizes == [(2, 4, 1), (2, 2, 1), (2, 4, 1), (1, 1, 1)]


def held(config):
    with training(config) as trainer:
        return sum(p.numel() for model in trainer.models for p in model.parameters())


def test_check_knows_what_hybrid_shards_hold(on_ranks):
    config = replace(MOE, num_layers=2, tp_size=2, expert_tp_size=1, ep_size=2, **OF_FOUR)
    _, of_rank = what_a_rank_holds(config, 8, 0)
    assert of_rank.optimizer == 16 * sum(on_ranks(held, config, world_size=8)) / 8  # bytes of AdamW's float64 moments


def test_the_number_of_parameters_is_exact():
    for form in FORMS:
        shape = replace(MOE, **form).shape
        norm = shape.hidden_size * (2 if shape.norm == "layernorm" else 1)  # the last one, which it leaves out
        with torch.device("meta"):
            model = ParallelGPT(shape, group_of_one())
        count = sum(p.numel() for p in model.parameters())
        assert shape.num_parameters == count - norm
        experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
        assert shape.num_active_parameters == count - norm - experts + experts * shape.top_k // 8
