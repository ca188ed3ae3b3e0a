"""The predictions of notebook 09, in its order."""

from course.predict import Choice, Number

own_seeds = Choice(
    "09.own_seeds",
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
    "09.memory_left",
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
    "09.times_as_long",
    "A backward pass costs about as much as two forward passes. "
    "How long does a step with recomputation take, compared with one without?",
    {
        "1": "Just as long",
        "1.6": "Up to 1.6 times as long",
        "2.4": "About twice as long",
        "inf": "Three times as long, or more",
    },
    {
        "2.4": "For that, backward would have to be done twice, too.",
        "inf": "A step was forward and backward. How many forward passes are added?",
    },
)
