"""The predictions of notebook 04, in its order."""

from course.predict import Choice, Number

parts_of_x_and_y = Choice(
    "04.parts_of_x_and_y",
    "X is [256, 1024], Y is [256, 512], t = 2. What shapes are a rank's part of X and the product that it computes?",
    {
        "[[256, 1024], [256, 256]]": "[256, 1024] and [256, 256]",
        "[[256, 512], [256, 256]]": "[256, 512] and [256, 256]",
        "[[256, 512], [256, 512]]": "[256, 512] and [256, 512]",
        "[[128, 1024], [128, 512]]": "[128, 1024] and [128, 512]",
    },
    {
        "[[256, 1024], [256, 256]]": "That is the column layer.",
        "[[256, 512], [256, 256]]": "A rank's rows of A are as long as before: 512.",
        "[[128, 1024], [128, 512]]": "That cuts the rows of X, as data parallelism does.",
    },
)

stored_at_16 = Choice(
    "04.stored_at_16",
    "in = 1024, out = 512, t = 16. PyTorch stores a weight as [out, in]. What shape is the weight stored on a rank?",
    {
        "(32, 1024)": "[32, 1024]",
        "(64, 512)": "[64, 512]",
        "(512, 64)": "[512, 64]",
        "(32, 64)": "[32, 64]",
    },
    {
        "(32, 1024)": "That is the column layer's.",
        "(64, 512)": "That is its part of A. PyTorch stores it transposed.",
        "(32, 64)": "Only one of the two dims is cut.",
    },
)

gradient_on_rank_0 = Choice(
    "04.gradient_on_rank_0",
    "Two ranks, x = [1, 2, 3, 4] on both. Each squares its slice; y is the sum of the squares over the ranks. "
    "What gradient of y.sum() with respect to x does rank 0 get?",
    {
        "half": "[2, 4, 0, 0]",
        "[2.0, 4.0, 6.0, 8.0]": "[2, 4, 6, 8]",
        "twice": "[4, 8, 12, 16]",
        "slice": "[2, 4]",
    },
    {
        "half": "That is what rank 0 knows by itself. Look at the backward of scatter_to_tp.",
        "twice": "The backward of reduce_from_tp is the identity, so nothing is counted twice.",
        "slice": "A gradient has the shape of its tensor, and x has four elements on each rank.",
    },
)

whole_gradients = Choice(
    "04.whole_gradients",
    "All of x goes into the layer on every rank. Which gradients does a rank then get whole?",
    {
        "['gradient of x', 'of the weight', 'of the bias']": "Those of x, of the weight and of the bias",
        "['gradient of x', 'of the bias']": "Those of x and of the bias",
        "['of the bias']": "That of the bias",
        "['of the weight']": "That of the weight",
    },
    {
        "['gradient of x', 'of the weight', 'of the bias']": "A gradient has the shape of its tensor. Which was cut?",
        "['of the bias']": "The layer takes its slice of x by scatter_to_tp. What does that do in backward?",
        "['of the weight']": "A gradient has the shape of its tensor, and the weight was sharded.",
    },
)

left_if_parallel = Choice(
    "04.left_if_parallel",
    "The layer sends an all-reduce of Y forward and an all-gather of the gradient of x backward. "
    "What is left with `input_is_parallel=True`?",
    {
        "[]": "Nothing",
        "['all_reduce']": "The all-reduce forward",
        "['all_gather']": "The all-gather backward",
        "['all_reduce', 'all_gather']": "Both",
    },
    {
        "[]": "The products are still partial.",
        "['all_gather']": "A rank that had only a slice of x needs the gradient of only that slice.",
        "['all_reduce', 'all_gather']": "The all-gather belongs to the slicing of x, which the layer skips now.",
    },
)

bias_before = Number(
    "04.bias_before",
    "8 ranks, x is zero, the bias is 1 everywhere. What is each element of Y if every rank adds the bias before the "
    "reduction?",
    {
        1: "That is the right result. How many ranks add 1 before the sum?",
        0: "The product is zero, but the bias is not.",
        0.125: "The reduction is a sum, not a mean.",
    },
)

