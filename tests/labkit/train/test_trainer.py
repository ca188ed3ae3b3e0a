"""Training on any number of ranks, in any layout: at each step the loss and the gradient norm of one process.

`make test` runs every layout at least once, and every two options together at least once. All of them with all of
them are 400 runs, half an hour: ``TRAIN_ALL=1 pytest -s -o faulthandler_timeout=3600 tests/test_train.py -k product``.
"""

import copy
import math
import os
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from labkit.data import EVALUATION_SAMPLES
from labkit.data_parallel import ShardedOptimizer
from labkit.groups import group_of_one, local_device
from labkit.launch import RankFailed, World, launch, stream
from labkit.model import ParallelGPT
from labkit.train import TrainConfig, steps, train, training
from labkit.train.gradients import clip_gradients
from labkit.train.master_weights import MasterWeights

TINY = TrainConfig(
    steps=10, batch_size=8, micro_batch_size=2, seq_length=8, hidden_size=16, num_attention_heads=8, num_layers=4,
    precision="float64", warmup_steps=3, learning_rate=0.01, min_learning_rate=0.001, eval_interval=5,
)  # fmt: skip
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def numbers(all_steps):
    """What must be the same in every layout."""
    return [value for step in all_steps for value in (step.loss, step.grad_norm, step.evaluation_loss or 0.0)]


# -- one process, against torch alone ----------------------------------------------------------------------------------


class PlainGPT(nn.Module):
    """The oracle: torch's own transformer layers, the whole model and the whole batch."""

    def __init__(self, config, vocab_size):
        super().__init__()
        h = config.hidden_size
        self.embedding, self.positions = nn.Embedding(vocab_size, h), nn.Parameter(torch.empty(config.seq_length, h))
        layers = [
            nn.TransformerEncoderLayer(
                h, config.num_attention_heads, 4 * h, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(config.num_layers)
        ]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(h)

    def loss(self, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.size(1), dtype=torch.float64)
        x = self.embedding(inputs) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.norm(x) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


TORCHS_NAMES = {
    "attention_norm": "norm1", "mlp_norm": "norm2", "mlp.up": "linear1", "mlp.down": "linear2",
    "attention.out": "self_attn.out_proj", "attention.qkv.": "self_attn.in_proj_",
}  # fmt: skip


def torchs_name(name):
    for ours, theirs in TORCHS_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def train_plainly(config):
    """Losses, gradient norms and evaluation losses by what PyTorch has: optimizer, clipping, learning-rate schedule."""
    text = config.make_text()
    model = PlainGPT(config, text.vocab_size).double()
    start = ParallelGPT(config.shape, group_of_one(), seed=config.seed, dtype=torch.float64)
    model.load_state_dict({torchs_name(name): value for name, value in start.state_dict().items()})
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(0.9, 0.95),
    )
    rise = LinearLR(optimizer, start_factor=1 / config.warmup_steps, total_iters=config.warmup_steps - 1)
    fall = CosineAnnealingLR(optimizer, config.steps - config.warmup_steps, eta_min=config.min_learning_rate)
    rates = SequentialLR(optimizer, [rise, fall], milestones=[config.warmup_steps])

    def batch(first):
        samples = [text.sample(first + row, config.seq_length + 1) for row in range(config.batch_size)]
        return torch.stack([torch.from_numpy(sample) for sample in samples])

    result = []
    for step in range(config.steps):
        optimizer.zero_grad()
        loss = model.loss(batch(step * config.batch_size))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or math.inf)
        optimizer.step()
        rates.step()
        with torch.no_grad():
            evaluation = model.loss(batch(EVALUATION_SAMPLES)).item() if (step + 1) % config.eval_interval == 0 else 0.0
        result += [loss.item(), norm.item(), evaluation]
    return result


@pytest.mark.parametrize("clip_norm", [0.0, 0.7, 100.0])
def test_one_process_trains_as_torch_does(on_ranks, clip_norm):
    config = replace(TINY, clip_norm=clip_norm)
    expected = train_plainly(config)
    assert numbers(on_ranks(train, config, world_size=1)[0]) == pytest.approx(expected, rel=1e-10, abs=0)
    norms = expected[1::3]
    assert all(norm > 0.7 for norm in norms[:3]), "0.7 would clip nothing"
    assert expected[0] - expected[-3] > 0.2, "nothing was learned"


