"""What does not fit is refused before anything runs: a call, and the part of its error that names value and way out.

Where a layout does not fit, the sentences are labkit's (tests/labkit/test_parallel_config.py). What is wrong with files
and folders is refused in test_data.py, test_folders.py and test_checkpoint.py.
"""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear
from torch.nn.functional import scaled_dot_product_attention

from labkit.groups import group_of_one, groups_of_one
from labkit.shape import GPT
from labkit.tensor_parallel import ParallelSelfAttention
from labtrain.data import InventedText
from labtrain.estimate import estimate
from labtrain.generation import generate
from labtrain.hugging_face import config_of
from labtrain.model import ParallelGPT
from tests.labtrain.tiny import MOE, TINY

SHAPE = GPT(num_layers=3, hidden_size=16, seq_length=8, vocab_size=13, num_attention_heads=4)
PAIR = dist.ProcessGroup(0, 2)  # of two ranks, where nobody sends anything


def shape(**options):
    return replace(SHAPE, **options)


def stage(model=SHAPE, group=None, **options):
    return ParallelGPT(model, group or group_of_one(), **options)


MODEL = stage()


def write(tokens=((1, 2),), model=MODEL, num_tokens=1, temperature=1.0, seed=0, **options):
    return generate(model, tokens, groups_of_one(), num_tokens, temperature=temperature, seed=seed, **options)


