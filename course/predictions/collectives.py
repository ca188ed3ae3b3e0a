"""The predictions of notebook 02, in its order."""

from course.predict import Choice, Number

after_reduce = Choice(
    "02.after_reduce",
    "Four ranks reduce to rank 0. Rank r has `[r, r + 1, r + 2, r + 3]`. What does rank 0 have afterwards?",
    {
        "[6]": "[6], the sum of its own numbers",
        "[48]": "[48], the sum of all numbers",
        "[6.0, 10.0, 14.0, 18.0]": "[6, 10, 14, 18], a sum for each position",
        "[0, 1, 2, 3, 1, 2, 3, 4]": "16 numbers, one rank's after the other's",
    },
    {
        "[6]": "The sum is over the ranks, so numbers of all of them go into it.",
        "[48]": "Tensors are added element by element, as a + b does.",
        "[0, 1, 2, 3, 1, 2, 3, 4]": "That would be a gather. A reduce adds on the way.",
    },
)

gathered = Number(
    "02.gathered",
    "Four ranks with two numbers each do an all-gather. How many numbers does rank 3 have afterwards?",
    {
        2: "That is what it has before. It also gets the tensors of the others.",
        4: "That would be one number from each rank. Each gives its whole tensor.",
        6: "Those are the numbers of the other three. Its own are in the result, too.",
        32: "That is what the four ranks have together.",
    },
)

transposed = Choice(
    "02.transposed",
    "An all-to-all: rank r has `[10r, 10r + 1, 10r + 2, 10r + 3]`. What does rank 1 have afterwards?",
    {
        "kept": "[10, 11, 12, 13]",
        "[0.0, 10.0, 20.0, 30.0]": "[0, 10, 20, 30]",
        "[1.0, 11.0, 21.0, 31.0]": "[1, 11, 21, 31]",
        "added": "[60, 64, 68, 72]",
    },
    {
        "kept": "That is what it has before. It keeps only one of these and gives the others away.",
        "[0.0, 10.0, 20.0, 30.0]": "Those are the first pieces, counted from 0. They go to rank 0.",
        "added": "Nothing is added here.",
    },
)

from_the_left = Number(
    "02.from_the_left",
    "Rank r has `[r, r + 1, r + 2, r + 3]`, sends it to the next of the four ranks, and returns what arrived. "
    "What is the first number that rank 0 returns?",
    {
        0: "That is its own, which it sends away.",
        1: "That is rank 1's. Rank 0 sends to rank 1, but from whom does it receive?",
        6: "That is the sum of all four. Here nothing is added, and each rank receives once.",
    },
)

absent = Choice(
    "02.absent",
    "Rank 2 returns before the all-reduce. What happens to ranks 0, 1 and 3?",
    {
        "None": "They get the sum of their three tensors",
        "RankFailed": "Each fails at its call, with an error of its own",
        "Deadlock": "They wait for rank 2, and would wait for minutes",
    },
    {
        "None": "The group has four ranks, and a collective ends when all of them have called it.",
        "RankFailed": "To an all-reduce, a rank that will never come looks like one that is only slow.",
    },
)

complete_sums = Number(
    "02.complete_sums",
    "With 4 ranks, after step 4: how many of a rank's four numbers are complete sums?",
    {
        1: "That is so after step 3, when the adding is done.",
        4: "That is so at the end, after 6 steps.",
        0: "Three steps add. After them, each rank has a complete sum.",
        3: "Count the steps that copy, up to step 4.",
    },
)

sent_by_each = Number(
    "02.sent_by_each",
    "A tensor of 1.2 MB. How many MB does each of 3 ranks send in a ring all-reduce?",
    {
        0.8: "That is one of the two rounds.",
        2.4: "That is twice the tensor, the limit for very many ranks.",
        1.2: "That is so with 2 ranks.",
        4.8: "That is what all three ranks send together.",
    },
    unit="MB",
    tolerance=0.01,
)

up_and_down = Number(
    "02.up_and_down",
    "8 ranks. A ring takes 2 · (8 − 1) = 14 steps. How many does a tree take?",
    {
        3: "That is the way to rank 0. The sum also has to come back.",
        14: "That is how many messages the ranks of the tree send in all. Many travel at the same time.",
        4: "With 8 ranks: 4 send, then 2, then 1. And the way back?",
    },
)

thousand_times = Choice(
    "02.thousand_times",
    "A message of 1 MiB has 1,024 times the bytes of one of 1 KiB. On 2 ranks, with α near a millisecond and B near "
    "1 GB/s: how many times as long does its all-reduce take?",
    {"few": "Fewer than 100 times", "many": "About 1,024 times", "more": "More than 2,000 times"},
    {
        "many": "Only the second part of the model grows with the size. How large is it for 1 KiB?",
        "more": "The number of steps stays the same, and they are most of the time for 1 KiB.",
    },
)

next_node = Number(
    "02.next_node",
    "An H100 node has 8 GPUs with NVLink, and 8 NDR cards. How many times slower is the path to a GPU in the next node "
    "than the path to a neighbour?",
    {
        18: "Both numbers are for one way: 450 GB/s, and not the 900 of the data sheet.",
        72: "That would be so if all 8 GPUs had to share one card.",
        6: "That is an A100's NVLink. An H100 has a newer one.",
        7: "That compares PCIe, not InfiniBand.",
    },
    tolerance=0.05,
)

nearest = Choice(
    "02.nearest",
    "Through which of its GPUs does this machine best reach other machines?",
    ["GPU0", "GPU1", "GPU2", "GPU3"],
    {
        "GPU1": "Read the row of NIC0. From GPU 1, data crosses two host bridges.",
        "GPU2": "Read the row of NIC0. GPU 2 is at the other CPU socket.",
        "GPU3": "Read the row of NIC0. GPU 3 is at the other CPU socket.",
    },
)

local_rank = Number(
    "02.local_rank",
    "Two nodes with 2 ranks each. What is `LOCAL_RANK` for rank 3 of the four ranks?",
    {
        3: "That is its number among all ranks. Its node has GPUs 0 and 1.",
        2: "That would be so if node 0 had one rank. Which ranks are on node 1?",
        0: "Ranks 2 and 3 share a node. Which of them takes its GPU 0?",
    },
)