def test_clipping_changes_the_training():
    clipped, free = (train_plainly(replace(TINY, steps=4, clip_norm=clip_norm)) for clip_norm in (0.01, 0.0))
    assert abs(clipped[-3] - free[-3]) > 1e-8


def test_clipping_scales_all_alike():
    def three():
        parameters = [nn.Parameter(torch.zeros(size)) for size in (3, 4, 5)]
        parameters[0].grad, parameters[1].grad = torch.ones(3), torch.full((4,), 2.0)
        return parameters

    norm = math.sqrt(3 + 16)
    for highest in (0.0, norm + 1, 1.5):
        ours, torchs = three(), three()
        clip_gradients(ours, norm, highest)
        nn.utils.clip_grad_norm_(torchs, highest or math.inf)
        for mine, other in zip(ours[:2], torchs):
            torch.testing.assert_close(mine.grad, other.grad)
        assert ours[2].grad is None


# -- every layout, against one process ---------------------------------------------------------------------------------

LAYOUTS = [
    (world_size, tp_size, pp_size)
    for world_size in (1, 2, 4, 8)
    for tp_size, pp_size in product((1, 2, 4, 8), repeat=2)
    if world_size % (tp_size * pp_size) == 0
]
OPTIONS = {
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble"),
    "sequence_parallel": (False, True),
    "sharded_optimizer": (False, True),
    "recompute": (False, True),
    "precision": ("float64", "float32"),
}


def all_runs():
    """Every layout with every combination of options that means something there."""
    for (world_size, tp_size, pp_size), values in product(LAYOUTS, product(*OPTIONS.values())):
        options = dict(zip(OPTIONS, values))
        num_chunks = 2 if options["schedule"] == "interleaved" else 1
        dp_size = world_size // (tp_size * pp_size)
        if (
            (tp_size > 1 or not options["sequence_parallel"])
            and (dp_size > 1 or not options["sharded_optimizer"])
            and (pp_size > 1 or options["schedule"] == "1f1b")
            and pp_size * num_chunks <= 8
        ):
            sizes = {"tp_size": tp_size, "pp_size": pp_size, "num_chunks": num_chunks}
            sizes["micro_batch_size"] = 1 if dp_size == 8 else 2
            sizes["num_layers"] = max(TINY.num_layers, pp_size * num_chunks)
            yield world_size, replace(TINY, **sizes, **options)


def pairs_of(world_size, config):
    """What a run covers: its layout, and each two of its options."""
    chosen = [(name, getattr(config, name)) for name in OPTIONS]
    return {(world_size, config.tp_size, config.pp_size), *combinations(chosen, 2)}


def chosen_runs():
    """Few of all runs, which cover every layout and every two options; the next is one that covers most."""
    left = list(all_runs())
    uncovered = set().union(*(pairs_of(*run) for run in left))
    while uncovered:
        best = max(left, key=lambda run: (len(pairs_of(*run) & uncovered), -run[0]))
        uncovered -= pairs_of(*best)
        yield best


def compare_with_one_process(on_ranks, runs):
    kinds = {(config.precision, config.num_layers) for _, config in runs}
    alone = {
        kind: on_ranks(train, replace(TINY, precision=kind[0], num_layers=kind[1]), world_size=1)[0] for kind in kinds
    }
    worst = dict.fromkeys(OPTIONS["precision"], 0.0)
    for world_size, config in runs:
        for rank, got in enumerate(on_ranks(train, config, world_size=world_size)):
            expected, rel = numbers(alone[config.precision, config.num_layers]), TOLERANCE[config.precision]
            assert numbers(got) == pytest.approx(expected, rel=rel, abs=0), f"rank {rank} of {world_size}, {config}"
            worst[config.precision] = max(
                [worst[config.precision], *(abs(a - b) / b for a, b in zip(numbers(got), expected) if b)]
            )
    return worst


def test_the_choice_is_complete():
    runs = list(chosen_runs())
    assert {(w, c.tp_size, c.pp_size) for w, c in runs} == set(LAYOUTS)
    assert len(LAYOUTS) == 20
    assert len(runs) < 40


