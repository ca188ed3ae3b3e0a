"""Embedding and cross-entropy cut by words give what one process gives, padding and ignored targets included."""

import weakref
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.communication import communication_log
from labkit.groups import group_of_one
from labkit.tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tests.labkit.tensor_parallel.conftest import (
    BATCH,
    DTYPES,
    SEQUENCE,
    SIZES,
    assert_same,
    randoms,
    sequence_slice,
)


def embedding_parity(num_embeddings, sequence_parallel, dtype):
    group = dist.group.WORLD
    torch.default_generator.manual_seed(4)
    options = {"keep_master_weight_for_test": True, "sequence_parallel": sequence_parallel, "dtype": dtype}
    layer = VocabParallelEmbedding(num_embeddings, 6, group, **options)
    reference = nn.Embedding(num_embeddings, 6, dtype=dtype)
    with torch.no_grad():
        reference.weight.copy_(layer.master_weight)
    ids = torch.randint(num_embeddings, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
    ids[0, :3] = torch.tensor([0, num_embeddings - 1, num_embeddings // 2])  # of 2 words, a third rank has none
    (grad,) = randoms((BATCH, SEQUENCE, 6), dtype=dtype)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, reference)]
    rows = layer.weight.size(0)

    def shard(weight):
        padded = F.pad(weight, (0, 0, 0, rows * group.size() - num_embeddings))
        return padded[group.rank() * rows : (group.rank() + 1) * rows]

    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        output, expected = layer(ids), reference(ids)
        output.backward(sequence_slice(grad, sequence_parallel))
        expected.backward(grad)
        assert_same(output, sequence_slice(expected, sequence_parallel), "output")
        assert_same(layer.weight.grad, shard(reference.weight.grad), "gradient")
        for optimizer in optimizers:
            optimizer.step()
    assert_same(layer.weight, shard(reference.weight), "weight after two steps")


@pytest.mark.parametrize("world_size", SIZES)
def test_embedding(on_ranks, world_size):
    def all_embeddings():
        for size, sequence_parallel, dtype in product([24, 10, 2], [False, True], DTYPES):
            embedding_parity(size, sequence_parallel, dtype)

    on_ranks(all_embeddings, world_size=world_size)


TOLERANCES = {  # relative and absolute
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 1e-4),
    torch.bfloat16: (1.6e-2, 1e-5),
}


