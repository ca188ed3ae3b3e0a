"""What cannot be is refused by name, with its value and mostly with a way out: a call, and what its error says.

Refusals of models and of what a rank has done before stand with the tests of those.
"""

import pickle
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from course.communication import communication_log
from labkit import context_parallel, layout, partition, schedules, tensor_parallel
from labkit.device import choose_backend
from labkit.parallel_config import ParallelConfig
from labkit.shape import GPT
from labkit.sizes import MAX_SIZE, Misfit, check_size
from tests.support.schedules import KINDS, ops, schedule_of

MODEL = GPT(num_layers=8, hidden_size=16, seq_length=16, vocab_size=64, num_attention_heads=8)
EXPERTS = replace(MODEL, num_experts=8)
FEW_GROUPS = replace(MODEL, num_query_groups=2)
LAYOUT = layout.ParallelLayout(16, tp_size=2, pp_size=4)
WITH_EXPERTS = layout.ParallelLayout(16, tp_size=2, ep_size=4, expert_tp_size=1)
BOTH = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
BAD_ORDERS = ("tp-dp", "tp-dp-pp-tp", "ep-tp-dp-pp-ep", "tp-dp-pp-xp", "", "tp_dp_pp", "tp-dp-pp-", None, ("tp", "dp"))


def gpt(**changes):
    """A model with these changes."""
    return replace(GPT(num_layers=2, hidden_size=100, seq_length=8, vocab_size=10, num_attention_heads=4), **changes)


def config(**options):
    return ParallelConfig(**{"batch_size": 16} | options)


def check(model, world_size, **options):
    config(**options).check(model, world_size)


CALLED = (
    check_size, choose_backend, config, gpt, ops, replace, schedule_of, torch.tensor, torch.ones, torch.zeros
)  # fmt: skip
KNOWN = {name: value for module in (layout, partition, schedules) for name, value in vars(module).items()}
KNOWN |= {each.__name__: each for each in CALLED} | KINDS | {"check_fit": check}
KNOWN |= dict(MODEL=MODEL, EXPERTS=EXPERTS, FEW_GROUPS=FEW_GROUPS, LAYOUT=LAYOUT, WITH_EXPERTS=WITH_EXPERTS, BOTH=BOTH)
KNOWN |= dict(MAX_SIZE=MAX_SIZE)

