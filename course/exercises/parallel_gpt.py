"""The exercises of notebook 10: how many parameters a rank holds of a layer, and a word drawn from logits that are cut.

In the second, the tensor group is the whole world, and its rank r has consecutive words.
"""

import torch
import torch.distributed as dist

from course.exercises.base import Exercise
from course.exercises.on_ranks import Conduct, RankExercise, gathered, only, own, whole_numbers

# -- what a rank holds -------------------------------------------------------------------------------------------------


def my_layer_parameters(hidden_size, tp_size):
    h, t = hidden_size, tp_size
    column = (3 * h * h + 3 * h + 4 * h * h + 4 * h) // t  # Q-K-V and the MLP's first layer, biases too
    row_weights = (h * h + 4 * h * h) // t
    whole = 2 * h + 2 * 2 * h  # biases of the two row layers; weight and bias of the two norms
    return column + row_weights + whole


layer_parameters = Exercise(
    "layer_parameters",
    my_layer_parameters,
    notebook="10",
    cases=[(64, 1), (64, 2), (64, 4), (12288, 8)],
    hints=[
        "List the twelve tensors that the cell above printed for layers.0. Which six are the same for t = 4?",
        "Four weight matrices have 3 h², h², 4 h² and 4 h² numbers: 12 h² in all, and all are cut. The biases of "
        "column layers are cut, those of row layers are not.",
        "Whole on every rank: two norms with a weight and a bias each, and the biases of the two row layers: 6 h.",
    ],
)


def parameters_wrongly(hidden_size, tp_size, cut, whole) -> int:
    """Return 12 h² / t with ``cut`` more vectors of h numbers that are cut, and ``whole`` that are not."""
    return (12 * hidden_size + cut) * hidden_size // tp_size + whole * hidden_size


layer_parameters.mistakes_of(
    parameters_wrongly,
    (dict(cut=13, whole=0), "Not everything is cut. Norms and the biases of row layers are whole on every rank."),
    (dict(cut=0, whole=0), "These are the four weight matrices. Biases and norms have parameters, too."),
    (dict(cut=7, whole=2), "The norms are missing: two, each with a weight and a bias of h numbers."),
    (
        dict(cut=0, whole=4),
        "The biases of the linear layers are missing: the column layers' are cut, the row layers' not.",
    ),
    (
        dict(cut=8, whole=3),
        "One norm's bias or weight twice is missing, and a row layer's bias is cut: it is whole on every rank.",
    ),
    (dict(cut=7, whole=4), "2 h too few: there are two norms, and each has a weight *and* a bias."),
    (dict(cut=0, whole=13), "A column layer's bias is cut with its outputs: each rank has those of its own columns."),
    (dict(cut=9, whole=4), "A row layer's bias is added after the sum, once for each of *all* outputs: it is not cut."),
    (dict(cut=11, whole=2), "A norm works on whole hidden states, so each rank has all of its weight and bias."),
)


# -- the next word -----------------------------------------------------------------------------------------------------


def gumbel(seed: int, num_rows: int, num_words: int) -> torch.Tensor:
    """Return Gumbel's noise in float64, [num_rows, num_words]: for the same arguments, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return -torch.log(-torch.log(torch.rand(num_rows, num_words, generator=generator, dtype=torch.float64)))


def my_next_word(logits, temperature, seed):
    num_rows, num_words = logits.shape  # those of this rank
    first = dist.get_rank() * num_words
    noise = gumbel(seed, num_rows, num_words * dist.get_world_size())  # of all words, on every rank
    scores = logits / temperature + noise[:, first : first + num_words]
    value, word = scores.max(-1)
    pair = torch.stack([value, (first + word).double()])
    pairs = [torch.empty_like(pair) for _ in range(dist.get_world_size())]
    dist.all_gather(pairs, pair)
    values, words = torch.stack(pairs, 1)  # [t, rows] each
    return words.gather(0, values.argmax(0, keepdim=True))[0].long()


def word_inputs(num_words: int, temperature: float, seed: int):
    """Return a rank's words, [5, V/t], of the same logits, and what is the same on all ranks."""
    vocab_size = num_words * dist.get_world_size()
    return own(whole_numbers((5, vocab_size), seed=seed).double() / 2, dim=1).contiguous(), temperature, seed


def a_pair_per_row(log: Conduct, logits, temperature, seed) -> str | None:
    enough = 2 * 8 * len(logits) * dist.get_world_size()
    if log.total_bytes() <= enough:
        return None
    return (
        f"It sends {log.total_bytes()} bytes. For each row, a value and a word from each rank are enough: {enough} "
        "bytes in all. Nobody wants to gather the logits of 128,000 words."
    )


