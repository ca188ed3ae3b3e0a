"""The predictions of notebook 08, 3D parallel, in its order."""

from course.predict import Choice, Number, Order

rank_5 = Choice(
    "08.rank_5",
    "8 ranks, t = 2, p = 2: what is d? Of 4 layers (0 to 3) and 16 samples (rows 0 to 15 of the batch), what does "
    "rank 5 have?",
    {
        "(0, 1, 1)": "Layers 0 and 1, the second half of each; rows 8 to 15",
        "(1, 0, 1)": "Layers 2 and 3, the first half of each; rows 8 to 15",
        "(1, 1, 0)": "Layers 2 and 3, the second half of each; rows 0 to 7",
        "(1, 1, 1)": "Layers 2 and 3, the second half of each; rows 8 to 15",
    },
    {
        "(0, 1, 1)": "That is rank 3. A stage has t · d = 4 ranks, so where does the second stage begin?",
        "(1, 0, 1)": "That is rank 6. The tensor axis is the fastest, so rank 5 is a neighbour of rank 4.",
        "(1, 1, 1)": "That is rank 7, the last of all.",
    },
)

micro_batches = Number(
    "08.micro_batches",
    "The cell trains twice with the same batch of 16 samples: in one process, then on 8 ranks. There, into "
    "how many micro-batches does each replica divide its share of a step?",
    {
        4: "That is 16 / 4, for one process. Two replicas share the 16 samples.",
        8: "Those are the samples of a replica. How many of them are in a micro-batch?",
        1: "Then a replica would have 4 samples. What is d?",
        16: "Those are all samples of the batch.",
    },
)

changed = Choice(
    "08.changed",
    "Which of the two will change the losses in the first ten digits: the zero-bubble schedule over 4 stages, "
    "or t = 4 with sequence parallelism and ZeRO-1?",
    {
        "[]": "Neither",
        "['1 x 4 x 2']": "Zero bubble",
        "['4 x 1 x 2']": "Sequence parallelism and ZeRO-1",
        "['1 x 4 x 2', '4 x 1 x 2']": "Both",
    },
    {
        "['1 x 4 x 2']": "Zero bubble computes the gradients of weights later, but before the optimizer's step.",
        "['4 x 1 x 2']": "Each rank updates its part of the weights, then all gather them. What would be different?",
        "['1 x 4 x 2', '4 x 1 x 2']": "Which gradient would get a different value, not only a different time or place?",
    },
)

a_quarter = Choice(
    "08.a_quarter",
    "t = 2, p = 2. Does each rank hold a quarter of the model's weights?",
    {"[-1]": "Less", "[0]": "Exactly a quarter", "[1]": "More", "[-1, 1]": "Some more, some less"},
    {
        "[-1]": "Then some weight would be on no rank.",
        "[0]": "Is every parameter of a layer cut? And who needs the embedding?",
        "[-1, 1]": "The stages are not alike. But both have something that is held twice.",
    },
)

most_bytes = Order(
    "08.most_bytes",
    "Along which axis do all ranks together send the most bytes in a step? 4 layers with 52,000 parameters, 16 samples "
    "of 16 tokens, hidden size 32: an activation is 8 samples of a replica, 4,096 numbers. In a group of two, a rank "
    "puts as many bytes on its link as an all-reduce's buffer has. Put the axes in order, the most first.",
    {"pp": "pipeline", "dp": "data", "tp": "tensor"},
    {
        ("dp", "tp", "pp"): "Gradients are sent once a step. How often does each layer send an activation?",
        ("dp", "pp", "tp"): "Each layer has 4 all-reduces of an activation on the tensor axis.",
        ("tp", "pp", "dp"): "Between two stages an activation goes once each way. A rank has 13,000 gradients or more.",
    },
)

first_step = Number(
    "08.first_step",
    "The run saves every two steps, and the plug is pulled after step 3. Which step is the first of the second run?",
    {
        4: "Step 3 was done, but who remembers it?",
        2: "That step was saved.",
        1: "There is a checkpoint.",
    },
)

doubled = Choice(
    "08.doubled",
    "4 ranks now instead of 8, with the same t, p and batch. What doubles on each rank?",
    {
        "['weights']": "The weights it holds",
        "['micro-batches']": "The micro-batches it computes in a step",
        "['weights', 'micro-batches']": "Both",
        "[]": "Neither",
    },
    {
        "['weights']": "t and p cut the weights, and they stay. Which of t, p and d is halved?",
        "['weights', 'micro-batches']": "d is halved, and does not cut weights: each replica has all of them.",
        "[]": "The batch stays as it is, and there is one replica instead of two.",
    },
)

micro_batches_of_gpt3 = Number(
    "08.micro_batches_of_gpt3",
    "How many micro-batches does each replica of this run take in a step?",
    {
        1536: "That is one replica's share if d were 1. How many replicas do 1024 GPUs make?",
        12: "That divides by the nodes. But a replica needs t · p = 128 GPUs, which are 16 nodes.",
        1.5: "That divides by all GPUs. The 128 GPUs of one replica share its micro-batches.",
        96: "That divides by the 16 stages. A micro-batch passes through all of them.",
    },
)

samples_of_405b = Number(
    "08.samples_of_405b",
    "512 GPUs, t = 8, local_batch_size 2. How many samples are in a step, all ranks together?",
    {
        1024: "That is 2 for each GPU. But the 8 ranks of a tensor group have the same samples.",
        16: "That is 2 · t. The tensor group shares samples; the data groups add them up.",
        2: "Those are one data-parallel rank's. How many of those are there?",
        64: "That is d. Each of these ranks has 2.",
    },
)
