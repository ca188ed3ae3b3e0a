"""The predictions of notebook 15, experts, in its order."""

from course.predict import Choice, Number

more_flops = Number(
    "15.more_flops",
    "A layer has E experts, MLPs of the same size, and k = 2 of them process each token. E grows from 8 to 64, for the "
    "same tokens. The layer has almost 8 times as many parameters. How many times as many FLOPs does it compute?",
    {
        8: "There are eight times as many experts. How many of them process a token?",
        4: "k stays the same: first 2 of 8 experts process a token, then 2 of 64.",
        0.125: "The share of experts that process a token falls. Their number does not.",
    },
    tolerance=0.03,
)

active_share = Choice(
    "15.active_share",
    "Mixtral 8x22B has 8 experts in each layer, in place of an MLP, and 2 of them process a token. "
    "What share of all parameters processes a token?",
    {"less": "Less than a quarter", "equal": "A quarter", "more": "More than a quarter"},
    {
        "equal": "That is right for the experts. What else does the model consist of?",
        "less": "Attention, norms and embeddings are not chosen: they process every token.",
    },
)

gradient_of_one = Choice(
    "15.gradient_of_one",
    "With k = 2, the two probabilities that are kept are divided by their sum. If the same is done with k = 1, "
    "how large is the gradient that the router's weight gets?",
    {
        "same": "About as large as with k = 2",
        "less": "About half as large, as there is one output instead of two",
        "none": "Zero",
    },
    {
        "same": "What is the one probability, after it is divided? And if its logit grows?",
        "less": "The output counts as much as before. But by how much does its weight change if its logit grows?",
    },
)

most_rows = Number(
    "15.most_rows",
    "16 words on 4 ranks, k = 2, and 2 experts on each rank. How many rows does one rank have to compute at most?",
    {
        8: "That is with even loads. What if all words choose alike?",
        16: "Each word makes two choices. Can both be experts of the same rank?",
        4: "Those are the words that a rank has. How many can be sent to it?",
        64: "A rank does not get a row from the same word more than twice.",
    },
)

ep_group = Choice(
    "15.ep_group",
    "16 GPUs with t = c = d = p = 2, and for the experts expert_tp = 1, ep = 4. "
    "Which group of ranks, including rank 0, together holds all experts of the first layer?",
    {
        "[0, 1, 2, 3]": "0, 1, 2, 3",
        "[0, 2, 4, 6]": "0, 2, 4, 6",
        "[0, 1, 4, 5]": "0, 1, 4, 5",
        "[0, 4, 8, 12]": "0, 4, 8, 12",
    },
    {
        "[0, 2, 4, 6]": "Those are the context and data ranks of tensor rank 0. With expert_tp = 1, is rank 1 a tensor "
        "rank of the same experts?",
        "[0, 1, 4, 5]": "Those are tensor and data ranks. In the second grid, ep comes right after expert_tp.",
        "[0, 4, 8, 12]": "Ranks 8 and 12 are in the second pipeline stage: they have different layers.",
    },
)

largest_ep = Number(
    "15.largest_ep",
    "The same 16 GPUs, t = c = d = p = 2, expert_tp = 1, and 64 experts in a layer. What is the largest ep that fits?",
    {
        2: "ep need not divide d. The second grid has all ranks of a stage to divide among its own axes.",
        4: "That is d · c. Tensor ranks may have different experts, too, as expert_tp is 1.",
        16: "Different stages have different layers, so the experts of a layer are on the ranks of one stage.",
        64: "There are only 16 ranks, in two stages.",
    },
)

more_ranks = Number(
    "15.more_ranks",
    "Each rank has the same number of tokens, and choices are even. ep grows from 2 to 8. "
    "How many times as many bytes does a rank send to other ranks?",
    {
        4: "There are four times as many ranks, but not four times as many rows. What share of its rows leaves a rank?",
        7: "A rank has seven times as many partners. But each of them gets fewer rows.",
        1: "The rows are as many as before. But some of them stay on the rank: a half, and then?",
        0.25: "That is how much less stays on the rank. How much does it send?",
    },
    tolerance=0.01,
)

leaves_node = Number(
    "15.leaves_node",
    "8 ranks in two nodes of 4, ep = 8, and choices are even. "
    "What percentage of the bytes that a rank sends to other ranks goes to the other node?",
    {
        50: "Half of its rows go to the other node. But not all rows are sent: one rank's share stays where it is.",
        87.5: "That is the share of its rows that leave the rank.",
        75: "How many other ranks are there, and how many of them are in the other node?",
    },
    unit="%",
    tolerance=0.01,
)

costs_most = Choice(
    "15.costs_most",
    "Each rank's micro-batch is about topics of its own. Experts could become good at topics. "
    "Which balancing hinders that most, and so ends at the highest training loss?",
    {
        "auxiliary loss": "The auxiliary loss, counted in each micro-batch",
        "global auxiliary loss": "The auxiliary loss, counted over all ranks",
        "bias": "The bias",
    },
    {
        "global auxiliary loss": "Over all ranks, all topics are there: an expert may have one, and loads are even.",
        "bias": "The bias is moved by counts over all ranks. Nothing asks each micro-batch for even loads.",
    },
)

dropped = Number(
    "15.dropped",
    "k = 1, 8 experts, 8 ranks, capacity factor 1. Each rank's tokens all choose one expert, and each rank's a "
    "different one. What percentage of the choices is dropped?",
    {
        0: "All experts have the same load, over all ranks. But a rank counts its own tokens only.",
        12.5: "That is what is kept: on each rank, its expert has room for an eighth of the rank's tokens.",
        50: "On each rank an expert has room for T k/E of its tokens, and here all of them choose the same one.",
        100: "Each rank keeps as many tokens as the expert that they chose has room for.",
    },
    unit="%",
    tolerance=0.005,
)

too_large = Number(
    "15.too_large",
    "8 ranks are 8 replicas (t = c = p = 1), and ep = 4: there are 2 copies of each expert. A framework averages an "
    "expert's gradient over the ranks that hold a copy, just as it averages every other gradient over the replicas. "
    "How many times too large is an expert's gradient?",
    {
        1: "An expert gets tokens from how many replicas, and the loss of all is the mean of how many?",
        2: "It is divided by 2, and should be divided by 8: how much is missing?",
        8: "It is divided by 2 already.",
        0.25: "It is divided by too little, so it is too large.",
    },
    tolerance=1e-6,
)
