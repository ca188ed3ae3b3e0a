"""What cannot be is refused by name, with its value and mostly with a way out: a call, and what its error says."""

import re
from dataclasses import replace
from math import inf, nan

import pytest

from course import sizing
from course.sizing.failures import checkpoint_interval, goodput
from course.sizing.fit import CONSTANTS, fitted_constants, rows_of
from course.sizing.fully_sharded import sharded_memory
from course.sizing.linear_cut import LinearCut
from course.sizing.messages import on_a_ring
from course.sizing.routing import Routed, drawn_logits, route
from course.sizing.shapes import DEEPSEEK_V3, LatentAttention
from labkit.layout import ParallelLayout
from labkit.schedules import Schedule, gpipe
from labkit.shape import GPT

TINY = GPT(num_layers=2, hidden_size=4, seq_length=8, vocab_size=10, num_attention_heads=2)
GPT_3 = GPT(num_layers=96, hidden_size=12288, seq_length=2048, vocab_size=51200, num_attention_heads=96)
EXPERTS = replace(TINY, num_layers=4, hidden_size=16, num_experts=8, moe_ffn_hidden_size=24)
V = sizing.Plan(replace(TINY, num_layers=8, tied=False), 2, 8, pp_size=2, num_chunks=2, schedule="v-half")
OF_EXPERTS = sizing.Plan(EXPERTS, 16, 16, tp_size=2, pp_size=2, ep_size=4, expert_tp_size=1)
SHARDED = sizing.Plan(replace(EXPERTS, moe_layer_freq=2), 8, 16, ep_size=4, zero_stage=3, recompute="none")
ROUTED = route(drawn_logits(2, 2, 4), 2)


def lost(**changes):
    job = dict(num_gpus=16_384, failures_per_node_day=4e-3, save_seconds=60, restart_seconds=600)
    return goodput(**job | changes)


def simulated(*rows, p=1, m=1):
    return sizing.simulate(Schedule("own", p, m, [sizing.read_ops(row) for row in rows]))


