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

data_group_of_6 = Choice(
    "01.data_group_of_6",
    "Take rank 6. In which stage is it, and which of these is its data group?",
    ["[2, 6, 10, 14]", "[6, 7]", "[4, 6]", "[4, 5, 6, 7]"],
    {
        "[2, 6, 10, 14]": "That is a column of the table: one rank of each stage, so a pipeline group.",
        "[6, 7]": "That is one cell of the table: a tensor group.",
        "[4, 5, 6, 7]": "That is the whole stage. A data group has only the ranks with the same place in their cells.",
    },
)

first_data_group = Choice(
    "01.first_data_group",
    "The same 16 GPUs with t = 4 and p = 2. What is d now, and which of these is the first data group?",
    ["[0, 1]", "[0, 2]", "[0, 4]", "[0, 8]"],
    {
        "[0, 1]": "Ranks 0 and 1 are in the same tensor group.",
        "[0, 2]": "That was so with t = 2. Now ranks 0 and 2 are in the same tensor group.",
        "[0, 8]": "That is a pipeline group: stage 1 begins at rank 8.",
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

crossing_in_second = Choice(
    "01.crossing_in_second",
    "Which grid is the same in both orders? Which kinds of group cross nodes in the second, `tp-pp-dp`?",
    {
        "['tp']": "Only tensor groups",
        "['dp']": "Only data groups",
        "['pp']": "Only pipeline groups",
        "['dp', 'pp']": "Data and pipeline groups",
    },
    {
        "['tp']": "The tensor axis comes first in both orders, so tensor ranks are neighbours in both.",
        "['pp']": "That was the first order. Now all four stages of a copy come before the next copy begins.",
        "['dp', 'pp']": "One copy of the model has 8 GPUs, and its pipeline groups stay among them.",
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
