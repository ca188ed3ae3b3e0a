"""The predictions of Start_Here, in its order."""

from course.predict import Choice, Number

returned = Choice(
    "00.returned",
    "Each of four ranks prints a line and returns its number times itself. What does `launch` return?",
    ["[1, 4, 9, 16]", "9", "[0, 1, 4, 9]", "[0, 0, 0, 0]"],
    {
        "[1, 4, 9, 16]": "Ranks are counted from 0.",
        "9": "That is what the last rank returns. What became of the other three?",
        "[0, 0, 0, 0]": "The ranks run the same function, but each has a number of its own.",
    },
)

num_processes = Number(
    "00.num_processes",
    "Each of four ranks returns the number of its process. How many different numbers are there, if you count the "
    "notebook's own as well?",
    {
        1: "Then the notebook's process would be all four ranks.",
        2: "Then one process would be all four ranks.",
        4: "Does a rank run in the notebook's process?",
    },
)

sum_on_rank_0 = Number(
    "00.sum_on_rank_0",
    "Ranks 0 to 3 give 1, 2, 3 and 4 to an all-reduce. What does rank 0 have afterwards?",
    {
        1: "That is what it gave. An all-reduce puts the result in its place.",
        2.5: "That is the mean: divide by the number of ranks yourself if you want that.",
        4: "That is the largest: the usual all-reduce adds.",
    },
)
