"""The predictions of notebook 01, in its order."""

from course.predict import Choice, Number, Order

num_data_groups = Number(
    "01.num_data_groups",
    "16 GPUs, t = 2, p = 4. How many data groups are there?",
    {
        2: "That is d, the size of a data group. Every GPU is in one of them.",
        4: "That is n/p, the number of pipeline groups.",
        1: "With d = 2, a data group has only 2 of the 16 GPUs.",
        16: "That is the number of GPUs. A data group has d of them.",
    },
)

size_three = Choice(
    "01.size_three",
    "16 GPUs and p = 4. What happens with t = 3?",
    {
        "rounded": "d is rounded down to 1, and 4 GPUs stay idle",
        "changed": "t is changed to the nearest size that fits",
        "ValueError": "An error is raised",
    },
    {
        "rounded": "4 idle GPUs would be a quarter of the machine, and nobody would be told.",
        "changed": "The training would run on groups that nobody asked for.",
    },
)

same_weights_as_6 = Choice(
    "01.same_weights_as_6",
    "Which ranks hold the same weights as rank 6?",
    ["[2, 6, 10, 14]", "[6, 7]", "[4, 6]", "[4, 5, 6, 7]", "[2, 3, 6, 7, 10, 11, 14, 15]"],
    {
        "[2, 6, 10, 14]": "Those are the four stages of one copy: each holds different layers.",
        "[6, 7]": "They hold the same layers, but different shards of each.",
        "[4, 5, 6, 7]": "Those are all ranks of stage 1: two shards, each twice. Which two have the same shard?",
        "[2, 3, 6, 7, 10, 11, 14, 15]": "That is one copy of the model. No two of its ranks hold the same weights.",
    },
)

step_in_data_group = Number(
    "01.step_in_data_group",
    "The same 16 GPUs with t = 4 and p = 2. By how much do the two rank numbers of a data group differ?",
    {
        1: "Neighbouring ranks are in the same tensor group, until that is full.",
        2: "That was so with t = 2. How many ranks come before the next copy now?",
        8: "That is the step from stage to stage. First come all copies of a stage, which are t · d ranks.",
    },
)

crossing = Choice(
    "01.crossing",
    "t = 2, p = 4 again, and nodes of 8 GPUs. Which kinds of group cross from one node to the other?",
    {
        "['tp']": "Only tensor groups",
        "['dp']": "Only data groups",
        "['pp']": "Only pipeline groups",
        "['dp', 'pp']": "Data and pipeline groups",
    },
    {
        "['tp']": "Tensor ranks are neighbours: 0 and 1 are in the same node, and so is every other pair.",
        "['dp']": (
            "A data group stays within one stage, and a stage is 4 neighbouring ranks. Do they fit into a node?"
        ),
        "['dp', 'pp']": "The ranks of a data group are 2 apart, within one stage. Does a stage fit into a node?",
    },
)

averages_with = Choice(
    "01.averages_with",
    "16 GPUs, t = 2, p = 4. The stages are placed by `tp-pp-dp`, and the data groups are those of `tp-dp-pp`. "
    "With what kind of rank does rank 0 average its gradients?",
    {
        "['dp']": "One with the same layers, and different data",
        "['tp']": "One with the other shard of its layers",
        "['pp']": "One with the layers of the next stage",
        "error": "None: PyTorch raises an error",
    },
    {
        "['dp']": "That is so if both use one order. In tp-pp-dp, what begins when a tensor group is full?",
        "['tp']": "The tensor axis comes first in both orders, so no data group has two ranks of one tensor group.",
        "error": "To PyTorch, a group is a list of ranks. It sees a fault only if the shapes of the gradients differ.",
    },
)

tensor_over_data = Number(
    "01.tensor_over_data",
    "16 GPUs, t = 8, p = 1, d = 2. How many times as much does the tensor axis send as the data axis? "
    "Estimate it to within a quarter.",
    {
        1170: "That compares one group with one group. There are 2 tensor groups, but 8 data groups.",
        72: "Did you count only one all-reduce per layer?",
        42: "An all-reduce among 8 ranks sends 14 times its bytes, and one among 2 ranks twice its bytes.",
        8: "Did you count only one layer?",
        2: "That is one all-reduce of a layer. There are 4 in each of 36 layers.",
    },
    tolerance=0.25,
)

most_across_nodes = Order(
    "01.most_across_nodes",
    "Which of these layouts of 16 GPUs sends the most bytes across nodes? Put them in order, the most first.",
    {
        (8, 1, "tp-dp-pp"): "t = 8, p = 1, order tp-dp-pp",
        (8, 1, "dp-tp-pp"): "t = 8, p = 1, order dp-tp-pp",
        (2, 4, "tp-dp-pp"): "t = 2, p = 4, order tp-dp-pp",
        (16, 1, "tp-dp-pp"): "t = 16, p = 1, order tp-dp-pp",
    },
    {
        ((8, 1, "dp-tp-pp"), (16, 1, "tp-dp-pp"), (8, 1, "tp-dp-pp"), (2, 4, "tp-dp-pp")): (
            "In both of the first two, tensor groups cross nodes. With t = 16 one group reduces the whole batch."
        ),
        lambda words: words.index("t = 8, p = 1, order dp-tp-pp") > 1: (
            "With data ranks as neighbours, a tensor group of 8 is spread over both nodes."
        ),
        lambda words: words.index("t = 16, p = 1, order tp-dp-pp") > 1: (
            "A tensor group of 16 does not fit into a node of 8 GPUs."
        ),
    },
)

pipeline_sum = Number(
    "01.pipeline_sum",
    "8 ranks, t = 2, p = 2, in the default order `tp-dp-pp`. Which sum does rank 6 get from its pipeline group?",
    {
        13: "That is the sum from its tensor group, 6 and 7.",
        10: "That is 4 and 6: its data group. In tp-pp-dp it would be its pipeline group.",
        6: "That is what it puts in. The other rank of the group puts in its own number.",
        32: "That would be 2 + 6 + 10 + 14, with 16 ranks and p = 4.",
    },
)

num_calls = Number(
    "01.num_calls",
    "8 ranks, t = 2, p = 2, and each rank is in three groups. How many times does it call `new_group`?",
    {
        3: "Those are the groups that it is in. It must call for the others too.",
        4: "That is the number of groups of one kind. There are three kinds.",
        8: "That is the number of ranks. The calls are counted by groups, on each rank.",
        24: "That is 8 ranks times 3 groups, so each group is counted once for each of its 2 ranks.",
        96: "That is how often all ranks together call it.",
    },
)
