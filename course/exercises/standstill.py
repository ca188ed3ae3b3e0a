"""The exercises of notebook 17: of each job that stands still, name rank, cause and line, and repair it.

The scripts are in course/standstill/scripts. Each is run as it is; nothing of labkit runs in it.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType

from course.exercises.base import Folded, Verdict, indent, kept_in_handouts, report
from course.standstill.runner import Job, run

SCRIPTS = Path(run.__code__.co_filename).with_name("scripts")

SHOWS = {
    "a collective on rank 0 only": "Rank 0 would have one call more than the others, under an `if` that asks for it.",
    "one rank has fewer batches": "One rank would have left the loop before the others, with nothing wrong in its log.",
    "groups used in different orders": "Each rank would wait in one group for a rank that waits in a different group.",
    "a branch on the rank's own value": "One rank would have skipped a call, because an `if` asks about its own data.",
    "shapes that differ": "All ranks would be in the same call on the same line, with sizes that differ.",
    "one rank catches an exception, and goes on": "One rank's log would have an error, after which it went on.",
    "new_group called by its members only": "Ranks would stand in `new_group`, or in the first call on a later group.",
    "both ranks send first": "Two ranks would stand in `send`, each to the other.",
    "a parameter that one rank does not use": "One rank would have fewer gradients to sum, without any `if`.",
    "a time-out shorter than one rank's work": "One rank would be at work, and the others would fail while waiting.",
    "slow, not stuck": "Two looks would differ: one more call, one more line of the log.",
    "a node that never joined": "All ranks would stand in `init_process_group`, and there would be too few of them.",
}
"""What can be wrong, and what one would see of it."""


def causes() -> None:
    """Print what can be wrong, with the numbers that `check` takes."""
    print("\n".join(f"{number:2}  {name}" for number, name in enumerate(SHOWS, start=1)))


@dataclass
class Case:
    """One job that stands still: `run` it, read, `check` which rank, what and which line is to blame.

    ``ranks`` and ``lines`` are right answers. Several ranks at once are a set; None stands for no rank in particular.
    """

    name: str
    script: str
    num_ranks: int
    cause: str
    ranks: tuple[int | frozenset[int] | None, ...]
    lines: tuple[int, ...]
    why: str
    typical: Mapping[tuple[str, object], str] = field(default_factory=dict)
    notebook: str = "17"

    @property
    def source(self) -> str:
        return (SCRIPTS / f"{self.script}.py").read_text()

    def show(self) -> None:
        """Print the script with the numbers of its lines."""
        lines = self.source.splitlines()
        print(f"{self.script}.py, on {self.num_ranks} ranks\n")
        print("\n".join(f"{number:3}  {line}".rstrip() for number, line in enumerate(lines, start=1)))

    def run(self, changes: Mapping[int, str] | None = None, detail: bool = False) -> Job:
        """Run it on ranks, with some lines changed, or with PyTorch's own checks of all calls."""
        return run(self.script, changed(self.source, changes or {}), self.num_ranks, detail)

    def check(self, rank: object = ..., cause: object = ..., line: object = ...) -> None:
        """Say whether this rank, this cause and this line are to blame."""
        report(self.name, self.verdict(rank, cause, line))

    def verdict(self, rank: object = ..., cause: object = ..., line: object = ...) -> Verdict:
        """Return what `check` prints, as data."""
        if not all(map(is_given, (rank, cause, line))):
            text = "not attempted yet. Name rank, cause (`causes()` lists them) and line."
            return Verdict("not attempted", f"{self.name}: {text}")
        if isinstance(cause, int) and cause in range(1, len(SHOWS) + 1):
            cause = list(SHOWS)[cause - 1]
        cause = str(cause).strip().rstrip(".").lower()
        if cause not in {each.lower() for each in SHOWS}:
            return Verdict("wrong", f"{self.name}: no cause is called {cause!r}.\n  `causes()` lists them.")
        if isinstance(rank, set | frozenset | list | tuple):
            rank = next(iter(rank)) if len(rank) == 1 else frozenset(rank)
        if isinstance(line, set | frozenset | list | tuple):  # of several lines, the first wrong one gets the advice
            line = next((each for each in line if each not in self.lines), next(iter(line), None))
        is_right = {
            "rank": rank in self.ranks,
            "cause": cause == self.cause.lower(),
            "line": line in self.lines,
        }
        if all(is_right.values()):
            return Verdict("passed", f"{self.name}: yes.\n{indent(self.why)}")
        answers = {"rank": rank, "cause": cause, "line": line}
        said = [f"right: {', '.join(part for part in is_right if is_right[part]) or 'nothing yet'}."]
        said += [self._advice(part, answers[part]) for part in is_right if not is_right[part]]
        return Verdict("wrong", "\n".join([f"{self.name}: not right yet.", *map(indent, said)]))

    def _advice(self, part: str, answer: object) -> str:
        if typical := self.typical.get((part, answer)):
            return f"What this usually is: {typical}"
        if part == "cause":
            shows = next(text for name, text in SHOWS.items() if name.lower() == answer)
            return f"The cause is a different one. With this one you would see something else: {shows}"
        if part == "rank":
            return "It is not this rank. Whoever waits is rarely to blame: look for the one who does something else."
        return "It is not this line. The line where ranks wait is not yet the line that sent them different ways."

    def hint(self) -> Folded:
        """Show how to go about it."""
        return Folded("Hint", HINT)

    @kept_in_handouts
    def solution(self) -> Folded:
        """Show who and what is to blame."""
        line = self.lines[0]
        code = self.source.splitlines()[line - 1].strip()
        text = f"{self.cause}, line {line}: `{code}`. {self.why}"
        return Folded("Solution", text, plain_text=text)