CALLED = (
    LatentAttention, LinearCut,
    ParallelLayout, Routed, checkpoint_interval, drawn_logits, fitted_constants, gpipe, lost, on_a_ring,
    replace, route, rows_of, sharded_memory, simulated,
)  # fmt: skip
KNOWN = vars(sizing) | {each.__name__: each for each in CALLED}
KNOWN |= dict(TINY=TINY, GPT_3=GPT_3, EXPERTS=EXPERTS, V=V, OF_EXPERTS=OF_EXPERTS, SHARDED=SHARDED, ROUTED=ROUTED)
KNOWN |= dict(CONSTANTS=CONSTANTS, DEEPSEEK_V3=DEEPSEEK_V3, inf=inf, nan=nan)
REFUSED = {
    "runs.KINDS['H300']": "'H300' is not a kind of GPU: use one of H100, ",
    "arguments(SHARDED, 'nemo')": "framework='nemo' is unknown: use megatron-lm, torchtitan, labkit",
    "arguments(SHARDED, 'labkit', gpus_per_node=3)": "gpus_per_node=3 does not divide world_size=8",
    "attention_messages(TINY, 'star', 2)": "context_parallel='star' is unknown: use ring, ulysses, all_gather",
    "flops_per_step(TINY, 1, 'some')": "recompute='some' is unknown",
    "step_time(Plan(TINY, 1, 1, precision='fp8'), DGX_H100)": "precision='fp8', but DGX H100 says no fp8_peak_flops",
    # traffic
    "step_traffic(TINY, ParallelLayout(8), gpus_per_node=0, batch_size=8)": "gpus_per_node=0 must be at least 1",
    "step_traffic(TINY, ParallelLayout(8), gpus_per_node=2.0, batch_size=8)": "gpus_per_node=2.0 must be a whole",
    "step_traffic(TINY, ParallelLayout(8), gpus_per_node=8, batch_size=0)": "batch_size=0 must be at least 1",
    "step_traffic(TINY, ParallelLayout(8), gpus_per_node=8, batch_size=2.0)": "batch_size=2.0 must be a whole number",
    "plan_traffic(Plan(GPT_3, 8, 8, zero_stage=2), 8)": "zero_stage=2: ",
    "plan_traffic(Plan(GPT_3, 8, 8, zero_stage=3), 8)": "use 0 or 1",
    "plan_traffic(Plan(GPT_3, 8, 8, recompute='selective', recompute_modules=['mlp']), 8)": "what ['mlp'] send again",
    # shards
    "sharding(replace(Plan(TINY, 4, 16), zero_stage=3), DGX_H100, 3)": "shard_size=3 does not divide dp_size",
    "sharding(replace(Plan(TINY, 4, 16), pp_size=2), DGX_H100)": "pp_size=2: sharding is modelled without a pipeline",
    "sharded_memory(SHARDED, shard_size=2)": "expert_tp_size=1 * ep_size=4 = 4 does not divide a copy's tp_size*shard",
    "sharded_memory(SHARDED, 2)": "or shard_size 4 or 8",
    # a V
    "replace(V, num_chunks=1)": "needs several stages with 2 chunks, not pp_size=2, num_chunks=1",
    "replace(V, schedule='dualpipe-v', batch_size=3)": "needs 2 * pp_size=4 micro-batches, there are 3",
    "replace(V, zero_stage=2)": "zero_stage=2 sends a layer's gradients when its backward is done",
    "replace(V, schedule='w')": "schedule='w' is unknown: use None, zero-bubble-v",
    # experts
    "replace(OF_EXPERTS, ep_size=16, model=replace(EXPERTS, num_experts=16))":
        "expert_tp_size=1 * ep_size=16 = 16 does not divide the expert grid's world_size/pp_size=8",
    "replace(OF_EXPERTS, ep_size=8, expert_tp_size=None)":
        "expert_tp_size=2 * ep_size=8 = 16 does not divide the expert grid's world_size/pp_size",
    "replace(OF_EXPERTS, model=replace(EXPERTS, num_experts=6))": "ep_size=4 does not divide num_experts=6",
    "replace(OF_EXPERTS, model=replace(EXPERTS, moe_ffn_hidden_size=25), expert_tp_size=2)":
        "expert_tp_size=2 does not divide",
    "replace(OF_EXPERTS, model=TINY)": "ep_size=4 is for experts",
    "Routed(ROUTED.experts, ROUTED.probs, 3)": "ep_size=2 does not divide num_experts=3",
    "Routed(ROUTED.experts, ROUTED.probs, 2)": "does not exist: use 0 to 1",
    "route(drawn_logits(1, 1, 4), 5)": "top_k=5 must be at most num_experts=4",
    # a matrix, and numbers, that are cut
    "LinearCut('column', 12, 10, 4)": "output_size=10: use tp_size 1, 2, 5 or 10, or output_size 8 or 12",
    "LinearCut('row', 3, 8, 4)": "tp_size=4 does not divide input_size=3: use tp_size 1 or 3, or input_size 4",
    "LinearCut('row', 12, 8, 0)": "tp_size=0 must be at least 1",
    "LinearCut('diagonal', 12, 8, 2)": "use 'column' or 'row'",
    "on_a_ring([[1, 2, 3], [4, 5, 6]], 'all-reduce')": "ranks=2 does not divide numbers_per_rank=3",
    # failures
    "lost(num_gpus=0)": "num_gpus=0 must be at least 1",
    "lost(failures_per_node_day=-1)": "failures_per_node_day=-1 must be a number from 0 up",
    "lost(failures_per_node_day=0)": "never fail: give a rate above 0",
    "lost(save_seconds=nan)": "save_seconds=nan must be a number from 0 up",
    "lost(restart_seconds=True)": "restart_seconds=True must be a number from 0 up",
    "lost(restart_seconds=86_400)": "as long as the job runs, failure_seconds=10546.9: use fewer GPUs",
    "lost(interval_seconds=-1)": "interval_seconds=-1 must be a number from 0 up",
    "lost(interval_seconds=30, background=True)": "shorter than a save in the background, save_seconds=60: use 60",
    "lost(other_failures_per_day='2')": "other_failures_per_day='2' must be a number from 0 up",
    "checkpoint_interval(0, 60)": "failure_seconds=0 must be a number above 0",
    # times of a schedule, and schedules that are none
    "simulate(gpipe(2, 3), forward_seconds=-1)": "forward_seconds=-1 must be finite and at least 0",
    "simulate(gpipe(2, 3), backward_seconds=nan)": "backward_seconds=nan",
    "simulate(gpipe(2, 3), forward_seconds=[1, 2, 3])": "has 3 times for 2 stages: give one for each",
    "simulate(gpipe(2, 3), backward_seconds=[1, -2])": "backward_seconds[1]=-2",
    "simulate(gpipe(2, 3), message_seconds=inf)": "message_seconds=inf",
    "simulate(gpipe(2, 3), weight_gradient_share=1.5)": "weight_gradient_share=1.5 must be in [0, 1]",
    "simulated('F0 B0 F1 B1', 'F0 F1 B0 B1', p=2, m=2)":
        "deadlock in 'own': rank 0 waits at B0 for B0 of rank 1; rank 1 waits at F1",
    "simulated('F0 B0 W0')": "rank 0 has W0, which this schedule has no use for",
    "simulated('F0 B0 F0.1 B0.1')": "rank 0 has F0.1, which this schedule has no use for",
    "simulated('F7 B7')": "rank 0 has F7, which this schedule has no use for",
    "simulated('F0 B0 F0 B0')": "rank 0 has F0 2 times",
    "simulated('F0')": "rank 0 lacks B0",
    "simulated('F0 B0', 'F0 B0')": "'own' has lists for 2 ranks, but pp_size=1: give each rank one list",
    # a search, and fits
    "search(GPT_3, 64, 64, DGX_A100, zero_stage=7)": "zero_stage=7",
    "search(GPT_3, 64, 64, DGX_A100, memory_share=1.5)": "memory_share=1.5 must be in (0, 1]",
    "search(GPT_3, 64, 64, DGX_A100, micro_batch_size=[0])": "micro_batch_size=0 must be at least 1",
    "search(GPT_3, 64, 64, DGX_A100, micro_batch_size=[])": "micro_batch_size=[] leaves nothing to try",
    "search(GPT_3, 64, 64, DGX_A100, recompute=['some'])": "recompute='some' is unknown",
    "search(GPT_3, 64, 64, DGX_A100, cp_sizes=[1])": "cp_sizes=[1] is not a choice of a search: use tp_size",
    "search(GPT_3, 64, 64, DGX_A100, precision='fp8')": "says no fp8_peak_flops",
    "search(GPT_3, 1, 1, DGX_A100).best": "need more memory than there is, the smallest needs ",
    "search(GPT_3, 1, 3, DGX_A100, tp_size=5).best": "candidates fits: most often, ",
    "FITTED['H300']": "'H300' is not a kind of GPU: use one of H100, ",
    "fitted_constants(rows_of('H100 bf16')[:2], CONSTANTS['H100 bf16'])":
        "2 runs cannot determine 3 constants: give 3 or more",
    "fitted(table_1()[:1], DGX_A100)": "1 rows cannot determine",
    # shapes
    "replace(DEEPSEEK_V3, hidden_size=0)": "hidden_size=0 must be at least 1",
    "replace(DEEPSEEK_V3, full_attention_freq=2)": "full_attention_freq=2 is for windows of attention: give a window",
    "replace(DEEPSEEK_V3, window=0)": "window=0 must be at least 1",
    "replace(DEEPSEEK_V3, latent=None, head_size=33)": "leaves an even head size",
    "replace(DEEPSEEK_V3, head_size=160)": "latent says the sizes of heads and norms: give no head_size",
    "LatentAttention(1536, 512, 128, 64, 127)": "whose mean must be a whole number: change v_head_dim",
    "LatentAttention(1536, 0, 128, 64, 128)": "kv_lora_rank=0 must be at least 1",
    "Plan(DEEPSEEK_V3, 1, 1, recompute='selective', recompute_modules=['mhc'])": "'mhc' is unknown: use core_attn",
    "Plan(TINY, 1, 1, recompute='selective', recompute_modules=['moe'])": "'moe' has no experts to compute again",
    "Plan(TINY, 1, 1, recompute='selective', recompute_modules=[])": "must be a list of names: use core_attn",
    "Plan(TINY, 1, 1, recompute='selective', recompute_modules='mlp')": "must be a list of names, not a word",
    "Plan(TINY, 1, 1, recompute_modules=['mlp'])": "use recompute='selective', or recompute_modules=None",
    "Plan(TINY, 1, 1, recompute='none', offload_layers=2)": "offload_layers=2 of 2 leaves none on the GPU",
    "Plan(TINY, 1, 1, offload_layers=1)": "use pp_size=1 and recompute='none', or offload_layers=0",
    "Plan(TINY, 1, 1, optimizer_bytes=6)": "optimizer_bytes=6 is unknown: use 4, 8 or 12",
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED)
def test_it_is_refused_by_name(call):
    with pytest.raises(ValueError, match=re.escape(REFUSED[call])):
        eval(call, dict(KNOWN))