# fmt: off
REFUSED = {
    # sizes
    "check_size('num_rows', 0)": "num_rows=0 must be at least 1",
    "check_size('num_rows', -8)": "num_rows=-8 must be at least 1",
    "check_size('num_rows', -1, 0)": "num_rows=-1 must be at least 0",
    "check_size('num_rows', True)": "num_rows=True must be a whole number",
    "check_size('num_rows', MAX_SIZE + 1)": "num_rows=1000000000001 must be at most 1,000,000,000,000",
    "ParallelLayout(MAX_SIZE - 11, tp_size=7)": "use tp_size 1 or 999999999989, ",  # a prime
    "ParallelLayout(10**30, tp_size=2)": "must be at most 1,000,000,000,000",
    "gpipe(2, 10**18 + 9)": "must be at most 1,000,000,000,000",
    # layouts
    "ParallelLayout(16, tp_size=3)":
        "tp_size=3 * pp_size=1 = 3 does not divide world_size=16: use tp_size 1, 2, 4, 8 or 16, or world_size 15 or 18",
    "ParallelLayout(16, tp_size=2, pp_size=3, cp_size=2)":
        "tp_size=2 * cp_size=2 * pp_size=3 = 12 does not divide world_size=16: use pp_size 1, 2 or 4, or world_size 12",
    "ParallelLayout(8, tp_size=16, pp_size=16)":
        "tp_size=16 * pp_size=16 = 256 does not divide world_size=8: use sizes whose product is 1, 2, 4 or 8, or world",
    "ParallelLayout(0)": "world_size=0 must be at least 1",
    "ParallelLayout(8, tp_size=-2)": "tp_size=-2 must be at least 1",
    "ParallelLayout(8, pp_size=2.0)": "pp_size=2.0 must be a whole number",
    "ParallelLayout(8, cp_size=True)": "cp_size=True must be a whole number",
    "ParallelLayout('8')": "world_size='8' must be a whole number",
    "ParallelLayout(None)": "world_size=None must be a whole number",
    "ParallelLayout(16, ep_size=0)": "ep_size=0 must be at least 1",
    "ParallelLayout(16, expert_tp_size=1.5)": "expert_tp_size=1.5 must be a whole number",
    **{f"ParallelLayout(8, order={order!r})":
        f"order={order!r} is not an order of the axes: use each of tp, dp, pp (and cp, ep) once, as in 'tp-cp-ep-dp-pp'"
        for order in BAD_ORDERS},
    "ParallelLayout(8, cp_size=2, order='tp-dp-pp')":
        "order='tp-dp-pp' leaves out cp while cp_size=2: name cp in it, as in 'tp-cp-dp-pp'",
    "ParallelLayout(16, tp_size=2, pp_size=2, ep_size=3)":
        "expert_tp_size=2 * ep_size=3 = 6 does not divide the expert grid's world_size/pp_size=8: use ep_size 1, 2 or",
    "ParallelLayout(16, pp_size=2, ep_size=2, expert_tp_size=8)":
        "expert_tp_size=8 * ep_size=2 = 16 does not divide the expert grid's world_size/pp_size=8: use expert_tp_size "
        "1, 2 or 4, or ep_size 1",
    "ParallelLayout(16, pp_size=2, ep_size=3, expert_tp_size=5)": "8: use sizes whose product is 1, 2, 4 or 8",
    "ParallelLayout(16, tp_size=2, pp_size=2, expert_tp_size=1, order='tp-pp-dp')":
        "order='tp-pp-dp' makes pipelines such as [0, 2] in the dense grid, but [0, 1] in the expert grid: name pp las",
    "LAYOUT.groups()": "a group needs at least one axis: use 'tp', 'cp', 'dp' or 'pp'",
    "LAYOUT.group_of(0)": "a group needs at least one axis: use 'tp', 'cp', 'dp' or 'pp'",
    "LAYOUT.groups('tensor')": "axis 'tensor' is unknown: use one of tp, cp, dp, pp",
    "LAYOUT.crossings('tensor', 8)": "axis 'tensor' is unknown: use one of tp, cp, dp, pp",
    "LAYOUT.size('world')": "axis 'world' is unknown: use one of tp, cp, dp, pp",
    "replace(LAYOUT, ep_size=2).groups('ep', 'tp')": "axis 'tp' is unknown: use one of expert_tp, ep, expert_dp, pp",
    "Grid({'a': 2, 'b': 3}).group_of(0, 'd')": "axis 'd' is unknown: use one of a, b",
    "Grid({'a': 2, 'b': 3}).rank_at(d=0)": "axis 'd' is unknown: use one of a, b",
    "LAYOUT.crossings('tp', 0)": "gpus_per_node=0 must be at least 1",
    "LAYOUT.coords(16)": "rank=16 must be a whole number from 0 to 15: world_size is 16",
    "LAYOUT.coords(1.5)": "rank=1.5 must be a whole number from 0 to 15",
    "LAYOUT.coords(-1)": "rank=-1 must be a whole number from 0 to 15",
    "LAYOUT.group_of('3', 'tp')": "rank='3' must be a whole number from 0 to 15",
    "LAYOUT.rank_at(tp=2)": "tp=2 must be a whole number from 0 to 1: tp_size is 2",
    "LAYOUT.rank_at(tp=1.5)": "tp=1.5 must be a whole number from 0 to 1: tp_size is 2",
    "LAYOUT.rank_at(pp=-1)": "pp=-1 must be a whole number from 0 to 3: pp_size is 4",
    "ParallelLayout(8, ep_size=4).experts_of(0, 6)":
        "ep_size=4 does not divide num_experts=6: use ep_size 1, 2, 3 or 6, or num_experts 4 or 8",
    "ParallelLayout(16, 2, cp_size=2).shard_groups(3)":
        "shard_size=3 does not divide dp_size * cp_size = 8: use 1, 2, 4 or 8",
    "WITH_EXPERTS.shard_groups(1)": "4 does not divide a copy's tp_size*shard_size=2: use ep_size 1 or 2, or shard",
    "WITH_EXPERTS.shard_groups(1, experts=True)": "ep_size 1 or 2, or shard_size 2, 4 or 8",
    "WITH_EXPERTS.shard_groups(3)": "shard_size=3 does not divide dp_size * cp_size = 8: use 2, 4 or 8",
    # partition
    "rows_of_replica(8, 3, 0)": "dp_size=3 does not divide batch_size=8: use dp_size 1, 2, 4 or 8, or batch_size 6 or",
    "check_divides(4, 'rows', 10)": "tp_size=4 does not divide rows=10: use tp_size 1, 2, 5 or 10, or rows 8 or 12",
    "check_divides(2, 'rows', 9, 3)": "2 * stride=3 = 6 does not divide rows=9: use tp_size 1 or 3, or rows 6 or 12",
    "check_divides(2, 'rows', 8, 3)": "tp_size=2 * stride=3 = 6 does not divide rows=8: use rows 6 or 12",
    "check_divides(4, 'rows', 3)": "tp_size=4 does not divide rows=3: use tp_size 1 or 3, or rows 4",
    "check_divides(1, 'rows', 8.0)": "rows=8.0 must be a whole number",
    "check_divides(1, 'rows', '8')": "rows='8' must be a whole number",
    "check_divides(1, 'rows', -8)": "rows=-8 must be at least 1",
    "check_divides(1, 'rows', 8, 0)": "stride=0 must be at least 1",
    "split_layers(6, 2, [2, 3])": "stage_layers=[2, 3] gives stages of [2, 3] layers, but num_stages=2 must have 1 lay",
    "split_layers(6, 3, [3, 3])": "num_stages=3 must have 1 layer or more each, and num_layers=6 together: change the",
    "split_layers(6, 2, [6, 0])": "stage_layers=0 must be at least 1",
    "split_layers(6, 2, [3.0, 3])": "stage_layers=3.0 must be a whole number",
    "split_layers(6, 2, 3)": "stage_layers=3 must be a list: give one number for each stage",
    "split_layers(6, 3, first_stage_layers=5)": "first_stage_layers=5 gives stages of [5, 0, 1] layers, but",
    "split_layers(6, 2, None, 2, 3)": "last_stage_layers=3 gives stages of [2, 3] layers",
    "split_layers(6, 3, None, 4, 4)": "gives stages of [4, -2, 4] layers, but",
    "split_layers(6, 1, first_stage_layers=2)": "gives stages of [2] layers, but num_stages=1 must",
    "split_layers(6, 3, last_stage_layers=0)": "last_stage_layers=0 must be at least 1",
    "split_layers(2, 4)": "an equal split gives stages of [0, 1, 0, 1] layers, but",
    "split_layers(6.0, 2)": "num_layers=6.0 must be a whole number",
    "split_layers(6, 0)": "num_stages=0 must be at least 1",
    "split_layers(2, 2, account_for_embedding_in_pipeline_split=True)": "=True gives stages of [0, 2] layers, but",
    "split_layers(6, 2, [3, 3], 3)": "stage_layers=[3, 3], first_stage_layers=3: two of these say how many layers one ",
    "split_layers(6, 2, [3, 3], **BOTH)": "in_pipeline_split=True: two of these say how many layers one stage has: lea",
    "split_layers(6, 2, first_stage_layers=2, **BOTH)": "in_pipeline_split=True: two of these say how many layers",
    "split_layers(6, 2, last_stage_layers=2, **BOTH)": "in_pipeline_split=True: two of these say how many layers",
    **{f"layers_of_stage(10, {stage}, 4)": f"stage={stage} is not one of num_stages=4: use 0 to 3"
        for stage in (4, -1, 1.0)},
    "tokens_of_rank(12, 4, 0)":
        "2 * cp_size=4 = 8 does not divide seq_length=12: use seq_length 8 or 16, or zigzag=False",
    "tokens_of_rank(10, 4, 0)": "does not divide seq_length=10: use seq_length 8 or 16",
    "tokens_of_rank(10, 4, 0, False)": "does not divide seq_length=10: use cp_size 1, 2, 5 or 10, or seq_length 8 or 1",
    "tokens_of_rank(16, 4, 4)": "cp_rank=4 is not one of cp_size=4: use 0 to 3",
    "tokens_of_rank(16, 4, -1)": "cp_rank=-1 must be at least 0",
    "tokens_of_rank(16, 0, 0)": "cp_size=0 must be at least 1",
    "tokens_of_rank(0, 2, 0)": "seq_length=0 must be at least 1",
    # shapes of models
    "gpt(num_layers=-4)": "num_layers=-4 must be at least 1",
    "gpt(hidden_size=2.5)": "hidden_size=2.5 must be a whole number",
    "gpt(seq_length=0)": "seq_length=0 must be at least 1",
    "gpt(vocab_size=True)": "vocab_size=True must be a whole number",
    "gpt(num_attention_heads=0)": "num_attention_heads=0 must be at least 1",
    "gpt(num_attention_heads=3)": "num_attention_heads=3 does not divide hidden_size=100: use num_attention_heads 1, ",
    "gpt(num_query_groups=3)": "num_query_groups=3 does not divide num_attention_heads=4: use num_query_groups 1",
    "gpt(num_attention_heads=None, num_query_groups=2)": "num_query_groups=2 divides attention heads: give",
    "gpt(norm='batchnorm')": "norm='batchnorm' is unknown: use layernorm or rmsnorm",
    # a job's options, each on its own
    "config(tp_size=0)": "tp_size=0 must be at least 1",
    "config(batch_size=2.5)": "batch_size=2.5 must be a whole number",
    "config(pp_size=True)": "pp_size=True must be a whole number",
    "config(shard_size=0)": "shard_size=0 must be at least 1",
    "config(zigzag='yes')": "zigzag='yes' is unknown: use True or False",
    "config(context_parallel='star')": "context_parallel='star' is unknown: use ring, ulysses or all_gather",
    "config(sequence_parallel='yes')": "sequence_parallel='yes' is unknown: use True or False",
    "config(zero_stage=4)": "zero_stage=4 is unknown: use 0, 1, 2 or 3",
    "config(schedule='2f2b')": "schedule='2f2b' is unknown: use gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v",
    "config(recompute=True)": "recompute=True is unknown: use none, selective or full",
    "config(stage_layers=8)": "stage_layers=8 must be a list: give one number for each stage",
    "config(stage_layers='35')": "stage_layers='35' must be a list: give one number for each stage",
    "config(stage_layers=(8, 0))": "stage_layers=0 must be at least 1",
    # a job's options together
    "check_fit(MODEL, 1, schedule='interleaved')": "='interleaved' needs num_chunks=2 or more: with one, use '1f1b'",
    "check_fit(MODEL, 1, num_chunks=2)":
        "num_chunks=2 needs schedule='interleaved', not '1f1b': use that, or num_chunks=1",
    "check_fit(MODEL, 1, schedule='v-half', num_chunks=3)": "num_chunks=3 needs schedule='interleaved', not 'v-half': ",
    "check_fit(MODEL, 8, pp_size=8, schedule='v-min')":
        "pp_size=8 * num_chunks=2 = 16 stages for num_layers=8: use 16 layers or more, or fewer stages",
    "check_fit(MODEL, 2, pp_size=2, stage_layers=(4, 3))": "stage_layers=(4, 3) gives stages of [4, 3] layers, but num",
    "check_fit(MODEL, 2, pp_size=2, stage_layers=(4, 4), last_stage_layers=4)":
        "stage_layers=(4, 4), last_stage_layers=4: two of these say how many layers one stage has: leave one out",
    "check_fit(MODEL, 2, pp_size=2, first_stage_layers=8)": "first_stage_layers=8 gives stages of [8, 0] layers, but",
    "check_fit(MODEL, 3, tp_size=3)":
        "tp_size=3 does not divide num_attention_heads=8: use tp_size 1, 2, 4 or 8, or num_attention_heads 6 or 9",
    "check_fit(MODEL, 16, tp_size=4, cp_size=4, context_parallel='ulysses')":
        "tp_size * cp_size=16 does not divide num_attention_heads=8: use tp_size * cp_size 1, 2, 4 or 8, or num_attent",
    "check_fit(FEW_GROUPS, 4, tp_size=4)": "tp_size=4 does not divide num_query_groups=2: use tp_size 1 or 2, or num_q",
    "check_fit(FEW_GROUPS, 4, tp_size=2, cp_size=2, context_parallel='ulysses')":
        "tp_size * cp_size=4 does not divide num_query_groups=2: use tp_size * cp_size 1 or 2, or num_query_groups 4",
    "check_fit(MODEL, 1, zero_stage=2, schedule='zero-bubble')":
        "schedule='zero-bubble' computes those of its weights later: use zero_stage=1, or schedule='1f1b'",
    "check_fit(MODEL, 4, shard_size=2)": "shard_size=2 shards nothing with zero_stage=0: use 1, 2 or 3",
    "check_fit(MODEL, 8, zero_stage=3, shard_size=3)": "shard_size=3 does not divide dp_size * cp_size = 8: use 1, 2,",
    "check_fit(MODEL, 16, cp_size=16)":
        "zigzag chunks: 2 * cp_size=16 = 32 does not divide seq_length=16: use seq_length 32, or zigzag=False",
    "check_fit(MODEL, 3, cp_size=3, zigzag=False)":
        "cp_size=3 does not divide seq_length=16: use cp_size 1, 2, 4, 8 or 16, or seq_length 15 or 18",
    "check_fit(MODEL, 32, cp_size=4, tp_size=8, sequence_parallel=True)":
        "tp_size=8 does not divide seq_length / cp_size=4: use tp_size 1, 2 or 4, or seq_length / cp_size 8",
    "check_fit(MODEL, 2, ep_size=2)": "ep_size=2 is for experts: give num_experts too, or leave ep_size out",
    "check_fit(MODEL, 6, tp_size=2, pp_size=2)": "tp_size=2 * pp_size=2 = 4 does not divide world_size=6: use tp_size",
    "check_fit(MODEL, 8, micro_batch_size=4)":
        "dp_size=8 * micro_batch_size=4 = 32 does not divide batch_size=16: use batch_size 32",
    "check_fit(MODEL, 4, cp_size=2, order='tp-dp-pp')": "order='tp-dp-pp' leaves out cp while cp_size=2: name cp in it",
    "check_fit(MODEL, 4, pp_size=4, schedule='dualpipe-v', batch_size=7)":
        "needs 2 * pp_size=8 micro-batches, there are 7: use a larger batch_size, or schedule='zero-bubble-v'",
    "check_fit(EXPERTS, 3, ep_size=3)":
        "ep_size=3 does not divide num_experts=8: use ep_size 1, 2, 4 or 8, or num_experts 6 or 9",
    "check_fit(EXPERTS, 3, expert_tp_size=3)":
        "expert_tp_size=3 does not divide width of an expert=64: use expert_tp_size 1, 2, 4, 8, 16, 32 or 64, or width",
    "check_fit(EXPERTS, 4, ep_size=8)":
        "expert_tp_size=1 * ep_size=8 = 8 does not divide the expert grid's world_size/pp_size=4: use ep_size 1, 2 or",
    "config(tp_size=3).check_model(MODEL, is_given=True)": "num_attention_heads=8: use tp_size 1, 2, 4 or 8",
    "config(pp_size=16).check_model(MODEL, is_given=True)": "16 stages for num_layers=8: use fewer stages",
    "config(recompute='selective').check_recompute(True)": "as fused attention does anyway: use recompute='none'",
    # devices
    "choose_backend('nccl', 2, 0)":
        "backend='nccl' needs a GPU for each of the 2 ranks and this machine has no GPU: use backend='auto' or 'gloo'",
    # schedules
    "gpipe(0, 4)": "pp_size=0 must be at least 1",
    "one_f_one_b(4, -1)": "num_micro_batches=-1 must be at least 1",
    "one_f_one_b(4, 2.5)": "num_micro_batches=2.5 must be a whole number",
    "interleaved(4, 8, True)": "num_chunks=True must be a whole number",
    "zero_bubble(4, 8, 1.0)": "extra_in_flight=1.0 with pp_size=4: use 0 (ZB-H1) to 3 (ZB-H2)",
    "zero_bubble(4, 8, 4)": "extra_in_flight=4 with pp_size=4: use 0 (ZB-H1) to 3 (ZB-H2)",
    "zero_bubble(4, '8')": "num_micro_batches='8' must be a whole number",
    "greedy(4, 8, 1)": "max_in_flight=1 is too low for a V: the last rank has both chunks of a micro-batch",
    "greedy(8, 8, 1)": "use 2 or more, such as 2p = 16",
    "greedy(4, 8, 2.5)": "max_in_flight=2.5 must be a whole number",
    "v_half('4', 8)": "pp_size='4' must be a whole number",
    "v_min(None, 8)": "pp_size=None must be a whole number",
    "v_min(2, 0)": "num_micro_batches=0 must be at least 1",
    "zero_bubble_v(0, 7)": "pp_size=0 must be at least 1",
    "dualpipe_v(4, 7)": "num_micro_batches=7 is below 2 * pp_size=8: use 8 or more, or zero_bubble_v",
    "dualpipe_v(0, 7)": "pp_size=0 must be at least 1",
    "v_shape(0)": "pp_size=0 must be at least 1",
    "v_shape('2')": "pp_size='2' must be a whole number",
    "round_robin(-1)": "pp_size=-1 must be at least 1",
    "round_robin(2, 0)": "num_chunks=0 must be at least 1",
    "schedule_of('F0 B0', m=1, kinds=('F', 'B'))": "must be the first one, the first two or all of forward, backward, ",
    "schedule_of('F0 B0', m=1, kinds=(B, F))": "must be the first one, the first two or all of forward, backward, wei",
    "schedule_of('F0 B0', m=1, kinds=())": "must be the first one, the first two or all of forward, backward, weight_",
    **{f"schedule_of('F0 B0', 'F0 B0', num_chunks=2, stages={stages})": said for stages, said in {
        "[[0, 3], [0, 2]]": "stage 0 of stages=[[0, 3], [0, 2]] lives twice: give each of 2 ranks 2 of the stages 0 to",
        "[[0, 3], [1, 4]]": "stage 4 of stages=[[0, 3], [1, 4]] does not exist: give each",
        "[[0, 3], [1]]": "stages=[[0, 3], [1]] has [2, 1] stages on its ranks: give each of 2 ranks 2 of",
        "[[0, 3, 1], [2]]": "has [3, 1] stages on its ranks",
        "[0, 1]": "stages=[0, 1] has [0, 0] stages on its ranks: give each of 2 ranks 2",
        "[[0.0, 3], [1, 2]]": "stage 0.0 of stages=[[0.0, 3], [1, 2]] does not exist",
        "[[0, [3]], [1, 2]]": "stage [3] of stages=[[0, [3]], [1, 2]] does not exist",
    }.items()},
    **{f"check({schedule})": said for schedule, said in {
        "schedule_of('F0 B0 F1 B1', 'F0 B0 F1')": "rank 1 lacks B1: each rank runs forward, backward once for each of",
        "schedule_of('F0 F1', 'F0 F1 B0 B1')": "rank 0 lacks B0 and 1 more",
        "schedule_of('F0 F0 B0 F1 B1')": "rank 0 has F0 2 times",
        "schedule_of('F0 B0 F1 B1 F2')": "rank 0 has F2, which this schedule has no use for",
        "schedule_of('F0 W0 B0 F1 B1 W1')": "rank 0 has W0, which this schedule has no use for",
        "schedule_of('F0 B0 F1 B1', num_chunks=2)":
            "rank 0 lacks F0.1 and 3 more: each rank runs forward, backward once for each of 2 micro-batches and 2 chu",
        "Schedule('own', 1, 1, [[(F, 0, 0)]])": "rank 0 has ('forward', 0, 0), which this schedule has no use",
        "[['F0']]": "[['F0']] is not a Schedule: make one, such as labkit.schedules.one_f_one_b(4, 8)",
        "Schedule('own', 2, 1, [ops('F0 B0')])": "'own' has lists for 1 rank, but pp_size=2: give each rank one list",
        "schedule_of('B0 F0', m=1)": "rank 0 has B0 before F0, whose result it needs: swap them",
        "schedule_of('F0 F0.1 B0.1 B0', 'F0.1 F0 B0.1 B0', m=1, num_chunks=2, stages=v_shape(2))":
            "rank 1 has F0.1 before F0, whose result it needs: swap them",
        "schedule_of('F0 B0 F1 B1', 'F0 F1 B0 B1')":
            "deadlock in 'own': rank 0 waits at B0 for B0 of rank 1; rank 1 waits at F1 for F1 of rank 0: move an op",
    }.items()},
}
# fmt: on