next_word = RankExercise(
    "next_word",
    my_next_word,
    notebook="10",
    cases=[(2, 12, 2.0, 11), (4, 12, 0.7, 10)],  # not always the last rank's word is the highest
    inputs=word_inputs,
    rule=only("all_gather", "all_reduce", also=a_pair_per_row),
    hints=[
        "The highest of logit / temperature + noise over the *whole* vocabulary is the word. Which pair of numbers "
        "does each rank know about its own words?",
        "A word's noise must not depend on who has it: draw `gumbel(seed, rows, V)` for all V words on every rank, and "
        "take the columns of this rank's words. They begin with word rank * V/t.",
        "`value, word = scores.max(-1)` on each rank; then gather the pairs (value, first + word), and for each row "
        "take the word of the rank with the highest value.",
    ],
    if_stuck="a collective that only one rank calls: rank 0 to collect words, or the one with the highest value. All "
    "ranks must call it, and all need the word.",
)


def own_columns(seed, rows, words):
    return own(gumbel(seed, rows, words * dist.get_world_size()), dim=1)


def of_the_highest(values, words):
    """Return each row's word on the first rank with the highest value."""
    pairs = gathered(torch.stack([values.double(), words.double()])[None], dim=0)  # [t, 2, rows]
    return pairs[:, 1].gather(0, pairs[:, 0].argmax(0, keepdim=True))[0].long()


def of_the_highest_in_view(values, words):
    """Take for a row what stands in the row of the gathered numbers, read as [rows, t]."""
    values, words = (gathered(each, dim=0).view(len(values), -1) for each in (values, words))
    return words.gather(1, values.argmax(1, keepdim=True))[:, 0]


def of_one_rank(values, words):
    """Return the words of the rank that has the highest value of all rows."""
    values, words = (gathered(each[None], dim=0) for each in (values, words))
    return words[values.max(1).values.argmax()]


def to_all(values, words, op=dist.ReduceOp.MAX):
    dist.all_reduce(words, op=op)
    return words


def words_wrongly(
    logits, temperature, seed, *, noise=own_columns, scores=lambda x, noise, temperature: x / temperature + noise,
    first=lambda rank, words: rank * words, join=of_the_highest, choose=lambda scores: scores.max(-1), compared=None,
):  # fmt: skip
    """Draw words with one thing wrong: the noise, the sums, the choice, the offset, or what is compared."""
    num_rows, num_words = logits.shape
    values, words = choose(scores(logits, noise(seed, num_rows, num_words), temperature))
    values = values if compared is None else compared(logits, words)
    return join(values.clone(), words + first(dist.get_rank(), num_words))


