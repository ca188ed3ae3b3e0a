"""The predictions of notebook 07, in its order."""

from course.predict import Choice, Number

sent_forward = Choice(
    "07.sent_forward",
    "Numbers have 8 bytes here (float64). What does rank 0 send in the forward pass?",
    {
        "(1, 1048576)": "1 message of 128 × 1024 numbers",
        "(4, 262144)": "4 messages of 32 × 1024 numbers",
        "(4, 1048576)": "4 messages of 128 × 1024 numbers",
        "(4, 8388608)": "4 messages of 1024 × 1024 numbers",
    },
    {
        "(1, 1048576)": "Then rank 1 would wait until rank 0 has done the whole batch.",
        "(4, 1048576)": "That is the whole batch, four times.",
        "(4, 8388608)": "Those are the weights of a layer. What does the next stage need of this one?",
    },
)

gradient_of_input = Choice(
    "07.gradient_of_input",
    "What would rank 1 find in `x.grad` if it had not called `x.requires_grad_()`?",
    {"right": "The gradient that rank 0 waits for", "zeros": "Zeros", "None": "Nothing: it is None"},
    {
        "right": "Autograd goes back to the parameters. Who told it that x needs a gradient, too?",
        "zeros": "Zeros would be a gradient that was computed.",
    },
)

makespan = Number(
    "07.makespan",
    "2 ranks, 4 micro-batches, GPipe. A forward takes 1 and a backward 2 time units. How long does the step take?",
    {
        12: "That is how long each rank works. "
        "Rank 1 also waits for its first input, and rank 0 for its first gradient.",
        24: "That is one rank after the other, as if nothing were done at the same time.",
        13: "That is when rank 1 is done. Rank 0 still has its last backward.",
    },
    unit="time units",
)

larger_makespan = Number(
    "07.larger_makespan",
    "What is the makespan with 4 ranks and 8 micro-batches, with the same times of 1 and 2?",
    {
        30: "Twice as much of both does not double the makespan: the formula has m + p − 1.",
        24: "That is the work of one rank. Where is the bubble?",
        36: "That has m + p. The first rank does not wait for itself.",
    },
    unit="time units",
)

one_f_one_b_holds = Choice(
    "07.one_f_one_b_holds",
    "4 ranks, 8 micro-batches. How long does 1F1B take, compared with GPipe, "
    "and how many micro-batches does rank 0 hold at most?",
    {
        "(True, 4)": "Less time, and rank 0 holds 4",
        "(False, 4)": "The same time, and rank 0 holds 4",
        "(True, 1)": "Less time, and rank 0 holds 1",
        "(False, 8)": "The same time, and rank 0 holds 8",
    },
    {
        "(True, 4)": "The first input still takes p − 1 steps down, and the last gradient p − 1 steps up.",
        "(True, 1)": "The last rank holds 1. Rank 0 goes on while its first micro-batch is on its way.",
        "(False, 8)": "That is GPipe. In 1F1B, rank 0 lets go of F0 as soon as its gradient has come back.",
    },
)

idle_with_chunks = Number(
    "07.idle_with_chunks",
    "4 ranks and 8 micro-batches: idle / ideal is 3/8 = 0.375 with v = 1. What is it with v = 2?",
    {
        0.375: "The last rank still starts p − 1 steps late, but how long is a step now?",
        0.75: "There are more messages, but each step from rank to rank takes less time.",
        0.09375: "That is a quarter. A chunk has half of the rank's layers.",
    },
    tolerance=0.01,
)

idle_of_last = Number(
    "07.idle_of_last",
    "4 ranks, 8 micro-batches; F, B and W take 1 time unit each. In 1F1B, rank 3 waits for 9 time units: 3 for its "
    "first input, and 6 at the end, while the last gradient goes up to rank 0. If W may be put off, how long must it "
    "still wait?",
    {
        9: "That is 1F1B. What could rank 3 do while the other ranks do their last B?",
        0: "A W can fill a gap only after a B. What could rank 3 do before its first input has come?",
        6: "At the end the other ranks' Bs take 3 now, not 6. But rank 3 may have Ws left to do meanwhile.",
        4.5: "Not every gap gets half as long. In which of the two gaps does rank 3 have a W to do?",
    },
    unit="time units",
)

