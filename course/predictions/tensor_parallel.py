"""The predictions of notebook 06, in its order."""

from course.predict import Choice, Number

a_quarter = Choice(
    "06.a_quarter",
    "With t = 4 instead of 1, which of these fall to a quarter on each rank: the numbers in its weights, "
    "its multiplications in forward, the numbers in the inputs of its layers?",
    {
        "['weights']": "Only the weights",
        "['weights', 'multiplications']": "The weights and the multiplications",
        "['weights', 'inputs']": "The weights and the inputs",
        "['weights', 'inputs', 'multiplications']": "All three",
    },
    {
        "['weights']": "Each rank multiplies the same x with fewer columns. How many products is that?",
        "['weights', 'inputs']": "What did the all-gather after the layer before it make of its columns?",
        "['weights', 'inputs', 'multiplications']": "A rank's columns need the whole x: what is cut is the output.",
    },
)

plain_backward = Choice(
    "06.plain_backward",
    "Just call `loss.backward()` on the output of `gather_forward`. What happens?",
    {
        "right": "Every rank gets the right gradients of its shards",
        "partial": "Gradients come out, but miss what the other ranks' columns add",
        "RuntimeError": "An error is raised",
    },
    {
        "right": "For that, autograd would have to know where the gathered numbers came from.",
        "partial": "`dist.all_gather` filled tensors that `torch.empty_like` made. What does autograd know of those?",
    },
)

too_large = Number(
    "06.too_large",
    "Four ranks, four layers, and the same loss on each rank. By which factor are the gradients of the first layer's "
    "weights too large?",
    {
        1: "Then no sum would be too many. Four ranks send a rank the gradient of its columns, of equal losses.",
        256: "That is one factor of 4 for each layer. But t ranks have t losses, however deep the network is.",
        16: "Count losses: four ranks add theirs. What would a second factor of 4 count?",
        0.25: "A sum of four gradients is larger, not smaller.",
    },
    tolerance=0.01,
)

num_messages = Number(
    "06.num_messages",
    "How many collectives do the four layers run, forward and backward together? "
    "The input of the first layer is data and needs no gradient.",
    {
        8: "One for each layer each way. But nobody needs the gradient of the first layer's input.",
        4: "Those are forward's. What does `copy_to_tp` do in backward?",
        3: "Those are backward's. Forward gathers, too.",
    },
)

num_pair_messages = Number(
    "06.num_pair_messages",
    "How many collectives do the two pairs run, forward and backward together?",
    {
        4: "One for each pair each way. But the first pair's input is data.",
        7: "That is the gathered design, with collectives between all layers.",
        2: "Those are forward's. Backward must add up the gradient of a pair's input.",
    },
)

link_share = Number(
    "06.link_share",
    "4 layers, 4 ranks. In each design, leave out the backward collective of the first layer, whose input needs no "
    "gradient. How many bytes does column-row put on a link, as a percentage of the gathered design with "
    "reduce-scatters?",
    {
        100: "That is right in the middle of a deep network. Now subtract what the first layer saves, in each design.",
        60: "That is the share of the first version, whose backward runs all-reduces.",
        42.9: "That is 3 of 7 collectives. But an all-gather puts half as much on a link as an all-reduce.",
        116.7: "That is the gathered design, as a percentage of column-row.",
    },
    unit="%",
    tolerance=0.02,
)

different_columns = Number(
    "06.different_columns",
    "All four ranks have the same seed, and each draws its own shard, a quarter of 1024 columns. "
    "How many different columns does a layer have?",
    {
        1024: "The same seed gives the same random numbers, on every rank.",
        4: "That is the number of ranks. Within a shard, all columns are different.",
        1: "Within a shard, the generator goes on from column to column.",
    },
)

same_gradient = Choice(
    "06.same_gradient",
    "A column-row pair is drawn with the same seed on all ranks, so their shards are copies. "
    "Which shards get the same gradient on all ranks?",
    {
        "[]": "None",
        "['column']": "Only those of the column layer",
        "['row']": "Only those of the row layer",
        "['column', 'row']": "Both",
    },
    {
        "[]": "The ranks have the same x, the same shards and the same loss. What could differ?",
        "['column']": "The gradient of the row layer comes from its input and from y. Do they differ between ranks?",
        "['row']": "The gradient of the column layer comes through the row layer. Does that differ between ranks?",
    },
)

not_gathered = Choice(
    "06.not_gathered",
    "That line gathers x once, before attention; without it each rank has 4 of the 16 tokens. What happens?",
    {
        "RuntimeError": "An error: shapes do not fit",
        "wrong": "Other losses, and no error: each rank attends to its own tokens",
        "right": "The same losses: x is gathered all the same",
    },
    {
        "RuntimeError": "What `SequenceParallel` hands on is not a plain tensor. What does it know of its shape?",
        "wrong": "What `SequenceParallel` hands on is not a plain tensor. Does `q` take it as whole?",
    },
)
