"""The predictions of notebook 08, in its order."""

from course.predict import Choice, Number

qkv_shape = Choice(
    "08.qkv_shape",
    "Hidden size 64, 4 heads, t = 4. The fused Q-K-V weight is [192, 64] as a whole. What does one rank store?",
    ["[192, 16]", "[48, 64]", "[48, 16]", "[64, 64]"],
    {
        "[192, 16]": "That cuts its inputs, as in a row layer. Q-K-V is a column layer.",
        "[48, 16]": "That cuts both dims. Each head needs the whole input.",
        "[64, 64]": "That is one of Q, K and V, for all heads. A rank has one head of each.",
    },
)

num_all_reduces = Number(
    "08.num_all_reduces",
    "How many all-reduces of hidden states does the step make, forward and backward together? "
    "Look at the picture of a layer, and do not forget what stands before and after the layers.",
    {
        8: "Those are the two layers'. What else in the model is cut?",
        4: "That is one layer, or both layers one way.",
        5: "That is one way.",
        9: "One of the two ends is missing. Which layer stands after the last one, and what does it do in backward?",
    },
)

curves_apart = Choice(
    "08.curves_apart",
    "How far apart will the three curves be at most, in nats? They are trained in float32.",
    {"0.001": "Less than 0.001", "0.1": "Between 0.001 and 0.1", "inf": "More than 0.1"},
    {
        "0.1": "All three have the same weights and the same batches. What is left that differs?",
        "inf": "More ranks do not see more data here: each of them works on every batch.",
    },
)