fresh_bias = Choice(
    "04.fresh_bias",
    "A test with a new layer does not see this fault. So what is in the bias of a new layer?",
    {
        "random": "Small random numbers",
        "[1.0]": "Ones",
        "[0.0]": "Zeros",
    },
    {
        "random": "torch.nn.Linear starts like that. A test would see t times a random number.",
        "[1.0]": "A test would see t instead of 1.",
    },
)

backward_of_the_pair = Choice(
    "04.backward_of_the_pair",
    "X is [16, 64], GeLU(XA) is [16, 256], in float32. What does the pair send in its backward pass?",
    {
        "[]": "Nothing",
        "[('all_reduce', 4096)]": "One all-reduce of 4,096 bytes",
        "[('all_reduce', 16384)]": "One all-reduce of 16,384 bytes",
        "both": "An all-reduce of 16,384 bytes, then one of 4,096",
    },
    {
        "[]": "That is so for the row layer, if its input is parallel. And for the column layer?",
        "[('all_reduce', 16384)]": "The gradient of GeLU(XA) stays in slices. What did every rank use as a whole?",
        "both": "The gradient of GeLU(XA) stays in slices, as GeLU(XA) itself does.",
    },
)

collectives_if_gathered = Number(
    "04.collectives_if_gathered",
    "The same two layers, gathered in between. How many collectives, forward and backward together?",
    {
        2: "That is the pair with slices in between. Now Y is gathered at the end of the first layer.",
        3: "Each operator has a partner in the other direction.",
        6: "The row layer takes its slice of a whole tensor: that sends nothing forward.",
    },
)

sum_of_gelus = Choice(
    "04.sum_of_gelus",
    "GeLU(x) is x times a number between 0 and 1: close to 1 for large x, close to 0 for very negative x. "
    "Compare GeLU(1) + GeLU(−1) with GeLU(1 + −1).",
    {
        "equal": "Both are the same",
        "less": "The sum of the GeLUs is less",
        "greater": "The sum of the GeLUs is greater",
    },
    {
        "equal": "That would be so if GeLU were linear.",
        "less": "GeLU(0) is 0. Which counts more, GeLU(1) or GeLU(−1)?",
    },
)

backward_on_a_link = Number(
    "04.backward_on_a_link",
    "X was kept in slices, and backward needs all of it once more. How many times as many bytes does backward put on "
    "each link of a ring as without sequence parallelism? Leave the bias out.",
    {
        1: "That is forward: an all-gather and a reduce-scatter instead of an all-reduce. What does backward add?",
        2: "That would be a second all-reduce. Which of its halves joins the slices of X?",
        1.25: "That is forward and backward together.",
    },
    tolerance=0.02,
)

more_on_a_link = Number(
    "04.more_on_a_link",
    "A ring puts 2(t − 1)/t · tokens · out numbers on each link. From t = 2 to t = 8, by what factor does that grow?",
    {
        4: "That is by how much the weight on a rank shrinks.",
        7: "You compared t − 1. Divide each by t.",
        1: "2(t − 1)/t is 1 for t = 2. And for t = 8?",
        0.25: "That is the factor for the weight on a rank.",
    },
    tolerance=0.01,
)

overlapped = Number(
    "04.overlapped",
    "t = 4. A slice of X takes 2 ms to the next rank, and 3 ms to be multiplied. First gather, then multiply: "
    "3 · 2 + 4 · 3 = 18 ms. How long does it take to multiply each slice while the next one travels?",
    {
        18: "That is one after the other. Which slice can a rank multiply while the first one travels?",
        14: "That waits for the first slice to arrive. A rank has its own slice from the start.",
        9: "A rank multiplies all four slices, its own as well.",
        6: "That is how long the slices travel. Multiplying takes longer, and nothing hides that.",
        15: "Travelling and multiplying at the same time takes as long as the longer of the two.",
    },
    unit="ms",
)
