"""The predictions of notebook 11, 3D parallel, in its order."""

from course.predict import Choice, Number, Order

rank_5 = Choice(
    "11.rank_5",
    "8 ranks, t = 2, p = 2: what is d? Of 4 layers (0 to 3) and 16 rows (0 to 15), what does rank 5 have?",
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

second_curve = Choice(
    "11.second_curve",
    "The cell trains twice with the same batch of 16 rows: in one process, then on 8 ranks. "
    "Where will the second curve lie?",
    {"below": "Below the first", "on": "On the first", "above": "Above the first"},
    {
        "below": "Two replicas share the 16 rows. How many does a step see in all?",
        "above": "What is cut is added up again, and all is in float64. What would be lost?",
    },
)

changed = Choice(
    "11.changed",
    "Which of the two will change the losses in the first ten digits: the zero-bubble schedule over 4 stages, "
    "or t = 4 with the sequence and the optimizer's states divided?",
    {
        "[]": "Neither",
        "['1 x 4 x 2']": "Zero bubble",
        "['4 x 1 x 2']": "The sequence and the states divided",
        "['1 x 4 x 2', '4 x 1 x 2']": "Both",
    },
    {
        "['1 x 4 x 2']": "Zero bubble computes the gradients of weights later, but before the optimizer's step.",
        "['4 x 1 x 2']": "Each rank updates its part of the weights, then all gather them. What would be different?",
        "['1 x 4 x 2', '4 x 1 x 2']": "Which gradient would get a different value, not only a different time or place?",
    },
)

a_quarter = Choice(
    "11.a_quarter",
    "t = 2, p = 2. Does each rank hold a quarter of the model's weights?",
    {"[-1]": "Less", "[0]": "Exactly a quarter", "[1]": "More", "[-1, 1]": "Some more, some less"},
    {
        "[-1]": "Then some weight would be on no rank.",
        "[0]": "Is every parameter of a layer cut? And who needs the embedding?",
        "[-1, 1]": "The stages are not alike. But both have something that is held twice.",
    },
)

most_bytes = Order(
    "11.most_bytes",
    "Which axis sends the most bytes in a step? 4 layers with 52,000 parameters, 16 rows of 16 tokens, hidden size 32: "
    "an activation is 8 rows of a replica, 4,096 numbers. Put them in order, the most first.",
    {"pp": "pipeline", "dp": "data", "tp": "tensor"},
    {
        ("dp", "tp", "pp"): "Gradients are sent once a step. How often does each layer send an activation?",
        ("dp", "pp", "tp"): "Each layer has 4 all-reduces of an activation on the tensor axis.",
        ("tp", "pp", "dp"): "Between two stages an activation goes once each way. A rank has 13,000 gradients or more.",
    },
)

first_step = Number(
    "11.first_step",
    "The run saves every two steps, and the plug is pulled after step 3. Which step is the first of the second run?",
    {
        4: "Step 3 was done, but who remembers it?",
        2: "That step was saved.",
        1: "There is a checkpoint.",
    },
)

loss_of_four = Choice(
    "11.loss_of_four",
    "4 ranks now, so d = 1, with the same batch. Which loss will the run print for the last step, "
    "compared with that of one process?",
    {"half": "Half of it", "same": "The same number", "worse": "A higher number: it sees half as many rows"},
    {
        "half": "A loss is a mean. It does not depend on who computes its terms.",
        "worse": "The batch has 16 rows in every layout. One replica takes all of them.",
    },
)
