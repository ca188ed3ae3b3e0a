"""The predictions of notebook 13, context parallel, in its order."""

from course.predict import Choice, Number

kept_of_long = Number(
    "13.kept_of_long",
    "The sequence grows from 8,192 tokens to 131,072, and the scores of attention are not kept. "
    "How many times as many bytes of activations does a GPU keep?",
    {
        256: "That would be so for the scores, one for each pair of tokens. They are computed again in backward.",
        1: "Every token has its own activations in every layer.",
        2: "Only what is s times something is kept. How many times 8,192 is 131,072?",
    },
    tolerance=0.02,
)

last_over_first = Number(
    "13.last_over_first",
    "c = 4, and each rank holds a quarter of the sequence, in order. A token sees itself and all tokens before it. "
    "Rank 3 computes how many times as many pairs of tokens as rank 0?",
    {
        1: "Each has as many tokens, but a late token sees more than an early one.",
        4: "Rank 3's tokens see four quarters at the end. How many does its average token see? And rank 0's?",
        3: "Count in halves of a block: rank 0 has one. And rank 3?",
        3.5: "That is rank 3's average token, in quarters of the sequence. And rank 0's?",
    },
    tolerance=0.02,
)

tokens_of_rank_1 = Choice(
    "13.tokens_of_rank_1",
    "32 tokens, numbered from 0, on 4 ranks, balanced. Which tokens does rank 1 hold?",
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
        100: "Then the balanced cut would gain nothing.",
        57.1: "That is c = 4.",
        50: "That is for very many ranks. Rank 7 has 15 halves of a block. What is the average?",
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

loss_of_ranks = Choice(
    "13.loss_of_ranks",
    "The same model and the same batch: in one process, with the sequence on 4 ranks, and with t = 2 and c = 2. "
    "How far apart are the losses after 5 steps, in float64?",
    {"same": "Equal to ten digits", "close": "Close, but not to ten digits", "apart": "Clearly apart"},
    {
        "close": "Merging blocks is not an approximation. What else would differ?",
        "apart": "Each rank sees only its tokens, but attention sees all. And the losses are added up.",
    },
)
