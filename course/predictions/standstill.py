"""The predictions of notebook 17, a job that stands still, in its order."""

from course.predict import Choice, Number

where_rank_2_stands = Choice(
    "17.where_rank_2_stands",
    "8 files on 3 ranks, and nothing moves. Where does rank 2 stand?",
    {
        "13": "Line 13, in the sum of gradients, as the others do",
        "19": "Line 19, where all ranks save",
        "gone": "Nowhere: it has ended",
    },
    {
        "13": "Then all three would be there, and the sum would be done. How many files has rank 2?",
        "gone": "It cannot end before line 19 has: there it needs the others.",
    },
)

called_missing = Choice(
    "17.called_missing",
    "Rank 0 evaluates, and calls one sum more than the others. Flight Recorder compares the calls of all ranks, one by "
    "one. Which ranks will its analysis call missing?",
    {"{0}": "Rank 0", "{1, 2}": "Ranks 1 and 2", "none": "None: all are there"},
    {
        "{0}": "Rank 0 has a call more, not one fewer. Who does not have the last one?",
        "none": "Rank 0 has made a call that nobody else has.",
    },
)

ranks_with_an_error = Number(
    "17.ranks_with_an_error",
    "With DETAIL, PyTorch compares each call on all ranks before it is made. Rank 1 leaves two sums out. How many of "
    "the three ranks end with an error?",
    {
        1: "Rank 1 is the one to blame, but each rank compares with the others.",
        2: "The two that wait see a difference. What does rank 1 see?",
        0: "DETAIL turns a difference into an error.",
    },
)

whose_log_has_the_error = Choice(
    "17.whose_log_has_the_error",
    "Rank 0 prepares data for 10 seconds, and the others wait, for at most 3. In whose log is the error?",
    {
        "0": "In that of rank 0",
        "others": "In those of ranks 1 and 2, or of one of them",
        "none": "In none: they just wait",
    },
    {
        "0": "Rank 0 does its work, and does not know that anybody waits.",
        "none": "After 3 seconds they wait no longer.",
    },
)