@pytest.mark.parametrize("call", REFUSED)
def test_it_is_refused_by_name(call):
    with pytest.raises(ValueError, match=re.escape(REFUSED[call])) as refused:
        eval(call, dict(KNOWN))
    error = refused.value
    if isinstance(error, Misfit):
        assert str(error) == f"{error.fault}: {error.advice}"
        assert str(pickle.loads(pickle.dumps(error))) == str(error)  # ranks send their errors


RULES = {  # what a search counts and an explorer shows: without the numbers of the one that does not fit
    "check_fit(MODEL, 1, schedule='interleaved')": "schedule='interleaved' needs num_chunks=2 or more",
    "check_fit(MODEL, 1, num_chunks=2)": "num_chunks needs schedule='interleaved'",
    "check_fit(MODEL, 8, pp_size=8, schedule='v-min')": "each stage must have 1 layer or more",
    "split_layers(2, 4)": "each stage must have 1 layer or more, and all num_layers together",
    "split_layers(6, 2, [3, 3], 3)": "two of these say how many layers one stage has",
    "check_divides(2, 'rows', 9, 3)": "tp_size * stride must divide rows",
    "check_fit(MODEL, 1, zero_stage=2, schedule='zero-bubble')":
        "ZeRO stages 2 and 3 do not go with a schedule that splits backward",
    "check_fit(MODEL, 4, shard_size=2)": "shard_size needs a ZeRO stage",
    "check_fit(MODEL, 8, zero_stage=3, shard_size=3)": "shard_size must divide dp_size * cp_size",
    "check_fit(MODEL, 16, cp_size=16)": "2 * cp_size must divide seq_length",
    "check_fit(MODEL, 2, ep_size=2)": "ep_size needs a model with experts",
    "ParallelLayout(16, tp_size=3)": "tp_size * pp_size must divide world_size",
    "check_fit(MODEL, 8, micro_batch_size=4)": "dp_size * micro_batch_size must divide batch_size",
    "ParallelLayout(8, cp_size=2, order='tp-dp-pp')": "order must name cp if cp_size is above 1",
    "ParallelLayout(16, tp_size=2, pp_size=2, expert_tp_size=1, order='tp-pp-dp')":
        "both grids must have the same pipelines",
    "check_fit(MODEL, 4, pp_size=4, schedule='dualpipe-v', batch_size=7)":
        "schedule='dualpipe-v' needs 2 * pp_size micro-batches",
}  # fmt: skip