HINT = """1. Has it failed? Which rank names a fault in *its own* work? "Connection closed by peer" is a consequence.
2. If not: does it stand still at all? Compare the two looks: calls and logs.
3. Are all ranks there? If not, which one is missing, and did it ever start?
4. Is there an error in a log, after which that rank went on?
5. Do ranks wait for each other: in different groups, in `new_group`, each in `send`?
6. Does one rank stand on a line of its own? It strayed, whoever is blamed.
7. All on the same line? Then count calls: Flight Recorder says who has one more or one fewer, and what sizes they had.
8. Follow the stray rank back to the `if`, `for`, `try` or missing gradient that sent only this rank there."""


@dataclass
class Repair:
    """The same job, to be mended: `check` takes the lines that change, and runs the script on real ranks."""

    name: str
    case: Case
    mended: Mapping[int, str]
    prints: Mapping[int, str]  # what each of these ranks must still print
    hint_text: str
    keeps: int | None = None  # the line that has to stay: it stands for something that cannot be mended
    one_of: tuple[int, ...] = ()  # where it ends by itself in any case: the lines of which one has to change
    notebook: str = "17"

    def check(self, changes: Mapping[int, str] | EllipsisType = ...) -> None:
        """Run the script with these lines in place of those with their numbers, and say whether it ends by itself."""
        report(self.name, self.verdict(changes))

    def verdict(self, changes: Mapping[int, str] | EllipsisType = ...) -> Verdict:
        """Return what `check` prints, as data."""
        if not is_given(changes) or not changes:
            return Verdict(
                "not attempted", f"{self.name}: not attempted yet. Write {{number of a line: what it says}}."
            )
        source = self.case.source
        num_lines = len(source.splitlines())
        if not isinstance(changes, Mapping) or not all(number in range(1, num_lines + 1) for number in changes):
            text = f"write {{number of a line: what it says}}, with numbers from 1 to {num_lines}."
            return Verdict("wrong", f"{self.name}: {text}")
        if self.keeps in changes:
            return Verdict(
                "wrong", f"{self.name}: not right yet.\n  Line {self.keeps} stays: the others should wait less for it."
            )
        if self.one_of and not set(self.one_of) & set(changes):
            return Verdict("wrong", f"{self.name}: not right yet.\n  The others still wait as long as before.")
        try:
            compile(changed(source, changes), f"{self.case.script}.py", "exec")
        except SyntaxError as error:
            return Verdict("raised", f"{self.name}: line {error.lineno} is not Python: {error.msg}.")
        return self._judge(self.case.run(changes))

    def _judge(self, job: Job) -> Verdict:
        if job.status == "stuck":
            return Verdict("stuck", f"{self.name}: it still stands still.\n{indent(job.where())}")
        if job.status == "failed":
            last = [log.strip().splitlines()[-1] for log in job.logs.values() if log.strip()]
            return Verdict("raised", "\n".join([f"{self.name}: it fails.", *map(indent, last)]))
        for rank, pattern in self.prints.items():
            if not re.search(pattern, job.logs[rank]):
                wanted = f"It ends, but rank {rank} no longer prints what it should, {pattern!r}. It printed:"
                text = "\n".join(map(indent, (wanted, job.logs[rank].strip() or "nothing")))
                return Verdict("wrong", f"{self.name}: not right yet.\n{text}")
        return Verdict("passed", f"{self.name}: correct, it ends by itself, and prints what it should.")

    def hint(self) -> Folded:
        """Show what the repair has to achieve."""
        return Folded("Hint", self.hint_text)

    @kept_in_handouts
    def solution(self) -> Folded:
        """Show the lines that change."""
        before = self.case.source.splitlines()
        after = changed(self.case.source, self.mended).splitlines()
        lines = [
            line for line in difflib.unified_diff(before, after, n=1, lineterm="") if line[:3] not in ("---", "+++")
        ]
        text = "\n".join(lines)
        return Folded("Solution", f"```diff\n{text}\n```", plain_text=text)


