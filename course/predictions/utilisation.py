"""The predictions of notebook 12, in its order."""

from course.predict import Choice, Number

computing_share = Number(
    "12.computing_share",
    "8 stages, 1 micro-batch, and messages that take no time. For what percentage of the step does each rank compute?",
    {
        100: "Each stage waits for the one before.",
        50: "There are 8 stages, not 2.",
        87.5: "That is the share for which it waits while the 7 others compute.",
    },
    unit="%",
    tolerance=0.06,
)

sum_of_window = Number(
    "12.sum_of_window",
    "A window shows 8 numbers: for what share of the window each rank computes. "
    "What do they add up to, about, in percent?",
    {
        800: "For that, all 8 ranks would have to compute during the whole window.",
        12.5: "That is one rank's share of the whole step. How many ranks compute at one moment?",
        10: "That is the window's share of the step. Each number is a share of the window.",
    },
    unit="%",
    tolerance=0.15,
)

times_as_fast = Number(
    "12.times_as_fast",
    "With m micro-batches a step takes m + 7 slots, each 1/m of a rank's work. "
    "How many times as fast as m = 1 is m = 16, if messages take no time?",
    {
        16: "The slots are 16 times as short, but there are more of them.",
        8: "That is without any bubble. With m = 16, how many of the slots does a rank wait?",
        2.875: "There are 23/8 times as many slots. But each is a 16th as long.",
    },
    tolerance=0.03,
)

shorter_with_chunks = Number(
    "12.shorter_with_chunks",
    "8 stages, 16 micro-batches, messages that take no time: the bubble is 7/16 of the ideal time. With v = 2 it is "
    "half as long. By what percentage does the whole step shrink?",
    {
        50: "So does the bubble. But most of a step is work, and that stays.",
        21.875: "You compared 7/32 with the ideal time. With its bubble the step takes 23/16 of that.",
        17.9: "That is by how much 23/16 is above 39/32. By how much is 39/32 below 23/16?",
        30.4: "That would be without any bubble.",
        0: "1F1B alone saves no time. But here the bubble gets shorter.",
    },
    unit="%",
    tolerance=0.04,
)

two_pipelines = Number(
    "12.two_pipelines",
    "One pipeline of 8 stages has 16 micro-batches, and idle / ideal is 7/16. Now the same 16 sequences go through two "
    "pipelines of 4 stages, side by side, still one for each micro-batch. What is idle / ideal?",
    {
        0.1875: "3/16 would be right if each pipeline had all 16. The two share them.",
        0.4375: "Two things change: how many stages a micro-batch goes through, and how many micro-batches there are.",
        0.875: "7/8 has the micro-batches of one replica. And how many stages has its pipeline?",
        0.75: "There are two pipelines, but they do not wait for each other.",
    },
    tolerance=0.02,
)

attention_times = Number(
    "12.attention_times",
    "The products of this attention take 139 µs at an H100's peak. Its memory moves 3.35 TB/s. If 9.2 GB of scores "
    "travel, too, how many times as long does it take at least?",
    {
        1: "Moving 9.2 GB at 3.35 TB/s takes 2.7 ms, far longer than 139 µs.",
        0.05: "It takes longer, not shorter.",
        2.7: "2.7 are the milliseconds. How many times 139 µs is that?",
    },
    tolerance=0.06,
)

tokens_to_hide = Number(
    "12.tokens_to_hide",
    "An H100 computes 989 teraFLOP/s and sends 50 GB/s to other nodes. How many tokens must a replica have in a "
    "step so "
    "that backward takes as long as its gradients' all-reduce?",
    {
        4945: "4 bytes for each parameter against 4 FLOPs for each parameter and token: the two 4s cancel.",
        39560: "The reduce-scatter puts 2 bytes of each parameter on the link, the all-gather 2. That makes 4, not 8.",
        9890: "That counts 2 bytes for each parameter. A reduce-scatter and an all-gather make 4.",
        13187: "Backward alone is 4 FLOPs; forward's 2 are over before the first gradient is there.",
        12480: "That is right for an A100: 312 teraFLOP/s over 25 GB/s.",
    },
    tolerance=0.03,
)

largest_t = Choice(
    "12.largest_t",
    "Llama 3 70B: F = 28,672, and its MLP is a SwiGLU. On an H100, C = 989 teraFLOP/s, and W = 450 GB/s by NVLink. "
    "Up to which t does an MLP compute longer than it sends, if all t ranks are joined by NVLink?",
    {"2": "t = 2", "4": "t = 4", "8": "t = 8", "16": "t = 16", "32": "t = 32"},
    {
        "2": "That is so over the network, at 50 GB/s.",
        "4": "3/2 · F · W/C is 1.5 · 28,672 · 450e9/989e12. Is that nearer to 4 or to 16?",
        "8": "F · W/C alone is 13. That is right for two products, and a SwiGLU has three.",
        "32": "3/2 · F · W/C is 19.6: with t = 32 the messages take longer than the products.",
    },
)

message_events = Choice(
    "12.message_events",
    "4 ranks, 1F1B, 8 micro-batches: a rank waits for a quarter of the step. Its messages are small, and are posted "
    "ahead. What do the events of all its messages add up to?",
    {
        "0.2": "Less than a fifth of the step: they are small",
        "0.5": "About the quarter for which it waits",
        "inf": "More than half of the step",
    },
    {
        "0.2": "An event lasts as long as the message is under way. When does that begin, for a receive that is posted "
        "ahead?",
        "0.5": "That would be so if a message were posted when its data is there, and nothing were computed meanwhile.",
    },
)