def test_every_layout(on_ranks):
    one_rank_two_chunks = 1, replace(TINY, schedule="interleaved", num_chunks=2)  # first and last stage are one rank's
    compare_with_one_process(on_ranks, [*chosen_runs(), one_rank_two_chunks])


@pytest.mark.skipif("TRAIN_ALL" not in os.environ, reason="takes half an hour: set TRAIN_ALL=1")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_whole_product(on_ranks, layout):
    runs = [run for run in all_runs() if (run[0], run[1].tp_size, run[1].pp_size) == layout]
    print(f"{layout}: {len(runs)} runs, worst {compare_with_one_process(on_ranks, runs)}")


@pytest.mark.parametrize("order", ["tp-pp-dp", "pp-dp-tp"])
def test_another_order_of_the_axes(on_ranks, order):
    alone = on_ranks(train, replace(TINY, steps=2), world_size=1)[0]
    config = replace(TINY, steps=2, tp_size=2, pp_size=2, order=order)
    for got in on_ranks(train, config, world_size=8):
        assert numbers(got) == pytest.approx(numbers(alone), rel=1e-10)


# -- data, dropout -----------------------------------------------------------------------------------------------------


def samples_of(config):
    with training(config) as trainer:
        batches = [trainer.micro_batches(first)[0] for first in (0, config.batch_size)]
    return [[row.tolist() for rows in batch for row in rows] for batch in batches]


def test_each_sample_is_seen_once_and_in_one_order(on_ranks):
    config = replace(TINY, micro_batch_size=1, tp_size=2)
    text = config.make_text()
    expected = [text.sample(number, config.seq_length + 1)[:-1].tolist() for number in range(16)]
    ranks = on_ranks(samples_of, config, world_size=8)
    first_of_each_replica = ranks[::2]
    assert ranks[1::2] == first_of_each_replica  # tensor-parallel ranks see the same
    for step in range(2):
        seen = [row for replica in first_of_each_replica for row in replica[step]]
        assert seen == expected[8 * step : 8 * step + 8]


def seeds_of(config):
    seeds = []
    with training(config) as trainer:
        for _ in trainer.steps():
            seeds.append(torch.initial_seed())
    return seeds


def test_dropout_masks_differ_by_step_and_replica(on_ranks):
    ranks = on_ranks(seeds_of, replace(TINY, steps=5, tp_size=2, num_layers=2), world_size=4)
    assert ranks[0] == ranks[1], "tensor-parallel ranks must draw alike"
    assert ranks[2] == ranks[3]
    assert len({*ranks[0], *ranks[2]}) == 10


@pytest.mark.parametrize("options", [{}, {"tp_size": 2, "sequence_parallel": True}, {"pp_size": 2}], ids=str)
def test_dropout_is_the_same_again_and_with_recomputation(on_ranks, options):
    config = replace(TINY, steps=3, dropout=0.2, num_layers=2, **options)
    once, again = on_ranks(train, config)[0], on_ranks(train, config)[0]
    assert numbers(once) == numbers(again)
    without = on_ranks(train, replace(config, dropout=0.0))[0]
    assert abs(once[0].loss - without[0].loss) > 1e-4
    recomputed = on_ranks(train, replace(config, recompute=True))[0]
    assert numbers(recomputed) == pytest.approx(numbers(once), rel=1e-10)


def test_evaluation_leaves_the_training_alone(on_ranks):
    config = replace(TINY, steps=4, dropout=0.1, num_layers=2)
    evaluated, not_evaluated = (on_ranks(train, replace(config, eval_interval=interval))[0] for interval in (1, 0))
    assert [step.loss for step in evaluated] == [step.loss for step in not_evaluated]
    assert {step.evaluation_loss for step in not_evaluated} == {None}
    assert len({step.evaluation_loss for step in evaluated}) == 4
    assert [step.number for step in evaluated] == [1, 2, 3, 4]


# -- steps as they come ------------------------------------------------------------------------------------------------


def test_steps_arrive_one_by_one_and_are_those_of_train(on_ranks):
    config = replace(TINY, steps=3, tp_size=2)
    expected = numbers(on_ranks(train, config)[0])
    with World(2) as world:
        arrived = [ranks[0] for ranks in stream(world, steps, config)]
        assert numbers(arrived) == pytest.approx(expected, rel=1e-12)
        assert numbers(world.run(train, config)[0]) == pytest.approx(expected, rel=1e-12)  # the ranks are free again


