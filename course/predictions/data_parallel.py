"""The predictions of notebook 06, in its order."""

from course.predict import Choice, Number

equal_on_all = Choice(
    "06.equal_on_all",
    "Which are equal on all four ranks: the loss, the rank's own gradients, the averaged gradients?",
    {
        "['loss', 'averaged']": "The loss and the averaged gradients",
        "['averaged']": "Only the averaged gradients",
        "['own gradients', 'averaged']": "Both gradients, but not the loss",
        "['loss', 'own gradients', 'averaged']": "All three: the weights are the same",
    },
    {
        "['loss', 'averaged']": "Each rank computes the loss of its own 32 rows.",
        "['own gradients', 'averaged']": "Gradients come from the rows, too.",
        "['loss', 'own gradients', 'averaged']": "The weights are the same, but the rows are not.",
    },
)

error_left = Choice(
    "06.error_left",
    "Four ranks with averaged gradients, float64, five steps. "
    "How large is the error of their weights, compared with those of one process?",
    {
        "none": "Exactly zero",
        "rounding": "Not zero, but below 1e-10",
        "visible": "About 1e-3",
    },
    {
        "none": "The mean of four means is the mean. But the rows are added in a different order, and sums round.",
        "visible": "Nothing was approximated, and float64 has 16 digits.",
    },
)

ratio_if_summed = Number(
    "06.ratio_if_summed",
    "In the first fault, with 4 ranks: which ratio does `Parity` show for the gradients?",
    {
        1: "That would be the mean.",
        0.25: "That is the factor that was forgotten.",
        16: "Each rank's gradient is already a mean over its rows. Only the mean over the ranks is missing.",
    },
    tolerance=0.01,
)

bytes_of_four = Number(
    "06.bytes_of_four",
    "Four micro-batches, then one update. How many times as many bytes must a rank send as with one micro-batch?",
    {
        4: "That is one all-reduce for each micro-batch. Is any gradient needed before the last backward?",
        0.25: "A gradient is as large as its weight, however few rows it comes from.",
        0: "Without any message, the replicas would become different models.",
    },
    tolerance=0.01,
)

ratio_if_kept = Number(
    "06.ratio_if_kept",
    "Three backward passes on the same rows, without `zero_grad`, and with the weights untouched. "
    "Which ratio does `Parity` then show for `.grad`?",
    {
        1: "That would be so with zero_grad, or if backward overwrote .grad.",
        12: "The four ranks average, so they add no factor.",
        6: "That is 1 + 2 + 3. Each pass adds one gradient.",
        4: "That is the number of ranks, and they average.",
    },
    tolerance=0.01,
)

under_way = Number(
    "06.under_way",
    "Four layers, a bucket each, with overlap. How many of the four messages are under way before the first layer's "
    "gradients exist?",
    {
        4: "The first layer's own bucket is not full by then.",
        0: "That is so without overlap.",
        1: "Backward reaches the first layer last.",
    },
)

divided_states = Number(
    "06.divided_states",
    "4.2 million parameters, two float32 numbers for each: 33.6 MB of states. "
    "With ZeRO-1 and d = 4, how many MB of states are on a rank?",
    {
        33.6: "That is without ZeRO-1.",
        16.8: "That is with d = 2.",
        4.2: "That is one of the two numbers, or one rank of eight.",
        134.4: "A rank keeps less than before, not more.",
    },
    unit="MB",
    tolerance=0.02,
)

same_weights = Choice(
    "06.same_weights",
    "Two steps of Adam, once undivided and once divided over 4 ranks. Do the weights agree?",
    {
        "False": "Yes, but for rounding",
        "different": "No: each rank has averaged only a part of the gradients",
        "True": "Yes, bit by bit",
    },
    {
        "False": "A different order of additions rounds differently. What does Adam add up over several parameters?",
        "different": "The gradients were averaged before the optimizer's step, on every rank.",
    },
)

memory_of_zero = Number(
    "06.memory_of_zero",
    "7.5 billion parameters on 64 GPUs: 16 bytes for each are 120 GB on every GPU. "
    "How many GB with ZeRO-1? Estimate it to within a tenth.",
    {
        1.875: "That divides all 16 bytes by 64. Every rank still has all weights and gradients.",
        15: "Those are the weights. The gradients are whole on every rank, too.",
        90: "Those are Adam's 12 bytes.",
        60: "That is half. Which of the 16 bytes does ZeRO-1 divide?",
    },
    unit="GB",
    tolerance=0.1,
)
