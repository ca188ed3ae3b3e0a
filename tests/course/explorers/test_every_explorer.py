"""What holds for every explorer: controls change what is shown, its repr can be typed, and what is wrong is refused."""

import pytest

from course.explorers.batch import batch_explorer
from course.explorers.context import context_explorer
from course.explorers.fully_sharded import SLOW, stage_explorer
from course.explorers.layout import layout_explorer
from course.explorers.routing import routing_explorer
from course.explorers.schedule import schedule_explorer
from course.explorers.schedule_builder import schedule_builder
from course.explorers.sharding import shard_explorer
from course.explorers.sizing import sizing_explorer

CALLS = {
    each.__name__: each
    for each in (
        batch_explorer, context_explorer, layout_explorer, routing_explorer, schedule_builder, schedule_explorer,
        shard_explorer, sizing_explorer, stage_explorer,
    )
}  # fmt: skip
ALL = {"says", "facts", "picture"}
EXPLORERS = {  # a call, what every change changes, and the changes, some after others
    "batch_explorer(128, 4, num_micro_batches=2)": (
        ALL - {"says"}, [{"batch_size": 256}, {"dp_size": 8}, {"num_micro_batches": 4}],
    ),
    "context_explorer(4096, cp_size=4, num_heads=32, num_kv_heads=8)": (
        {"facts"}, [{"seq_length": 8192}, {"cp_size": 8}, {"tp_size": 2}, {"num_heads": 16}, {"num_kv_heads": 4}],
    ),
    "stage_explorer(recompute='full')": (set(), [
        {"model": "7.5 billion"}, {"cluster": SLOW.name}, {"world_size": 128}, {"micro_batch_size": 2},
        {"num_micro_batches": 4}, {"shard_size": 16}, {"recompute": "none"},
    ]),
    "layout_explorer(16, tp_size=2, pp_size=4)": (ALL - {"says"}, [
        {"tp_size": 4}, {"pp_size": 2}, {"world_size": 32}, {"order": "tp-pp-dp"}, {"gpus_per_node": 4}, {"cp_size": 2},
    ]),
    "layout_explorer(16, 2, 2, 2, ep_size=4, expert_tp_size=1)": (ALL, [{"expert_tp_size": 2}]),
    "routing_explorer()": (
        set(), [{"num_tokens": 8}, {"num_experts": 16}, {"top_k": 4}, {"ep_size": 2}, {"skew": 2.0}],
    ),
    "schedule_explorer('interleaved', 4, 8, 2)": (ALL, [
        {"name": "GPipe"}, {"pp_size": 2}, {"num_micro_batches": 4}, {"num_chunks": 3}, {"forward": 2.0},
        {"backward": 1.0}, {"message": 0.5}, {"rival": "1F1B"},
    ]),
    "shard_explorer('column', 1024, 512, tp_size=2)": (ALL - {"says"}, [
        {"cut": "row"}, {"input_size": 2048}, {"output_size": 1024}, {"tp_size": 4}, {"batch_size": 64},
    ]),
    "sizing_explorer()": (ALL, [
        {"pp_size": 4, "world_size": 512, "model": "145.6 billion"}, {"cluster": "DGX H100"}, {"world_size": 512},
        {"batch_size": 3072}, {"tp_size": 4}, {"pp_size": 16}, {"micro_batch_size": 2}, {"num_chunks": 2},
        {"recompute": "selective"}, {"zero_stage": 1}, {"fused_attention": True},
        {"fused_attention": True, "cp_size": 2}, {"billion_tokens": 450}, {"num_chunks": 2, "schedule": "v-half"},
        {"cluster": "DGX H100", "fp8": True}, {"model": "Mixtral 8x22B", "ep_size": 8},
        {"model": "Mixtral 8x22B", "expert_tp_size": 2},
    ]),
}  # fmt: skip


def make(call):
    return eval(call, dict(CALLS))


def shown(explorer):
    scene = explorer.steps[0]
    return {"says": explorer.says, "facts": (explorer.facts, scene.table), "picture": scene.marks}


@pytest.mark.parametrize(("call", "changes"), [(call, each) for call in EXPLORERS for each in EXPLORERS[call][1]])
def test_every_control_changes_what_is_shown(call, changes):
    explorer, (*earlier, control) = make(call), changes
    for each in earlier:
        explorer.choose(**{each: changes[each]})
    before = shown(explorer)
    explorer.choose(**{control: changes[control]})
    assert getattr(explorer.choice, control) == changes[control]
    assert "moved" not in explorer.says or "This does not fit" in explorer.says
    changed = {name for name, now in shown(explorer).items() if now != before[name]}
    assert changed and changed >= EXPLORERS[call][0]


@pytest.mark.parametrize("call", [*EXPLORERS, "schedule_builder(2, 2, ['F0 F1', ''])"])
def test_its_repr_is_short_and_can_be_typed(call):
    explorer = make(call)
    again = make(repr(explorer))
    assert (again.choice, again.shown) == (explorer.choice, explorer.shown)
    assert len(repr(explorer)) < 130


@pytest.mark.parametrize(("call", "says"), [
    ("batch_explorer(dp_size=3)", "dp_size=3 * num_micro_batches=1 = 3 does not divide batch_size=128"),
    ("layout_explorer(16, tp_size=3)", "does not divide world_size=16"),
    ("layout_explorer(ep_size=3)", "ep_size=3 does not divide num_experts=64"),
    ("schedule_builder(1, 1, [5])", "'5' is not an op: write F, B or W"),
    ("schedule_builder(placement='W')", "placement='W' is unknown: use 'in turn' or 'V'"),
    ("schedule_builder(split='no')", "backward in B and W='no' is not offered: use one of False, True"),
    ("schedule_explorer('2f2b')", "schedule='2f2b' is unknown: use GPipe, 1F1B"),
    ("schedule_explorer('1F1B', '2')", "ranks p='2' is not offered: use one of 1, 2"),
    ("schedule_explorer('1F1B', None)", "ranks p=None is not offered: use one of 1, 2"),
    ("schedule_explorer(message='a')", "message time='a' is not offered: use one of 0.0, 0.25"),
    ("schedule_explorer('1F1B', 1000)", "pp_size=1000 * num_micro_batches=8 is more than 512, which takes"),
    ("schedule_explorer().choose(ranks=4)", "ranks is not a control: use one of name, pp_size"),
    ("shard_explorer(tp_size=3)", "tp_size=3 does not divide output_size=512"),
    ("sizing_explorer(tp_size=7)", "tp_size=7"),
    ("sizing_explorer('70 billion')", "model='70 billion' is unknown: use one of yours, or 1.7 billion"),
    ("sizing_explorer(cluster='mine')", "cluster='mine' is unknown: use one of yours, or DGX A100 80GB"),
])  # fmt: skip
def test_what_is_not_offered_is_refused_at_once(call, says):
    with pytest.raises(ValueError) as refused:
        make(call)
    assert says in str(refused.value)
