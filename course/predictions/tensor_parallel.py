"""The predictions of notebook 07, in its order."""

from course.predict import Choice, Number

y_shape = Choice(
    "07.y_shape",
    "With t = 4, what is the shape of `y` in `gather_forward`, before the all-gather?",
    ["[128, 1024]", "[128, 256]", "[32, 1024]", "[32, 256]"],
    {
        "[128, 1024]": "That is x, after the all-gather. A rank has only some of the columns.",
        "[32, 1024]": "That would cut the rows of the batch, as data parallelism does.",
        "[32, 256]": "Only the columns of the weight are cut. Every rank has all rows of x.",
    },
)

plain_backward = Choice(
    "07.plain_backward",
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

num_messages = Number(
    "07.num_messages",
    "How many messages do the four layers send, forward and backward together? "
    "The input of the first layer is data and needs no gradient.",
    {
        8: "One for each layer each way. But nobody needs the gradient of the first layer's input.",
        4: "Those are forward's. What does `copy_to_tp` do in backward?",
        3: "Those are backward's. Forward gathers, too.",
    },
)

num_pair_messages = Number(
    "07.num_pair_messages",
    "How many messages do the two pairs send, forward and backward together?",
    {
        4: "One for each pair each way. But the first pair's input is data.",
        7: "That is the gathered design, with messages between all layers.",
        2: "Those are forward's. Backward must add up the gradient of a pair's input.",
    },
)

link_share = Number(
    "07.link_share",
    "4 layers, 4 ranks. In both designs, leave out the all-reduce for the first layer, which is not needed. "
    "What percentage of the gathered design's bytes does column-row put on a link?",
    {
        66.7: "That is 2/3, with a gradient for every layer's input. Subtract 2 from each design's total.",
        42.9: "That is 3 of 7 messages. But an all-gather puts half as much on a link as an all-reduce.",
    },
    unit="%",
    tolerance=0.02,
)

different_columns = Number(
    "07.different_columns",
    "All four ranks have the same seed, and each draws its own shard, a quarter of 1024 columns. "
    "How many different columns does a layer have?",
    {
        1024: "The same seed gives the same random numbers, on every rank.",
        4: "That is the number of ranks. Within a shard, all columns are different.",
        1: "Within a shard, the generator goes on from column to column.",
    },
)

same_gradient = Choice(
    "07.same_gradient",
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