most_at_work = Number(
    "07.most_at_work",
    "8 ranks, 3 micro-batches. How many ranks work at the same time, at most?",
    {
        8: "A rank needs a micro-batch to work on.",
        1: "When the first micro-batch has left a rank, the next one can come.",
        0: "There may be fewer micro-batches than ranks: nothing in the order forbids it.",
    },
)

added_by_messages = Choice(
    "07.added_by_messages",
    "p = 2, m = 8, forward 10 ms, backward 20 ms: 270 ms. Now each message takes 5 ms, "
    "and neither rank has to stop while it travels. What does that add to GPipe, and to 1F1B?",
    {
        "[0, 0]": "Nothing to either",
        "[10, 10]": "10 ms to each",
        "[10, 40]": "10 ms to GPipe, 40 ms to 1F1B",
        "[80, 10]": "80 ms to GPipe, 10 ms to 1F1B",
    },
    {
        "[0, 0]": "The first message each way cannot be hidden: rank 1 has nothing to do before it comes.",
        "[10, 10]": "In 1F1B, rank 0 needs B0 from rank 1 before its next forward. Does it need anything in GPipe?",
        "[80, 10]": "GPipe sends 8 messages one way, and no rank waits for an answer. Does each of them cost time?",
    },
)

too_long_when_clipped = Number(
    "07.too_long_when_clipped",
    "m = 8, nobody divides, and gradients are clipped to a norm of 1. In a step whose right gradient has a norm of "
    "0.25, how many times too long is the step of plain SGD?",
    {
        8: "That is without clipping. How long is a gradient of norm 2 after it?",
        1: "So it is where clipping shortens both. But the right gradient is below the limit.",
        2: "That is the norm before it is clipped. How long is the step after, and how long should it be?",
        0.5: "Clipping halves the gradient of norm 2. Compare what is left of it with the right one.",
        0.125: "The gradient is too large, not too small: backward adds up eight of them.",
    },
)

alone_or_in_stages = Choice(
    "07.alone_or_in_stages",
    "We train the same model on one process, without any pipeline. How will its losses differ from those of 4 stages?",
    {
        "0.001": "In the last digits only: sums are rounded differently",
        "0.1": "Visibly, and more from step to step: AdamW sees only a part of the model on each rank",
        "inf": "From the start: each stage draws its own weights",
    },
    {
        "0.1": "AdamW treats each number on its own: it needs nothing from other stages.",
        "inf": "Weights are drawn by their names. So which weights does a stage begin with?",
    },
)

loss_in_a_v = Choice(
    "07.loss_in_a_v",
    "4 ranks, 8 stages: down the ranks, and up again. Which rank has the last stage, and computes the loss?",
    {0: "Rank 0", 1: "Rank 1", 3: "Rank 3"},
    {
        3: "Rank 3 is where the V turns: it has stages 3 and 4. Where does it lead from there?",
        1: "Go up once more: stage 5 is on rank 2, and stage 6 on rank 1.",
    },
)

held_where_it_turns = Number(
    "07.held_where_it_turns",
    "A micro-batch goes through the V alone; a forward pass takes 1 time unit, a backward pass 2. Stage 0 holds its "
    "activations from the start of its forward to the end of its backward, 24 time units. For how long does rank 3 "
    "hold those of its two stages, together?",
    {
        18: "That would be stages 3 and 7, as in turn. Which are the stages of rank 3 in the V?",
        15: "That is stage 3 alone. Stage 4 is on rank 3, too.",
        12: "That is stage 4 alone. Stage 3 is on rank 3, too.",
        13.5: "That is the mean of its two stages. Add them up.",
        6: "Rank 3 has the loss in a pipeline in turn. Here stages 5 to 7 come before its first backward.",
    },
    unit="time units",
)

two_steps = Number(
    "07.two_steps",
    "`step` is called twice on the same batch, with m = 4, and nobody clears `.grad` in between. How many times the "
    "gradient of one step does it hold then?",
    {
        2: "That is the right sum. But the second step divides `.grad`: what is in it by then?",
        1: "Then the two would have been averaged. Each step divides by m, not by the number of steps.",
        0.5: "Nothing is divided by 8. What do the second step's four backwards add to, and what is then divided?",
        0.25: "That is what is left of the first step's gradient. The second step adds its own.",
    },
)