def changed(source: str, changes: Mapping[int, str]) -> str:
    """Return a script with some lines replaced: by one line, by several, or by none.

    >>> changed("a\\nb\\nc\\n", {1: "x\\ny", 2: ""})
    'x\\ny\\nc\\n'
    """
    lines = source.splitlines()
    new = [changes.get(number, line) for number, line in enumerate(lines, start=1)]
    kept = [text for number, text in enumerate(new, start=1) if number not in changes or text]
    return "\n".join(kept) + "\n"


def is_given(answer: object) -> bool:
    return answer is not ...


# -- the twelve -----------------------------------------------------------------------------------------------------

case_1 = Case(
    "case_1",
    "train_on_files",
    3,
    "one rank has fewer batches",
    (2,),
    (11,),
    "8 files on 3 ranks are 3, 3 and 2. Rank 2 left the loop and went on to save; the others wait for its third sum.",
    {
        ("rank", 0): "rank 0 waits where it should. Which rank has gone on without it?",
        (
            "rank",
            frozenset((0, 1)),
        ): "two ranks wait on the line where all belong. The third went on: majority is right.",
        ("line", 13): "that is where the others wait. Which line decides how often a rank comes here?",
        ("line", 19): "that is where rank 2 waits. Which line let it get there so early?",
    },
)
repair_1 = Repair(
    "repair_1",
    case_1,
    {
        11: "same_for_all = len(files) // dist.get_world_size()\n"
        "for number, batch in enumerate(files[rank :: dist.get_world_size()][:same_for_all], start=1):"
    },
    {0: r"batch 2 done(.|\n)*saving", 2: r"batch 2 done(.|\n)*saving"},
    "Every rank must go through the loop equally often: leave a file out, or read one twice.",
)

