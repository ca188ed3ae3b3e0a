"""Draw the way from "nothing moves" to a cause, as questions to ask one after the other."""

from course.pictures.parts import titled
from course.pictures.scene import WIDTH, Scene, arrow, box, label
from course.pictures.style import IDLE, INK, tint
from course.table import Table

QUESTIONS = (
    ("Has a rank failed? Read the logs of all of them.", "yes", "shapes that differ, a time-out too short", (7, 4)),
    ("Do two looks differ: a call more, a line more?", "yes", "slow, not stuck: who is awaited?", (5,)),
    ("Have all ranks started, and do they still run?", "no", "a node never joined, or a rank died", (12,)),
    ("Is there an error after which a rank went on?", "yes", "an exception that was caught", (8,)),
    ("Do ranks wait in different groups, new_group, send?", "yes", "two orders, members only, both send", (11, 9, 10)),
    ("Does one rank stand on a line of its own?", "yes", "it strayed: batches, own value, gradient", (1, 6, 3)),
    ("All on one line: has one made a call more?", "yes", "a collective that only some ranks call", (2,)),
    ("Have all made the same calls?", "yes", "the network or a machine: NCCL_DEBUG, RAS", ()),
)
"""What to ask, the answer that ends the search, what it means, and the cases of notebook 17 where it is so."""
ROW, HEIGHT, TOP = 62.0, 42.0, 62.0
ASKED, FOUND = 400.0, 420.0  # widths of the two columns
CAUSE = "#009E73"
TOLD = range(1, 6)  # the cases that come before the picture; whoever reads it has still to find the others


def with_cases(cases: tuple[int, ...]) -> str:
    """Return the numbers of some cases, in parentheses: of those that the core path tells.

    >>> with_cases((7, 4)), with_cases((3, 1)), with_cases((8,))
    (' (case 4)', ' (cases 1, 3)', '')
    """
    told = sorted(set(cases) & {*TOLD})
    numbers = ", ".join(map(str, told))
    return f" ({'case' if len(told) == 1 else 'cases'} {numbers})" if told else ""


def draw_questions() -> Scene:
    """Draw the questions down the left, and at the right what has been found where the search ends."""
    left = WIDTH - FOUND
    marks = []
    for number, (question, answer, meaning, cases) in enumerate(QUESTIONS):
        y = TOP + number * ROW
        middle = y + HEIGHT / 2
        says = meaning + with_cases(cases)
        marks.append(box(f"asked{number}", 0, y, ASKED, HEIGHT, IDLE, question, fact=question))
        marks.append(arrow(f"to{number}", [(ASKED, middle), (left, middle)], INK))
        marks.append(label(f"answer{number}", (ASKED + left) / 2 - 4, middle - 12, answer, anchor="middle"))
        marks.append(box(f"found{number}", left, y, FOUND, HEIGHT, tint(CAUSE, 0.25), says, fact=says))
        if number < len(QUESTIONS) - 1:
            marks.append(arrow(f"down{number}", [(ASKED / 2, y + HEIGHT), (ASKED / 2, y + ROW)], INK))
    table = Table(
        ("ask", "if", "then"),
        [(question, answer, meaning + with_cases(cases)) for question, answer, meaning, cases in QUESTIONS],
    )
    says = "Eight questions, from whether the job has failed to whether all made the same calls"
    return titled(
        "From nothing moves to a cause",
        says,
        marks,
        table,
        below="Nothing moves. Ask from the top, and stop at the first answer that leads to the right",
    )
