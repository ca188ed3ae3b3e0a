"""The predictions of notebook 14, fully sharded, in its order."""

from course.predict import Choice, Number

lower_stages = Choice(
    "14.lower_stages",
    "On 8 GPUs, stage 3 holds 18/8 = 2.25 bytes for each parameter on a GPU. "
    "With enough GPUs, which lower stages get down to that, too?",
    {"[]": "None of them", "[2]": "Only stage 2", "[1, 2]": "Stages 1 and 2", "[0, 1, 2]": "All of them"},
    {
        "[]": "What does stage 2 hold on very many GPUs? Only one of its three parts does not shrink.",
        "[1, 2]": "Stage 1 keeps weights and gradients whole. How many bytes are that, however large d is?",
        "[0, 1, 2]": "Stage 0 shards nothing: more GPUs are more copies, each as large.",
    },
)

units_whole = Number(
    "14.units_whole",
    "Four units on four ranks. While a unit computes, the next one is fetched. "
    "For how many units at most does a rank hold memory at the same time?",
    {
        4: "Each unit is freed once it has computed. Which are needed at the same time?",
        1: "Then the next unit would be fetched only after this one is done.",
        3: "One computes, and one is on its way. Which would be the third?",
    },
)

kept_weights = Number(
    "14.kept_weights",
    "Forward of all four layers is done, on samples that need no gradient. For backward, autograd has kept the inputs "
    "of all four. How many of their weights has it kept?",
    {
        4: "A weight is needed for the gradient of its layer's input. Does every layer's input need one?",
        0: "Backward through a linear layer computes grad @ weight, for the layers below.",
        1: "Which layers have a layer below them that needs a gradient?",
    },
)

forward_ms = Number(
    "14.forward_ms",
    "Four units, each computes for 20 ms, and its weights travel for 10 ms. The next unit travels while one computes. "
    "How long does forward take, in ms?",
    {
        120: "That is without prefetch: 4 times 20 + 10.",
        80: "The first unit's weights have nothing to travel beside.",
        40: "That is for the messages alone.",
        100: "You counted two waits. Which message but the first has to be waited for?",
    },
    unit="ms",
)

sent_ratio = Number(
    "14.sent_ratio",
    "Stage 3 gathers weights forward and backward, and reduce-scatters gradients. An all-reduce is a reduce-scatter "
    "and an all-gather. Stage 3 sends how many times as many numbers as plain data parallelism?",
    {
        3: "Three passes over the parameters. And how many has an all-reduce?",
        1: "That would be so if weights stayed whole from forward to backward.",
        2: "Count in passes around the ring: an all-reduce has two. And stage 3?",
    },
    tolerance=0.01,
)

sent_in_4 = Number(
    "14.sent_in_4",
    "Four micro-batches a step; stage 3 averages gradients in each of their backwards. It sends how many times as many "
    "numbers as plain data parallelism, which sends its gradients once a step?",
    {
        1.5: "That is for a single micro-batch. Which of the three collectives can wait for the last?",
        12: "Those are the passes around the ring. An all-reduce has two.",
        4.5: "That is with gradients sent only once. Here each backward sends them.",
        3: "You counted two passes for each micro-batch. Stage 3 has three.",
    },
    tolerance=0.01,
)

leaves_node = Choice(
    "14.leaves_node",
    "32 GPUs in nodes of 8, and the model is sharded over the 8 GPUs of each node. Which collectives leave a node?",
    {
        "['two gathers of weights']": "The gathers of weights",
        "['reduce-scatter of gradients']": "The reduce-scatters of gradients",
        "['all-reduce of gradient shards']": "The all-reduces of each GPU's shard of the gradients",
        "['reduce-scatter of gradients', 'all-reduce of gradient shards']": "All collectives of gradients",
    },
    {
        "['two gathers of weights']": "Where are the other shards of the weights?",
        "['reduce-scatter of gradients']": "It sums over one node, and gives each GPU the piece for its shard.",
        "['reduce-scatter of gradients', 'all-reduce of gradient shards']": "The first sum is over one node only.",
    },
)

next_step = Number(
    "14.next_step",
    "A checkpoint is written after every fifth step. Say that a node dies when 17 steps are done. "
    "Which step is the first one that the remaining node computes?",
    {
        18: "The weights after step 17 were in the memory of the ranks, which are gone. What is on the disk?",
        17: "The weights after step 16 are nowhere. What is on the disk?",
        15: "The checkpoint was written after step 15.",
        1: "There is a checkpoint.",
        20: "There is no checkpoint of step 20 yet.",
    },
)

only_the_model = Choice(
    "14.only_the_model",
    "`fully_shard` is called on the model alone, of four layers, on four ranks. How much of weights and gradients does "
    "a rank hold at most, in one step?",
    {"less": "Less than with DDP", "equal": "As much as with DDP", "more": "More than with DDP"},
    {
        "less": "The model is one unit. How much of a unit is gathered for forward, and when is its gradient sent?",
        "equal": "All weights and all gradients are whole before the first reduce-scatter. And what else does a rank "
        "keep?",
    },
)