def as_torch_has_it(logits, target, **options):
    """Loss and gradient are those of one process, whatever they are; so is the dtype of the loss."""
    group, words = dist.group.WORLD, logits.size(-1)
    rows = -(-words // group.size())
    rtol, atol = TOLERANCES[logits.dtype]

    def shard(x, value):
        padded = F.pad(x, (0, rows * group.size() - words), value=value)
        return padded.chunk(group.size(), -1)[group.rank()]

    unsharded = logits.clone().requires_grad_()
    expected = F.cross_entropy(unsharded.flatten(0, -2), target.long().flatten(), **options)
    local_logits = shard(logits, 99.0).clone().requires_grad_()  # padding of any value takes no part
    how_many = {"vocab_size": words} if words % group.size() else {}
    loss = vocab_parallel_cross_entropy(local_logits, target, group, **how_many, **options)
    expected = expected.view(loss.shape)
    weights = torch.linspace(0.5, 1.7, loss.numel()).view(loss.shape)
    for losses in (loss, expected):
        (losses * weights).sum().backward()
    torch.testing.assert_close(loss, expected, rtol=rtol, atol=atol, equal_nan=True)
    gradient = shard(unsharded.grad, 0.0)
    torch.testing.assert_close(local_logits.grad, gradient, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("world_size", SIZES)
def test_cross_entropy(on_ranks, world_size):
    def all_losses():
        cases = product([24, 10], [0.0, 0.1], ["mean", "sum", "none"], DTYPES, [1.0, 200.0])
        for words, smoothing, reduction, dtype, scale in cases:
            (logits,) = randoms((BATCH, SEQUENCE, words), dtype=dtype)
            target = torch.randint(words, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
            target[0, 1:3] = -100
            target[1, 0] = words - 1
            as_torch_has_it(logits * scale, target, label_smoothing=smoothing, reduction=reduction)

    on_ranks(all_losses, world_size=world_size)


INF, NAN = float("inf"), float("nan")
ODD = {  # logits and targets where a sum, a product or a difference is easily infinite or not a number
    "a masked word": ([[0.0, 0.0, 0.0, -INF]], [0]),
    "the target is masked": ([[0.0, 0.0, 0.0, -INF]], [3]),
    "every word is masked": ([[-INF] * 4, [1.0, 2.0, 3.0, 4.0]], [0, 1]),
    "an infinite logit": ([[0.0, INF, 0.0, 0.0]], [1]),
    "near the largest float": ([[3e38, 0.0, 0.0, -3e38], [3e38, 0.0, 0.0, -3e38]], [0, 1]),
    "nan where the target is ignored": ([[NAN, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0]], [-100, 1]),
    "a masked word where the target is ignored": ([[0.0, 0.0, -INF, 1.0], [1.0, 2.0, 3.0, 4.0]], [-100, 1]),
    "all targets are ignored": ([[1.0, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0]], [-100, -100]),
    "no tokens": (torch.zeros(0, 4).tolist(), []),
}


def test_odd_logits_and_targets(on_ranks):
    def all_odd():
        for case, smoothing, reduction in product(ODD.values(), [0.0, 0.1, 1.0], ["mean", "sum", "none"]):
            logits, target = torch.tensor(case[0]).view(-1, 4), torch.tensor(case[1], dtype=torch.long)
            as_torch_has_it(logits, target, label_smoothing=smoothing, reduction=reduction)

    on_ranks(all_odd)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_large_vocabulary_in_half_precision(on_ranks, dtype):
    def both_ways(dtype):
        (logits,) = randoms((3, 50304), dtype=torch.float32)
        for target_type in (torch.long, torch.int32, torch.int16, torch.uint8):
            as_torch_has_it(logits.to(dtype), torch.tensor([3, 7, 11], dtype=target_type))

    on_ranks(both_ways, dtype)


def test_cross_entropy_sends_four_numbers_per_token(on_ranks):
    def count():
        logits = torch.randn(5, 1000, requires_grad=True)
        with communication_log() as log:
            vocab_parallel_cross_entropy(logits, torch.zeros(5, dtype=torch.long), dist.group.WORLD).backward()
        return [(record.operation, record.message_bytes) for record in log.records]

    assert on_ranks(count)[0] == [("all_reduce", 5 * 4), ("all_reduce", 3 * 5 * 4)]


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors had at once of all that was made inside the block."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage.data_ptr(), storage.nbytes())
        return result

    def gone(self, address, num_bytes):
        self.known.discard(address)
        self.now -= num_bytes


def peaks_of_cross_entropy():
    group = dist.group.WORLD
    logits, target = torch.randn(64, 4096, requires_grad=True), torch.randint(4096, (64,))
    with PeakBytes() as forward:
        loss = vocab_parallel_cross_entropy(logits, target, group, label_smoothing=0.1)
    with PeakBytes() as backward:
        [gradient] = torch.autograd.grad(loss, logits)
    assert gradient.isfinite().all()
    return forward.most / logits.nbytes, backward.most / logits.nbytes


def test_cross_entropy_makes_little_that_is_as_large_as_the_logits(on_ranks):
    """Backward makes the gradient and nothing else of that size."""
    for forward, backward in on_ranks(peaks_of_cross_entropy):
        assert forward < 1.5
        assert 1 <= backward < 1.5


def test_on_a_gpu_the_host_waits_for_nothing():
    """The meta device stands in for one: it has no values, so whatever the host asks for raises."""
    group = group_of_one()
    layer = VocabParallelEmbedding(10, 4, group).to("meta")
    ids = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    with pytest.raises(RuntimeError):
        (ids > 3).any().item()
    logits = layer(layer(ids))
    vocab_parallel_cross_entropy(logits, ids, group).backward()
    assert layer.weight.grad.shape == (10, 4)


def test_hidden_states_give_the_logits_of_the_local_words(on_ranks):
    def compare():
        torch.manual_seed(3)
        layer = VocabParallelEmbedding(10, 4, dist.group.WORLD)
        x = torch.randn(2, 3, 4)
        return torch.equal(layer(x), x @ layer.weight.T)

    assert on_ranks(compare) == [True] * 2
