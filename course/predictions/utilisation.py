"""The predictions of notebook 12, in its order."""

from course.predict import Choice, Number, Order

computing_share = Number(
    "12.computing_share",
    "8 stages, 1 micro-batch, and messages that take no time. For what percentage of the step does each rank compute?",
    {
        100: "Each stage waits for the one before.",
        50: "There are 8 stages, not 2.",
        87.5: "That is the share for which it waits while the 7 others compute.",
    },
    unit="%",
    tolerance=0.06,
)

sum_of_window = Number(
    "12.sum_of_window",
    "A window shows 8 numbers: for what share of the window each rank computes. "
    "What do they add up to, about, in percent?",
    {
        800: "For that, all 8 ranks would have to compute during the whole window.",
        12.5: "That is one rank's share of the whole step. How many ranks compute at one moment?",
        10: "That is the window's share of the step. Each number is a share of the window.",
    },
    unit="%",
    tolerance=0.15,
)

times_as_fast = Number(
    "12.times_as_fast",
    "With m micro-batches a step takes m + 7 slots, each 1/m of a rank's work. "
    "How many times as fast as m = 1 is m = 16, if messages take no time?",
    {
        16: "The slots are 16 times as short, but there are more of them.",
        8: "That is without any bubble. With m = 16, how many of the slots does a rank wait?",
        2.875: "There are 23/8 times as many slots. But each is a 16th as long.",
    },
    tolerance=0.03,
)

shorter_with_chunks = Number(
    "12.shorter_with_chunks",
    "8 stages, 16 micro-batches, messages that take no time: the bubble is 7/16 of the ideal time. With v = 2 it is "
    "half as long. By how many percent does the whole step get shorter?",
    {
        50: "So does the bubble. But most of a step is work, and that stays.",
        21.875: "You compared 7/32 with the ideal time. With its bubble the step takes 23/16 of that.",
        17.9: "That is by how much 23/16 is above 39/32. By how much is 39/32 below 23/16?",
        30.4: "That would be without any bubble.",
        0: "1F1B alone saves no time. But here the bubble gets shorter.",
    },
    unit="%",
    tolerance=0.04,
)

instead_of_work = Choice(
    "12.instead_of_work",
    "With t = 8 and p = 1, what will be the larger part of the time in which a rank does not compute?",
    {
        "idle": "Idle: what it waits for has not been computed yet",
        "communication": "Communication: the data is on its way",
    },
    {"idle": "All 8 ranks have a part of every layer, and begin with it at the same time."},
)

most_memory = Order(
    "12.most_memory",
    "The naive plan with the three kinds of recomputation: which needs the most memory? "
    "A stage has 2 layers, and attention's scores take most of a layer's bytes. “Selective” never keeps them. "
    "“Full” keeps only each layer's input, and makes all of a layer again when backward comes to it, scores too. "
    "Put them in order, the most first.",
    ["selective", "none", "full"],
    {
        (
            "none",
            "selective",
            "full",
        ): "“Full” keeps the least. But add one whole layer, of all 16 sequences, at its peak.",
        ("full", "none", "selective"): "“Full” has one whole layer at its peak. “None” has both.",
    },
)

best_tensor_size = Choice(
    "12.best_tensor_size",
    "32 layers, batch of 32 sequences, one per micro-batch; 64 GPUs in nodes of 8. Which split is the fastest?",
    ["t = 2, p = 32", "t = 4, p = 16", "t = 8, p = 8", "t = 16, p = 4", "t = 32, p = 2"],
    {
        "t = 2, p = 32": "32 stages with 32 micro-batches: the bubble is nearly as long as the work.",
        "t = 4, p = 16": "idle / ideal is 15/32. What would make the pipeline shorter, and what would that cost?",
        "t = 16, p = 4": "A tensor group of 16 does not fit into a node, and its all-reduces leave it.",
        "t = 32, p = 2": "A tensor group of 32 is on 4 nodes, and sends twice in each layer each way.",
    },
)

times_as_many_days = Number(
    "12.times_as_many_days",
    "GPT-3: 300 billion tokens, 175 billion parameters, 1024 GPUs at 140 teraFLOP/s each. A larger run: 450 billion "
    "tokens, a trillion parameters, 3072 GPUs at 163. How many times as many days does it take? A quarter more or less "
    "is near enough.",
    {
        8.6: "That is how much more work it is. But there are three times as many GPUs.",
        25.7: "More GPUs make it shorter, not longer.",
        1.5: "That is the factor in tokens only. The model is larger, too.",
    },
    tolerance=0.25,
)

fewest_gpus = Choice(
    "12.fewest_gpus",
    "300 billion tokens for GPT-3's 175 billion parameters in 50 days: how many of these A100s are just enough? "
    "The attention alone is recomputed, so a token costs little more than 6 FLOPs for each parameter, "
    "and a GPU achieves some 150 teraFLOP/s.",
    {"256": "256", "512": "512", "1024": "1024"},
    {
        "256": "6 T P / (n X) is about 95 days with 256 GPUs.",
        "1024": "1024 GPUs need about 24 days. Could half of them do?",
    },
)