LOCAL = (
    "Each rank chose among its own words, so the ranks go on with different texts. Compare the highest values of all "
    "ranks, and take the word that has the highest."
)
NO_OFFSET = "The words are counted from 0 on every rank. Rank r's first word is number r * V/t of the vocabulary."
LOCAL_FROM_0 = (
    "Each rank chose among its own words, and counts them from 0. Compare the values of all ranks; rank r's words "
    "begin at r * V/t."
)
OTHER_NOISE = (
    "Each rank drew different numbers, of a seed of its own. Each word then has its probability, but a different t "
    "writes a different text. Draw for all V words with the same seed, and take the columns of your own."
)
SAME_NOISE = (
    "Word i of each rank got the same noise, as if it were the same word: words that share it are not drawn as often "
    "as they should be. Draw for all V words on each rank, and take the columns of your own."
)
GREEDY = "There is no noise in it: this always takes the most probable word."
NO_TEMPERATURE = (
    "The temperature has no effect: it is left out, or it divides the noise as well, and then the same word is the "
    "highest for each temperature. Divide the logits alone."
)
UPSIDE_DOWN = (
    "The higher the temperature, the more often yours takes the most probable word. It divides the logits: it neither "
    "multiplies them nor divides the noise."
)
WHICH_WORD = "The word of the highest *value* counts. Yours depends on the numbers of the words."
BY_LOGITS = "The ranks' words are compared by their logits. Compare them by the sums, with temperature and noise."
LOCAL_SOFTMAX = (
    "Each rank made probabilities of its own words, which add up to 1 on every rank: a word among improbable ones then "
    "looks probable. Logits as they are can be compared."
)
ONE_SCORE = "Return the word, not its value."
next_word.mistakes_of(
    words_wrongly,
    (dict(join=lambda values, words: words), LOCAL),
    (dict(join=lambda values, words: words, noise=lambda seed, rows, words: gumbel(seed, rows, words)), LOCAL),
    (dict(join=lambda values, words: words, first=lambda rank, words: 0), LOCAL_FROM_0),
    (
        dict(
            join=lambda values, words: words,
            first=lambda rank, words: 0,
            noise=lambda seed, rows, words: gumbel(seed, rows, words),
        ),
        LOCAL_FROM_0,
    ),
    (dict(first=lambda rank, words: 0), NO_OFFSET),
    (dict(first=lambda rank, words: rank), "Rank r's first word is r * V/t, not r: each rank has V/t words."),
    (dict(first=lambda rank, words: (rank + 1) * words), "Ranks count from 0: rank r's first word is r * V/t."),
    (dict(first=lambda rank, words: rank * 5), "The offset is counted in words, V/t per rank, not in rows."),
    (dict(noise=lambda seed, rows, words: gumbel(seed + dist.get_rank(), rows, words)), OTHER_NOISE),
    (
        dict(noise=lambda seed, rows, words: own_columns(seed + dist.get_rank(), rows, words)),
        "The seed is different on each rank. The columns that you take are of different tables then: use the seed as "
        "it is, so that every rank draws the same table.",
    ),
    (dict(noise=lambda seed, rows, words: gumbel(seed, rows, words)), SAME_NOISE),
    (
        dict(noise=lambda seed, rows, words: gumbel(seed, rows, words * dist.get_world_size())[:, :words]),
        "You took the first V/t columns on each rank. Rank r's words begin at column r * V/t.",
    ),
    (
        dict(noise=lambda seed, rows, words: own_columns(seed, 1, words)),
        "All rows got the same noise. Draw a number for each row and word.",
    ),
    (dict(noise=lambda seed, rows, words: 0), GREEDY),
    (
        dict(noise=lambda seed, rows, words: 0, scores=lambda x, noise, T: (x / T).softmax(-1)),
        "There is no noise, and each rank's probabilities add up to 1: the highest need not be the highest logit.",
    ),
    (dict(scores=lambda x, noise, T: x + noise), NO_TEMPERATURE),
    (dict(scores=lambda x, noise, T: x * T + noise), UPSIDE_DOWN),
    (dict(scores=lambda x, noise, T: x / T - noise), "The noise is subtracted. Gumbel's is added."),
    (dict(scores=lambda x, noise, T: (x / T).softmax(-1) + noise), LOCAL_SOFTMAX),
    (dict(scores=lambda x, noise, T: (x / T).log_softmax(-1) + noise), LOCAL_SOFTMAX),
    (dict(choose=lambda scores: scores.min(-1)), "You took the lowest. The highest sum is drawn."),
    (dict(compared=lambda logits, words: logits.gather(-1, words[:, None])[:, 0]), BY_LOGITS),
    (dict(compared=lambda logits, words: logits.max(-1).values), BY_LOGITS),
    (dict(join=to_all), WHICH_WORD),
    (
        dict(join=of_one_rank),
        "These are the words of one rank for all rows. Which rank has the highest value may differ from row to row: "
        "compare the ranks in each row.",
    ),
    (
        dict(join=lambda values, words: to_all(values, words, dist.ReduceOp.MIN)),
        "This is always rank 0's word. The highest value may be on any rank.",
    ),
    (
        dict(join=lambda values, words: to_all(values, words, dist.ReduceOp.SUM)),
        "You added up the words of all ranks. Only the word that has the highest value counts.",
    ),
    (dict(join=lambda values, words: to_all(words, values)), ONE_SCORE),
    (
        dict(join=lambda values, words: of_the_highest_in_view(values, words)),
        "What was gathered lies rank after rank, [t, rows], and `view` read it as [rows, t]: these are words of "
        "different rows.",
    ),
)


@next_word.mistake("This is the rank that has the word. Return the word: that rank's, counted in the whole vocabulary.")
def the_rank(logits, temperature, seed):
    return my_next_word(logits, temperature, seed) // logits.size(-1)


@next_word.mistake("One word for all rows: take the maximum in each row, over the words.")
def one_for_all(logits, temperature, seed):
    return my_next_word(logits, temperature, seed)[:1].expand(len(logits)).contiguous()


@next_word.mistake(
    "`torch.multinomial` draws from the words of this rank alone, as if there were no others. Add `gumbel`'s noise and "
    "take the highest: that can be compared over ranks."
)
def by_multinomial(logits, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
