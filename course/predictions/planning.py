"""The predictions of notebook 16, planning, in its order."""

from course.predict import Choice, Number, Order

most_memory = Order(
    "16.most_memory",
    "What takes the most memory on a GPU of the first stage? t · p = 16 divide the 70 billion parameters. A weight "
    "has 2 "
    "bytes, its states in the optimizer 12, which d · c = 4 ranks divide. 80 layers are 20 on a stage. Each keeps some "
    "0.3 GB for a sequence in flight, and there are at least 4. Put them in order, the most first.",
    ["weights", "activations", "optimizer"],
    {
        (
            "optimizer",
            "weights",
            "activations",
        ): "20 layers · 0.3 GB · 4 sequences make 24 GB. And 12 bytes over 4 are 3.",
        (
            "optimizer",
            "activations",
            "weights",
        ): "4 ranks divide the 12 bytes: 3 for each parameter. Activations take 24 GB or more.",
        ("activations", "weights", "optimizer"): "2 bytes of a weight against 12/4 of the optimizer.",
        (
            "weights",
            "optimizer",
            "activations",
        ): "70 billion over 16 are 4.4 billion: 9 GB of weights. And 20 · 0.3 · 4?",
    },
)

second_largest = Choice(
    "16.second_largest",
    "Most of this step is matrix products. Which part is the next largest? t = 4 ranks of a node send four times in "
    "each layer, and a fourth of that hides; there are 64 micro-batches on 4 stages with 5 chunks; and gradients are "
    "sent once a step, behind the last backward.",
    {
        "memory_bound": "Kernels that only move memory: norms, SwiGLU, residuals",
        "bubble": "The bubble",
        "tensor_parallel": "Tensor-parallel messages",
        "data_parallel": "Gradient messages",
    },
    {
        "memory_bound": "They move more bytes, but the memory is eight times as fast as the links between the GPUs.",
        "bubble": "(p − 1)/(v m) is 3/320 of the work.",
        "data_parallel": "9 GB over a link of 50 GB/s are a fifth of a second, and something hides them.",
    },
)

left_out = Choice(
    "16.left_out",
    "The mean error of these 18 rows is 1.9 %, fitted to all of them. Now each run is predicted from runs of other "
    "models "
    "only. What happens to the mean error?",
    {
        "smaller": "It becomes smaller",
        "up to twice": "It becomes larger, up to twice as large",
        "more": "It becomes more than twice as large",
    },
    {
        "smaller": "Constants fitted to a row are the best for it. Without it they can only be worse, or as good.",
        "up to twice": "Three constants on 18 rows sound safe. But how many models are there, and how alike?",
    },
)

best_tensor_size = Choice(
    "16.best_tensor_size",
    "32 layers, batch of 32 sequences, one per micro-batch; 64 GPUs in nodes of 8. Which split is the fastest?",
    ["t = 2, p = 32", "t = 4, p = 16", "t = 8, p = 8", "t = 16, p = 4", "t = 32, p = 2"],
    {
        "t = 2, p = 32": "32 stages with 32 micro-batches: the bubble is nearly as long as the work.",
        "t = 4, p = 16": "idle / ideal is 15/32. What would make the pipeline shorter, and what would that cost?",
        "t = 16, p = 4": "A tensor group of 16 does not fit into a node, and its all-reduces leave it.",
        "t = 32, p = 2": "A tensor group of 32 is on 4 nodes, and sends twice in each layer each way.",
    },
)

times_the_hours = Number(
    "16.times_the_hours",
    "One model has 7 billion parameters, another one 70 billion. Each is trained on 20 tokens for each of its "
    "parameters, and GPUs are equally busy. How many times as many GPU hours does the larger one take?",
    {
        10: "That would be for the same tokens. How many tokens does the larger one get?",
        20: "That is how many tokens there are for each parameter, in both.",
        1: "The GPU hours are 6 T P / X: both T and P are larger.",
    },
    tolerance=0.01,
)

fewest_gpus = Choice(
    "16.fewest_gpus",
    "A trillion tokens for Llama 3's 70 billion parameters in 30 days: how many H100s are just enough? Nothing need be "
    "recomputed, so a token costs 6 FLOPs for each parameter, and a GPU achieves some 550 teraFLOP/s (attention "
    "included, which is a seventh more than the 6).",
    {"128": "128", "256": "256", "512": "512", "1024": "1024"},
    {
        "128": "6 T P / (n X) is about 70 days with 128 GPUs.",
        "256": "6 T P / (n X) is about 35 days with 256 GPUs, and attention comes on top.",
        "1024": "1024 GPUs need about 10 days. Could half of them do?",
    },
)

hours_between = Number(
    "16.hours_between",
    "2,048 nodes: 419 failures in 54 days. How many hours pass between two failures of a job on 128 of these nodes, "
    "1,024 "
    "GPUs?",
    {
        3.1: "That is for all 2,048 nodes. With a sixteenth of them failures are rarer.",
        0.19: "Fewer nodes fail less often, not more.",
        12.4: "A sixteenth of the nodes: a sixteenth of the failures, not a fourth.",
        6334: "That is a single node.",
    },
    unit="hours",
    tolerance=0.05,
)

too_often_or_seldom = Choice(
    "16.too_often_or_seldom",
    "Young's rule says some 19 minutes here. With which interval is more of the time left for new work: "
    "2 minutes, or 2 hours?",
    {
        "often": "2 hours: saving too often costs more",
        "seldom": "2 minutes: repeating too much work costs more",
        "same": "About as much with both, within 2 percentage points",
    },
    {
        "often": "Saves take a minute of every three. But how much does a failure repeat, with 2 hours between saves?",
        "seldom": "Each failure repeats a minute only. But what share of the time do the saves take, a minute each?",
    },
)

rsc_1 = Choice(
    "16.rsc_1",
    "How long did jobs of 1,024 GPUs run on that cluster, as Meta measured it?",
    {
        "shorter": "Less than half as long",
        "same": "About 29 hours, within a factor of two",
        "longer": "More than twice as long",
    },
    {
        "same": "Is a node that fails the only thing that ends a job?",
        "longer": "Nodes alone would end it after 28.8 hours. Can anything else make it longer?",
    },
)

copies_of_expert = Number(
    "16.copies_of_expert",
    "128 GPUs, p = 8, ep = 8, and expert_tp = 1. On how many ranks is each expert of a layer?",
    {
        8: "d is 8, the copies of every other weight. Experts are on the second grid: expert_tp · ep · expert_dp · "
        "p = n.",
        1: "8 ranks have one of the 8 experts each. A stage has 16 ranks.",
        16: "A stage has 16 ranks. 8 of them have different experts.",
        4: "d/t is not what counts: expert_tp is 1.",
    },
)

estimate_of_titan = Choice(
    "16.estimate_of_titan",
    "The constants for this H100 were fitted to NVIDIA's own runs, and attention's to long sequences of torchtitan. "
    "Will the estimate for this run be right?",
    {
        "right": "Yes, within 10 %",
        "slow": "No: it took less time than estimated",
        "fast": "No: it took more time than estimated",
    },
    {
        "right": "It is a different program, of 2024, and a different machine.",
        "slow": "NVIDIA's programs were tuned on NVIDIA's machine. This H100 has slower memory and less power.",
    },
)