@pytest.mark.parametrize("call", RULES)
def test_a_misfit_says_its_rule(call):
    with pytest.raises(Misfit) as refused:
        eval(call, dict(KNOWN))
    assert refused.value.rule == RULES[call]


# ---- on two ranks, g: refused before any message

# fmt: off
ATTENTION = {  # in each of three ways
    "*3 * [zeros(1, 4, 3, 2)], g": "2 * cp_size=2 = 4 does not divide seq_length=6: use seq_length 4 or 8, or zigzag=F",
    "*3 * [zeros(1, 4, 0, 2)], g, zigzag=False": "seq_length=0 must be at least 1",
    "zeros(1, 4, 2, 2), *2 * [zeros(1, 3, 2, 2)], g": "num_kv_heads=3 does not divide num_heads=4: use num_kv_heads 1,",
    "zeros(1, 4, 2, 2), *2 * [zeros(1, 0, 2, 2)], g": "num_kv_heads=0 must be at least 1",
    "*3 * [zeros(4, 2, 2)], g":
        "q [4, 2, 2], k [4, 2, 2] and v [4, 2, 2] do not fit together: use q [batch, heads, s",
    "zeros(1, 4, 2, 2), *2 * [zeros(1, 4, 4, 2)], g": "k [1, 4, 4, 2] and v [1, 4, 4, 2] do not fit together",
    "*2 * [zeros(1, 4, 2, 2)], zeros(1, 4, 2, 3), g": "v [1, 4, 2, 3] do not fit together",
    "*2 * [zeros(1, 4, 2, 2)], zeros(1, 4, 2, 2).half(), g": "v torch.float16: use one dtype for all",
}
WAYS = ("ring_attention", "ulysses_attention", "all_gather_attention")
EMBEDDING = "VocabParallelEmbedding(10, 4, g)"
ON_RANKS = {
    **{f"{way}({arguments})": said for way in WAYS for arguments, said in ATTENTION.items()},
    "ulysses_attention(*3 * [zeros(1, 3, 2, 2)], g)":
        "cp_size=2 does not divide num_heads=3: use cp_size 1 or 3, or num_heads 2",
    "ulysses_attention(zeros(1, 4, 2, 2), *2 * [zeros(1, 1, 2, 2)], g)":
        "cp_size=2 does not divide num_kv_heads=1: use cp_size 1, or",
    "ColumnParallelLinear(4, 9, g)": "2 does not divide output_size=9: use tp_size 1, 3 or 9, or output_size 8 or 10",
    "RowParallelLinear(7, 4, g)": "tp_size=2 does not divide input_size=7: use tp_size 1 or 7, or input_size 6 or 8",
    "ColumnParallelLinear(4, 8, g, stride=3)":
        "tp_size=2 * stride=3 = 6 does not divide output_size=8: use output_size 6 or 12",
    "ColumnParallelLinear(4, 8.0, g)": "output_size=8.0 must be a whole number",
    "ColumnParallelLinear('4', 8, g)": "input_size='4' must be a whole number",
    "RowParallelLinear(0, 8, g)": "input_size=0 must be at least 1",
    "RowParallelLinear(4, 8, g, stride=1.5)": "stride=1.5 must be a whole number",
    "ColumnParallelLinear(4, 8, g, sequence_parallel=True)": "use gather_output=False with it",
    "RowParallelLinear(4, 8, g, sequence_parallel=True)": "use input_is_parallel=True with it",
    "ColumnParallelLinear(4, 8, g)(ones(2, 5))": "has width 5, this layer takes input_size = 4",
    "RowParallelLinear(4, 8, g, input_is_parallel=True)(ones(2, 4))":
        "has width 4, this layer takes input_size=4 / tp_size = 2",
    "scatter_to_tp(ones(2, 7), g)": "group.size()=2 does not divide x.size(-1)=7: use group.size() 1 or 7, or x.size(-",
    "ParallelSelfAttention(12, 3, g)": "tp_size=2 does not divide num_attention_heads=3: use tp_size 1 or 3, or num_at",
    "ParallelSelfAttention(10, 4, g)": "num_attention_heads=4 does not divide hidden_size=10: use num_attention_heads",
    "ParallelSelfAttention(12, 2.0, g)": "num_attention_heads=2.0 must be a whole number",
    "ParallelSelfAttention(12.5, 2, g)": "hidden_size=12.5 must be a whole number",
    "ParallelMLP(4, 7, g)": "tp_size=2 does not divide output_size=7",
    **{f"ShardedDropout({p}, g)": f"p={p} must be a number from 0 to 1" for p in ("2", "-0.1", "'0.1'")},
    "ShardedDropout(float('nan'), g)": "p=nan must be a number from 0 to 1",
    "ParallelSelfAttention(4, 2, g, dropout=2)": "dropout=2 must be a number from 0 to 1",
    f"{EMBEDDING}(tensor([1, 10]))": "ids contains 10, outside the vocabulary: use words from 0 to 9",
    f"{EMBEDDING}(tensor([[-1]]))": "ids contains -1, outside the vocabulary",
    f"{EMBEDDING}(ones(2))": "ids has dtype torch.float32: words are whole numbers",
    "VocabParallelEmbedding(10.0, 4, g)": "num_embeddings=10.0 must be a whole number",
    "VocabParallelEmbedding(10, 0, g)": "embedding_dim=0 must be at least 1",
    **{f"vocab_parallel_cross_entropy({arguments})": said for arguments, said in {
        "ones(1, 4), tensor([8]), g": "target contains 8, outside the vocabulary: use words from 0 to 7",
        "ones(1, 4), tensor([True]), g": "target has dtype torch.bool: words are whole numbers",
        "ones(2, 4), tensor([0]), g": "target has shape [1]: logits of so many tokens need [2]",
        "ones(1, 4), tensor([0]), g, vocab_size=9":
            "vocab_size=9 is more than the 8 words that the ranks have: use at most 8",
        "ones(1, 4), tensor([0]), g, vocab_size=7.5": "vocab_size=7.5 must be a whole number",
        "ones(1, 4).long(), tensor([0]), g": "logits have dtype torch.int64",
        **{f"ones(1, 4), tensor([0]), g, {wrong}": f"label_smoothing={wrong} must be a number from 0 to 1"
            for wrong in ("2", "-1", "'0.1'")},
        "ones(1, 4), tensor([0]), g, float('nan')": "label_smoothing=nan must be a number from 0 to 1",
        "ones(1, 4), tensor([0]), g, reduction='average'":
            "reduction='average' is unknown: use 'mean', 'sum' or 'none'",
    }.items()},
}
# fmt: on


def refused_before_any_message(calls):
    """On a rank: make each of the calls."""
    known = vars(context_parallel) | vars(tensor_parallel) | vars(tensor_parallel.operators)
    known |= {"g": dist.group.WORLD, "tensor": torch.tensor, "ones": torch.ones, "zeros": torch.zeros}
    for call, said in calls.items():
        torch.default_generator.manual_seed(1)
        with communication_log() as log, pytest.raises(ValueError, match=re.escape(said)):
            eval(call, dict(known))
        assert all(record.message_bytes <= 16 for record in log.records), call  # a layer made is checked once


def test_it_is_refused_on_ranks_before_any_message(on_ranks):
    on_ranks(refused_before_any_message, ON_RANKS)