@pytest.mark.parametrize("why", [KeyboardInterrupt, ZeroDivisionError])
def test_a_cell_that_stops_between_two_steps_leaves_nothing(why):
    """The stop button, or a mistake in what draws the loss."""
    endless = replace(TINY, steps=10**6)
    seen = []
    with pytest.raises(why), World(2) as world:  # noqa: PT012 - as a cell does it
        pids = world.run(os.getpid)
        for ranks in stream(world, steps, endless):
            seen.append(ranks[0].loss)
            if len(seen) == 3:
                raise why
    assert len(seen) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- bfloat16 ----------------------------------------------------------------------------------------------------------


def a_model(dtype):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(dtype)


def some_rows(number):
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(number)).bfloat16()


def give_gradients(model, number):
    model.zero_grad()
    model(some_rows(number)).square().mean().backward()


def test_master_weights_against_a_loop_by_hand():
    model, by_hand = a_model(torch.bfloat16), a_model(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    masters = [p.detach().float().requires_grad_() for p in by_hand.parameters()]
    inner = torch.optim.AdamW(masters, lr=1e-3)
    rounded_only = a_model(torch.bfloat16)
    naive = torch.optim.AdamW(rounded_only.parameters(), lr=1e-3)
    for number in range(20):
        for each in (optimizer, inner):
            each.param_groups[0]["lr"] = 1e-3 / (number + 1)  # what a schedule does
        give_gradients(model, number)
        optimizer.step()
        give_gradients(by_hand, number)
        for master, parameter in zip(masters, by_hand.parameters()):
            master.grad = parameter.grad.float()
        inner.step()
        for master, parameter in zip(masters, by_hand.parameters()):
            parameter.data.copy_(master.data)
        give_gradients(rounded_only, number)
        naive.step()
    for parameter, expected, master in zip(model.parameters(), by_hand.parameters(), masters):
        assert torch.equal(parameter, expected)
        assert parameter.dtype == torch.bfloat16
        state = optimizer.state[parameter]
        assert torch.equal(state["master_weight"], master)
        assert {value.dtype for value in state.values()} == {torch.float32}
    different = [not torch.equal(a, b) for a, b in zip(model.parameters(), rounded_only.parameters())]
    assert any(different), "without master weights it is the same: this test shows nothing"


def test_master_weights_are_resumed_bit_by_bit():
    model = a_model(torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for number in range(3):
        give_gradients(model, number)
        optimizer.step()
    other = a_model(torch.bfloat16)
    resumed = MasterWeights(other.parameters(), torch.optim.AdamW, lr=1.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3, 6):
        for each, its_optimizer in ((model, optimizer), (other, resumed)):
            give_gradients(each, number)
            its_optimizer.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def sharded_master_weights():
    """On a rank: against the same optimizer undivided, also after loading; and what is kept here."""
    models = [a_model(torch.bfloat16) for _ in range(3)]
    make = partial(MasterWeights, optimizer_class=torch.optim.AdamW)
    plain = make(models[0].parameters(), lr=1e-2)
    sharded = ShardedOptimizer(models[1].parameters(), make, dist.group.WORLD, lr=1e-2)
    for number in range(3):
        for model, optimizer in zip(models, (plain, sharded)):
            give_gradients(model, number)
            optimizer.step()
    models[2].load_state_dict(models[0].state_dict())
    loaded = ShardedOptimizer(models[2].parameters(), make, dist.group.WORLD, lr=1.0)
    loaded.load_state_dict(copy.deepcopy(plain.state_dict()))
    for number in range(3, 6):
        for model, optimizer in zip(models, (plain, sharded, loaded)):
            give_gradients(model, number)
            optimizer.step()
    for values in zip(*(model.parameters() for model in models)):
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[0], values[2])
    kinds = {x.dtype for state in loaded.state.values() for x in state.values()}
    return kinds, [sum(x.nbytes for s in o.state.values() for x in s.values() if x.dim()) for o in (plain, loaded)]


def test_master_weights_in_a_sharded_optimizer(on_ranks):
    num_parameters = sum(p.numel() for p in a_model(torch.float32).parameters())
    ranks = on_ranks(sharded_master_weights)
    assert [kinds for kinds, _ in ranks] == [{torch.float32}] * 2
    assert {whole for _, (whole, _) in ranks} == {12 * num_parameters}  # master weight, two averages: 4 bytes each
    assert sum(own for _, (_, own) in ranks) == 12 * num_parameters


@pytest.mark.parametrize(
    "options", [{}, {"sharded_optimizer": True}, {"tp_size": 2, "sequence_parallel": True}], ids=str
)
def test_bfloat16_learns_as_float32_does(on_ranks, options):
    config = replace(TINY, precision="bfloat16", num_layers=2, **options)
    got = [step.loss for step in on_ranks(train, config)[0]]
    expected = [step.loss for step in on_ranks(train, replace(config, precision="float32", tp_size=1), world_size=1)[0]]
    assert got == pytest.approx(expected, rel=0.01)
    assert got[-1] < got[0] - 0.2
    assert got != expected


# -- numbers that are none ---------------------------------------------------------------------------------------------


def diverge(config, rank, how, where):
    """Train; from step 2 on something is wrong on one rank."""
    with training(config) as trainer:
        trainer.step()
        if dist.get_rank() == rank:
            modules = {name: module for model in trainer.models for name, module in model.named_modules()}
            if how == "parameter":
                modules[where].weight.data.view(-1)[1] = math.nan
            elif how == "forward":
                modules[where].register_forward_hook(lambda _, __, out: (out[0] * math.inf, *out[1:]))
            elif how == "backward":
                modules[where].weight.register_hook(lambda gradient: gradient * math.inf)
        trainer.step()


@pytest.mark.parametrize(
    ("how", "rank", "where", "what"),
    [
        ("parameter", 5, "layers.3.mlp.up", "the parameter layers.3.mlp.up.weight, before the step"),
        ("forward", 3, "layers.1.mlp.up", "the output of layers.1.mlp.up"),
        ("backward", 7, "layers.2.attention.qkv", "the gradient of layers.2.attention.qkv.weight"),
        ("backward", 2, "embedding", "the gradient of embedding.weight"),
    ],
)
def test_the_first_rank_and_place_is_found(how, rank, where, what):
    """tp, dp and pp 2: every collective spreads a NaN to ranks that had none."""
    config = replace(TINY, tp_size=2, pp_size=2, precision="float32", eval_interval=0)
    with pytest.raises(RankFailed) as caught:
        launch(diverge, config, rank, how, where, world_size=8)
    assert isinstance(caught.value.cause, FloatingPointError)
    text = str(caught.value.cause)
    assert text.startswith("step 2: ")
    assert f"First on rank {rank}: {what}." in text
    assert "lost its connection" not in str(caught.value)  # every rank stops by itself


def test_a_learning_rate_that_is_far_too_high_stops_the_run():
    config = replace(TINY, learning_rate=1e200, clip_norm=0, pp_size=2, schedule="zero-bubble", num_layers=2)
    with pytest.raises(
        RankFailed, match="raised FloatingPointError: step 2: the loss is nan, the gradient norm"
    ) as caught:
        launch(train, config, world_size=2)
    assert "First on rank 0: the output of layers.0" in str(caught.value.cause)
    assert len(launch(train, replace(config, steps=1, learning_rate=0.01), world_size=2)[0]) == 1


# -- what does not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps=0: use a whole number from 1 up"),
        ({"steps": 2.5}, "steps=2.5: use a whole number from 1 up"),
        ({"steps": "4"}, "steps='4': use a whole number from 1 up"),
        ({"micro_batch_size": -1}, "micro_batch_size=-1: use a whole number from 1 up"),
        ({"hidden_size": 16.0}, "hidden_size=16.0: use a whole number from 1 up"),
        ({"pp_size": True}, "pp_size=True: use a whole number from 1 up"),
        ({"warmup_steps": -1}, "warmup_steps=-1: use a whole number from 0 up"),
        ({"eval_interval": 1.5}, "eval_interval=1.5: use a whole number from 0 up"),
        ({"save_interval": 1.5}, "save_interval=1.5: use a whole number from 0 up"),
        ({"seed": 1.5}, "seed=1.5: use a whole number from 0 up"),
        ({"seed": 1 << 63}, "seed=9223372036854775808 has more than 63 bits: use a smaller number"),
        ({"clip_norm": math.nan}, "clip_norm=nan: use a finite number from 0 up"),
        ({"weight_decay": "0.1"}, "weight_decay='0.1': use a finite number from 0 up"),
        ({"min_learning_rate": -1}, "min_learning_rate=-1: use a finite number from 0 up"),
        ({"learning_rate": math.inf}, "learning_rate=inf: use a finite number from 0 up"),
        ({"learning_rate": 0.0}, "learning_rate=0 learns nothing: use a number above 0, 0.003 say"),
        ({"dropout": 1.0}, "dropout=1.0 is no probability to drop: use 0 or more, below 1"),
        ({"dropout": "0.1"}, "dropout='0.1' is no probability to drop: use 0 or more, below 1"),
        ({"text": None}, "text=None is no file: name one, or use 'invented'"),
        ({"schedule": "2f2b"}, "schedule='2f2b' is unknown: use gpipe, 1f1b, interleaved, zero-bubble"),
        ({"precision": "float16"}, "precision='float16' is unknown: use float32, float64, bfloat16"),
        ({"num_chunks": 2}, "num_chunks=2 needs schedule='interleaved', not '1f1b': use that, or num_chunks=1"),
        ({"schedule": "interleaved"}, "schedule='interleaved' needs num_chunks=2 or more: with one, use '1f1b'"),
        ({"pp_size": 4, "num_chunks": 2, "schedule": "interleaved"}, "num_chunks=2 = 8 stages for num_layers=4: use 8"),
        ({"num_attention_heads": 3}, "num_attention_heads=3 does not divide hidden_size=16: use 1, 2, 4, 8, 16, or"),
        ({"tp_size": 3}, "tp_size=3 does not divide num_attention_heads=8: use 1, 2, 4, 8, or"),
        ({"seq_length": 9, "tp_size": 2, "sequence_parallel": True}, "does not divide seq_length=9: use 1, 3, 9"),
        ({"resume": True}, "resume and save_interval need a checkpoint_dir: name a folder"),
        ({"checkpoint_dir": ""}, "checkpoint_dir='' is no folder: name one, or leave it out"),
        ({"save_interval": 5}, "resume and save_interval need a checkpoint_dir: name a folder"),
        ({"text": "no/such/file"}, "the text no/such/file cannot be read (No such file or directory): name a file"),
        ({"text": "."}, "the text . is a folder, a pipe or a device: name a file"),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError) as caught:
        replace(TINY, **options)
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    config = replace(TINY, steps=np.int64(4), hidden_size=np.int32(16), learning_rate=np.float32(0.5))
    assert (type(config.steps), type(config.hidden_size)) == (int, int)
    assert config == replace(TINY, steps=4, hidden_size=16, learning_rate=0.5)


