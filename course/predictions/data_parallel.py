"""The predictions of notebook 05, in its order."""

from course.predict import Choice, Number

equal_on_all = Choice(
    "05.equal_on_all",
    "Which are equal on all four ranks: the loss, the rank's own gradients, the averaged gradients?",
    {
        "['loss', 'averaged']": "The loss and the averaged gradients",
        "['averaged']": "Only the averaged gradients",
        "['own gradients', 'averaged']": "Both gradients, but not the loss",
        "['loss', 'own gradients', 'averaged']": "All three: the weights are the same",
    },
    {
        "['loss', 'averaged']": "Each rank computes the loss of its own 32 samples.",
        "['own gradients', 'averaged']": "Gradients come from the samples, too.",
        "['loss', 'own gradients', 'averaged']": "The weights are the same, but the samples are not.",
    },
)

error_left = Choice(
    "05.error_left",
    "Four ranks with averaged gradients, float64, five steps. "
    "How large is the error of their weights, compared with those of one process?",
    {
        "none": "Exactly zero",
        "rounding": "Not zero, but below 1e-10",
        "visible": "About 1e-3",
    },
    {
        "none": "The mean of four means is the mean. But the samples are added in a different order, and sums round.",
        "visible": "Nothing was approximated, and float64 has 16 digits.",
    },
)

ratio_undivided = Number(
    "05.ratio_undivided",
    "In the first fault, each of 4 ranks adds up the gradients of 8 mean losses, and the ranks' sums are added: which "
    "ratio does `Parity` show?",
    {
        128: "That counts samples. Each loss is already a mean over its 4 samples: what is added up are 8 · 4 means.",
        4: "Those are the ranks. But each rank's gradient is itself a sum, of 8 backward passes.",
        8: "Those are the backward passes on a rank. The all-reduce then adds up 4 ranks.",
        1: "That would be the mean. Is there a division anywhere after the losses?",
    },
    tolerance=0.01,
)

bytes_of_four = Number(
    "05.bytes_of_four",
    "Four micro-batches with `no_sync`, then one update. How many times as many bytes does a rank send as with one "
    "micro-batch?",
    {
        4: "That is one all-reduce for each micro-batch. Is any gradient needed before the last backward?",
        0.25: "A gradient is as large as its weight, however few samples it comes from.",
        0: "Without any collective, the replicas would become different models.",
    },
    tolerance=0.01,
)

ratio_if_kept = Number(
    "05.ratio_if_kept",
    "Three backward passes on the same samples, without `zero_grad`, and with the weights untouched. "
    "Which ratio does `Parity` then show for `.grad`?",
    {
        1: "That would be so with zero_grad, or if backward overwrote .grad.",
        12: "The four ranks average, so they add no factor.",
        6: "That is 1 + 2 + 3. Each pass adds one gradient.",
        4: "That is the number of ranks, and they average.",
    },
    tolerance=0.01,
)

different_samples = Number(
    "05.different_samples",
    "1024 samples. Each of 4 ranks shuffles them with a seed of its own, and reads the first 256. How many different "
    "samples are read, all ranks together? Estimate it to within a twentieth.",
    {
        1024: "Then no two ranks would choose the same sample. But none knows what the others choose.",
        256: "Then all would choose the same samples, as with one seed and no rank.",
        768: "A sample is missed by one rank with probability 3/4. By all four?",
        324: "That is how many nobody reads: (3/4)^4 of them.",
    },
    tolerance=0.05,
)

four_gpus = Choice(
    "05.four_gpus",
    "One GPU takes 16 samples a step. Four GPUs take 16 each, with the same learning rate, and see the same 8192 "
    "samples once. How is their test loss, compared with that of one GPU?",
    {
        "lower": "Lower: the gradients are means over more samples, so they are better",
        "same": "The same: they have seen the same samples",
        "higher": "Higher",
    },
    {
        "lower": "Each gradient is better. But how many steps are made with these, and how long is each?",
        "same": "They have. But 64 samples now make one step, of about the length that 16 made before.",
    },
)

which_rule = Choice(
    "05.which_rule",
    "Four GPUs take 64 samples a step instead of 16, and a quarter of the steps. Which learning rate, without warm-up, "
    "gives the lowest test loss here?",
    {
        "the same": "0.5, as before",
        "square root": "1.0: √4 times as large",
        "linear": "2.0: 4 times as large",
    },
    {
        "the same": "That is what you have just seen: a quarter of the steps, each as long as before.",
        "square root": "Then 4 steps become one that is twice as long. That leaves half of the way.",
    },
)

noise_later = Choice(
    "05.noise_later",
    "The gradient noise scale S / |G|² is measured at the start of training and at its end. How does it change?",
    {
        "falls": "It falls: a trained model is sure of itself, so its gradients have less noise",
        "other": "It stays about the same: it belongs to the data",
        "grows": "It grows",
    },
    {
        "falls": "S does fall. What happens to the gradient of all data, as the loss gets near its lowest point?",
        "other": "The samples stay as they are. But all gradients depend on the weights, too.",
    },
)

under_way = Number(
    "05.under_way",
    "Four layers, a bucket each, with overlap. How many of the four all-reduces are under way before the first layer's "
    "gradients exist?",
    {
        4: "The first layer's own bucket is not full by then.",
        0: "That is so without overlap.",
        1: "Backward reaches the first layer last.",
    },
)

same_weights = Choice(
    "05.same_weights",
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

bytes_of_zero = Number(
    "05.bytes_of_zero",
    "4 ranks, one step. How many times as many bytes does a rank send with ZeRO-1 as in plain data parallelism, which "
    "all-reduces the gradients?",
    {
        0.25: "A quarter is what a rank keeps. But its gradients matter to all shards, and it needs all weights.",
        0.5: "That is the reduce-scatter alone. Afterwards each rank has a quarter of the new weights.",
        1.5: "That is an all-reduce and the all-gather. Does a rank need the average of gradients outside its shard?",
        2: "Two collectives instead of one, but each sends half of what an all-reduce does.",
    },
    tolerance=0.01,
)

memory_of_zero = Number(
    "05.memory_of_zero",
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

samples_of_rank = Number(
    "05.samples_of_rank",
    "103 samples on 4 ranks, by a `DistributedSampler` with its defaults. How many samples does each rank read in "
    "an epoch?",
    {
        103: "That would be without a sampler: each rank reads all of it.",
        25: "That would be with `drop_last=True`: three samples are left out.",
        25.75: "There are no fractions of a sample.",
    },
)
