"""Answers to the exercises on the parallel GPT."""

import torch
import torch.distributed as dist

from course.exercises.parallel_gpt import gumbel

# -- layer_parameters ----------------------------------------------------------------------------------------------


def all_divided(hidden_size, tp_size):
    return (12 * hidden_size**2 + 13 * hidden_size) // tp_size


def weights_only(hidden_size, tp_size):
    return 12 * hidden_size * hidden_size // tp_size


def one_norm(hidden_size, tp_size):
    h = hidden_size
    attention = 3 * h * h // tp_size + 3 * h // tp_size + h * h // tp_size + h
    mlp = 4 * h * h // tp_size + 4 * h // tp_size + 4 * h * h // tp_size + h
    return 2 * h + attention + mlp


def row_biases_divided(hidden_size, tp_size):
    h = hidden_size
    return 4 * h + (12 * h * h + 9 * h) // tp_size


def biases_whole(hidden_size, tp_size):
    matrices = [(3 * hidden_size, hidden_size), (hidden_size, hidden_size)] + 2 * [(4 * hidden_size, hidden_size)]
    return sum(rows * columns // tp_size for rows, columns in matrices) + 13 * hidden_size


def by_shapes(hidden_size, tp_size):
    h, own = hidden_size, hidden_size // tp_size
    norms = 2 * (h + h)
    attention = 3 * own * h + 3 * own + h * own + h
    return norms + attention + 4 * own * h + 4 * own + h * 4 * own + h


# -- next_word -----------------------------------------------------------------------------------------------------


def local_maximum(logits, temperature, seed):
    rank, n = dist.get_rank(), logits.size(1)
    noise = gumbel(seed, len(logits), n * dist.get_world_size())
    return rank * n + torch.argmax(logits / temperature + noise[:, rank * n : rank * n + n], dim=1)


def local_draw(logits, temperature, seed):
    return torch.argmax(logits / temperature + gumbel(seed, *logits.shape), dim=1)


def local_multinomial(logits, temperature, seed):
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def gathers_logits(logits, temperature, seed):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    whole = torch.cat(parts, 1)
    return (whole / temperature + gumbel(seed, *whole.shape)).argmax(1)


def best_of(value, word):
    """What every rank knows after two all-gathers: the word of the highest value."""
    t = dist.get_world_size()
    values, words = [torch.empty_like(value) for _ in range(t)], [torch.empty_like(word) for _ in range(t)]
    dist.all_gather(values, value.contiguous())
    dist.all_gather(words, word.contiguous())
    best = torch.stack(values).argmax(0)
    return torch.stack(words)[best, torch.arange(len(best))]


def columns(logits, seed):
    noise = gumbel(seed, len(logits), logits.size(1) * dist.get_world_size())
    return noise.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def counted_from_0(logits, temperature, seed):
    value, word = (logits / temperature + columns(logits, seed)).max(1)
    return best_of(value, word)


def seed_of_the_rank(logits, temperature, seed):
    rank = dist.get_rank()
    value, word = (logits / temperature + gumbel(seed + rank, *logits.shape)).max(1)
    return best_of(value, word + rank * logits.size(1))


def same_noise_everywhere(logits, temperature, seed):
    value, word = (logits / temperature + gumbel(seed, *logits.shape)).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1))


def first_columns(logits, temperature, seed):
    noise = gumbel(seed, len(logits), logits.size(1) * dist.get_world_size())[:, : logits.size(1)]
    value, word = (logits / temperature + noise).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1))


def most_probable(logits, temperature, seed):
    value, word = (logits / temperature).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1))


def without_temperature(logits, temperature, seed):
    value, word = (logits + columns(logits, seed)).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1))


def temperature_of_both(logits, temperature, seed):
    value, word = ((logits + columns(logits, seed)) / temperature).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1))


def noise_subtracted(logits, temperature, seed):
    value, word = (logits / temperature - columns(logits, seed)).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1))


def log_softmax_first(logits, temperature, seed):
    value, word = (torch.log_softmax(logits / temperature, 1) + columns(logits, seed)).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1))


def largest_word(logits, temperature, seed):
    word = (logits / temperature + columns(logits, seed)).argmax(1) + dist.get_rank() * logits.size(1)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return word


def compared_without_noise(logits, temperature, seed):
    word = (logits / temperature + columns(logits, seed)).argmax(1)
    return best_of(logits.gather(1, word[:, None])[:, 0], word + dist.get_rank() * logits.size(1))


def the_value(logits, temperature, seed):
    value = (logits / temperature + columns(logits, seed)).max(1).values
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value


def as_floats(logits, temperature, seed):
    value, word = (logits / temperature + columns(logits, seed)).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1)).double()


def rank_0_collects(logits, temperature, seed):
    value, word = (logits / temperature + columns(logits, seed)).max(1)
    word = word + dist.get_rank() * logits.size(1)
    return best_of(value, word) if dist.get_rank() == 0 else word


def by_all_reduces(logits, temperature, seed):
    value, word = (logits / temperature + columns(logits, seed)).max(1)
    highest = value.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    word = (word + dist.get_rank() * logits.size(1)).masked_fill(value < highest, -1)
    dist.all_reduce(word, op=dist.ReduceOp.MAX)
    return word


def by_two_gathers(logits, temperature, seed):
    value, word = (logits / temperature + columns(logits, seed)).max(1)
    return best_of(value, word + dist.get_rank() * logits.size(1))


WRONG = [
    ("layer_parameters", all_divided, "everything is divided"),
    ("layer_parameters", weights_only, "only weights count"),
    ("layer_parameters", one_norm, "one norm is forgotten"),
    ("layer_parameters", row_biases_divided, "row biases are cut"),
    ("layer_parameters", biases_whole, "all biases are whole"),
    ("next_word", local_maximum, "each rank has its own"),
    ("next_word", local_draw, "each rank draws its own, counted from 0"),
    ("next_word", local_multinomial, "torch's own draw, of each rank's words"),
    ("next_word", gathers_logits, "gathers all logits"),
    ("next_word", counted_from_0, "the offset of the shard is forgotten"),
    ("next_word", seed_of_the_rank, "different random numbers on each rank"),
    ("next_word", same_noise_everywhere, "word i of each rank has the same noise"),
    ("next_word", first_columns, "the offset of the noise is forgotten"),
    ("next_word", most_probable, "no noise"),
    ("next_word", without_temperature, "no temperature"),
    ("next_word", temperature_of_both, "the noise is divided by it, too"),
    ("next_word", noise_subtracted, "the sign of the noise"),
    ("next_word", log_softmax_first, "a softmax over the rank's own words"),
    ("next_word", largest_word, "the maximum of the words"),
    ("next_word", compared_without_noise, "the ranks' words compared by logits"),
    ("next_word", the_value, "the value of the word"),
    ("next_word", as_floats, "words as floats"),
    ("next_word", rank_0_collects, "a collective that some ranks skip"),
]

RIGHT = [
    ("layer_parameters", by_shapes),
    ("next_word", by_all_reduces),
    ("next_word", by_two_gathers),
]
