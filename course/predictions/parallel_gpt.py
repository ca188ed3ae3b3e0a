"""The predictions of notebook 10, in its order."""

from course.predict import Choice, Number

qkv_shape = Choice(
    "10.qkv_shape",
    "Hidden size 64, 4 heads, t = 4. The fused Q-K-V weight is [192, 64] as a whole. What does one rank store?",
    ["[192, 16]", "[48, 64]", "[48, 16]", "[64, 64]"],
    {
        "[192, 16]": "That cuts its inputs, as in a row layer. Q-K-V is a column layer.",
        "[48, 16]": "That cuts both dims. Each head needs the whole input.",
        "[64, 64]": "That is one of Q, K and V, for all heads. A rank has one head of each.",
    },
)

llama_qkv = Choice(
    "10.llama_qkv",
    "LLAMA has hidden size 64, 4 heads of queries and 2 heads of keys and values, each with 16 numbers per token. "
    "t = 2. What does one rank store of the fused Q-K-V weight?",
    ["[96, 64]", "[64, 64]", "[128, 64]", "[48, 64]"],
    {
        "[96, 64]": "That is half of 3 · 64 rows. Here K and V are narrower than Q.",
        "[128, 64]": "That is the whole weight.",
        "[48, 64]": "That is one head each of Q, K and V. How many heads of queries share them?",
    },
)

num_all_reduces = Number(
    "10.num_all_reduces",
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
    "10.curves_apart",
    "How far apart will the three curves be at most, in nats? They are trained in float32.",
    {"0.001": "Less than 0.001", "0.1": "Between 0.001 and 0.1", "inf": "More than 0.1"},
    {
        "0.1": "All three have the same weights and the same batches. What is left that differs?",
        "inf": "More ranks do not see more data here: each of them works on every batch.",
    },
)

words_written = Choice(
    "10.words_written",
    "After 150 steps the model writes four lines, letter by letter. How many of its words are words of the language?",
    {"0.1": "One in ten, or fewer", "0.5": "Up to a half", "0.99": "More than a half, but not all", "1": "All of them"},
    {
        "0.1": "The loss comes near the floor. How could it, if the model did not know the words?",
        "0.5": "Inside a word, the next letter is nearly certain. Look at how near the loss comes to the floor.",
        "1": "Letters are drawn, each by its probability: now and then one with a small probability.",
    },
)

near_float32 = Choice(
    "10.near_float32",
    "Which of the two runs with bfloat16 ends less than 0.01 nats from the loss of float32?",
    {
        "['bfloat16 with master weights', 'bfloat16 only']": "Both",
        "['bfloat16 with master weights']": "Only the one with master weights",
        "[]": "Neither",
    },
    {
        "['bfloat16 with master weights', 'bfloat16 only']": "A step of AdamW is about as large as the learning rate, "
        "0.0003. What is 1 + 0.0003 in bfloat16?",
        "[]": "Forward and backward are rounded in both runs. But does such an error always point the same way?",
    },
)

counted_heads = Choice(
    "10.counted_heads",
    "Attention divides its queries by `unflatten(-1, (4, -1))`: 4 heads, of whatever size is left. On one GPU that is "
    "right. What happens to the first loss with t = 2, where a rank has half of the numbers?",
    {
        "error": "There is none: an error says that 32 numbers are not 4 heads of 16",
        "same": "It is the same",
        "different": "It is different, and nothing is raised",
    },
    {
        "error": "Nothing here says 16. The size is what is left.",
        "same": "Which numbers does a softmax now compare, and by how many is a head divided?",
    },
)
