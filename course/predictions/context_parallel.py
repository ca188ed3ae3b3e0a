"""The predictions of notebook 13, context parallel, in its order."""

from course.predict import Choice, Number

kept_by_stages = Number(
    "13.kept_by_stages",
    "A sequence of 131,072 tokens per micro-batch. 16 GPUs instead of 8, as two stages: t = 8, p = 2, 1F1B, many "
    "micro-batches. A GPU of the first stage keeps about how many times as many bytes of activations as with p = 1?",
    {
        0.5: "It has half of the layers. And how many micro-batches does the first of two stages hold at once?",
        2: "It holds two micro-batches. But of how many layers?",
        0.25: "A stage does not have half of the tokens. How many micro-batches does it hold?",
    },
    tolerance=0.12,
)

last_over_first = Number(
    "13.last_over_first",
    "c = 4, and each rank holds a quarter of the sequence, in order. A token sees itself and all tokens before it. "
    "Rank 3 computes how many times as many pairs of tokens as rank 0?",
    {
        1: "Each has as many tokens, but a late token sees more than an early one.",
        4: "Rank 3's tokens see four quarters at the end. How many does its average token see? And rank 0's?",
        3: "Rank 0 computes half a block, for it sees only its own tokens. And rank 3?",
        3.5: "That is rank 3's average token, in quarters of the sequence. And rank 0's?",
    },
    tolerance=0.02,
)

tokens_of_rank_1 = Choice(
    "13.tokens_of_rank_1",
    "32 tokens, numbered from 0, on 4 ranks, zigzag. Which tokens does rank 1 hold?",
    {
        "[range(8, 16)]": "8 to 15",
        "[range(4, 8), range(20, 24)]": "4 to 7 and 20 to 23",
        "[range(4, 8), range(24, 28)]": "4 to 7 and 24 to 27",
        "[range(1, 32, 4)]": "1, 5, 9, ... 29",
    },
    {
        "[range(8, 16)]": "That is a quarter in order, as in the left picture.",
        "[range(4, 8), range(20, 24)]": "Those are chunks 1 and 5. Rank 3 would have 3 and 7, and the most work.",
        "[range(1, 32, 4)]": "Every fourth token would be nearly balanced, too. But here a rank has two whole chunks.",
    },
)

merged = Number(
    "13.merged",
    "Two blocks of keys. The first has weight 4 and gives 17.5; the second has weight 16 and gives 32.5. "
    "What does attention to all of these keys give?",
    {
        25: "That is the mean of the two. But the second block has four times the weight.",
        20.5: "That is with the two weights swapped.",
        50: "Attention is a weighted mean. It cannot be above both.",
    },
    tolerance=0.001,
)

pace_of_8 = Number(
    "13.pace_of_8",
    "c = 8, tokens in order. All ranks wait for the slowest. "
    "What share of the time does a rank compute, on average, in percent?",
    {
        12.5: "That would be one rank at a time. How many blocks does rank 7 compute, and how many all ranks?",
        100: "Then the zigzag cut would gain nothing.",
        57.1: "That is c = 4.",
        50: "That is for very many ranks. Rank 7 computes 7.5 blocks. What is the mean?",
        46.7: "That is the share of the time in which they wait.",
    },
    unit="%",
    tolerance=0.02,
)

ring_sends = Number(
    "13.ring_sends",
    "A ring of 4 ranks, forward and backward. Backward needs all keys and values once more. Each rank adds its part to "
    "their gradients, which must come home in the end. Keys and values travel as one message, and so do their two "
    "gradients. How many messages does each rank send?",
    {
        3: "That is the forward pass.",
        6: "That is for keys and values, forward and backward. And their gradients?",
        9: "After three steps, the gradients are not home yet: they are on the rank before.",
        20: "You counted keys and values apart.",
        12: "Keys and values need not come home: their rank still has them.",
    },
)

fewest_bytes = Choice(
    "13.fewest_bytes",
    "16 heads of queries on 4 ranks, forward. Ulysses sends 3/4 of a rank's queries, keys, values and outputs. "
    "The ring sends keys and values three times. Which sends fewer bytes with 16 kv heads, and which with 4?",
    {
        "['ring', 'ring']": "The ring both times",
        "['ulysses', 'ulysses']": "Ulysses both times",
        "['ulysses', 'ring']": "Ulysses with 16 kv heads, the ring with 4",
        "['ring', 'ulysses']": "The ring with 16 kv heads, Ulysses with 4",
    },
    {
        "['ring', 'ring']": "With 16 kv heads, the ring sends 3 · 2 tensors as large as the queries. And Ulysses?",
        "['ulysses', 'ulysses']": "With 4 kv heads, keys and values shrink to a quarter. Queries and outputs do not.",
        "['ring', 'ulysses']": "Which of the two sends only keys and values?",
    },
)

gradient_bytes = Number(
    "13.gradient_bytes",
    "Four ranks train the same model on the same batch, once as d = 4 and once as c = 4. "
    "How many times as many bytes of gradients does each rank all-reduce with c = 4?",
    {
        0.25: "It has a quarter of the tokens. But how many of the weights?",
        0: "There is one replica, but each context rank has only what its own tokens add to a gradient.",
        4: "It works on four times as many sequences, but each weight still has one gradient a step.",
        16: "Neither the tokens nor the sequences of a rank change how large a gradient is.",
    },
)

positions_used = Choice(
    "13.positions_used",
    "32 tokens on 4 ranks. `tokens` is a buffer of `context_parallel`, the table of positions is not. Rank 1 has the "
    "tokens 4 to 7 and 24 to 27. Which positions does `table[: tokens.numel()]` give them?",
    {
        "[4, 5, 6, 7, 24, 25, 26, 27]": "4 to 7 and 24 to 27",
        "[8, 9, 10, 11, 12, 13, 14, 15]": "8 to 15",
        "[0, 1, 2, 3, 4, 5, 6, 7]": "0 to 7",
    },
    {
        "[4, 5, 6, 7, 24, 25, 26, 27]": "So it would be if the table had been cut, too.",
        "[8, 9, 10, 11, 12, 13, 14, 15]": "Nothing shifts the table: rank 1 takes its first rows, as all ranks do.",
    },
)
