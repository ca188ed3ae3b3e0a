"""The predictions of notebook 11, in its order."""

from course.predict import Choice, Number

own_seeds = Choice(
    "11.own_seeds",
    "Each of two ranks seeds torch with its own number, so all their dropout masks differ. "
    "What will differ between the ranks: their losses, or their gradients of the last norm, which both hold whole?",
    {
        "[]": "Neither",
        "['losses']": "Only the losses",
        "['gradients']": "Only the gradients",
        "['losses', 'gradients']": "Both",
    },
    {
        "[]": "Both ranks hold copies of the hidden states. Are they still copies after different masks?",
        "['losses']": "A rank has logits for only half of the letters. How does it get the loss of the others?",
        "['losses', 'gradients']": "The loss is made of sums over both ranks, so which of them can have its own?",
    },
)

memory_left = Number(
    "11.memory_left",
    "t goes from 1 to 4, without sequence parallelism. To what percentage does the memory of a layer fall? "
    "Use the column “here”, and only its terms with sbh.",
    {
        25: "For that, all of it would have to be cut.",
        18.75: "That is what is left of the cut part, 3 of 16. The rest stays.",
        75: "12 of 16 is the part that is cut. Divide it by t, and add the rest.",
    },
    unit="%",
    tolerance=0.03,
)

times_as_long = Choice(
    "11.times_as_long",
    "A backward pass costs about as many FLOPs as two forward passes. "
    "How many FLOPs does a step take if the whole layer is recomputed, compared with one without?",
    {
        "1": "Just as many",
        "1.3333333333333333": "More, up to 4/3",
        "1.5": "More than 4/3, up to 1.5 times",
        "inf": "More than 1.5 times",
    },
    {
        "1": "The layer's forward pass is computed again. Where would that be free?",
        "1.5": "A step was three forward passes long, backward counted as two. How many are added?",
        "inf": "For that, backward would have to be done twice, too.",
    },
)

pays_more = Choice(
    "11.pays_more",
    "What frees more memory for each FLOP that is added: to recompute attention, or the MLP? "
    "The attention scores are not kept in either case. The table of the formula says what is.",
    {"attention": "Attention, Q-K-V and output projection", "mlp": "The MLP"},
    {
        "attention": "Attention would, if its scores were kept. Here it keeps 4 sbh, and to get them again costs the "
        "product with [3h, h]. Count the same for the MLP.",
    },
)

kept_all_reduces = Choice(
    "11.kept_all_reduces",
    "The policy also keeps what all-reduces return, so that backward need not send them again. What happens?",
    {
        "unseen": "Nothing changes: a policy is not asked about messages",
        "right": "One all-reduce fewer, and the same gradients",
        "wrong": "One all-reduce fewer, and wrong gradients",
    },
    {
        "unseen": "An all-reduce is an operation like all others. The policy hears of it.",
        "right": "`dist.all_reduce(x)` changes x. In recomputation the call is left out, and the kept sum is handed "
        "back instead. Who takes it?",
    },
)