CALLED = (InventedText, Linear, config_of, estimate, math, shape, stage, torch, write)
KNOWN = {each.__name__: each for each in CALLED} | {
    "MODEL": MODEL,
    "PAIR": PAIR,
    "attend": scaled_dot_product_attention,
    "attention": partial(ParallelSelfAttention, 32, 8, group_of_one()),
    "config": partial(replace, TINY),
    "experts": partial(replace, MOE),
    "no_experts": partial(replace, MOE, num_experts=None, moe_ffn_hidden_size=None),
}
REFUSED = {
    "config(steps=0)": "steps=0 must be at least 1",
    "config(steps=2.5)": "steps=2.5 must be a whole number",
    "config(steps='4')": "steps='4' must be a whole number",
    "config(micro_batch_size=-1)": "micro_batch_size=-1 must be at least 1",
    "config(hidden_size=16.0)": "hidden_size=16.0 must be a whole number",
    "config(warmup_steps=-1)": "warmup_steps=-1 must be at least 0",
    "config(eval_interval=1.5)": "eval_interval=1.5 must be a whole number",
    "config(save_interval=1.5)": "save_interval=1.5 must be a whole number",
    "config(seed=1.5)": "seed=1.5 must be a whole number from 0 up, of at most 63 bits",
    "config(seed=1 << 63)": "seed=9223372036854775808 must be a whole number from 0 up",
    "config(clip_norm=math.nan)": "clip_norm=nan must be a number from 0 to 1000",
    "config(weight_decay='0.1')": "weight_decay='0.1' must be a number from 0 to 1000",
    "config(weight_decay=1e308)": "weight_decay=1e+308 must be a number from 0 to 1000",
    "config(min_learning_rate=-1)": "min_learning_rate=-1 must be a number from 0 to 1000",
    "config(min_learning_rate=0.02)": "min_learning_rate=0.02 is above learning_rate=0.01, so the rate would rise: use",
    "config(learning_rate=math.inf)": "learning_rate=inf must be a number from 0 to 1000",
    "config(learning_rate=None)": "learning_rate=None must be a number from 0 to 1000",
    "config(learning_rate=0.0)": "learning_rate=0 learns nothing: use a number above 0, such as 0.003",
    "config(dropout=1.0)": "dropout=1.0 must be in [0, 1)",
    "config(dropout='0.1')": "dropout='0.1' must be in [0, 1)",
    "config(cp_size=2, dropout=0.1)": "dropout=0.1 does not work with cp_size=2: use dropout=0",
    "config(precision='float16')": "precision='float16' is unknown: use float32, float64 or bfloat16",
    "config(num_attention_heads=3)": "does not divide hidden_size=16: use num_attention_heads 1, 2, 4, 8 or 16, or",
    "config(tp_size=3)": "tp_size=3 does not divide num_attention_heads=8: use tp_size 1, 2, 4 or 8, or",
    "config(norm='batchnorm')": "norm='batchnorm' is unknown: use layernorm or rmsnorm",
    "config(positions='rope', num_attention_heads=16)": "a head has 1: use a num_attention_heads that leaves",
    "config(recompute=True)": "recompute=True is unknown: use none, selective or full",
    "config(recompute='selective')": "recompute='selective' computes the scores again, as fused attention does",
    "config(keep=-1)": "keep=-1 must be at least 0",
    "config(keep=2)": "keep=2 needs a checkpoint_dir: name a folder",
    "config(resume=True)": "resume=True needs a checkpoint_dir: name a folder",
    "config(save_interval=5)": "save_interval=5 needs a checkpoint_dir: name a folder",
    "config(checkpoint_dir=3)": "checkpoint_dir=3 is not a folder: name one, or leave it out",
    "config(checkpoint_dir='')": "checkpoint_dir='' is not a folder: name one, or leave it out",
    "config(profile_dir='')": "profile_dir='' is not a folder: name one, or leave it out",
    "config(profile_dir='x', profile_step_start=11)": "profile_step_end=20 profile none of 10 steps: use, for",
    "config(profile_dir='x', profile_step_end=10)": "profile_step_start=10 and profile_step_end=10 profile none of 10",
    "config(gpu_memory_gib=80)": "gpu_memory_gib=80 is for check=: give a number of ranks too",
    "config(text=3)": "text=3 is not a file: name one, or use 'invented'",
    "config(text='no/file')": "the text no/file cannot be read (No such file or directory): name a file",
    "config(text='.')": "the text . is a folder, a pipe or a device: name a file",
    "config(tokens='a.bin')": "tokens='a.bin' needs the vocab_size of its tokenizer, such as 50257 for GPT-2's",
    "config(tokens='a.bin', text='a.txt', vocab_size=9)": "text='a.txt' and tokens='a.bin': name one file",
    "config(tokens=3, vocab_size=9)": "text='invented' and tokens=3: name one file, a text or tokens",
    "config(tokens='no/ids', vocab_size=9)": "the token file no/ids cannot be read (No such file or directory): name",
    "config(tokens='.', vocab_size=9)": "the token file . is a folder, a pipe or a device: name a file",
    "config(tokens='a.bin', vocab_size=0)": "vocab_size=0 must be at least 1",
    "config(tokens='a.bin', vocab_size=9, token_bits=8)": "token_bits=8 is unknown: use 16, 32, 64 or None",
    "config(vocab_size=9)": "vocab_size=9 is for a file of tokens: name one by tokens=, or leave out vocab_size",
    "config(token_bits=16)": "token_bits=16 is for a file of tokens: name one by tokens=, or leave out token_bits",
    "config(init_from='meta-llama/Llama-3.2-1B')": "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`",
    "config(init_from='gpt2')": "get it with `hf download gpt2 --local-dir gpt2`, then name that folder",
    "config(init_from='/no/such')": "/no/such is not a folder here, and labtrain downloads nothing: name a folder that",
    "config(tp_size=4).layout(6)": "tp_size=4 * pp_size=1 = 4 does not divide world_size=6",
    "config().layout(3)": "dp_size=3 * micro_batch_size=2 = 6 does not divide batch_size=8: use batch_size 6 or 12",
    "config(order='tp-dp').layout(8)": "order='tp-dp'",
    "config(tp_size=2, pp_size=2, fit_ranks=True).resize_to(10)": "no tp, cp and pp fit 10 ranks: use 8 ranks",
    "config(tp_size=2, batch_size=7, fit_ranks=True).resize_to(2)": "use a batch_size that micro_batch_size divides",
    "config(pp_size=2, stage_layers=[1, 3], fit_ranks=True).resize_to(3)": (
        "fit 3 ranks: use 2 ranks, or leave out stage_layers, which keep pp_size=2"
    ),
    "config(num_layers=1 << 30).check_memory(1)": "GB of memory: use a smaller model, or a larger tp_size",
    # Experts
    "no_experts(ep_size=2)": "ep_size=2 is for experts: give num_experts too, or leave ep_size out",
    "no_experts(aux_loss_coefficient=0.1)": "aux_loss_coefficient=0.1 is for experts: give num_experts",
    "no_experts(num_shared_experts=1)": "give num_experts too",
    "experts(top_k=9)": "top_k=9 must be at most num_experts=8",
    "experts(top_k=0)": "top_k=0 must be at least 1",
    "experts(num_experts=6, ep_size=4)": "ep_size=4 does not divide num_experts=6: use ep_size 1, 2, 3 or 6, or num_e",
    "experts(expert_tp_size=3)": "expert_tp_size=3 does not divide width of an expert=8: use expert_tp_size 1, 2, 4",
    "experts(moe_ffn_hidden_size=9, tp_size=2)": "tp_size=2 does not divide width of an expert=9",
    "experts(num_shared_experts=1, moe_ffn_hidden_size=9, tp_size=2, expert_tp_size=1)": "of shared experts=9",
    "experts(moe_layer_freq=2, ffn_hidden_size=9, tp_size=2)": "tp_size=2 does not divide ffn_hidden_size=9: use",
    "experts(capacity_factor=0)": "capacity_factor=0 must be a number above 0: leave it out to drop no token",
    "experts(capacity_factor=math.nan)": "capacity_factor=nan must be a number above 0",
    "experts(aux_loss='batch')": "aux_loss='batch' is unknown: use micro_batch, sequence or global",
    "experts(z_loss_coefficient=-1)": "z_loss_coefficient=-1 must be a number of at least 0",
    "experts(router_scores='tanh')": "router_scores='tanh' is unknown: use softmax or sigmoid",
    "experts(moe_layer_freq=0)": "moe_layer_freq=0 must be at least 1",
    "experts(pp_size=2, ep_size=8, batch_size=16).layout(8)": "expert grid's world_size/pp_size=4: use ep_size 1, 2 or",
    "experts(tp_size=4, ep_size=2).layout(6)": "does not divide world_size=6",
    "experts(shard_size=2, zero_stage=3, ep_size=4, micro_batch_size=1).layout(8)": "or shard_size 4 or 8",
    "estimate(experts(shard_size=2, zero_stage=3, ep_size=4, micro_batch_size=1), 8)": "or shard_size 4 or 8",
    # A model, and what it writes
    "stage(shape(num_attention_heads=None))": "has no num_attention_heads: give a number that divides hidden_size",
    "stage(num_stages=4)": "[0, 1, 1, 1] layers, but num_stages=4 must have 1 layer or more each, and num_layers=3",
    "stage(num_stages=0)": "num_stages=0 must be at least 1",
    "stage(stage=2, num_stages=2)": "stage=2 is not one of num_stages=2: use 0 to 1",
    "stage(stage=-1, num_stages=2)": "stage=-1 is not one of num_stages=2",
    "stage(shape(seq_length=7), PAIR, sequence_parallel=True)": "seq_length=7: use tp_size 1 or 7, or seq_length 6",
    "stage(shape(num_attention_heads=6))": "num_attention_heads=6 does not divide hidden_size=16",
    "stage(dropout=1.0)": "dropout=1.0 must be in [0, 1)",
    "stage(dropout=-0.1, sequence_parallel=True)": "dropout=-0.1 must be in [0, 1)",
    "MODEL(torch.zeros(1, 9, dtype=torch.long))": "9 tokens are more than seq_length=8: give fewer",
    "MODEL(torch.tensor([[13]]))": "ids contains 13, outside the vocabulary",
    "attention(dropout=0.1, attend=attend)": "dropout=0.1 acts on attention weights, which attend= never has",
    "attention(num_query_groups=3)": "num_query_groups=3 does not divide num_attention_heads=8",
    "write(seed=1.5)": "seed=1.5 must be a whole number from 0 up, of at most 31 bits",
    "write(seed=1 << 31)": "seed=2147483648 must be a whole number from 0 up",  # it would draw as 0 does
    "write(temperature=True)": "temperature=True must be a number from 0 to 1000",
    "write(temperature=-1)": "temperature=-1 must be a number from 0 to 1000",
    "write(top_k=14)": "top_k=14 is more than vocab_size=13",
    "write(num_tokens=0)": "num_tokens=0 must be at least 1",
    "write(num_tokens=7)": "2 tokens and num_tokens=7 more are above seq_length=8",
    "write(torch.ones(1, 2))": "tokens have dtype torch.float32, but words are whole numbers: use",
    "write(torch.ones(1, 2, dtype=torch.bool))": "tokens have dtype torch.bool",
    "write([[1], [2, 3]])": "tokens=[[1], [2, 3]] must be rows of equally many whole numbers",
    "write([1, 2])": "tokens of shape [2]: give rows of at least one token",
    "write([[1, 13]])": "tokens contain 13, which is outside the vocabulary: use words from 0 to 12",
    "write([[-1]])": "tokens contain -1, which is outside",
    "write(model=Linear(1, 1))": "model is a Linear: give this rank's ParallelGPT",
    "config_of(shape(num_query_groups=2))": "num_query_groups=2 is not the form of a model that transformers knows: ",
    "config_of(shape(num_experts=4, top_k=1))": "is not the form of a model that transformers knows: ",
    "InventedText(num_words=1)": "num_words=1 leaves nothing to predict: use at least 2",
}


@pytest.mark.parametrize("call", REFUSED)
def test_it_is_refused_by_name(call):
    with pytest.raises(ValueError, match=re.escape(REFUSED[call])):
        eval(call, dict(KNOWN))