case_2 = Case(
    "case_2",
    "train_and_evaluate",
    3,
    "a collective on rank 0 only",
    (0,),
    (21, 22),
    "evaluate() sums over all ranks, and only rank 0 calls it. Its sum met the others' gradients of step 3: hence a "
    "negative mean of squares. From then on rank 0 is one call ahead.",
    {
        (
            "rank",
            frozenset((1, 2)),
        ): "Flight Recorder names them because rank 0 made a call more. Who else made that call?",
        ("rank", 1): "Flight Recorder takes rank 0 for right. Which rank printed something impossible?",
        ("line", 13): "the sum itself is right, if all ranks call it. Who calls evaluate()?",
        ("line", 19): "they all stand there. Count the calls: which rank made one in between?",
        ("cause", "shapes that differ"): "sizes differ because two different calls met. Why did they?",
    },
)
repair_2 = Repair(
    "repair_2",
    case_2,
    {
        21: "    if step % 2 == 0:",
        22: '        loss = evaluate()\n        if rank == 0:\n            print(f"step {step}: loss {loss:.3f}")',
    },
    {0: r"step 2: loss 0\.293(.|\n)*step 4: loss 0\.100"},
    "All ranks must evaluate; only the printing belongs to rank 0.",
)

case_3 = Case(
    "case_3",
    "two_experts",
    3,
    "a parameter that one rank does not use",
    (1,),
    (16, 12),
    "Rank 1 computed only expert 1, so no gradient of expert 0 ever came, and its two sums were not called. The sums "
    "of the shared layer met those of expert 0, which have the same sizes: nobody noticed until rank 1 had none left.",
    {
        ("line", 14): "a router may choose. Which line leaves out of the model what was not chosen?",
        ("line", 20): "that is where rank 1 waits. Which line let it get there with two sums fewer?",
        ("rank", frozenset((0, 2))): "they sum the gradients of all parameters. Who did it less often?",
        ("cause", "a branch on the rank's own value"): "no `if` decides about a sum here: backward does.",
        ("cause", "one rank has fewer batches"): "each has one batch. What does backward come to on each rank?",
    },
)
repair_3 = Repair(
    "repair_3",
    case_3,
    {
        16: "outputs = [expert(x) * (number in chosen) for number, expert in enumerate(experts)]\n"
        "sum(outputs).square().mean().backward()"
    },
    {0: r"norm 2\.503", 1: r"norm 2\.503"},
    "Backward must come to every parameter on every rank: what is the output of an expert times zero?",
)

case_4 = Case(
    "case_4",
    "prepare",
    3,
    "a time-out shorter than one rank's work",
    (0,),
    (9,),
    "Rank 0 needs ten seconds, and the others were told to wait three. The rank that fails is not the one to blame.",
    {
        ("rank", 1): "it only waited, as it was told. What was it waiting for?",
        ("rank", 2): "it only waited, as it was told. What was it waiting for?",
        ("rank", frozenset((1, 2))): "they only waited, as they were told. What were they waiting for?",
        ("line", 21): "that is where they wait. Which line says how long?",
        ("line", 15): "the work takes what it takes. Which line says how long others wait for it?",
        ("cause", "slow, not stuck"): "rank 0 is slow, and that was known. Something did not allow for it.",
    },
)
repair_4 = Repair(
    "repair_4",
    case_4,
    {9: 'dist.init_process_group("gloo", timeout=timedelta(minutes=2))'},
    {0: "3 ranks train", 2: "3 ranks train"},
    "Give the work that rank 0 does alone enough time: for this group, or for a second one that only waits.",
)

case_5 = Case(
    "case_5",
    "train_from_disk",
    3,
    "slow, not stuck",
    (1,),
    (15, 14, 20),
    "The looks differ: calls are added. Rank 1 needs more than a second for each batch, and all others wait for it.",
    {
        ("rank", frozenset((0, 2))): "they wait. For whom?",
        ("line", 21): "that is where the others wait. What is the last one doing?",
        ("cause", "one rank has fewer batches"): "it ended by itself, and all made six steps.",
    },
)
repair_5 = Repair(
    "repair_5",
    case_5,
    {
        19: "from concurrent.futures import ThreadPoolExecutor\n"
        "for batch in ThreadPoolExecutor(6).map(read, range(1, 7)):  # ahead of need",
        20: "    gradient = weight - batch",
    },
    {0: r"weight 3\.94", 1: r"weight 3\.94"},
    "Nothing has to be killed. Read ahead of need, in a thread, so that batches are there when they are wanted.",
    keeps=15,
    one_of=(13, 14, 16, 19, 20, 21, 22),
)

