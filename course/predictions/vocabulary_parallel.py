"""The predictions of notebook 09, in its order."""

from course.predict import Between, Choice, Number

num_rows = Number(
    "09.num_rows",
    "A vocabulary of 10, t = 3. Every rank has a table of the same size. How many rows does it have?",
    {
        3: "3 · 3 = 9. Who has the tenth id?",
        Between(3, 4): "A rank has whole rows.",
        10: "That is the whole table.",
        12: "That is how many rows the three ranks have together.",
    },
)

gradients_of_rank_2 = Choice(
    "09.gradients_of_rank_2",
    "The loss depends on all logits. No token of the batch is on rank 2. From which of its two uses does the shard of "
    "rank 2 get a gradient that is not zero?",
    {
        "[]": "From neither",
        "['embedding']": "From the embedding",
        "['output']": "From the output layer",
        "['embedding', 'output']": "From both",
    },
    {
        "[]": "Which logits does rank 2 compute, and for which tokens?",
        "['embedding']": "In the embedding, rank 2 gave zeros, whatever is in its shard. Does the loss depend on it?",
        "['embedding', 'output']": "Both uses are of the same shard, but the embedding looked up none of its rows.",
    },
)

numbers_per_token = Choice(
    "09.numbers_per_token",
    "A vocabulary of 32,768 on 4 ranks, which may only add up and take maxima. "
    "How many scalars per token must each rank contribute?",
    {
        "none": "None",
        "few": "Fewer than 10",
        "slice": "8,192, its own logits",
        "all": "32,768, all logits",
    },
    {
        "none": "The sum runs over the whole vocabulary, and a rank has only its own logits.",
        "slice": "It can add up the exponentials of its own logits by itself.",
        "all": "It has only a quarter of them. And do the others need each one?",
    },
)

with_padding = Choice(
    "09.with_padding",
    "Two logits of padding, both 0, are added to the 10 real ones. What becomes of the loss?",
    {"smaller": "It becomes smaller", "same": "It stays the same", "larger": "It becomes larger"},
    {
        "same": "The logits are 0, and exp(0) is not.",
        "smaller": "The logit of the target stays what it was. What becomes of the sum of the exponentials?",
    },
)

flops_in_chunks = Number(
    "09.flops_in_chunks",
    "The loss in 8 chunks, with the logits of each computed again in backward. How many times as many FLOPs as before "
    "does the output layer take, forward and backward?",
    {
        2: "Only the product of the forward pass is done again. How many products has backward?",
        8: "Each chunk has an eighth of the tokens.",
        1: "Backward needs the logits, and they are gone.",
        1.5: "Backward has two products: one for the gradient of the input, and one for that of the weight.",
        1.125: "Every chunk is computed again, not one of the eight.",
    },
    tolerance=0.02,
)

still_tied = Choice(
    "09.still_tied",
    "The embedding and the output layer share one weight. Then `parallelize_module` cuts both, by rows of the weight. "
    "What becomes of the tie?",
    {
        "tied": "It holds: both layers share one DTensor",
        "apart": "It is gone: two weights, which differ after the first step",
        "error": "An error says that the weight is cut already",
    },
    {
        "tied": "`parallelize_module` replaces the parameters of one layer after the other. By what?",
        "error": "Each layer gets a parameter of its own, and nobody looks whether two were the same.",
    },
)
