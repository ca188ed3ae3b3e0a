"""The predictions of notebook 03, in its order."""

from course.predict import Choice, Number

part_of_a = Choice(
    "03.part_of_a",
    "in = 1024, out = 512, t = 2. What shape is a rank's part of A?",
    {
        "(512, 512)": "[512, 512]",
        "(512, 256)": "[512, 256]",
        "(1024, 256)": "[1024, 256]",
        "(1024, 512)": "[1024, 512]",
    },
    {
        "(512, 512)": "That is half of the rows. The next notebook cuts like that.",
        "(512, 256)": "That is cut both ways. A column of Y needs all of X, so a rank needs whole columns of A.",
        "(1024, 512)": "That is all of A.",
    },
)

stored_at_16 = Choice(
    "03.stored_at_16",
    "The same layer with t = 16. What shape is the weight that a rank stores?",
    {
        "(1024, 32)": "[1024, 32]",
        "(512, 64)": "[512, 64]",
        "(32, 1024)": "[32, 1024]",
        "(32, 64)": "[32, 64]",
    },
    {
        "(1024, 32)": "That is its part of A. How does PyTorch store A?",
        "(512, 64)": "That is a part of the rows of A. This layer is cut by its columns.",
        "(32, 64)": "Only one of the two dims is cut.",
    },
)

weight_of_rank_3 = Choice(
    "03.weight_of_rank_3",
    "in = 1024, out = 512. 4 ranks with t = 2, so two copies of the model. What shape is the weight stored on rank 3?",
    {
        "(128, 1024)": "[128, 1024]",
        "(256, 1024)": "[256, 1024]",
        "(512, 1024)": "[512, 1024]",
        "(256, 512)": "[256, 512]",
    },
    {
        "(128, 1024)": "That is cut by the number of all ranks.",
        "(512, 1024)": "Rank 3 shares a copy with rank 2.",
        "(256, 512)": "Data parallelism cuts the batch, not the weight.",
    },
)

rows_of_rank_1 = Choice(
    "03.rows_of_rank_1",
    "After `backward`, the whole layer has a weight gradient of shape [12, 8]. Which part of it does rank 1 of 2 have?",
    {
        "columns": "Columns 4 to 7",
        "terms": "All rows, each with half of the terms of its sum",
        "every second": "Rows 1, 3, 5, 7, 9 and 11",
        "[6, 7, 8, 9, 10, 11]": "Rows 6 to 11",
    },
    {
        "columns": "Columns of A are rows of what PyTorch stores.",
        "terms": "A row of the gradient needs all of X and one column of dY. Rank 1 has both, for its own columns.",
        "every second": "Each rank keeps a block of consecutive rows.",
    },
)

gradient_of_rank_1 = Number(
    "03.gradient_of_rank_1",
    "Rank 0 has the 2, rank 1 the 5. Each rank runs plain autograd, without communication in backward. "
    "What gradient of x does rank 1 get?",
    {
        7: "That is the true gradient. Does rank 1's autograd know that x was multiplied by 2 on rank 0?",
        3.5: "That is an average of the two. Nobody computes it without a message.",
        2: "That is what rank 0 gets.",
        10: "It multiplies x by 5 once.",
    },
)

copies_of_scale = Choice(
    "03.copies_of_scale",
    "Without `copy_to_tp`, what happens to the two copies of `scale` in three steps?",
    {
        "error": "The second step raises an error, because the copies differ",
        "same": "They stay equal, and move more slowly than they should",
        "apart": "They drift apart",
    },
    {
        "error": "Nobody compares them.",
        "same": "One rank's gradient has the factor 2 in it, the other's the factor 5.",
    },
)

without_gathering = Choice(
    "03.without_gathering",
    "With `gather_output=True` the group sends an all-gather of Y forward, and an all-reduce of dX, the gradient of X, "
    "backward. Which of the two is left with `gather_output=False`?",
    {
        "[]": "Neither",
        "['all_gather']": "The all-gather of Y",
        "['all_reduce']": "The all-reduce of dX",
        "['all_gather', 'all_reduce']": "Both",
    },
    {
        "[]": "X was still used by every rank.",
        "['all_gather']": "That is the one that gathers the shards.",
        "['all_gather', 'all_reduce']": "Nobody gathers the shards now.",
    },
)

returned_bias = Number(
    "03.returned_bias",
    "t = 2, out = 12, `gather_output=False`, `skip_bias_add=True`. How many numbers are in the returned bias?",
    {
        12: "That is the whole bias. But a rank's output has only its own columns.",
        0: "That is so without skip_bias_add: then the second value is None.",
        24: "That is both ranks' together, if each had all of it.",
    },
)

two_blocks = Choice(
    "03.two_blocks",
    "t = 2. The twelve rows are cut into two blocks. Which rows does rank 0 get?",
    {
        "Q0 Q1 K0 K1 V0 V1": "Q0 Q1 K0 K1 V0 V1",
        "Q0 Q1 Q2 Q3 K0 K1": "Q0 Q1 Q2 Q3 K0 K1",
        "Q0 Q2 K0 K2 V0 V2": "Q0 Q2 K0 K2 V0 V2",
    },
    {
        "Q0 Q1 K0 K1 V0 V1": "Attention needs that. But a block knows nothing of Q, K and V.",
        "Q0 Q2 K0 K2 V0 V2": "That is every second row. A block is consecutive rows.",
    },
)

times_smaller = Number(
    "03.times_smaller",
    "Weight 2 MiB, X 1 MiB, Y 0.5 MiB. From t = 1 to t = 8, how many times smaller does their sum on a rank become? "
    "A tenth more or less is near enough.",
    {
        8: "That is so for the weight and for Y. Which part of X does a rank need for its columns of Y?",
        2: "That is so if only the weight shrinks. Y is sharded by columns, too.",
        4: "That is so if X shrinks, and Y does not. Which of the two does every rank need whole?",
        1: "All three are whole on every rank only without tensor parallelism.",
    },
    tolerance=0.1,
)