case_6 = Case(
    "case_6",
    "train_on_records",
    3,
    "a branch on the rank's own value",
    (2,),
    (15, 17, 16),
    "Only rank 2 has the broken record, and so only rank 2 skipped the sum. From then on it was a step ahead.",
    {
        ("line", 12): "records do break. Which line lets that decide whether a rank takes part in a sum?",
        ("line", 13): "records do break. Which line lets that decide whether a rank takes part in a sum?",
        ("line", 18): "that is where the others wait. What decides whether a rank comes there?",
        ("cause", "one rank has fewer batches"): "all have five. What does the log of one rank say?",
        (
            "cause",
            "one rank catches an exception, and goes on",
        ): "nothing was raised. Which statement skipped the step?",
    },
)
repair_6 = Repair(
    "repair_6",
    case_6,
    {
        15: "    is_broken = gradient.isnan().any().float()\n"
        "    dist.all_reduce(is_broken, op=dist.ReduceOp.MAX)\n"
        "    if is_broken:"
    },
    {0: r"loss \d", 2: r"loss \d"},
    "All skip the step, or none does: let the ranks agree first, with a sum or a maximum. Or add nothing: zeros.",
)

case_7 = Case(
    "case_7",
    "scores",
    4,
    "shapes that differ",
    (3,),
    (10, 11),
    "10 samples in four chunks are 3, 3, 3 and 1. Each rank made room for four tensors of its own size. gloo sends a "
    "tensor in two halves: of 12 bytes come 6, and rank 3 has room for half of 4.",
    {
        ("rank", 0): "its connection was closed. By whom? That is a consequence.",
        ("rank", 2): "its connection was closed. By whom? That is a consequence.",
        ("line", 12): "that is where it fails. Which line makes what is sent there?",
        ("cause", "one rank has fewer batches"): "all make one call. What do they hand over?",
    },
)
repair_7 = Repair(
    "repair_7",
    case_7,
    {
        10: "scores = torch.full((3,), float('nan'))\n"
        "own = samples.chunk(world_size)[rank].square()\n"
        "scores[: len(own)] = own",
        13: 'print(f"mean score {torch.cat(everything).nanmean():.1f}")',
    },
    {0: r"mean score 28\.5", 3: r"mean score 28\.5"},
    "All ranks must send equally much: fill up the shorter ones, and leave out afterwards what was filled in.",
)

case_8 = Case(
    "case_8",
    "train_on",
    3,
    "one rank catches an exception, and goes on",
    (1,),
    (23, 21, 22, 24),
    "In step 2, rank 1 raised before it called all_reduce. Line 23 caught that, and rank 1 went on to step 3: since "
    "then it has made one call fewer than the others, and nobody noticed until it had no step left.",
    {
        ("line", 19): "batches do break. Which line lets a rank go on as if it had taken part?",
        ("line", 12): "that is where it was raised. Which line hid it?",
        ("line", 13): "that is where the others wait. Why did one rank not come here in step 2?",
        ("cause", "shapes that differ"): "two sizes differ on one rank, before anything is sent. What happened next?",
    },
)
repair_8 = Repair(
    "repair_8",
    case_8,
    {
        11: "def train(batch):\n    gradient = torch.zeros(4)\n    if len(batch) == 4:",
        12: "        gradient = weight - torch.tensor(batch)",
    },
    {0: "all ranks agree: True", 1: "all ranks agree: True"},
    "A rank that cannot compute must still take part in the sum, or all must stop.",
)