def test_the_highest_seed_trains(on_ranks):
    assert len(on_ranks(train, replace(TINY, seed=(1 << 63) - 1, steps=1, dropout=0.1))[0]) == 1


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (6, {"tp_size": 4}, "tp_size=4 * pp_size=1 = 4 does not divide world_size=6"),
        (3, {}, "dp_size=3 * micro_batch_size=2 does not divide batch_size=8: use batch_size 6 or 12"),
        (8, {}, "dp_size=8 * micro_batch_size=2 does not divide batch_size=8: use batch_size 16"),
        (8, {"order": "tp-dp"}, "order='tp-dp'"),
    ],
    ids=str,
)
def test_a_world_that_does_not_fit_is_refused(world_size, options, message):
    with pytest.raises(ValueError) as caught:
        replace(TINY, **options).layout(world_size)
    assert message in str(caught.value)


def test_a_world_that_does_not_fit_is_reported_by_launch():
    with pytest.raises(RankFailed, match=r"raised ValueError: dp_size=3 \* micro_batch_size=2 does not divide"):
        launch(train, TINY, world_size=3)


def test_a_file_that_is_too_short_says_so(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("short")
    with pytest.raises(RankFailed, match=r"short.txt has 5 bytes, a sample takes 9 and another is"):
        launch(train, replace(TINY, text=str(file)), world_size=2)


def test_ranks_compute_where_the_world_is(on_ranks):
    def devices(config):
        with training(config) as trainer:
            return {parameter.device.type for parameter in trainer.parameters} == {local_device().type}

    assert on_ranks(devices, TINY) == [True, True]