case_9 = Case(
    "case_9",
    "evaluate_and_save",
    3,
    "new_group called by its members only",
    (2,),
    (12, 13),
    "Each rank counts groups to name them, and members meet under that name. Rank 2 skipped the first group, so what "
    "it calls group 1 is group 2 for the others, and they never meet.",
    {
        (
            "rank",
            frozenset((0, 1)),
        ): "Flight Recorder misses them in a group that only one rank believes in. Whose count is off?",
        ("rank", 0): "it stands in new_group, where all should be. Which rank is elsewhere?",
        ("line", 17): "all call this one. Which group did one rank not make before?",
        ("line", 18): "that is where one rank may wait, in a group that no other has. Why has no other?",
    },
)
repair_9 = Repair(
    "repair_9",
    case_9,
    {12: "evaluators = dist.new_group([0, 1])", 13: "if rank < 2:"},
    {0: r"loss 1\.0(.|\n)*saved", 2: "saved"},
    "All ranks must call new_group for all groups, in one order, members or not.",
)

case_10 = Case(
    "case_10",
    "borders",
    2,
    "both ranks send first",
    (None, 0, 1, frozenset((0, 1))),
    (12,),
    "A send returns when the other side receives, and each would receive only after its own send. Some libraries put "
    "small messages aside, so that a send returns at once: do not count on it.",
    {
        ("line", 13): "no rank has come that far.",
    },
)
repair_10 = Repair(
    "repair_10",
    case_10,
    {12: "request = dist.isend(border, peer)", 13: "dist.recv(received, peer)\nrequest.wait()"},
    {0: "border of rank 1", 1: "border of rank 0"},
    "One side must receive first, or a send must not wait: `isend`, or `batch_isend_irecv` for several.",
)

case_11 = Case(
    "case_11",
    "grid",
    4,
    "groups used in different orders",
    (None, 0, 1, 2, 3, frozenset((0, 1, 2, 3)), frozenset((0, 3)), frozenset((1, 2))),
    (13, 14, 15, 16, 17, 18),
    "0 waits for 1 in their row, 1 for 3 in their column, 3 for 2, and 2 for 0: a circle. Each order alone is fine.",
)
repair_11 = Repair(
    "repair_11",
    case_11,
    {
        13: "dist.all_reduce(x, group=row)",
        14: "dist.all_reduce(x, group=column)",
        **dict.fromkeys(range(15, 19), ""),
    },
    {0: "sum 4", 3: "sum 4"},
    "All ranks must use their groups in one order: rows first, say.",
)

case_12 = Case(
    "case_12",
    "start",
    2,
    "a node that never joined",
    (frozenset((2, 3)), 2, 3, None),
    (8, 11),
    "The script counts on 2 nodes with 2 ranks each, and only those of node 0 have started. Ranks 2 and 3 are nowhere, "
    "so none of the ranks that you can see is to blame.",
    {
        ("rank", 0): "it waits for all four. Which of the four never started?",
        ("rank", frozenset((0, 1))): "they are those that started. Which did not?",
        ("line", 15): "that is where they wait. Which line says for how many?",
    },
)
repair_12 = Repair(
    "repair_12",
    case_12,
    {11: 'world_size = int(os.environ["WORLD_SIZE"])', 12: 'rank = int(os.environ["RANK"])'},
    {0: "2 ranks train", 1: "2 ranks train"},
    "Do not work out how many ranks there should be: torchrun knows who has joined, and sets WORLD_SIZE and RANK.",
)

CASES = [case_1, case_2, case_3, case_4, case_5, case_6, case_7, case_8, case_9, case_10, case_11, case_12]
REPAIRS = [repair_1, repair_2, repair_3, repair_4, repair_5, repair_6, repair_7, repair_8, repair_9, repair_10]
REPAIRS += [repair_11, repair_12]
